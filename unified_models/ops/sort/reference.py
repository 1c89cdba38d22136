"""Sorting by Python's stable sort."""

from torch import Tensor


def by_expert(ids_TK: Tensor, E: int) -> tuple[list[int], list[int], list[int]]:
    """The order, the flat places and the counts."""
    ids = ids_TK.flatten().tolist()
    order = sorted(range(len(ids)), key=ids.__getitem__)
    places = [order.index(pair) for pair in range(len(ids))]
    return order, places, [ids.count(e) for e in range(E)]

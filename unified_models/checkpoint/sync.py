"""The sync list: every tensor that a forward reads, by its checkpoint name, out of a model and back into one."""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from unified_models.checkpoint.names import Names, Part
from unified_models.checkpoint.shards import some
from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def named_tensors(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, master or table) of everything that the forward reads, in module order.

    A stacked Weight comes as one view for each of its matrices; a weight that holds packed bytes only, as its
    dequantised float32 values, made one matrix at a time. The scale of an FP8 linear's input comes as X.input_scale
    after X.weight, one for each matrix of a stack. Views share the model's storage; nothing has a gradient.
    """
    for part in Names.of(model).parts:
        yield part.name, values_of(part)


def values_of(part: Part) -> Tensor:
    """The master values (packed only: dequantised, a copy) or the table entries of one part."""
    owner = part.owner
    if isinstance(owner, Table):
        return owner.data
    if owner.sharding is not None:
        raise ValueError(
            f"{owner.label}: the masters are cut over processes; adapters.fsdp.named_tensors gathers them"
        )
    if owner.master is not None:
        master = owner.master.detach()
        return master if part.index is None else master[part.index]
    packed = owner().packed
    if part.index is not None:
        packed = {name: values[part.index] for name, values in packed.items()}
    return owner.format.unpack(packed, part.shape).view(part.shape)


@torch.no_grad()
def digests(model: LanguageModel) -> dict[str, str]:
    """A hash of every tensor that the forward reads, by module path: packed bytes and tables. Two models with the same
    digests compute the same bits. RuntimeError: a weight is not committed."""
    read = {f"{path}.{name}": t for path, w in model.weights() for name, t in w().packed.items()}
    read |= {path: table() for path, table in model.tables()}
    return {name: _digest(tensor) for name, tensor in read.items()}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake2b(data, digest_size=16).hexdigest()  # type: ignore[arg-type]


@torch.no_grad()
def update(
    model: LanguageModel, named_tensors: Iterable[tuple[str, Tensor]], strict: bool = True
) -> None:
    """Take new master values and table entries, and commit, in place: no storage moves.

    Args:
        named_tensors: checkpoint names, as `named_tensors(model)` yields them (any spelling that a checkpoint may
            have), with float32, bfloat16 or float16 masters, and whole numbers for tables. All are held until all are
            checked. Names that the model file skips by rule and experts of other processes are passed over; a tied
            head must come with the embedding, and equal it.
        strict: every tensor of the model must be there.

    Raises ValueError listing every problem before the first byte changes: names unknown, missing or given twice;
    shapes; dtypes (a float32-compute parameter takes float32 only, anything else has lost bits); table entries.
    """
    names = Names.of(model)
    elsewhere = {name for part in names.elsewhere for name in part.spellings()}
    given: dict[str, tuple[Part, Tensor]] = {}
    problems: list[str] = []
    unknown: list[str] = []
    twins: dict[str, tuple[Part, Tensor]] = {}
    for name, values in named_tensors:
        part = names.by_name.get(name)
        if part is None and (twin := names.twin(name)):
            twins[name] = (twin, values)
        elif part is None and name not in elsewhere:
            unknown.extend([] if names.reason(name) else [name])
        elif part is None:
            continue
        elif part.name in given:
            problems.append(f"{name} is given twice")
        else:
            given[part.name] = (part, values)
            problems.extend(_problems(name, part, values))
    for name, (twin, values) in twins.items():
        problems.extend(_apart(name, values, twin, given))
    missing = [part.name for part in names.parts if part.name not in given]
    if unknown:
        problems.insert(0, f"unknown ({len(unknown)}): {some(unknown)}")
    if missing and strict:
        problems.insert(0, f"missing ({len(missing)}): {some(missing)}")
    if problems:
        raise ValueError("the update was not applied\n  " + "\n  ".join(problems))

    for part, values in given.values():
        if isinstance(part.owner, Table):
            part.owner.data.copy_(values)
        else:
            part.owner.assign(values.to(_device(part.owner)), part.index)
    if not missing:
        model.weights_from = "master"


def _apart(
    name: str, values: Tensor, twin: Part, given: Mapping[str, tuple[Part, Tensor]]
) -> Iterator[str]:
    """A tied head is given beside the embedding, with its values, or not at all."""
    if twin.name not in given:
        yield f"{name} is given without {twin.name}, which it is the same tensor as"
        return
    other = given[twin.name][1]
    if values.shape != other.shape or not torch.equal(values.float(), other.float()):
        yield f"{name} and {twin.name} are one tensor of the model, and were given different values"


def _problems(name: str, part: Part, values: Tensor) -> Iterator[str]:
    owner = part.owner
    if values.shape != part.shape:
        yield f"{name} is {tuple(values.shape)}, expected {tuple(part.shape)}"
    if isinstance(owner, Weight):
        if values.dtype not in WEIGHT_DTYPES or (owner.exact and values.dtype != torch.float32):
            expected = "float32" if owner.exact else "float32, bfloat16 or float16"
            yield f"{name} is {values.dtype}, expected {expected}"
            return
    elif values.dtype not in TABLE_DTYPES:
        yield f"{name} is {values.dtype}, expected whole numbers"
        return
    try:
        owner.check(values, name)
    except ValueError as problem:
        yield str(problem)


def _device(weight: Weight) -> torch.device:
    return next(t.device for t in (*weight.parameters(), *weight.buffers()))

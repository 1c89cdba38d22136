"""Exact ties at the indexer's cut: with four index heads all of them are off for some entries, whose scores are 0."""

from pathlib import Path

import pytest

import unified_models as um
from unified_models import verify
from unified_models.verify.schedule import KINDS


@pytest.mark.parametrize("numerics", ["deployed", "float32"])
def test_four_index_heads_tie_and_stay_exact_C03(tmp_path: Path, numerics: str) -> None:
    """No context makes these ties: the scores are as the model computes them."""
    um.make_tiny("deepseek_v4", tmp_path / "v4", index_n_heads=4, num_hidden_layers=3)
    kinds = [kind for kind in KINDS if kind.name in ("random cuts", "batched", "packed")]
    report = verify.verify_folder(
        tmp_path / "v4",
        numerics=(numerics,),
        threads=(1,),
        tokens=0,
        lengths=(3, 41, 130, 200),
        kinds=kinds,
        progress=False,
    )
    assert report.counters.select_ties > 0
    assert report.total.compared >= 3 * (2 + 40 + 129 + 199)
    assert report.total.unequal == 0

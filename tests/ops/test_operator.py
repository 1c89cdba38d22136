"""The seam of operators, and what a process must be like for their bits to be kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from unified_models import ops
from unified_models.ops import backend
from unified_models.ops.operator import observe, operator

CPU = torch.device("cpu")


@operator
def inner(x: int) -> int:
    return x + 1


@operator
def outer(x: int) -> int:
    return 10 * inner(x)


def test_outermost_calls_are_shown() -> None:
    """A call inside an operator is part of it; outside of `observe` nobody looks."""
    seen: list[tuple[str, Any]] = []

    def look(name: str, out: Any) -> Any:
        seen.append((name, out))
        return out

    assert outer(1) == 20
    with observe(look):
        assert outer(1) == 20
        assert inner(1) == 2
    assert inner(5) == 6
    assert seen == [("outer", 20), ("inner", 2)]


def test_an_observer_may_replace_what_is_returned() -> None:
    with observe(lambda name, out: -out):
        assert outer(1) == -20
        with observe(lambda name, out: 7):
            assert inner(1) == 7
        assert inner(1) == -2


def test_the_seam_survives_an_error() -> None:
    """An operator that raises inside another leaves the observer in place; leaving the block removes it."""

    @operator
    def broken() -> None:
        raise ValueError("broken")

    seen: list[str] = []
    with observe(lambda name, out: seen.append(name) or out):
        with pytest.raises(ValueError, match="broken"):
            broken()
        inner(1)
    inner(1)
    assert seen == ["inner"]


def test_gradients_pass_an_observer_backward() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with observe(lambda name, out: out * 2):
        ops.rms_norm(x, None, 1e-6).sum().backward()
    doubled = x.grad.clone()
    x.grad = None
    ops.rms_norm(x, None, 1e-6).sum().backward()
    assert torch.allclose(doubled, 2 * x.grad)


def test_every_folder_is_in_the_table() -> None:
    root = Path(ops.__file__).parent
    folders = {p.name for p in root.iterdir() if (p / "__init__.py").is_file()}
    assert folders == set(backend.OPERATORS)
    assert all(set(table) == folders for table in backend.BACKENDS.values())
    assert {name.split("/")[1] for name in backend.sources() if "/arithmetic.py" in name} <= folders


def test_what_changes_bits_is_refused() -> None:
    backend.require(CPU)
    with pytest.raises(RuntimeError, match=r"no exact backend for device 'xla:1'.*cpu"):
        backend.require(torch.device("xla", 1))
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="autocast is on"):
        backend.require(CPU)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(RuntimeError, match="'medium', which lets float32 products run in bf16"):
            backend.require(CPU)
    finally:
        torch.set_float32_matmul_precision("highest")
    backend.require(CPU)


def test_compilation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"torch\.compile .* run eagerly"):
        backend.require(CPU)

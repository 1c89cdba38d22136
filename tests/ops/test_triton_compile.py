"""Every Triton kernel, compiled for Hopper on any machine: the interpreter runs what the compiler refuses."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import without

ROOT = Path(__file__).parents[2]


def named(node: ast.AST) -> str:
    """The last part of a name; nothing of other expressions."""
    return getattr(node, "id", getattr(node, "attr", ""))


def kernels(sources: dict[str, str]) -> set[str]:
    """module.name of all that modules launch, `name[grid](...)`. AssertionError: a jitted function is neither launched
    where it is written, nor called in any module, so that nobody knows who compiles it."""
    jitted, launched, called = set(), set(), set()
    for module, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and any(
                named(d.func if isinstance(d, ast.Call) else d) == "jit"
                for d in node.decorator_list
            ):
                jitted.add((module, node.name))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add((module, named(node.func.value)))
            elif isinstance(node, ast.Call):
                called.add(named(node.func))
    lost = [(m, name) for m, name in jitted - launched if name not in called]
    assert not lost, f"neither launched nor called: {sorted(lost)}"
    return {f"{module}.{name}" for module, name in jitted & launched}


@pytest.mark.slow(150)
def test_every_kernel_is_compiled_for_hopper() -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_child"],
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-3000:]
    files = sorted((ROOT / "unified_models").rglob("*.py"))
    wanted = kernels(
        {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}
    )
    compiled = set(re.findall(r"^unified_models\S+", run.stdout, re.MULTILINE))
    assert compiled == wanted, f"not compiled: {sorted(wanted - compiled)}"
    assert len(wanted) == 68
    assert re.search(r"^68 kernels, \d+ variants compiled", run.stdout, re.MULTILINE)


def test_kernels_are_found_where_they_are_launched() -> None:
    source = (
        "@triton.jit\ndef _a(x): ...\n"
        "@triton.jit(do_not_specialize=['n'])\ndef _b(n):\n    _a(n)\n"
        "def b(n):\n    _b[(1,)](n)\n    xs[0](n)\n"
    )
    assert kernels({"m": source}) == {"m._b"}
    with pytest.raises(AssertionError, match="_b"):
        kernels({"m": source.replace("_b[(1,)]", "_c[(1,)]")})

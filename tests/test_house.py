"""The house rules, read off the source with `ast`. Each rule comes with faulty sources that it must catch.

A rule is a function of one file that yields (line, what is wrong). RULES at the end says which files each one reads.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OP_FOLDERS = sorted((ROOT / "unified_models/ops").glob("[!_.]*/"))
Fault = tuple[int, str]

# Lowest first. A file imports its own tier and those below; what is not named here is above them all.
TIERS = [
    rooms.split()
    for rooms in (
        "autograd config progress quantization",
        "formats",
        "weight",
        "ops",
        "context model",
        "models",
        "registry",
        "checkpoint",
    )
]
MODEL_IMPORTS = (
    *("torch", "einops", "dataclasses", "functools", "math", "typing", "collections.abc"),
    *(f"unified_models.{room}" for room in ("config", "context", "model", "ops", "quantization")),
)
# In a model file: words that no part of a name may be, and names that may not occur at all.
MODEL_WORDS = re.compile(r"training|prefill|decode|decoding|past")
MODEL_NAMES = re.compile(
    r"rank|world_size|dist|distributed|device|cuda|triton|environ|hasattr|getattr"
    r"|matmul|mm|bmm|addmm|einsum"  # a product is ctx.linear, or inside an op
)
EDGE = "the last < 32 elements of a call or of a thread's share get other bits"
OPERATORS = {
    "sigmoid": f"{EDGE}; 1 / (1 + exp(-x))",
    "expit": f"{EDGE}; 1 / (1 + exp(-x))",
    "silu": f"{EDGE}; x / (1 + exp(-x))",
    "softplus": f"{EDGE}; where(x > 20, x, log1p(exp(min(x, 20))))",
    "gelu": f"{EDGE}; write it with erf or tanh",
    "exp2": f"{EDGE}; exp(x * ln 2)",
    "pow": "short and single inputs get other bits; multiply out",
    "topk": "orders ties arbitrarily; a stable sort, or unique keys and a comment on the line that no tie is left",
    "conv1d": "sums in another order than bias, then taps; write the taps out",
    "scaled_dot_product_attention": "its blocks depend on the number of keys; ops/attend",
}
FOREIGN = ("math", "triton", "unified_models")  # not torch's: math.pow, tl.sigmoid, ops.sigmoid
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
ORDER = re.compile(r"^#+ .*order of summation", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root of the repository, and its text."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """The file's lines; line n is lines[n - 1]."""
        return self.text.splitlines()

    @property
    def module(self) -> tuple[str, ...]:
        """The dotted name, in parts."""
        parts = self.path.with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    @property
    def room(self) -> str:
        """The sub-package or module of unified_models that the file is of; "adapters" for those."""
        return "adapters" if self.module[0] == "adapters" else "".join(self.module[1:2])

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of everything imported; `from a import b` is a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                keep = len(self.module) + (self.path.name == "__init__.py") - node.level
                parts = [*(self.module[:keep] if node.level else ()), *filter(None, [node.module])]
                yield from ((node.lineno, ".".join([*parts, alias.name])) for alias in node.names)

    def names(self) -> Iterator[tuple[int, str]]:
        """(line, name) of every identifier, without its shape suffix: past_S is past."""
        for node in ast.walk(self.tree):
            for field in ("id", "attr", "arg", "name", "asname"):
                for name in str(getattr(node, field, None) or "").split("."):
                    yield getattr(node, "lineno", 1), re.sub(r"_[A-Z]+$", "", name)


Rule = Callable[[Source], Iterator[Fault]]


def tier(room: str) -> int:
    """The height of a room: a sub-package of unified_models, or a module in it."""
    return next((n for n, rooms in enumerate(TIERS) if room in rooms), len(TIERS))


def direction(source: Source) -> Iterator[Fault]:
    """Imports point down the tiers, and nothing imports an adapter."""
    room = source.room
    for line, name in source.imports():
        parts = name.split(".")
        if parts[:2] == ["unified_models", "adapters"] or parts[0] == "adapters":
            if room != "adapters":
                yield line, f"imports {name}: nothing imports an adapter"
        elif parts[0] == "unified_models" and tier(room) < tier(parts[1] if parts[1:] else ""):
            yield line, f"{room} imports {name}, which is above it"


def model_imports(source: Source) -> Iterator[Fault]:
    """A model file imports torch, a little of the standard library, the context and token-local ops."""
    for line, name in source.imports():
        if not any(f"{name}.".startswith(f"{allowed}.") for allowed in MODEL_IMPORTS):
            yield line, f"a model file does not import {name}"


def model_vocabulary(source: Source) -> Iterator[Fault]:
    """A model file knows no phase, device or process group; its signatures say all they take.

    `Config.tiny` alone takes **overrides: they become fields of a dataclass, which refuses a misspelt one.
    """
    for line, name in source.names():
        if MODEL_NAMES.fullmatch(name) or any(map(MODEL_WORDS.fullmatch, name.split("_"))):
            yield line, f"a model file does not say {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and node.name != "tiny":
            yield node.lineno, f"**{node.args.kwarg.arg} swallows misspelt arguments"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.lineno, "@ depends on the number of rows: ctx.linear, or an op"
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            tested = ast.unparse(node.left)
            if re.search(r"cache|memory|slot", tested, re.IGNORECASE):
                yield node.lineno, f"asks whether {tested} is there"


def safe_operators(source: Source) -> Iterator[Fault]:
    """No operator of torch whose bits depend on where an element stands (measured on CPU)."""
    ours, torchs = set(), set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                root = (module or alias.name).split(".")[0]
                bound = alias.asname or alias.name.split(".")[0]
                (ours if root in FOREIGN or getattr(node, "level", 0) else torchs).add(bound)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            name, known = node.attr, isinstance(node.value, ast.Name) and node.value.id in ours
        elif isinstance(node, ast.Name):
            name, known = node.id, node.id not in torchs
        else:
            continue
        reason = OPERATORS.get(name.lower().rstrip("_"))
        told = name == "topk" and re.search(r"#.*\bties?\b", source.lines[node.lineno - 1])
        if reason and not known and not told:
            yield node.lineno, f"{name}: {reason}"


def sizes(source: Source) -> Iterator[Fault]:
    """A model file has at most 600 lines, any other 400; a function 60."""
    limit = 600 if source.path.parts[:2] == ("unified_models", "models") else 400
    if len(source.lines) > limit:
        yield limit, f"{len(source.lines)} lines, limit {limit}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 60:
                yield node.lineno, f"{node.name} has {length} lines, limit 60"


def finished(source: Source) -> Iterator[Fault]:
    """Nothing is left for later, no error is swallowed, and a file is named for what it holds."""
    if source.path.name in ("utils.py", "util.py", "helpers.py", "common.py", "misc.py"):
        yield 1, "name the file for what it holds"
    for number, line in enumerate(source.lines, 1):
        if found := UNFINISHED.search(line):
            yield number, found[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if re.search(r"\b(BaseException|Exception|everything)\b", caught):
                yield node.lineno, f"except {caught}: say which error"


def documented(source: Source) -> Iterator[Fault]:
    """The file and each public function and class at its top level say what they are for.

    Config, Model and Block of a model file are what CONTRIBUTING.md says; a reference is one with its file.
    """
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield 1, "the file has no docstring"
    told = ("Config", "Model", "Block") if source.room == "models" else ()
    for node in source.tree.body if source.path.name != "reference.py" else ():
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if node.name not in told and not ast.get_docstring(node):
            yield node.lineno, f"{node.name} has no docstring"


def in_folders(*folders: str) -> Callable[[Path], bool]:
    """Whether a path lies in one of these folders of unified_models."""
    return lambda path: path.parts[0] == "unified_models" and path.parts[1] in folders


def anywhere(path: Path) -> bool:
    """Every file of the package and of the adapters."""
    return path.parts[0] != "tests"


def deployed(path: Path) -> bool:
    """Where the forward is: neither the plain maths of an op's reference, nor the baseline that exact bits beat."""
    forward = in_folders("ops", "models", "formats", "context")(path)
    return forward and path.name != "reference.py" and path.name != "plain.py"


RULES: dict[Rule, Callable[[Path], bool]] = {
    direction: anywhere,
    model_imports: in_folders("models"),
    model_vocabulary: in_folders("models"),
    safe_operators: deployed,
    sizes: lambda path: True,
    finished: anywhere,
    documented: anywhere,
}


def sources() -> list[Source]:
    """Every Python file of the house. adapters/ is read where it lies, not through its link."""
    paths = [
        p.relative_to(ROOT)
        for top in ("unified_models", "adapters", "tests")
        for p in (ROOT / top).rglob("*.py")
    ]
    paths = sorted(p for p in paths if p.parts[:2] != ("unified_models", "adapters"))
    return [Source(path, (ROOT / path).read_text()) for path in paths]


def op_faults(folder: Path, test: Path) -> list[str]:
    """What an op folder lacks."""
    readme = folder / "README.md"
    told = readme.read_text() if readme.is_file() else ""
    tests = test.read_text() if test.is_file() else ""
    wanted = {
        "reference.py": (folder / "reference.py").is_file(),
        "README.md with a heading 'Order of summation'": ORDER.search(told),
        f"tests/ops/{test.name}": tests,
        f"the word backward in tests/ops/{test.name}": "backward" in tests,
    }
    return [what for what, there in wanted.items() if not there]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    read = [source for source in sources() if RULES[rule](source.path)]
    assert read, f"{rule.__name__} read no file"
    faults = [
        f"{source.path}:{line}: {what}"
        for source in read
        for line, what in sorted(set(rule(source)))
    ]
    assert not faults, f"{rule.__doc__}\n" + "\n".join(faults)


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=lambda p: p.name)
def test_op_folder(folder: Path) -> None:
    lacking = op_faults(folder, ROOT / "tests/ops" / f"test_{folder.name}.py")
    assert not lacking, f"ops/{folder.name} lacks {', '.join(lacking)}"


def test_no_large_files() -> None:
    tops = [ROOT / top for top in ("adapters", "configs", "docs", "tests", "unified_models")]
    files = [p for top in tops for p in top.rglob("*") if p.is_file()]
    large = [f"{p}: {p.stat().st_size} bytes" for p in files if p.stat().st_size > 2_000_000]
    assert files
    assert not large, large


def test_adapters_link_is_relative() -> None:
    assert os.readlink(ROOT / "unified_models/adapters") == "../adapters"


MODEL = "unified_models/models/m.py"
OP = "unified_models/ops/o/__init__.py"
FAULTY = [  # a rule, a file, and what it may not say
    (direction, OP, "from unified_models.context import Rows"),
    (direction, OP, "from unified_models import models"),
    (direction, OP, "from ...engine import Engine"),
    (direction, "unified_models/ops/o.py", "from ..engine import Engine"),
    (direction, "unified_models/weight.py", "def f(): import unified_models.ops.linear"),
    (direction, "unified_models/formats/f.py", "import unified_models.weight"),
    (direction, "unified_models/context/c.py", "import unified_models.checkpoint.names"),
    (direction, "unified_models/context/c.py", "import unified_models as um"),
    (direction, "unified_models/cli.py", "from unified_models.adapters import vllm"),
    (direction, "unified_models/cli.py", "import adapters"),
    (model_imports, MODEL, "import os"),
    (model_imports, MODEL, "from unified_models.engine import Engine"),
    (model_imports, MODEL, "import torchvision"),
    (model_vocabulary, MODEL, "if self.training: pass"),
    (model_vocabulary, MODEL, "def f(x, is_prefill): pass"),
    (model_vocabulary, MODEL, "n = step.past_S"),
    (model_vocabulary, MODEL, "def decode(x): pass"),
    (model_vocabulary, MODEL, "import torch.distributed as dist"),
    (model_vocabulary, MODEL, "torch.arange(3, device=x)"),
    (model_vocabulary, MODEL, "r = group.rank"),
    (model_vocabulary, MODEL, "getattr(cfg, 'n', 1)"),
    (model_vocabulary, MODEL, "def f(x, **options): pass"),
    (model_vocabulary, MODEL, "if kv_cache is None: pass"),
    (model_vocabulary, MODEL, "y = x @ w"),
    (safe_operators, OP, "import torch\ny = torch.sigmoid(x)"),
    (safe_operators, OP, "y = x.sigmoid_()"),
    (safe_operators, OP, "from torch.nn import functional as F\nact = F.silu"),
    (safe_operators, OP, "from torch.nn.functional import softplus\nsoftplus(x)"),
    (safe_operators, MODEL, "act = nn.GELU()"),
    (safe_operators, OP, "y = torch.special.exp2(x)"),
    (safe_operators, "unified_models/formats/f.py", "s = amax.log2().ceil().exp2()"),
    (safe_operators, OP, "y = x.pow(2)"),
    (safe_operators, OP, "best = scores.topk(8)"),
    (sizes, OP, "x = 1\n" * 401),
    (sizes, MODEL, "x = 1\n" * 601),
    (sizes, "tests/t.py", "def f():\n" + "    x = 1\n" * 60),
    (finished, OP, "x = 1  # TODO later"),
    (finished, OP, "raise NotImplementedError"),
    (finished, OP, "try: pass\nexcept (OSError, Exception): pass"),
    (finished, OP, "try: pass\nexcept: pass"),
    (finished, "unified_models/ops/utils.py", ""),
    (documented, OP, '"""Doc."""\ndef f(): pass'),
    (documented, OP, '"""Doc."""\nclass C: pass'),
    (documented, "unified_models/ops/o/reference.py", "x = 1"),
    (documented, MODEL, '"""Doc."""\nclass Attention: pass'),
]
CLEAN = [
    (
        direction,
        OP,
        "from unified_models.weight import Weight; import unified_models.formats.weights",
    ),
    (direction, OP, "from . import arithmetic; from ..linear import cpu"),
    (direction, "unified_models/engine/e.py", "from unified_models import checkpoint, context"),
    (direction, "adapters/vllm/a.py", "import unified_models.adapters.vllm, unified_models.engine"),
    (
        model_imports,
        MODEL,
        "import torch; from torch import nn; from unified_models.ops import rope",
    ),
    (model_vocabulary, MODEL, '"""decode."""; n = cfg.q_lora_rank + cfg.o_groups; picks is None'),
    (model_vocabulary, MODEL, "def tiny(cls, **overrides): pass"),
    (
        safe_operators,
        OP,
        "import math; from unified_models import ops; ops.sigmoid(math.pow(2, 3))",
    ),
    (safe_operators, OP, "def softplus(x): pass\nsoftplus(x)"),
    (safe_operators, OP, "best = keys.topk(8)  # all keys differ, so no tie is left"),
    (safe_operators, OP, "import triton.language as tl; tl.sigmoid(x)"),
    (sizes, MODEL, "x = 1\n" * 600),
    (finished, OP, "try: pass\nexcept OSError: pass"),
    (documented, OP, '"""Doc."""\ndef f():\n    """Doc."""\ndef _g(): pass'),
    (documented, MODEL, '"""Doc."""\nclass Model: pass'),
]


@pytest.mark.parametrize(
    ("rule", "path", "text", "caught"), [(*f, True) for f in FAULTY] + [(*c, False) for c in CLEAN]
)
def test_rule_catches(rule: Rule, path: str, text: str, caught: bool) -> None:
    assert RULES[rule](Path(path)), "the rule does not read this file"
    assert bool(list(rule(Source(Path(path), text)))) == caught


def test_op_folder_catches(tmp_path: Path) -> None:
    folder, test = tmp_path / "o", tmp_path / "test_o.py"
    folder.mkdir()
    assert len(op_faults(folder, test)) == 4
    (folder / "reference.py").touch()
    (folder / "README.md").write_text("# O\n\nThe order of summation is none.\n")
    test.write_text("def test_o(): pass\n")
    assert len(op_faults(folder, test)) == 2
    (folder / "README.md").write_text("# O\n\n## Order of summation\n")
    test.write_text("def test_o_backward(): pass\n")
    assert not op_faults(folder, test)

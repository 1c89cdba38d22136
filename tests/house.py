"""The rules that a file of the house keeps, each a function from its source to the lines that break it."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
OP_FOLDERS = sorted((ROOT / "unified_models/ops").glob("[!_.]*/"))
Fault = tuple[int, str]

# Lowest first. A file imports its own tier and those below; what is not named here is above them all.
TIERS = [
    rooms.split()
    for rooms in (
        "autograd config operands progress quantization sharding",
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
SUMS = (
    "sums",
    "sums_triton",
    "products",
    "products_triton",
    "pages_triton",
    "records_triton",
    "triton",
    "reference",
)
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


def sums(source: Source) -> Iterator[Fault]:
    """A sum within a row and a stack of products go through ops/sums.py and ops/products.py, where each backend has its
    order; elsewhere a comment on the line says why any order will do. A backward_triton.py has gradients alone."""
    if source.path.name == "backward_triton.py":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("sum", "mean", "cumsum", "bmm"):
            line = source.lines[node.lineno - 1]
            if not re.search(r"#.*\b(gradient|count|CPU|numpy)", line):
                yield node.lineno, f"{node.attr}: ops/sums.py, ops/products.py"


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
    sums: lambda path: in_folders("ops", "models")(path) and path.stem not in SUMS,
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

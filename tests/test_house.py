"""The house rules, read off the source with `ast`. Each rule comes with faulty sources that it must catch.

A rule is a function of one file that yields (line, what is wrong). RULES at the end says which files each one reads.
"""

import os
from pathlib import Path

import pytest

from tests.house import (
    OP_FOLDERS,
    ORDER,
    ROOT,
    RULES,
    Rule,
    Source,
    direction,
    documented,
    finished,
    model_imports,
    model_vocabulary,
    safe_operators,
    sizes,
    sources,
    sums,
)


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
    (sums, OP, "y = x.square().mean(-1)"),
    (sums, MODEL, "gates / gates.sum(-1, keepdim=True)"),
    (sums, OP, "import torch\ny = torch.bmm(a, b)"),
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
    (sums, OP, "from unified_models.ops.sums import row_sum\ny = row_sum(x)"),
    (sums, OP, "dsinks -= share.sum(0)  # a gradient"),
    (sums, "unified_models/ops/o/backward_triton.py", "total += tl.sum(g * y, axis=0)"),
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

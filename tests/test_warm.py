"""Which products are compiled ahead, at which numbers of rows, by whom; on a CPU, where nothing can be compiled."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import unified_models as um
from unified_models import cli
from unified_models.ops.linear import narrow
from unified_models.warm import compiling
from unified_models.warm.compiling import EACH, LARGEST, rows, warm, warm_apart
from unified_models.warm.products import Product, described, of_weight, products
from unified_models.weight import Weight

CONFIGS = Path(__file__).parent.parent / "configs"
BF16, F32 = torch.bfloat16, torch.float32
SMALL = [Product(512, 4096, F32), Product(1024, 4096, BF16, fp8=True), Product(256, 4096, BF16)]
SMS = 132


def plain(*shapes: tuple[int, int]) -> set[Product]:
    return {Product(N, K, dtype) for N, K in shapes for dtype in (BF16, F32)}


def fp8(*shapes: tuple[int, int]) -> set[Product]:
    return {Product(N, K, BF16, fp8=True) for N, K in shapes}


BY_HAND = {
    "deepseek_v4_flash": {
        *fp8((1024, 4096), (32768, 1024), (512, 4096)),  # wq_a, wq_b: 64 heads of 512, wkv
        Product(1024, 4096, BF16, fp8=True, groups=8),  # wo_a: 8 groups of 8 heads
        *fp8((4096, 8192)),  # wo_b
        *fp8((8192, 1024)),  # the indexer's wq_b: 64 heads of 128
        *fp8((2048, 4096), (4096, 2048)),  # the shared expert's w1 and w3, w2
        *plain((129280, 4096)),  # head
        *plain((1024, 4096), (512, 4096)),  # compressors of 4 tokens, twice 512, and of 128, 512
        *plain((256, 4096)),  # the indexer's compressor, twice 128, and the gate of 256 experts
    },
    "nemotron_3_nano_30b": plain(
        (131072, 2688),  # head
        (10304, 2688),  # in_proj: 4096 + 4096 + 2 * 8 * 128 + 64
        (2688, 4096),  # out_proj, and o_proj: 32 heads of 128
        (4096, 2688),  # q_proj; k_proj and v_proj, 256 x 2688, are small
        (3712, 2688),  # the shared expert's two
        (2688, 3712),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_products_of_a_released_config(name: str) -> None:
    """No weight of experts, no gate or projection below 2^20 elements, nothing that is float32."""
    found = products(described(CONFIGS / f"{name}.json"))
    assert set(found) == BY_HAND[name]
    assert len(found) == len(BY_HAND[name]), "each once"
    sizes = [p.groups * p.N * p.K for p in found]
    assert sizes == sorted(sizes, reverse=True), "the longest work begins first"


@pytest.mark.parametrize(
    ("format_", "shape", "groups", "wanted"),
    [
        ("bfloat16", (1024, 1024), 1, plain((1024, 1024))),
        ("bfloat16", (4 * 1024, 2048), 4, plain((1024, 2048))),  # a group is a product of its own
        ("bfloat16", (4 * 256, 2048), 4, set()),  # and small
        ("bfloat16", (1024, 1056), 1, set()),
        ("bfloat16", (2, 1024, 1024), 1, set()),
        ("mxfp4", (1024, 1024), 1, plain((1024, 1024))),
        ("nvfp4", (1024, 1024), 1, {Product(1024, 1024, F32)}),
        ("fp8_tensor", (1024, 1024), 1, set()),
        ("float32", (1024, 1024), 1, set()),
        ("fp8_ue8m0", (1024, 1024), 1, fp8((1024, 1024))),
        ("fp8_float32", (1024, 1088), 1, set()),
        ("fp8_float32", (8 * 1024, 1024), 8, {Product(1024, 1024, BF16, True, 8)}),
        ("fp8_ue8m0", (2, 1024, 1024), 1, set()),
    ],
)
def test_products_of_a_weight(
    format_: str, shape: tuple[int, ...], groups: int, wanted: set[Product]
) -> None:
    with torch.device("meta"):
        axes = [part for size in shape for part in (None, size)]
        weight = Weight(*axes, format=format_, groups=groups)
    assert set(of_weight(weight)) == wanted


@pytest.mark.parametrize("format_", ["bfloat16", "nvfp4", "mxfp4", "fp8_tensor", "float32"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_a_linear_asks_for_is_listed(
    monkeypatch: pytest.MonkeyPatch, make_reading: Callable[[str], object], format_: str, dtype
) -> None:
    """The arithmetic's own way from a weight to a product of `narrow`, with DeepGEMM said to be there."""
    from unified_models.ops.linear import arithmetic

    reading, asked = make_reading(format_), set[Product]()
    w = narrow.values(reading).view(1, *reading.shape)
    outer = arithmetic.outer_scale(reading)
    held = arithmetic.Operand(w, None, None if outer is None else outer.expand(1), len(w[0]))

    def product(x: Tensor, w_NK: Tensor, out: torch.dtype = F32) -> Tensor:
        if x.dtype == w_NK.dtype == BF16 and narrow.large(w_NK):
            asked.add(Product(*w_NK.shape, out))
        return torch.zeros(len(x), len(w_NK), dtype=out)

    monkeypatch.setattr(narrow, "product", product)
    x = OnGpu(torch.zeros(2, 1024, dtype=BF16))
    arithmetic.product(arithmetic.Input(x, None), held, 0, dtype)  # type: ignore[arg-type]
    assert asked <= set(of_weight(reading.weight))
    assert bool(asked) is (format_ in ("bfloat16", "nvfp4", "mxfp4"))


class OnGpu:
    """A tensor that says it lies on a GPU."""

    is_cuda = True

    def __init__(self, x: Tensor) -> None:
        self.x, self.dtype = x, x.dtype

    def __len__(self) -> int:
        return len(self.x)


@pytest.fixture
def make_reading() -> Callable[[str], object]:
    def make(format_: str) -> object:
        weight = Weight(None, 1024, None, 1024, format=format_)
        weight.label = "w"
        with torch.no_grad():
            weight.assign(torch.randn(1024, 1024))
            if weight.input_scale is not None:
                weight.input_scale.assign(torch.tensor(0.1))
        return weight()

    return make


def test_formats_are_those_of_the_tensors(tmp_path: Path) -> None:
    """Where there are tensors, their headers decide, not what the config implies."""
    folder = tmp_path / "v4"
    um.make_tiny("deepseek_v4", folder)
    loaded, seen = um.load(folder), described(folder)
    told = [{path: w.format.name for path, w in model.weights()} for model in (loaded, seen)]
    assert told[0] == told[1] and "fp8_ue8m0" in told[0].values()
    assert all(w.packed_names == () and w.master.is_meta for _, w in seen.weights())
    assert products(described(folder / "config.json")) == products(seen) == []


def test_a_pattern_is_believed_where_there_are_no_tensors_D21(tmp_path: Path) -> None:
    """An exclude list that grew after the tensors were written: the file holds NVFP4, and that is what runs."""
    folder, bare = tmp_path / "tiny", tmp_path / "bare"
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mtp*"]}
    um.make_tiny("nemotron_h", folder, quantization_config=settings)
    for file in (folder / "config.json", folder / "hf_quant_config.json"):
        file.write_text(file.read_text().replace('"lm_head"', '"lm_head", "*q_proj"'))
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    for path, wanted in ((folder, "nvfp4"), (bare, "bfloat16")):
        seen = {name: w.format.name for name, w in described(path).weights()}
        found = {seen[name] for name in seen if name.endswith("q_proj")}
        assert found == {wanted}, path
        assert "nvfp4" in {seen[name] for name in seen if name.endswith("k_proj")}


def test_a_folder_without_tensors_and_a_bad_one(tmp_path: Path) -> None:
    shutil.copy(CONFIGS / "deepseek_v4_flash.json", tmp_path / "config.json")
    assert set(products(described(tmp_path))) == BY_HAND["deepseek_v4_flash"]
    with pytest.raises(ValueError, match="nowhere"):
        described(tmp_path / "nowhere")
    (tmp_path / "other.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ValueError, match=r"other\.json.*model_type"):
        described(tmp_path / "other.json")
    um.make_tiny("qwen3", tmp_path / "tiny")
    raw = json.loads((tmp_path / "tiny/config.json").read_text())
    raw["num_hidden_layers"] += 1
    (tmp_path / "tiny/config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"tiny.*does not fit.*missing"):
        described(tmp_path / "tiny")


def tile(M: int, N: int, *, wide: bool) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and multicast, by rules as DeepGEMM's on Hopper: fewest waves of tiles over the
    chip, then the fullest last one, then the smallest; 16 and 32 rows for so few, 256 where the result is bfloat16."""
    best: tuple[int, ...] = ()
    for m in (64, 128, *[m for m in (16, 32) if m >= M], *[256] * wide):
        for n in range(16, 257, 16):
            if min(m, n) <= 128:
                tiles = -(-M // m) * -(-N // n)
                waves = -(-tiles // SMS)
                choice = (waves, (waves - 1) * SMS - tiles, m > M, m, n)
                best = min(best or choice, choice)
    m, n = best[3:]
    return m, n, M >= 512 and -(-M // m) % 2 == 0


def tiles(N: int, sizes: Iterable[int], *, wide: bool) -> set[tuple[int, int, bool]]:
    return {tile(M, N, wide=wide) for M in sizes}


@pytest.mark.parametrize("product", [Product(512, 4096, BF16), Product(1024, 4096, F32)], ids=str)
def test_any_number_of_rows_finds_its_tile(product: Product) -> None:
    """At every step of 97 rows beyond 2048, or at powers of two, a tile is missed."""
    N, tokens, wide = product.N, 8192, product.dtype == BF16
    tried = rows(product, tokens)
    every = tiles(N, range(1, tokens + 1), wide=wide)
    assert tiles(N, tried, wide=wide) == every
    assert len(every) > 20
    assert tiles(N, [2**i for i in range(14)], wide=wide) < every
    assert len(tried) < tokens / 3


def test_rows_are_tried_once_and_as_far_as_they_go() -> None:
    one = Product(512, 4096, F32)
    assert rows(one, 1) == [1]
    assert rows(one, 300) == [*range(1, 301)]
    assert rows(one, EACH) == [*range(1, EACH + 1)]
    assert rows(one, EACH + 70) == [*range(1, EACH + 1), EACH + 64, EACH + 70]
    head = Product(129280, 4096, F32)
    most = LARGEST // (129280 * 4)
    assert rows(head, 20000)[-1] == most and EACH < most < 20000
    half = Product(129280, 4096, BF16)
    assert rows(half, 20000)[-1] == LARGEST // (129280 * 2)
    grouped = Product(129280, 64, F32, groups=2)
    assert rows(grouped, 20000)[-1] == LARGEST // (129280 * 8)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        rows(one, 0)


def note(folder: Path, product: Product, sizes: Sequence[int]) -> None:
    """In the place of multiplying: what a process was given, and by whom it was done."""
    told = {"sizes": list(sizes), "pid": os.getpid()}
    with (folder / f"{product}".replace(" ", "_")).open("a") as file:
        file.write(json.dumps(told) + "\n")


def fail(product: Product, sizes: Sequence[int]) -> None:
    """One of SMALL cannot be compiled."""
    if product == SMALL[1]:
        raise RuntimeError("nvcc: out of registers")


@pytest.mark.slow(12)
def test_each_product_is_one_process_work(tmp_path: Path) -> None:
    warm(SMALL, 2200, processes=2, work=partial(note, tmp_path))
    pids = set()
    assert len(list(tmp_path.iterdir())) == len(SMALL)
    for product in SMALL:
        (line,) = (tmp_path / f"{product}".replace(" ", "_")).read_text().splitlines()
        told = json.loads(line)
        assert told["sizes"] == rows(product, 2200)
        pids.add(told["pid"])
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids


@pytest.mark.slow(12)
def test_a_product_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=f"^{SMALL[1]}: nvcc: out of registers"):
        warm(SMALL, 10, processes=2, work=fail)


@pytest.mark.parametrize(
    "product",
    [Product(64, 128, F32), Product(64, 128, BF16), Product(256, 384, BF16, True)]
    + [Product(256, 384, BF16, True, groups=3)],
    ids=str,
)
def test_what_is_multiplied(monkeypatch: pytest.MonkeyPatch, product: Product) -> None:
    """Operands of the shapes and dtypes that `narrow`'s products say they read, at each number of rows; the largest
    first, whose memory serves the others: ascending, a head's outputs of every size stayed side by side, 72 GiB."""
    quantize = pytest.importorskip("unified_models.ops.quantize_triton")
    G, N, K, seen = product.groups, product.N, product.K, []
    stack = (G,) if G > 1 else ()

    def quantize_rows(x: Tensor, dtype: torch.dtype, *, tokens_last: bool) -> tuple[Tensor, Tensor]:
        assert dtype == torch.float8_e4m3fn and tokens_last
        return x.to(dtype), torch.ones(*x.shape[:-1], K // 128)

    def deep_product(x: Tensor, w: Tensor, dtype: torch.dtype) -> None:
        assert not product.fp8 and dtype == product.dtype and x.dtype == w.dtype == BF16
        assert x.shape == (len(x), K) and w.shape == (N, K)
        seen.append(len(x))

    def deep_scaled_product(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> None:
        assert product.fp8 and x.dtype == w.dtype == torch.float8_e4m3fn
        assert x.shape == (len(x), *stack, K) and xs.shape == (len(x), *stack, K // 128)
        assert w.shape == (G, N, K) and ws.shape == (G, N // 128, K // 128)
        seen.append(len(x))

    monkeypatch.setattr(quantize, "quantize_rows", quantize_rows)
    monkeypatch.setattr(narrow, "deep_product", deep_product)
    monkeypatch.setattr(narrow, "deep_scaled_product", deep_scaled_product)
    compiling.multiply(product, [1, 7, 3], "cpu")
    assert seen == [7, 3, 1]


def test_refusals_come_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(compiling, "ProcessPoolExecutor", spawn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^no GPU here, [^\n]*$"):
        warm(SMALL)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        warm(SMALL, 0, work=fail)
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        warm(SMALL, processes=0, work=fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(narrow, "deep_gemm_release", lambda: None)
    with pytest.raises(ValueError, match=r"^nothing to compile: [^\n]*NVIDIA L4[^\n]*$"):
        warm(SMALL)
    monkeypatch.setattr(narrow, "deep_gemm_release", lambda: "0.0")
    warm([])  # nothing to do, and nobody asked
    with pytest.raises(AssertionError, match="was started"):
        warm(SMALL)


def run(*args: object) -> tuple[int, str]:
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["warm", *map(str, args)])
    return shown.exit_code, shown.output


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = CONFIGS / "deepseek_v4_flash.json"
    status, text = run(flash, "--list")
    assert status == 0
    assert sorted(text.splitlines()) == sorted(map(str, BY_HAND["deepseek_v4_flash"]))
    assert "8 x 1024 x 4096, fp8 to bfloat16" in text.splitlines()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = run(flash)
    assert status == 2 and text.startswith("no GPU here") and len(text.splitlines()) == 1
    given: list[object] = []
    monkeypatch.setattr(compiling, "warm", lambda *args: given.extend(args))
    status, text = run(flash, "--tokens", 100, "--processes", 3)
    assert status == 0 and f"{len(BY_HAND['deepseek_v4_flash'])} products, up to 100" in text
    assert given == [products(described(flash)), 100, 3]
    status, text = run("--help")
    assert "Example: unified-models warm " in text and "DG_JIT_CACHE_DIR" in text


@pytest.mark.slow(8)
def test_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    """`python -m unified_models.warm`, which ends as the command does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = CONFIGS / "qwen3_0_6b.json"
    with pytest.raises(RuntimeError, match=r"unified_models\.warm .*qwen3.* 64: exit status 2"):
        warm_apart(path, 64)
    assert "no GPU here" in capfd.readouterr().err
    listed = [sys.executable, "-m", "unified_models.warm", str(path), "--list"]
    done = subprocess.run(listed, capture_output=True, text=True)
    assert done.returncode == 0 and "3072 x 1024, bfloat16 to float32" in done.stdout

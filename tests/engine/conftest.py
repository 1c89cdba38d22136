"""A toy whose every token is a checksum of all that it may read, a small Nemotron-H, and ways to compare their runs bit
by bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unified_models as um
from unified_models.context import Entries, Rows, State, Weight
from unified_models.context.memory import PackMemory, Readable, closed
from unified_models.context.step import Step
from unified_models.engine import Engine
from unified_models.model import LanguageModel, bind_numerics
from unified_models.models import nemotron_h
from unified_models.ops.logprob import logprobs
from unified_models.tiny import randomize

PRIME = 4093


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = 64
    max_position_embeddings: int = 4096


class ToyContext:
    """What the toy needs of a context: the step and the memory."""

    def __init__(self, step: Step, memory: Any) -> None:
        self.step, self.memory = step, memory


def owner_and_position(step: Step) -> list[tuple[int, int]]:
    return list(zip(step.sequence_T.tolist(), step.positions_T.tolist(), strict=True))


class Mixer(nn.Module):
    """Each token becomes a whole-number checksum of the rows within its reach, weighted by their age."""

    def __init__(self, keep: int | None) -> None:
        super().__init__()
        self.slot = Rows(2, keep=keep)

    def forward(self, x: list[int], ctx: ToyContext) -> list[int]:
        new = torch.tensor([[v, (v * 7) % PRIME] for v in x], dtype=torch.float32)
        got = ctx.memory.rows(ctx.step, self.slot, new.view(-1, 2))
        rows, base = got.rows_RD.tolist(), got.base_S.tolist()
        out = []
        for s, p in owner_and_position(ctx.step):
            first = 0 if self.slot.keep is None else max(0, p - self.slot.keep + 1)
            reach = rows[base[s] + first : base[s] + p + 1]
            assert len(reach) == p + 1 - first
            out.append(sum((i + first + 1) * (a + 3 * b) for i, (a, b) in enumerate(reach)))
        return [(v + 11 * int(o)) % PRIME for v, o in zip(x, out, strict=True)]


class Windows(nn.Module):
    """Each token becomes a checksum of the closed windows, each a checksum of its inputs."""

    def __init__(self, stride: int, overlap: bool) -> None:
        super().__init__()
        self.slot = Entries(1, stride=stride, overlap=overlap)

    def forward(self, x: list[int], ctx: ToyContext) -> list[int]:
        step, slot = ctx.step, self.slot
        new = torch.tensor(x, dtype=torch.float32)[:, None] + torch.arange(slot.open.dim)
        inputs = ctx.memory.rows(step, slot.open, new)
        first_S, counts_S = closed(step, slot)
        entries = []
        for s, (first, count) in enumerate(zip(first_S.tolist(), counts_S.tolist(), strict=True)):
            for w in range(first, first + count):
                entries.append(self._entry(inputs, s, (w + 1) * slot.stride))
        kept = ctx.memory.entries(step, slot, torch.tensor(entries).view(-1, 1))
        rows, base = kept.rows_RD[:, 0].tolist(), kept.base_S.tolist()
        out = []
        for s, p in owner_and_position(step):
            seen = rows[base[s] : base[s] + (p + 1) // slot.stride]
            assert len(seen) == (p + 1) // slot.stride
            out.append(sum((w + 1) * v for w, v in enumerate(seen)))
        return [(v + 13 * int(o)) % PRIME for v, o in zip(x, out, strict=True)]

    def _entry(self, inputs: Readable, s: int, end: int) -> float:
        base = int(inputs.base_S[s])
        reach = inputs.rows_RD[base + max(0, end - self.slot.span) : base + end]
        assert len(reach) == min(end, self.slot.span)
        return float(sum((i + 1) * int(v.sum()) for i, v in enumerate(reach)) % PRIME)


class Scan(nn.Module):
    """Each token becomes a checksum of all before it: the one at the last boundary, and the rows since."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.slot = State((1, 1, 1), groups=1, chunk=chunk)

    def forward(self, x: list[int], ctx: ToyContext) -> list[int]:
        step, slot = ctx.step, self.slot
        new = torch.tensor(x, dtype=torch.float32)[:, None] * torch.tensor([1.0, 2.0, 3.0])
        got = ctx.memory.rows(step, slot.open, new)
        rows, base = got.rows_RD.sum(1).tolist(), got.base_S.tolist()
        states = ctx.memory.states(step, slot).flatten().tolist()
        ends, out = [], []
        for s, p in owner_and_position(step):
            first = p // slot.chunk * slot.chunk
            reach = rows[base[s] + first : base[s] + p + 1]
            assert len(reach) == p + 1 - first
            out.append(int(31 * states[s] + sum((i + 1) * v for i, v in enumerate(reach))) % PRIME)
            if (p + 1) % slot.chunk == 0:
                states[s] = float(out[-1])
                ends.append(states[s])
        ctx.memory.keep_states(step, slot, torch.tensor(ends).view(-1, 1, 1, 1))
        return out


class Toy(LanguageModel):
    """Slots of most kinds that the engine stores, in layers that read each other; with `chunks`, scans of them, too."""

    def __init__(self, *chunks: int) -> None:
        super().__init__()
        self.config = ToyConfig()
        self.salt = Weight(None, 1, format="float32")
        layers = (Mixer(7), Windows(4, True), Mixer(None), Windows(32, False), Mixer(1))
        self.layers = nn.ModuleList((*layers, *(Scan(chunk) for chunk in chunks)))
        self.name_parts()
        self.salt.assign(torch.tensor([3.0]))

    def forward(self, ids_T: Tensor, ctx: ToyContext) -> Tensor:
        salt = int(self.salt().value)
        positions = ctx.step.positions_T.tolist()
        x = [
            (i * 17 + 5 * p + salt) % PRIME for i, p in zip(ids_T.tolist(), positions, strict=True)
        ]
        for layer in self.layers:
            x = layer(x, ctx)
        return torch.tensor(x, dtype=torch.float32)[:, None]

    def logits(self, hidden_TM: Tensor, ctx: ToyContext) -> Tensor:
        v = torch.arange(self.config.vocab_size, dtype=torch.float32)
        return (hidden_TM * (v + 1) + v * v) % 251 / 64


class Trial:
    """Runs of the toy, and what they must equal: the whole sequence in one pack without past."""

    def __init__(self, *chunks: int) -> None:
        self.model = Toy(*chunks)

    def engine(self, **options: Any) -> Engine:
        return Engine(self.model, context=ToyContext, **options)

    def prompts(self, *lengths: int, offset: int = 0) -> list[list[int]]:
        """Tokens that differ from prompt to prompt from the first on."""
        return [
            [(7 * p * p + 3 * p + 5 * i + offset) % 64 for p in range(length)]
            for i, length in enumerate(lengths)
        ]

    def whole(self, sequence: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Logprobs of tokens 1, 2, .. of a sequence that runs alone, in one step."""
        step = Step.of([len(sequence)])
        ctx = ToyContext(step, PackMemory())
        with torch.no_grad():
            hidden = self.model(torch.tensor(sequence), ctx)[:-1]
            t = torch.full((len(hidden),), temperature)
            return logprobs(self.model.logits(hidden, ctx), t, torch.tensor(sequence[1:]))

    def check(
        self, prompts: Sequence[Sequence[int]], outs: Sequence[Any], temperature: float = 1.0
    ) -> int:
        """Every sampled token's logprob has the bits of the whole sequence; returns how many were compared."""
        compared = 0
        for prompt, out in zip(prompts, outs, strict=True):
            assert len(out.ids) == len(out.logprobs) == len(out.versions) > 0
            expected = self.whole([*prompt, *out.ids], temperature)[len(prompt) - 1 :]
            compared += same_bits(out.logprobs, expected)
        return compared


def same_bits(a: Tensor, b: Tensor) -> int:
    """Equal float32 bit patterns; returns how many were compared, at least one."""
    assert a.dtype == b.dtype == torch.float32
    assert a.shape == b.shape, f"{tuple(a.shape)} and {tuple(b.shape)}"
    unequal = int((a.view(torch.int32) != b.view(torch.int32)).sum())
    assert not unequal, f"{unequal} of {a.numel()} differ"
    assert a.numel(), "nothing was compared"
    return a.numel()


MIXED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        f"backbone.layers.{layer}.mixer.{name}_proj": {"quant_algo": algorithm}
        for layers, names, algorithm in (
            ((0, 2), ("in", "out"), "FP8"),
            ((1, 4), [f"experts.{e}.{n}" for e in range(8) for n in ("up", "down")], "NVFP4"),
            ((1, 4), ("shared_experts.up", "shared_experts.down"), "W4A16_NVFP4"),
        )
        for layer in layers
        for name in names
    }
    | {"lm_head": {"quant_algo": "W4A16_NVFP4"}},
}


class Hybrid:
    """A small Nemotron-H with chunks of Q tokens, and what its runs must equal: the training forward."""

    def __init__(self, chunk: int, mixed: bool) -> None:
        self.Q, self.mixed = chunk, mixed
        self.model = self.build()

    def build(self, seed: int = 0) -> LanguageModel:
        """mixed: FP8, NVFP4 and an FP8 cache; otherwise bf16."""
        config = nemotron_h.Config.tiny(
            chunk_size=self.Q, quantization_config=MIXED if self.mixed else None
        )
        model = nemotron_h.Model(config)
        randomize(model, seed)
        bind_numerics(model, "deployed")
        return model

    def engine(self, **options: Any) -> Engine:
        """On poisoned memory."""
        return Engine(self.model, **{"poison": True, **options})

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Tokens that differ from prompt to prompt from the first on."""
        return [
            [(13 * p * p + 5 * p + 31 * i) % 512 for p in range(length)]
            for i, length in enumerate(lengths)
        ]

    def trained(
        self, given: list[list[int]], outs: list[Any], t: float = 1.0, model: Any = None
    ) -> list[Tensor]:
        """The training forward's logprobs of the sampled tokens."""
        sequences = [[*prompt, *out.ids] for prompt, out in zip(given, outs, strict=True)]
        with torch.no_grad():
            whole = um.logprobs(model or self.model, sequences, t)
        return [lps[len(prompt) - 1 :] for prompt, lps in zip(given, whole, strict=True)]

    def check(self, given: list[list[int]], outs: list[Any], t: float = 1.0) -> int:
        """Every sampled token has the bits of training; returns how many were compared."""
        expected = self.trained(given, outs, t)
        return sum(same_bits(out.logprobs, lps) for out, lps in zip(outs, expected, strict=True))

    def idle(self, engine: Engine) -> bool:
        """No page has a user; those without a name hold nothing."""
        memory = engine._memory
        assert len(memory.states) == 2
        for store in memory.states.values():
            free = store.table.pool._free
            assert (store.held_P2[free] == -1).all() and bool(store.data_PX[free].isnan().all())
        return memory.used_pages == 0


KINDS = {
    "q16-bf16": (16, False),
    "q16-mixed": (16, True),
    "q128-bf16": (128, False),
    "q128-mixed": (128, True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS, scope="module")
def hybrid(request: pytest.FixtureRequest) -> Hybrid:
    """Its model is one that no test changes."""
    return Hybrid(*request.param)


@pytest.fixture
def hybrid_of() -> Callable[[int, bool], Hybrid]:
    return Hybrid


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Fixtures that outlive a test run before the house's own fixture sets this."""
    torch.set_num_threads(1)


@pytest.fixture
def trial() -> Trial:
    return Trial()


@pytest.fixture
def scan_trial() -> Trial:
    return Trial(32, 64, 32)


@pytest.fixture
def bits() -> Callable[[Tensor, Tensor], int]:
    return same_bits

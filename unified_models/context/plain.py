"""The baseline: the same model file under plain batch-shaped torch operators, as most systems run it.

Matrix products take the batch as it comes, attention is one softmax over all keys so far, experts run at their own
row counts. Nothing here is row-invariant, on purpose: this is what exact bits are compared with.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.context.interface import Experts, Pool
from unified_models.context.local import LocalContext
from unified_models.context.slots import Rows
from unified_models.formats.activations import dequantized_rows
from unified_models.weight import Reading, Weight


class PlainContext(LocalContext):
    """LocalContext with the operators that sum replaced by torch's own at the shapes of the step."""

    def linear(self, x: Tensor, *weights: Weight, dtype: torch.dtype | None = None) -> Any:
        outs = [self._linear(x, w, dtype) for w in weights]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _linear(self, x: Tensor, weight: Weight, dtype: torch.dtype | None) -> Tensor:
        reading = self.read(weight)
        # Wider operands where a wider result is asked: torch has no product of bf16 into float32.
        work = dtype or reading.format.activation
        x = dequantized_rows(x) if reading.format.quantizes_input else x
        x, w = x.to(work), values(reading, work)
        if weight.groups > 1:
            return torch.einsum("tgk,gnk->tgn", x, w.unflatten(0, (weight.groups, -1)))
        return F.linear(x, w)

    def attend_latent(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        slot: Rows,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        pool: Pool | None = None,
        picks_TK: Tensor | None = None,
    ) -> Tensor:
        recent = self.memory.rows(self.step, slot, kv_TD)
        outs = []
        for s, (past, length) in enumerate(zip(self.step.past, self.step.lengths, strict=True)):
            part = slice(int(self.step.starts_S[s]), int(self.step.starts_S[s]) + length)
            at = torch.arange(past, past + length)[:, None]
            first = max(0, past - slot.keep + 1) if slot.keep else 0
            seen_at = torch.arange(first, past + length)
            keys = recent.rows_RD[seen_at + recent.base_S[s]]
            seen = (seen_at <= at) & (seen_at > at - (slot.keep or past + length))
            if pool is not None:
                numbers = torch.arange((past + length) // pool.slot.stride)
                old = pool.rows_RD[numbers + pool.base_S[s]]
                visible = numbers < pool.count_T[part, None]
                if picks_TK is not None:
                    visible = (picks_TK[part, :, None] == numbers).any(1)
                keys, seen = torch.cat((old, keys)), torch.cat((visible, seen), 1)
            outs.append(self._attention(q_THD[part], keys, seen, scale, sinks_H))
        return torch.cat(outs)

    @staticmethod
    def _attention(
        q_THD: Tensor, keys: Tensor, seen: Tensor, scale: float, sinks_H: Tensor | None
    ) -> Tensor:
        scores = torch.einsum("thd,nd->htn", q_THD, keys.to(q_THD.dtype)).float() * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks_H is not None:
            scores = torch.cat((scores, sinks_H[:, None, None].expand(-1, len(q_THD), 1)), -1)
        p = torch.softmax(scores, -1)[..., : len(keys)].to(q_THD.dtype)
        return torch.einsum("htn,nd->thd", p, keys.to(q_THD.dtype))

    def moe(self, x_TM: Tensor, ids_TK: Tensor, gates_TK: Tensor, experts: Experts) -> Tensor:
        out = torch.zeros_like(x_TM, dtype=torch.float32)
        stacks = [self.read(w) for w in (experts.gate, experts.up, experts.down)]
        work = stacks[0].format.activation
        gate, up, down = (values(r, work) for r in stacks)
        quantize = stacks[0].format.quantizes_input
        for e in range(len(gate)):
            t, k = (ids_TK == e).nonzero(as_tuple=True)
            x = dequantized_rows(x_TM[t]).to(work) if quantize else x_TM[t]
            a, b = F.linear(x, gate[e]), F.linear(x, up[e])
            if experts.limit is not None:
                a, b = a.clamp(max=experts.limit), b.clamp(-experts.limit, experts.limit)
            h = F.silu(a) * b
            h = dequantized_rows(h).to(work) if quantize else h
            out = out.index_add(0, t, F.linear(h, down[e]).float() * gates_TK[t, k, None])
        return out.to(x_TM.dtype)


def values(reading: Reading, dtype: torch.dtype) -> Tensor:
    """What a product reads; kept until the next commit where no gradient is asked for."""
    if torch.is_grad_enabled():
        return reading.value.to(dtype)
    kept: Tensor = reading.operand(KEPT[dtype])
    return kept


def in_float32(reading: Reading) -> Tensor:
    """The dequantised weight."""
    return reading.dequantized()


def in_bfloat16(reading: Reading) -> Tensor:
    """The dequantised weight; what FP8 and FP4 hold is exact in bfloat16."""
    return reading.dequantized().to(torch.bfloat16)


KEPT = {torch.float32: in_float32, torch.bfloat16: in_bfloat16}

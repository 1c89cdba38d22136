"""The baseline: the same model file under plain batch-shaped torch operators, as most systems run it.

Matrix products take the batch as it comes, attention is one softmax over all keys so far, experts run at their own
row counts. Nothing here is row-invariant, on purpose: this is what exact bits are compared with.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.autograd import apply
from unified_models.context.interface import Experts, Pool
from unified_models.context.local import LocalContext
from unified_models.context.paged import open_rows
from unified_models.context.slots import Rows, State
from unified_models.formats.activations import RoundTrip
from unified_models.ops.rounded import rounded
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
        x = seen(reading, x)
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
                old = pool.readable.rows_RD[numbers + pool.readable.base_S[s]]
                visible = numbers < pool.count_T[part, None]
                if picks_TK is not None:
                    visible = (picks_TK[part, :, None] == numbers).any(1)
                keys, seen = torch.cat((old, keys)), torch.cat((visible, seen), 1)
            outs.append(self._attention(q_THD[part], keys, seen, scale, sinks_H))
        return torch.cat(outs)

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        slot: Rows,
        *,
        scale: float,
        scales: tuple[Weight, Weight] | None = None,
    ) -> Tensor:
        new_TD = torch.cat((k_TGD, v_TGD), 1).flatten(1)
        kept = self.memory.rows(self.step, slot, new_TD, self._channels(k_TGD, scales))
        rows_R2GD = kept.rows_RD.unflatten(1, (2, *k_TGD.shape[1:]))
        each, outs = q_THD.shape[1] // k_TGD.shape[1], []
        for s, (past, length) in enumerate(zip(self.step.past, self.step.lengths, strict=True)):
            at = torch.arange(past, past + length)[:, None]
            first = max(0, past - slot.keep + 1) if slot.keep else 0
            seen_at = torch.arange(first, past + length)
            hidden = (seen_at > at) | (seen_at <= at - (slot.keep or past + length))
            k, v = rows_R2GD[seen_at + kept.base_S[s]].repeat_interleave(each, 2).unbind(1)
            q = q_THD[self.step.starts_S[s] : self.step.starts_S[s + 1]]
            scores = torch.einsum("thd,nhd->htn", q, k.to(q.dtype)).float() * scale
            p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).to(q.dtype)
            outs.append(torch.einsum("htn,nhd->thd", p, v.to(q.dtype)))
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

    def conv(self, x_TC: Tensor, taps: Weight, bias: Weight | None, slot: Rows) -> Tensor:
        assert slot.keep is not None
        kept = self.memory.rows(self.step, slot, x_TC)
        taps_C1K, outs = self.read(taps).value, []
        bias_C = None if bias is None else self.read(bias).value
        for s, (past, length) in enumerate(zip(self.step.past, self.step.lengths, strict=True)):
            first = max(0, past - slot.keep + 1)
            seen = kept.rows_RD[torch.arange(first, past + length) + kept.base_S[s]].float()
            padded = F.pad(seen.T, (slot.keep - 1 - (past - first), 0))[None]
            if length:
                outs.append(F.conv1d(padded, taps_C1K, bias_C, groups=len(taps_C1K))[0].T)
        return torch.cat(outs) if outs else x_TC.float()

    def scan(
        self,
        x_THP: Tensor,
        dt_TH: Tensor,
        b_TGN: Tensor,
        c_TGN: Tensor,
        slot: State,
        *,
        a_H: Tensor,
        skip_H: Tensor,
    ) -> Tensor:
        """Everything since the last boundary at once, with operands rounded to c's dtype, as kernels for chunks do; a
        single new token by the recurrence, as samplers decode."""
        x_RHP, dt_RH, b_RGN, base_S = open_rows(self.step, self.memory, x_THP, dt_TH, b_TGN, slot)
        states_SHPN = self.memory.states(self.step, slot)
        each, outs, ends = x_THP.shape[1] // b_TGN.shape[1], [], []
        c_THN = c_TGN.repeat_interleave(each, 1)
        for s, (past, length) in enumerate(zip(self.step.past, self.step.lengths, strict=True)):
            state, first = states_SHPN[s], past - past % slot.chunk
            for start in range(first, past + length, slot.chunk):
                end = min(start + slot.chunk, past + length)
                at = torch.arange(start, end) + base_S[s]
                part = (x_RHP[at], dt_RH[at], b_RGN[at].repeat_interleave(each, 1), a_H)
                new = max(past, start)
                token = int(self.step.starts_S[s]) + new - past
                c = c_THN[token : token + end - new]
                y, after = (recurrence if length == 1 else chunk)(state, *part, c)
                outs.append(y + skip_H[:, None] * part[0][new - start :])
                if end - start == slot.chunk:
                    state = after
                    ends.append(after)
        new_UHPN = torch.stack(ends) if ends else states_SHPN[:0]
        self.memory.keep_states(self.step, slot, new_UHPN)
        y_THP = torch.cat(outs) if outs else x_THP.float()
        return y_THP.to(c_TGN.dtype)

    def moe(self, x_TM: Tensor, ids_TK: Tensor, gates_TK: Tensor, experts: Experts) -> Tensor:
        out = torch.zeros_like(x_TM, dtype=torch.float32)
        for e in range(experts.up.shape[0]):
            t, k = (ids_TK == e).nonzero(as_tuple=True)
            up = self._expert(x_TM[t], experts.up, e)
            if experts.gate is None:
                h = up.relu().square()
            else:
                gate = self._expert(x_TM[t], experts.gate, e)
                if experts.limit is not None:
                    gate = gate.clamp(max=experts.limit)
                    up = up.clamp(-experts.limit, experts.limit)
                h = F.silu(gate) * up
            y = self._expert(h, experts.down, e)
            out = out.index_add(0, t, y.float() * gates_TK[t, k, None])
        return out.to(x_TM.dtype)

    def _expert(self, x: Tensor, weight: Weight, e: int) -> Tensor:
        reading = self.read(weight)
        work = reading.format.activation
        x = seen(reading, x, e)
        return F.linear(x.to(work), values(reading, work)[e])


def recurrence(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, a_H: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """y of the last token, and the state after it. x [R, H, P], dt [R, H], b [R, H, N], c [1, H, N]."""
    for i in range(len(x)):
        decay = torch.exp(dt[i] * a_H)[:, None, None]
        state = decay * state + (dt[i, :, None] * x[i])[..., None] * b[i, :, None]
    return torch.einsum("hpn,thn->thp", state, c.float()), state


def chunk(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, a_H: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """y of the last len(c) rows, and the state after all, by matrix products over the rows there are."""
    decay, dtype, c = (dt * a_H).cumsum(0), c.dtype, c.float()
    own = decay[len(x) - len(c) :]
    later = torch.arange(len(x)) > torch.arange(len(x) - len(c), len(x))[:, None]
    apart = (own[:, None] - decay).masked_fill(later[..., None], -torch.inf)
    w = torch.einsum("ihn,jhn->ijh", c, b) * torch.exp(apart) * dt
    y = torch.einsum("ijh,jhp->ihp", rounded(w, dtype), x)
    from_state = torch.einsum("ihn,hpn->ihp", c, rounded(state, dtype))
    left = torch.exp(decay[-1] - decay) * dt
    added = torch.einsum("jhp,jhn->hpn", x, rounded(b * left[..., None], dtype))
    y = y + torch.exp(own)[..., None] * from_state
    return y, torch.exp(decay[-1])[:, None, None] * state + added


def seen(reading: Reading, x: Tensor, index: int | None = None) -> Tensor:
    """What a product reads instead of x; its gradient goes straight through, in float32."""
    if reading.format.input == "plain":
        return x
    return apply(RoundTrip, x.float(), reading.seen(x.detach(), index))


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

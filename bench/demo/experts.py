"""The routed experts of one layer as a single autograd node over rows padded to one capacity per expert.

Batched products over `[E, capacity, H]` ran 2 to 3 times faster in bfloat16 than a loop over experts
(2-core AMX machine), and the hand-written backward replaces slow scatter-adds by gathers.  Nothing is
dropped: the capacity is the load of the busiest expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class GroupedExperts(torch.autograd.Function):
    """`y[j] = down[e] (silu(gate[e] x[j//K]) * up[e] x[j//K])` where `slot[j]` is in expert `e`'s rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, gate_up: Tensor, down: Tensor, capacity: int) -> Tensor:
        """Return `[N*K,H]` expert outputs of `x [N,H]` for the flat choices placed at `slot [N*K]`."""
        e, h, k = gate_up.shape[0], x.shape[1], slot.shape[0] // x.shape[0]
        rows = x.new_zeros(e * capacity, h)
        rows.index_copy_(0, slot, x.unsqueeze(1).expand(-1, k, -1).reshape(-1, h))
        rows = rows.view(e, capacity, h)
        hidden = torch.bmm(rows, gate_up.mT)
        gate, up = hidden.chunk(2, -1)
        act = functional.silu(gate) * up
        y = torch.bmm(act, down.mT).view(-1, h).index_select(0, slot)
        ctx.save_for_backward(rows, slot, gate_up, down, hidden, act)
        ctx.k = k
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None]:  # type: ignore[override]
        """Return gradients of rows and both weight stacks."""
        rows, slot, gate_up, down, hidden, act = ctx.saved_tensors
        e, capacity, h = rows.shape
        d_out = dy.new_zeros(e * capacity, h).index_copy_(0, slot, dy).view(e, capacity, h)
        d_act, d_down = torch.bmm(d_out, down), torch.bmm(d_out.mT, act)
        gate, up = hidden.chunk(2, -1)
        sig = torch.sigmoid(gate)
        d_hidden = torch.cat((d_act * up * sig * (1 + gate * (1 - sig)), d_act * gate * sig), -1)
        d_gate_up = torch.bmm(d_hidden.mT, rows)
        d_rows = torch.bmm(d_hidden, gate_up).view(-1, h).index_select(0, slot)
        return d_rows.view(-1, ctx.k, h).sum(1), None, d_gate_up, d_down, None


def routed(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum the chosen experts of every row.

    Args:
        x: `[N,H]`.
        ids: `[N,K]` chosen experts.
        weights: `[N,K]` float32.
        gate_up: `[E,2M,H]` in the dtype of `x`.
        down: `[E,H,M]` in the dtype of `x`.

    Returns:
        `[N,H]` float32.
    """
    n, k = ids.shape
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=gate_up.shape[0])
    capacity = -(-int(counts.max()) // 16) * 16
    starts = torch.arange(gate_up.shape[0]) * capacity - (counts.cumsum(0) - counts)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(n * k) + starts[flat[order]]
    y = GroupedExperts.apply(x, slot, gate_up, down, capacity).view(n, k, -1)
    return (y.float() * weights.unsqueeze(-1)).sum(1)

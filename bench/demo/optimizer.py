"""Muon for matrices of the layers, AdamW for everything else.

Muon orthogonalises the momentum of a matrix with Newton-Schulz steps (Jordan et al., 2024) and scales it so
that its entries have the root mean square of an Adam step.  Experts are batched: gate, up and down matrices
of one expert share a shape.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

MUON_RMS = 0.2
NEWTON_STEPS = 4
ADAM_ONLY = (
    "embed_tokens",
    "lm_head",
    "ngram_embedding",
    "mlp.gate.",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
    "block_inject_weight",
    "indexer",
    "conv1d",
)


def newton_schulz(g: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices of a bfloat16 batch `[B,r,c]`, approximately."""
    flip = g.shape[-2] > g.shape[-1]
    out = []
    for x in (g.mT if flip else g).split(64):  # 64 matrices stay in the cache
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(NEWTON_STEPS):
            a = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        out.append(x)
    x = torch.cat(out)
    return x.mT if flip else x


class Muon:
    """Keeps one momentum buffer per parameter; `step` takes the learning rate."""

    def __init__(self, params: dict[str, nn.Parameter], momentum: float = 0.95) -> None:
        self.params, self.momentum = params, momentum
        self.buffers = {n: torch.zeros_like(p) for n, p in params.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply one update; matrices of one shape are handled as one batch."""
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for name, p in self.params.items():
            if p.grad is None:
                continue
            buf = self.buffers[name]
            buf.mul_(self.momentum).add_(p.grad)
            update = torch.add(p.grad, buf, alpha=self.momentum).bfloat16()
            # A fused gate_up tensor holds two matrices per expert.
            rows = p.shape[-2] // 2 if name.endswith("gate_up_proj") else p.shape[-2]
            shape = (rows, p.shape[-1])
            groups.setdefault(shape, []).append((p.view(-1, *shape), update.view(-1, *shape)))
        for (rows, cols), members in groups.items():
            scale = -lr * MUON_RMS * math.sqrt(max(rows, cols))
            direction = newton_schulz(torch.cat([u for _, u in members]))
            for (p, _), d in zip(members, direction.split([m[0].shape[0] for m in members]), strict=True):
                p.add_(d, alpha=scale)


class Optimizer:
    """Both optimisers with one learning-rate scale."""

    def __init__(self, model: nn.Module, muon_lr: float = 6e-3, adam_lr: float = 3e-3) -> None:
        named = dict(model.named_parameters())
        matrices = {n: p for n, p in named.items() if p.ndim >= 2 and not any(a in n for a in ADAM_ONLY)}
        tables = [p for n, p in named.items() if "embed" in n and p.ndim == 2 and n not in matrices]
        rest = [p for n, p in named.items() if n not in matrices and not any(p is t for t in tables)]
        self.muon, self.muon_lr = Muon(matrices), muon_lr
        self.adam = torch.optim.AdamW(
            [{"params": tables, "base": 2 * adam_lr}, {"params": rest, "base": adam_lr}],
            lr=adam_lr,
            betas=(0.9, 0.98),
            eps=1e-10,
            weight_decay=0.0,
            fused=True,
        )

    def step(self, scale: float) -> None:
        """Apply one update at `scale` times the base rates."""
        self.muon.step(scale * self.muon_lr)
        for group in self.adam.param_groups:
            group["lr"] = scale * group["base"]
        self.adam.step()

    def state_dict(self) -> dict[str, object]:
        """Return everything needed to resume."""
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state["muon"].items():
            self.muon.buffers[name].copy_(value)
        self.adam.load_state_dict(state["adam"])

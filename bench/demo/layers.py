"""The parts of `qwen4_exp` for training in torch: hyper-connections, GDN, QSA, PLE, MoE.

Every module follows the published equations; `bench.demo.check_parity` compares the whole model with an
independent step-by-step numpy implementation.  Matrix products run in `COMPUTE.dtype` (bfloat16 uses AMX),
the residual stack, norms, softmaxes and the recurrence stay float32.

Shapes: B rows, T positions, N = B*T, H hidden, C residual streams, E experts, K chosen experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ngram_constants
from .experts import routed

Config = dict[str, Any]


@dataclass
class Compute:
    """Number format of matrix products, switched by the caller before building batches."""

    dtype: torch.dtype = torch.float32


COMPUTE = Compute()


def mm(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T` computed in the product dtype."""
    return functional.linear(x.to(COMPUTE.dtype), weight.to(COMPUTE.dtype))


def matrix(rows: int, cols: int, gain: float = 1.0) -> nn.Linear:
    """Return a bias-free linear layer with normal weights of standard deviation `gain / sqrt(cols)`."""
    layer = nn.Linear(cols, rows, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(cols))
    return layer


class Vector(nn.Module):
    """A bare `weight` vector under its own name, as norms have in checkpoints."""

    def __init__(self, size: int, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))


class Depthwise(nn.Module):
    """A causal depthwise convolution whose last tap multiplies the current position."""

    def __init__(self, channels: int, taps: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, taps) * std)

    def forward(self, x_BTC: Tensor, dilation: int = 1) -> Tensor:
        """Return the convolution of `[B,T,C]`, zeros before the start."""
        taps, length = self.weight.shape[-1], x_BTC.shape[1]
        padded = functional.pad(x_BTC, (0, 0, (taps - 1) * dilation, 0))
        return sum(
            padded[:, k * dilation : k * dilation + length] * self.weight[:, 0, k] for k in range(taps)
        )


def znorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis with a zero-centred weight, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def hc_read(
    r: Tensor, g: Tensor, down: Tensor, up: Tensor, inject: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Contract a stack `[N,C,H]` to `[N,H]`; also return the write weights `[N,C]` (none for a mixer)."""
    n, c, h = r.shape
    xn = (r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps) * (1 + g.view(c, h))).to(COMPUTE.dtype)
    low = mm(xn.view(n, c * h), torch.cat((down, inject))).float() / c
    gate = torch.sigmoid(mm(functional.silu(low[:, : down.shape[0]]), up).float()).view(n, c, h)
    return (gate * xn.float()).mean(1), 2 * torch.sigmoid(low[:, down.shape[0] :])


def hc_write(r: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Add `y [N,H]` to every stream of `r [N,C,H]` with weights `w [N,C]`."""
    return r + w.unsqueeze(-1) * y.float().unsqueeze(1)


class HyperConnection(nn.Module):
    """Reads the residual stack; `combine=False` is the final mixer, which has no write weights."""

    def __init__(self, cfg: Config, combine: bool = True) -> None:
        super().__init__()
        c, wide, rank = cfg["hc_count"], cfg["hc_count"] * cfg["hidden_size"], cfg["hc_lowrank"]
        self.eps = cfg["rms_norm_eps"]
        self.hc_norm = Vector(wide)
        self.input_mix_weight_down = matrix(rank, wide, gain=2.0)
        self.input_mix_weight_up = matrix(wide, rank, gain=0.5)
        if combine:
            self.block_inject_weight = matrix(c, wide, gain=1.0)

    def forward(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(mixed [N,H], write weights [N,C] or [N,0])`."""
        down = self.input_mix_weight_down.weight
        inject = self.block_inject_weight.weight if hasattr(self, "block_inject_weight") else down[:0]
        return hc_read(r, self.hc_norm.weight, down, self.input_mix_weight_up.weight, inject, self.eps)


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule, in the chunked form (exact in real arithmetic)."""

    CHUNK = 32

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        h = cfg["hidden_size"]
        self.nk, self.nv = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"]
        self.dk, self.dv, self.eps = (
            cfg["linear_key_head_dim"],
            cfg["linear_value_head_dim"],
            cfg["rms_norm_eps"],
        )
        kd, vd = self.nk * self.dk, self.nv * self.dv
        self.in_proj_qkv, self.in_proj_z = matrix(2 * kd + vd, h), matrix(vd, h)
        self.in_proj_a, self.in_proj_b = matrix(self.nv, h), matrix(self.nv, h)
        self.conv1d = Depthwise(2 * kd + vd, cfg["linear_conv_kernel_dim"], 0.3)
        # Decay rates spread over half a token to a few hundred, as usual for this layer.
        self.A_log = nn.Parameter(torch.log(torch.linspace(1.0, 8.0, self.nv)))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(torch.logspace(-2.5, -0.5, self.nv))))
        self.norm = Vector(self.dv, 1.0)
        self.out_proj = matrix(h, vd, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B,T,H]` to `[B,T,H]` from an empty state."""
        b, t, _ = x.shape
        u = functional.silu(self.conv1d(mm(x, self.in_proj_qkv.weight).float()))
        q, k, v = u.split((self.nk * self.dk, self.nk * self.dk, self.nv * self.dv), -1)
        ab = mm(x, torch.cat((self.in_proj_a.weight, self.in_proj_b.weight))).float()
        g = -self.A_log.exp() * functional.softplus(ab[..., : self.nv] + self.dt_bias)
        beta = torch.sigmoid(ab[..., self.nv :])
        q, k = (self._unit(z.reshape(b, t, self.nk, self.dk)) for z in (q, k))
        o = self._delta_rule(q / math.sqrt(self.dk), k, v.reshape(b, t, self.nv, self.dv), g, beta)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps) * self.norm.weight
        return mm(o.flatten(-2) * torch.sigmoid(mm(x, self.in_proj_z.weight).float()), self.out_proj.weight)

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def _delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        b, t, n = q.shape[0], q.shape[1], self.CHUNK
        pad, rep = -t % n, self.nv // self.nk

        def chunks(z: Tensor, heads: int) -> Tensor:
            z = functional.pad(z.reshape(b, t, heads, -1), (0, 0, 0, 0, 0, pad))
            return z.view(b, -1, n, heads, z.shape[-1]).permute(1, 0, 3, 2, 4)  # [chunk, B, head, n, d]

        q, k = (chunks(z, self.nk).repeat_interleave(rep, 2) for z in (q, k))
        v, g, beta = chunks(v, self.nv), chunks(g, self.nv), chunks(beta, self.nv)
        gamma = g.squeeze(-1).cumsum(-1)
        lower = torch.ones(n, n, dtype=torch.bool).tril()
        decay = torch.exp((gamma.unsqueeze(-1) - gamma.unsqueeze(-2)).masked_fill(~lower, -torch.inf))
        eye = torch.eye(n)
        system = beta * (k @ k.mT) * decay * (1 - eye) + eye
        grow = gamma.exp().unsqueeze(-1)
        rhs = torch.cat((beta * v, beta * grow * k), -1)
        u, wk = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True).split(
            (self.dv, self.dk), -1
        )
        local = (q @ k.mT) * decay
        q_in, last = q * grow, gamma[..., -1:]
        k_out = (k * (last - gamma).exp().unsqueeze(-1)).mT
        keep = last.exp().unsqueeze(-1)
        state, out = v.new_zeros(b, self.nv, self.dk, self.dv), []
        for i in range(q.shape[0]):
            fresh = u[i] - wk[i] @ state
            out.append(q_in[i] @ state + local[i] @ fresh)
            state = keep[i] * state + k_out[i] @ fresh
        o = torch.stack(out, 1)  # [B, chunk, head, n, d]
        return o.transpose(2, 3).reshape(b, t + pad, self.nv, self.dv)[:, :t]


def rope(x: Tensor, positions: Tensor, inv: Tensor) -> Tensor:
    """Rotate the first `2*len(inv)` of the last axis; `x` is `[B,T,heads,d]`, `positions` `[T]`."""
    half = inv.shape[0]
    angle = (positions.float()[:, None] * inv)[:, None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def select_blocks(scores: Tensor, complete: Tensor, budget: int) -> Tensor:
    """Return the mask of the `budget` best complete blocks, ties to the smaller block.

    Args:
        scores: `[B,T,NB]` float32.
        complete: `[T,NB]`, which blocks the query may see.
        budget: number of blocks.
    """
    if scores.shape[-1] <= budget:
        return complete.expand_as(scores)
    scores = scores.masked_fill(~complete, -1.0)
    cut = scores.topk(budget, -1).values[..., -1:]
    above, equal = scores > cut, scores == cut
    need = budget - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= need))) & complete


class SparseAttention(nn.Module):
    """QSA: grouped-query attention over the blocks an indexer selects, plus the indexer's own loss."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        h, self.eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.nh, self.nk, self.d = cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"]
        self.ratio, self.budget = (
            cfg["indexer_compress_ratio"],
            cfg["indexer_budget"] // cfg["indexer_compress_ratio"],
        )
        self.hi, self.di = cfg["indexer_n_heads"], cfg["indexer_head_dim"]
        rot = int(self.d * cfg["partial_rotary_factor"])
        theta = cfg["rope_parameters"]["rope_theta"]
        self.register_buffer("inv", 1.0 / theta ** (torch.arange(0, rot, 2).float() / rot), persistent=False)
        self.q_proj, self.k_proj = matrix(self.nh * self.d * 2, h), matrix(self.nk * self.d, h)
        self.v_proj, self.o_proj = matrix(self.nk * self.d, h), matrix(h, self.nh * self.d, gain=0.5)
        self.q_norm, self.k_norm = Vector(self.d), Vector(self.d)
        self.indexer = nn.Module()
        self.indexer.index_qk_proj = matrix((self.hi + 1) * self.di, h)
        self.indexer.q_layernorm, self.indexer.k_layernorm = Vector(self.di), Vector(self.di)

    def block_scores(self, x: Tensor) -> Tensor:
        """Return indexer scores `[B,T,NB]` of every block, complete or not."""
        b, t, _ = x.shape
        nb, pos = t // self.ratio, torch.arange(t)
        qk = mm(x, self.indexer.index_qk_proj.weight).float().view(b, t, self.hi + 1, self.di)
        iq = rope(znorm(qk[:, :, : self.hi], self.indexer.q_layernorm.weight, self.eps), pos, self.inv)
        pooled = qk[:, : nb * self.ratio, self.hi].reshape(b, nb, self.ratio, self.di).mean(2)
        pooled = znorm(pooled, self.indexer.k_layernorm.weight, self.eps).unsqueeze(2)
        kb = rope(pooled, pos[: nb * self.ratio : self.ratio], self.inv).squeeze(2)
        raw = iq.reshape(b, t * self.hi, self.di) @ kb.mT
        return raw.view(b, t, self.hi, nb).relu().sum(2) / math.sqrt(self.di)

    def forward(self, x: Tensor, sparse: bool = True) -> tuple[Tensor, Tensor]:
        """Return `(output [B,T,H], indexer loss)`; `sparse=False` attends densely (early training only)."""
        b, t, _ = x.shape
        pos = torch.arange(t)
        qg = mm(x, self.q_proj.weight).view(b, t, self.nh, 2, self.d)
        k = mm(x, self.k_proj.weight).view(b, t, self.nk, self.d)
        v = mm(x, self.v_proj.weight).view(b, t, self.nk, self.d)
        q = rope(znorm(qg[..., 0, :], self.q_norm.weight, self.eps), pos, self.inv).to(COMPUTE.dtype)
        k = rope(znorm(k, self.k_norm.weight, self.eps), pos, self.inv).to(COMPUTE.dtype)
        rep = self.nh // self.nk
        k, v = (z.repeat_interleave(rep, 2).transpose(1, 2) for z in (k, v))
        logits = (q.transpose(1, 2) @ k.mT).float() / math.sqrt(self.d)
        causal = pos[:, None] >= pos
        dense = torch.softmax(logits.masked_fill(~causal, -torch.inf), -1)
        nb = t // self.ratio
        scores = self.block_scores(x.detach())
        complete = (pos[:, None] + 1) // self.ratio > torch.arange(nb)
        loss = self._indexer_loss(dense.detach(), scores, complete)
        probs = dense
        if sparse and nb > self.budget:
            keep = select_blocks(scores.detach(), complete, self.budget).repeat_interleave(self.ratio, -1)
            tail = pos >= ((pos[:, None] + 1) // self.ratio) * self.ratio
            keep = functional.pad(keep, (0, t - nb * self.ratio)) | (tail & causal)
            probs = dense * keep.unsqueeze(1)
            probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-20)
        o = (probs.to(COMPUTE.dtype) @ v).transpose(1, 2).float() * torch.sigmoid(qg[..., 1, :].float())
        return mm(o.flatten(-2), self.o_proj.weight), loss

    def _indexer_loss(self, dense: Tensor, scores: Tensor, complete: Tensor) -> Tensor:
        """KL from the heads' mean attention mass per complete block to the softmax of the block scores."""
        b, _, t, _ = dense.shape
        nb = scores.shape[-1]
        mass = dense.mean(1)[..., : nb * self.ratio].reshape(b, t, nb, self.ratio).sum(-1) * complete
        mass = mass[:, self.ratio :]
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
        logp = torch.log_softmax(scores.masked_fill(~complete, -1e9), -1)[:, self.ratio :]
        return (target * (torch.log(target.clamp_min(1e-9)) - logp)).sum(-1).mean()


class MixtureOfExperts(nn.Module):
    """Softmax top-k router, grouped experts, one gated shared expert."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        h, m, self.e = cfg["hidden_size"], cfg["moe_intermediate_size"], cfg["num_experts"]
        s, self.k = cfg["shared_expert_intermediate_size"], cfg["num_experts_per_tok"]
        self.gate = matrix(self.e, h)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(self.e, 2 * m, h) / math.sqrt(h))
        self.experts.down_proj = nn.Parameter(torch.randn(self.e, h, m) * 0.5 / math.sqrt(m))
        self.shared_expert = nn.Module()
        self.shared_expert.gate_proj, self.shared_expert.up_proj = matrix(s, h), matrix(s, h)
        self.shared_expert.down_proj = matrix(h, s, gain=0.5)
        self.shared_expert_gate = matrix(1, h)
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(output [N,H], load-balance loss)`; `load` keeps the last share of rows per expert."""
        # Router products stay float32: its choices are discrete and it is small.
        probs = torch.softmax(functional.linear(x, self.gate.weight), -1)
        top, ids = probs.topk(self.k, -1)
        self.load = torch.bincount(ids.flatten(), minlength=self.e).float() / ids.numel()
        balance = self.e * (self.load * probs.mean(0)).sum()
        xc, exp, sh = x.to(COMPUTE.dtype), self.experts, self.shared_expert
        gate_up, down = exp.gate_up_proj.to(COMPUTE.dtype), exp.down_proj.to(COMPUTE.dtype)
        y = routed(xc, ids, top / top.sum(-1, keepdim=True), gate_up, down)
        inner = functional.silu(mm(xc, sh.gate_proj.weight)) * mm(xc, sh.up_proj.weight)
        scale = torch.sigmoid(functional.linear(x, self.shared_expert_gate.weight))
        return y + scale * mm(inner, sh.down_proj.weight).float(), balance


class NgramMemory(nn.Module):
    """PLE: hashed bigram and trigram rows, gated per stream against the residual stack."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        c, h, e = cfg["hc_count"], cfg["hidden_size"], cfg["ple_embed_dim"]
        self.c, self.h, self.eps, self.eos = c, h, cfg["rms_norm_eps"], cfg["eos_token_id"]
        self.n, self.per = cfg["ngram_size"], cfg["heads_per_ngram"]
        const = ngram_constants(cfg)
        self.key_proj, self.value_proj = matrix(c * h, e), matrix(h, e)
        self.norm_key, self.norm_query, self.norm_conv = Vector(c * h), Vector(c * h), Vector(c * h)
        self.conv1d = Depthwise(c * h, cfg["ple_conv_kernel_size"], 0.05)
        emb = self.ple_embedding = nn.Module()
        emb.register_buffer("layer_multipliers", torch.tensor(const["multipliers"]))
        emb.register_buffer("ngram_heads_vocab_sizes", torch.tensor(const["sizes"]))
        emb.register_buffer("ngram_heads_offsets", torch.tensor(const["offsets"]))
        emb.ngram_embedding = nn.Embedding(const["rows"], const["width"])
        nn.init.normal_(emb.ngram_embedding.weight, std=0.3)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return table rows `[B,T,heads]`; a separator going backwards blanks itself and everything older."""
        emb, context, cut = self.ple_embedding, [tokens], torch.zeros_like(tokens, dtype=torch.bool)
        for s in range(1, self.n):
            prev = functional.pad(tokens, (s, 0), value=self.eos)[:, : tokens.shape[1]]
            cut = cut | (prev == self.eos)
            context.append(torch.where(cut, self.eos, prev))
        out, acc = [], context[0] * emb.layer_multipliers[0]
        for order in range(1, self.n):
            acc = acc ^ (context[order] * emb.layer_multipliers[order])
            heads = slice((order - 1) * self.per, order * self.per)
            out.append(
                acc.unsqueeze(-1) % emb.ngram_heads_vocab_sizes[heads] + emb.ngram_heads_offsets[heads]
            )
        return torch.cat(out, -1)

    def forward(self, r: Tensor, tokens: Tensor) -> Tensor:
        """Return what is added to the stack `r [N,C,H]` for `tokens [B,T]`."""
        b, t = tokens.shape
        e = self.ple_embedding.ngram_embedding(self.rows(tokens)).view(b * t, -1)
        w = (self.c, self.h)
        key = znorm(mm(e, self.key_proj.weight).view(-1, *w), self.norm_key.weight.view(w), self.eps)
        query = znorm(r, self.norm_query.weight.view(w), self.eps)
        s = (key * query).sum(-1) / math.sqrt(self.h)
        s = s.sign() * s.abs().clamp_min(1e-6).sqrt()
        gated = torch.sigmoid(s).unsqueeze(-1) * mm(e, self.value_proj.weight).float().unsqueeze(1)
        normed = znorm(gated, self.norm_conv.weight.view(w), self.eps).view(b, t, -1)
        return gated + functional.silu(self.conv1d(normed, dilation=self.n)).view(-1, *w)

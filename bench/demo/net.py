"""The whole demo network: trunk, final mixer, head and the multi-token-prediction module.

Parameter names equal the official checkpoint's, except for the prefix `model.language_model.` of the trunk
and the n-gram table, which is one matrix here and `split_ngram_parts` matrices on disk
(`bench.demo.checkpoint`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import (
    Config,
    GatedDeltaNet,
    HyperConnection,
    MixtureOfExperts,
    NgramMemory,
    SparseAttention,
    Vector,
    hc_write,
    matrix,
    mm,
    znorm,
)


class DecoderLayer(nn.Module):
    """One layer: optional n-gram memory, a mixer half and an expert half, both through hyper-connections."""

    def __init__(self, cfg: Config, linear: bool, ple: bool) -> None:
        super().__init__()
        self.attn_hyper_connection, self.mlp_hyper_connection = HyperConnection(cfg), HyperConnection(cfg)
        if linear:
            self.linear_attn = GatedDeltaNet(cfg)
        else:
            self.self_attn = SparseAttention(cfg)
        self.mlp = MixtureOfExperts(cfg)
        if ple:
            self.ple = NgramMemory(cfg)

    def forward(self, r: Tensor, tokens: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Map the stack `[N,C,H]`; return `(stack, load-balance loss, indexer loss)`."""
        b, t = tokens.shape
        if hasattr(self, "ple"):
            r = r + self.ple(r, tokens)
        x, w = self.attn_hyper_connection(r)
        x, index_loss = x.view(b, t, -1), x.new_zeros(())
        if hasattr(self, "linear_attn"):
            y = self.linear_attn(x)
        else:
            y, index_loss = self.self_attn(x, sparse)
        r = hc_write(r, w, y.reshape(b * t, -1))
        x, w = self.mlp_hyper_connection(r)
        y, balance = self.mlp(x)
        return hc_write(r, w, y), balance, index_loss


class MultiTokenPredictor(nn.Module):
    """Predicts the token after next from the trunk's final stack and the next token."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        h, self.c, self.eps = cfg["hidden_size"], cfg["hc_count"], cfg["rms_norm_eps"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Vector(h), Vector(self.c * h)
        self.fc_embedding, self.fc_hidden = matrix(h, h, gain=0.7), matrix(h, h, gain=0.7)
        self.layers = nn.ModuleList([DecoderLayer(cfg, linear=False, ple=False)])
        self.hyper_connection_mixer = HyperConnection(cfg, combine=False)

    def forward(self, r: Tensor, emb: Tensor, tokens: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run cells for stacks `r [N,C,H]`; `emb [N,H]` and `tokens [B,T]` are those of the next tokens."""
        e = mm(znorm(emb, self.pre_fc_norm_embedding.weight, self.eps), self.fc_embedding.weight)
        hn = znorm(r.flatten(1), self.pre_fc_norm_hidden.weight, self.eps).view_as(r)
        x = (mm(hn, self.fc_hidden.weight) + e.unsqueeze(1)).float()
        x, balance, index_loss = self.layers[0](x, tokens, sparse)
        return self.hyper_connection_mixer(x)[0], balance, index_loss


class DemoModel(nn.Module):
    """`qwen4_exp` text model with its MTP module."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        h, v = cfg["hidden_size"], cfg["vocab_size"]
        self.c = cfg["hc_count"]
        self.embed_tokens = nn.Embedding(v, h)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, kind == "linear_attention", i + 1 in cfg["ple_layer_ids"])
            for i, kind in enumerate(cfg["layer_types"])
        )
        self.hyper_connection_mixer = HyperConnection(cfg, combine=False)
        self.lm_head = matrix(v, h, gain=0.5)
        self.mtp = MultiTokenPredictor(cfg)

    def trunk(self, tokens: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `(hidden [N,H], stack [N,C,H], balance loss, indexer loss)` for `tokens [B,T]`."""
        r = self.embed_tokens(tokens).flatten(0, 1).unsqueeze(1).expand(-1, self.c, -1)
        balance = index_loss = r.new_zeros(())
        for layer in self.layers:
            r, bal, idx = layer(r, tokens, sparse)
            balance, index_loss = balance + bal, index_loss + idx
        return self.hyper_connection_mixer(r)[0], r, balance, index_loss

    def forward(self, tokens: Tensor, sparse: bool = True) -> Tensor:
        """Return logits `[B,T,V]` in float32."""
        hidden = self.trunk(tokens, sparse)[0]
        return mm(hidden, self.lm_head.weight).float().view(*tokens.shape, -1)

    def mtp_logits(self, tokens: Tensor, sparse: bool = True) -> Tensor:
        """Return teacher-forced MTP logits `[B,T-1,V]`; cell i sees the stack at i and token i+1."""
        b, t = tokens.shape
        r = self.trunk(tokens, sparse)[1]
        hidden = self.mtp_hidden(r, tokens, sparse)[0]
        return mm(hidden, self.lm_head.weight).float().view(b, t - 1, -1)

    def mtp_hidden(self, r: Tensor, tokens: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run the MTP cells on the trunk stack `r [B*T,C,H]` of `tokens [B,T]`."""
        b, t = tokens.shape
        inner = r.view(b, t, *r.shape[1:])[:, :-1].flatten(0, 1)
        nxt = tokens[:, 1:]
        return self.mtp(inner, self.embed_tokens(nxt).flatten(0, 1), nxt, sparse)


def weighted_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean negative log-likelihood of `targets [N]` under `hidden [N,H]`."""
    losses = functional.cross_entropy(mm(hidden, head).float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable numbers."""
    return sum(p.numel() for p in model.parameters())


def build(cfg: Config, seed: int = 0) -> DemoModel:
    """Return a freshly initialised model, the same for the same seed."""
    torch.manual_seed(seed)
    return DemoModel(cfg)

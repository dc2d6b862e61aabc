"""One token at a time in numpy float64: the independent reference for `bench.demo.check_parity`.

Written from the architecture's equations with explicit state and no batching, so it shares no code and no
vectorisation with the training model.  Reads official tensor names.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray
ROOT = "model.language_model."


def sigmoid(x: Array) -> Array:
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def best(scores: Array, count: int) -> Array:
    """Return the ids of the `count` largest scores, ties to the smaller id."""
    return np.lexsort((np.arange(len(scores)), -scores))[:count]


class Oracle:
    """Steps the trunk and the MTP cell; state lives in plain dictionaries."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Array]) -> None:
        self.c, self.eps = config, config["rms_norm_eps"]
        self.w = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in tensors.items()}
        rot = int(config["head_dim"] * config["partial_rotary_factor"])
        self.inv = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, rot, 2) / rot)

    def start(self) -> list[dict[str, Any]]:
        """Return empty states, one per layer."""
        return [{} for _ in range(self.c["num_hidden_layers"])]

    def linear(self, name: str, x: Array) -> Array:
        """Apply the matrix `name`."""
        return self.w[name + ".weight"] @ x

    def norm(self, x: Array, name: str) -> Array:
        """Zero-centred RMS norm over the last axis."""
        gain = self.w[name + ".weight"].reshape(-1, x.shape[-1])
        gain = gain[0] if x.ndim == 1 else gain
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * (1 + gain)

    def rope(self, x: Array, position: int) -> Array:
        """Rotate the first dims of the last axis."""
        half, angle = len(self.inv), position * self.inv
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = x[..., :half], x[..., half : 2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)

    def read(self, p: str, r: Array) -> tuple[Array, Array | None]:
        """Hyper-connection read of the stack `r [C,H]`."""
        streams = self.c["hc_count"]
        xn = self.norm(r, p + ".hc_norm")
        low = silu(self.linear(p + ".input_mix_weight_down", xn.reshape(-1)) / streams)
        gate = sigmoid(self.linear(p + ".input_mix_weight_up", low)).reshape(r.shape)
        mixed = (gate * xn).mean(0)
        if p + ".block_inject_weight.weight" not in self.w:
            return mixed, None
        return mixed, 2 * sigmoid(self.linear(p + ".block_inject_weight", xn.reshape(-1)) / streams)

    def delta_net(self, p: str, x: Array, st: dict[str, Any]) -> Array:
        """One step of the gated delta rule."""
        c = self.c
        nk, nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        u = self.linear(p + ".in_proj_qkv", x)
        window = np.vstack([st.get("conv", np.zeros((c["linear_conv_kernel_dim"] - 1, len(u)))), u])
        st["conv"] = window[1:]
        u = silu((window * self.w[p + ".conv1d.weight"][:, 0].T).sum(0))
        q, k, v = np.split(u, [nk * dk, 2 * nk * dk])
        q, k, v = q.reshape(nk, dk), k.reshape(nk, dk), v.reshape(nv, dv)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / math.sqrt(dk)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        q, k = np.repeat(q, nv // nk, 0), np.repeat(k, nv // nk, 0)
        beta = sigmoid(self.linear(p + ".in_proj_b", x))
        soft = np.logaddexp(0, self.linear(p + ".in_proj_a", x) + self.w[p + ".dt_bias"])
        state = (
            st.get("S", np.zeros((nv, dk, dv))) * np.exp(-np.exp(self.w[p + ".A_log"]) * soft)[:, None, None]
        )
        delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        st["S"] = state = state + k[:, :, None] * delta[:, None, :]
        o = np.einsum("hkv,hk->hv", state, q)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + self.eps) * self.w[p + ".norm.weight"]
        o = o * sigmoid(self.linear(p + ".in_proj_z", x).reshape(nv, dv))
        return self.linear(p + ".out_proj", o.reshape(-1))

    def attention(self, p: str, x: Array, st: dict[str, Any], position: int) -> Array:
        """One query of block-sparse attention."""
        c = self.c
        nh, nk, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        di, hi, ratio = c["indexer_head_dim"], c["indexer_n_heads"], c["indexer_compress_ratio"]
        qk = self.linear(p + ".indexer.index_qk_proj", x)
        iq = self.rope(self.norm(qk[: hi * di].reshape(hi, di), p + ".indexer.q_layernorm"), position)
        raw, blocks = st.setdefault("raw", []), st.setdefault("blocks", [])
        raw.append(qk[hi * di :])
        n = len(raw)
        if n % ratio == 0:
            pooled = self.norm(np.mean(raw[-ratio:], 0), p + ".indexer.k_layernorm")
            blocks.append(self.rope(pooled, n - ratio))
        keep = np.zeros(n, bool)
        keep[n // ratio * ratio :] = True
        if blocks:
            scores = np.maximum(np.array(blocks) @ iq.T, 0).sum(-1) / math.sqrt(di)
            chosen = best(scores, c["indexer_budget"] // ratio)
            keep[(chosen[:, None] * ratio + np.arange(ratio)).ravel()] = True
        qg = self.linear(p + ".q_proj", x).reshape(nh, 2, d)
        q = self.rope(self.norm(qg[:, 0], p + ".q_norm"), position)
        key = self.rope(self.norm(self.linear(p + ".k_proj", x).reshape(nk, d), p + ".k_norm"), position)
        st.setdefault("k", []).append(key)
        st.setdefault("v", []).append(self.linear(p + ".v_proj", x).reshape(nk, d))
        keys, values = (np.repeat(np.array(st[z])[keep], nh // nk, 1) for z in "kv")
        a = np.einsum("hd,thd->ht", q, keys) / math.sqrt(d)
        a = np.exp(a - a.max(-1, keepdims=True))
        o = np.einsum("ht,thd->hd", a / a.sum(-1, keepdims=True), values) * sigmoid(qg[:, 1])
        return self.linear(p + ".o_proj", o.reshape(-1))

    def experts(self, p: str, x: Array) -> Array:
        """Routed experts and the shared expert."""
        c, m = self.c, self.c["moe_intermediate_size"]
        z = self.linear(p + ".gate", x)
        prob = np.exp(z - z.max())
        prob /= prob.sum()
        ids = best(prob, c["num_experts_per_tok"])
        y = np.zeros_like(x)
        for e in sorted(ids):
            gu = self.w[p + ".experts.gate_up_proj"][e] @ x
            y += prob[e] / prob[ids].sum() * (self.w[p + ".experts.down_proj"][e] @ (silu(gu[:m]) * gu[m:]))
        sh = p + ".shared_expert"
        inner = silu(self.linear(sh + ".gate_proj", x)) * self.linear(sh + ".up_proj", x)
        return y + sigmoid(self.linear(p + ".shared_expert_gate", x)) * self.linear(sh + ".down_proj", inner)

    def memory(self, p: str, r: Array, token: int, st: dict[str, Any]) -> Array:
        """The n-gram memory's addition to the stack."""
        c, w, e = self.c, self.w, p + ".ple_embedding"
        eos, n = c["eos_token_id"], c["ngram_size"]
        past = st.get("ids", [eos] * (n - 1))
        context, cut = [token], False
        for previous in reversed(past):
            cut = cut or previous == eos
            context.append(eos if cut else previous)
        st["ids"] = [*past[1:], token]
        mult, size, offset = (
            w[f"{e}.{z}"].tolist()
            for z in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        )
        per, rows, acc = c["heads_per_ngram"], [], context[0] * mult[0]
        for order in range(1, n):
            acc ^= context[order] * mult[order]
            rows += [acc % size[h] + offset[h] for h in range((order - 1) * per, order * per)]
        first = w[f"{e}.ngram_embedding.shard_0.weight"].shape[0]
        emb = np.concatenate(
            [w[f"{e}.ngram_embedding.shard_{row // first}.weight"][row % first] for row in rows]
        )
        key = self.norm(self.linear(p + ".key_proj", emb).reshape(r.shape), p + ".norm_key")
        s = (key * self.norm(r, p + ".norm_query")).sum(-1) / math.sqrt(c["hidden_size"])
        s = np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6))
        gated = sigmoid(s)[:, None] * self.linear(p + ".value_proj", emb)
        normed = self.norm(gated, p + ".norm_conv").reshape(-1)
        window = np.vstack(
            [st.get("N", np.zeros(((c["ple_conv_kernel_size"] - 1) * n, len(normed)))), normed]
        )
        st["N"] = window[1:]
        return gated + silu((window[::n] * w[p + ".conv1d.weight"][:, 0].T).sum(0)).reshape(r.shape)

    def layer(self, p: str, r: Array, st: dict[str, Any], position: int, token: int) -> Array:
        """One decoder layer on the stack `[C,H]`."""
        if p + ".ple.key_proj.weight" in self.w:
            r = r + self.memory(p + ".ple", r, token, st)
        x, inject = self.read(p + ".attn_hyper_connection", r)
        is_linear = p + ".linear_attn.A_log" in self.w
        y = (
            self.delta_net(p + ".linear_attn", x, st)
            if is_linear
            else self.attention(p + ".self_attn", x, st, position)
        )
        r = r + inject[:, None] * y
        x, inject = self.read(p + ".mlp_hyper_connection", r)
        return r + inject[:, None] * self.experts(p + ".mlp", x)

    def token(self, token: int, position: int, state: list[dict[str, Any]]) -> tuple[Array, Array]:
        """Decode one token; return logits `[V]` and the final stack `[C,H]`."""
        r = np.tile(self.w[ROOT + "embed_tokens.weight"][token], (self.c["hc_count"], 1))
        for i, st in enumerate(state):
            r = self.layer(f"{ROOT}layers.{i}", r, st, position, token)
        return self.linear("lm_head", self.read(ROOT + "hyper_connection_mixer", r)[0]), r

    def mtp(self, r: Array, following: int, position: int, st: dict[str, Any]) -> Array:
        """MTP cell of `position`: its stack and the next token; return logits for the token after that."""
        emb = self.norm(self.w[ROOT + "embed_tokens.weight"][following], "mtp.pre_fc_norm_embedding")
        hidden = self.norm(r.reshape(-1), "mtp.pre_fc_norm_hidden").reshape(r.shape)
        x = hidden @ self.w["mtp.fc_hidden.weight"].T + self.linear("mtp.fc_embedding", emb)
        x = self.layer("mtp.layers.0", x, st, position, following)
        return self.linear("lm_head", self.read("mtp.hyper_connection_mixer", x)[0])

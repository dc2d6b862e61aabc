# ruff: noqa
# fmt: off
# Copied from the project's specification folder (spec/qwen4exp_numpy_ref.py); only these first lines are new.
# Role: the torch-free oracle, float64, one token at a time, written from the equations alone. `tests/parity/test_oracle.py`
# compares the model with it under its own unforced tie rule (score descending, block ascending).
#!/usr/bin/env python3
"""Plain numpy `qwen4_exp` text model + MTP cell, written from the equations of qwen4exp.md (not from any other code).

    python qwen4exp_numpy_ref.py DIR [--float32]      DIR made by make_tiny_hf_qwen4exp.py

One token at a time, explicit state, no batching: slow, meant for tiny checkpoints and for reading.  Compares itself
with DIR/golden.npz.  Needs numpy only (own safetensors reader, so bfloat16 files work too).
"""
import json
import math
import pathlib
import struct
import sys

import numpy as np


def load(folder):
    out = {}
    for f in sorted(pathlib.Path(folder).glob("*.safetensors")):
        raw = np.memmap(f, np.uint8, "r")
        n = struct.unpack("<Q", raw[:8].tobytes())[0]
        for name, d in json.loads(raw[8:8 + n].tobytes()).items():
            if name == "__metadata__":
                continue
            b = raw[8 + n + d["data_offsets"][0]: 8 + n + d["data_offsets"][1]].tobytes()
            if d["dtype"] == "BF16":
                a = (np.frombuffer(b, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                a = np.frombuffer(b, {"F32": "<f4", "F16": "<f2", "I64": "<i8"}[d["dtype"]])
            out[name] = a.reshape(d["shape"])
    return out


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Ref:
    def __init__(self, folder, dtype=np.float64):
        self.c = json.loads((pathlib.Path(folder) / "config.json").read_text())["text_config"]
        w = load(folder)
        self.w = {k: (v.astype(dtype) if v.dtype.kind == "f" else v) for k, v in w.items()}
        self.dtype, self.eps = dtype, self.c["rms_norm_eps"]
        self.H, self.S = self.c["hidden_size"], self.c["hc_count"]
        rot = int(self.c["head_dim"] * self.c["partial_rotary_factor"])
        self.inv = self.c["rope_parameters"]["rope_theta"] ** (-np.arange(0, rot, 2) / rot)
        # the n-gram table, parts in numeric order
        self.table = {}
        for k in [k for k in self.w if ".ngram_embedding.shard_" in k]:
            self.table.setdefault(k.split(".shard_")[0], {})[int(k.split(".shard_")[1].split(".")[0])] = self.w[k]
        self.table = {k: np.concatenate([v[i] for i in range(len(v))]) for k, v in self.table.items()}

    # ---- pieces
    def znorm(self, x, name):                      # zero-centred RMSNorm over the last axis
        g = self.w[name + ".weight"].reshape(-1, x.shape[-1])
        g = g[0] if x.ndim == 1 else g
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * (1 + g)

    def lin(self, name, x):
        return self.w[name + ".weight"] @ x

    def hc_read(self, p, R):                       # R [S,H] -> mixed [H], inject weights [S] (None for a mixer)
        xn = self.znorm(R, p + ".hc_norm")
        flat = xn.reshape(-1)
        lo = silu(self.lin(p + ".input_mix_weight_down", flat) / self.S)
        gate = sigmoid(self.lin(p + ".input_mix_weight_up", lo)).reshape(R.shape)
        mixed = (gate * xn).mean(0)
        if p + ".block_inject_weight.weight" not in self.w:
            return mixed, None
        return mixed, 2 * sigmoid(self.lin(p + ".block_inject_weight", flat) / self.S)

    def rope(self, x, pos):                        # x [..., d], rotates the first 2*len(inv) dims
        h, a = len(self.inv), pos * self.inv
        c, s = np.cos(a), np.sin(a)
        x1, x2 = x[..., :h], x[..., h:2 * h]
        return np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s, x[..., 2 * h:]], -1)

    def gdn(self, p, x, st):
        c = self.c
        nk, nv, dk, dv = (c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"],
                          c["linear_value_head_dim"])
        u = self.lin(p + ".in_proj_qkv", x)
        win = np.vstack([st.setdefault("conv", np.zeros((c["linear_conv_kernel_dim"] - 1, len(u)), self.dtype)), u])
        st["conv"] = win[1:]
        u = silu((win * self.w[p + ".conv1d.weight"][:, 0].T).sum(0))
        q, k, v = u[:nk * dk].reshape(nk, dk), u[nk * dk:2 * nk * dk].reshape(nk, dk), u[2 * nk * dk:].reshape(nv, dv)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / math.sqrt(dk)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        q, k = np.repeat(q, nv // nk, 0), np.repeat(k, nv // nk, 0)
        beta = sigmoid(self.lin(p + ".in_proj_b", x))
        g = -np.exp(self.w[p + ".A_log"]) * np.logaddexp(0, self.lin(p + ".in_proj_a", x) + self.w[p + ".dt_bias"])
        s = st.setdefault("S", np.zeros((nv, dk, dv), self.dtype)) * np.exp(g)[:, None, None]
        delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", s, k))
        st["S"] = s = s + k[:, :, None] * delta[:, None, :]
        o = np.einsum("hkv,hk->hv", s, q)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + self.eps) * self.w[p + ".norm.weight"]
        o = o * sigmoid(self.lin(p + ".in_proj_z", x).reshape(nv, dv))
        return self.lin(p + ".out_proj", o.reshape(-1))

    def qsa(self, p, x, st, pos):
        c = self.c
        nh, nk, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        di, hi, r = c["indexer_head_dim"], c["indexer_n_heads"], c["indexer_compress_ratio"]
        qk = self.lin(p + ".indexer.index_qk_proj", x)
        iq = self.rope(self.znorm(qk[:hi * di].reshape(hi, di), p + ".indexer.q_layernorm"), pos)
        raw, blocks = st.setdefault("raw", []), st.setdefault("blocks", [])
        raw.append(qk[hi * di:])
        n = len(raw)
        if n % r == 0:                              # a block has just completed: pool, normalise, rotate at its start
            pooled = self.znorm(np.mean(raw[-r:], 0), p + ".indexer.k_layernorm")
            blocks.append(self.rope(pooled, st["first_pos"] + n - r))
        nb, keep = n // r, np.zeros(n, bool)
        if nb:
            score = np.maximum(np.array(blocks) @ iq.T, 0).sum(-1) / math.sqrt(di)
            best = np.lexsort((np.arange(nb), -score))[:c["indexer_budget"] // r]
            keep[(best[:, None] * r + np.arange(r)).ravel()] = True
        keep[nb * r:] = True
        if "force" in st:                           # test aid: follow the golden choice where the cut is a tie
            keep = st.pop("force")
        qg = self.lin(p + ".q_proj", x).reshape(nh, 2, d)
        q = self.rope(self.znorm(qg[:, 0], p + ".q_norm"), pos)
        st.setdefault("k", []).append(self.rope(self.znorm(self.lin(p + ".k_proj", x).reshape(nk, d), p + ".k_norm"), pos))
        st.setdefault("v", []).append(self.lin(p + ".v_proj", x).reshape(nk, d))
        K, V = (np.repeat(np.array(st[z])[keep], nh // nk, 1) for z in "kv")
        a = np.einsum("hd,thd->ht", q, K) / math.sqrt(d)
        a = np.exp(a - a.max(-1, keepdims=True))
        o = np.einsum("ht,thd->hd", a / a.sum(-1, keepdims=True), V) * sigmoid(qg[:, 1])
        st["keep"] = keep
        return self.lin(p + ".o_proj", o.reshape(-1))

    def moe(self, p, x, note):
        c, m = self.c, self.c["moe_intermediate_size"]
        z = self.lin(p + ".gate", x)
        prob = np.exp(z - z.max())
        prob /= prob.sum()
        ids = np.lexsort((np.arange(len(prob)), -prob))[:c["num_experts_per_tok"]]
        wt = prob[ids] / (prob[ids].sum() if c.get("norm_topk_prob", True) else 1)
        note.append((ids, wt))
        y = 0
        for e, a in sorted(zip(ids, wt)):
            gu = self.w[p + ".experts.gate_up_proj"][e] @ x
            y = y + a * (self.w[p + ".experts.down_proj"][e] @ (silu(gu[:m]) * gu[m:]))
        sh = self.lin(p + ".shared_expert.down_proj",
                      silu(self.lin(p + ".shared_expert.gate_proj", x)) * self.lin(p + ".shared_expert.up_proj", x))
        return y + sigmoid(self.lin(p + ".shared_expert_gate", x)) * sh

    def ple(self, p, R, tok, st):
        c, w, e = self.c, self.w, p + ".ple_embedding"
        eos = c["eos_token_id"] if isinstance(c["eos_token_id"], int) else c["eos_token_id"][0]
        hist = st.setdefault("ids", [eos] * (c["ngram_size"] - 1))
        ctx, cut = [tok], False
        for prev in reversed(hist):
            cut = cut or prev == eos
            ctx.append(eos if cut else prev)
        st["ids"] = (hist + [tok])[1:]
        m, size, off = (w[f"{e}.{n}"].tolist() for n in
                        ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"))
        rows, acc = [], ctx[0] * m[0]
        for order in range(2, c["ngram_size"] + 1):
            acc ^= ctx[order - 1] * m[order - 1]
            for h in range((order - 2) * c["heads_per_ngram"], (order - 1) * c["heads_per_ngram"]):
                rows.append(acc % size[h] + off[h])
        emb = self.table[e + ".ngram_embedding"][rows].reshape(-1)
        key = self.znorm(self.lin(p + ".key_proj", emb).reshape(R.shape), p + ".norm_key")
        s = (key * self.znorm(R, p + ".norm_query")).sum(-1) / math.sqrt(self.H)
        s = np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6))
        G = sigmoid(s)[:, None] * self.lin(p + ".value_proj", emb)
        N = self.znorm(G, p + ".norm_conv").reshape(-1)
        k, dil = c["ple_conv_kernel_size"], c["ngram_size"]
        win = np.vstack([st.setdefault("N", np.zeros(((k - 1) * dil, len(N)), self.dtype)), N])
        st["N"] = win[1:]
        return G + silu((win[::dil] * w[p + ".conv1d.weight"][:, 0].T).sum(0)).reshape(R.shape), rows

    def layer(self, p, R, st, pos, tok, note):
        if p + ".ple.key_proj.weight" in self.w:
            delta, rows = self.ple(p + ".ple", R, tok, st)
            note["ple"].append(delta.reshape(-1)), note["rows"].append(rows)
            R = R + delta
        mixed, inj = self.hc_read(p + ".attn_hyper_connection", R)
        note["amix"].append(mixed)
        y = (self.gdn(p + ".linear_attn", mixed, st) if p + ".linear_attn.A_log" in self.w
             else self.qsa(p + ".self_attn", mixed, st, pos))
        R = R + inj[:, None] * y
        mixed, inj = self.hc_read(p + ".mlp_hyper_connection", R)
        return R + inj[:, None] * self.moe(p + ".mlp", mixed, note["route"])

    def start(self):
        return [dict(first_pos=0) for _ in range(self.c["num_hidden_layers"])]

    def token(self, tok, pos, state):
        """One decode step -> logits [V], pre-mixer stack [S,H], notes."""
        root, note = "model.language_model.", dict(ple=[], rows=[], amix=[], route=[])
        R = np.tile(self.w[root + "embed_tokens.weight"][tok], (self.S, 1))
        for i, st in enumerate(state):
            R = self.layer(f"{root}layers.{i}", R, st, pos, tok, note)
        mixed, _ = self.hc_read(root + "hyper_connection_mixer", R)
        return self.lin("lm_head", mixed), R, note

    def mtp(self, R, nxt, pos, st):
        """MTP cell: stack of position `pos`, token of position pos+1 -> logits for position pos+2."""
        e = self.lin("mtp.fc_embedding", self.znorm(self.w["model.language_model.embed_tokens.weight"][nxt],
                                                    "mtp.pre_fc_norm_embedding"))
        h = self.znorm(R.reshape(-1), "mtp.pre_fc_norm_hidden").reshape(R.shape)      # ONE norm over S*H
        X = h @ self.w["mtp.fc_hidden.weight"].T + e
        note = dict(ple=[], rows=[], amix=[], route=[])
        X = self.layer("mtp.layers.0", X, st, pos, None, note)
        return self.lin("lm_head", self.hc_read("mtp.hyper_connection_mixer", X)[0]), X, note


def main():
    folder = sys.argv[1]
    ref = Ref(folder, np.float32 if "--float32" in sys.argv else np.float64)
    g = np.load(pathlib.Path(folder) / "golden.npz")
    state, mst, worst = ref.start(), dict(first_pos=0), dict(logits=0.0, mtp=0.0, ple=0.0, mix=0.0, stack=0.0)
    bad_rows = bad_routes = bad_masks = ties = 0
    prev = None
    for t, tok in enumerate(g["tokens"].tolist()):
        for i, st in enumerate(state):
            if f"qsa_tie_{i}" in g and g[f"qsa_tie_{i}"][t]:
                st["force"], ties = g[f"qsa_mask_{i}"][t, :t + 1], ties + 1
        logits, R, note = ref.token(tok, t, state)
        worst["logits"] = max(worst["logits"], np.abs(logits - g["logits"][t]).max())
        worst["stack"] = max(worst["stack"], np.abs(R.reshape(-1) - g["stream_after"][-1, t]).max())
        worst["mix"] = max(worst["mix"], np.abs(np.array(note["amix"]) - g["attn_mixed"][:, t]).max())
        if note["ple"]:
            worst["ple"] = max(worst["ple"], np.abs(note["ple"][0] - g["ple_delta"][t]).max())
            bad_rows += note["rows"][0] != g["ngram_rows"][t].tolist()
        bad_routes += sum(set(a.tolist()) != set(b.tolist()) for (a, _), b in zip(note["route"], g["router_ids"][:, t]))
        for i, st in enumerate(state):
            bad_masks += "keep" in st and not np.array_equal(st["keep"], g[f"qsa_mask_{i}"][t, :t + 1])
        if prev is not None and "mtp_logits" in g:
            if "mtp_qsa_tie" in g and g["mtp_qsa_tie"][t - 1]:
                mst["force"], ties = g["mtp_qsa_mask"][t - 1, :t], ties + 1
            ml, _, _ = ref.mtp(prev, tok, t - 1, mst)
            bad_masks += "mtp_qsa_mask" in g and not np.array_equal(mst["keep"], g["mtp_qsa_mask"][t - 1, :t])
            worst["mtp"] = max(worst["mtp"], np.abs(ml - g["mtp_logits"][t - 1]).max())
        prev = R
    print("max abs difference", {k: float(f"{v:.3g}") for k, v in worst.items()})
    print("wrong: n-gram rows", bad_rows, " routes", bad_routes, " QSA masks", bad_masks, " (rows forced because of a tie:", ties, ")")


if __name__ == "__main__":
    main()

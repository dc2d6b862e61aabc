#!/usr/bin/env python3
# ruff: noqa
# fmt: off
# Kept as it ran: the goldens' provenance is this text.
"""Build a tiny DFlash2 drafter with the upstream reference code and record golden outputs.

The reference is the `dflash` wheel (z-lab, MIT, version 0.1.0): `dflash.model` (torch) and,
when importable, `dflash.model_mlx` (MLX).  This file contains no upstream code; it only drives it.

  pip install --no-deps dflash==0.1.0      # the [local] extra pins older torch/transformers
  python make_tiny_dflash2.py --out tiny_dflash2
  python make_tiny_dflash2.py --out tiny_dflash2 --dflash-src DIR_WITH_UNPACKED_WHEEL --no-mlx

What it writes into --out
  config.json            draft config, schema of a released DFlash2 checkpoint
  model.safetensors      draft weights under checkpoint names (codebooks without `.weight`), fp32
  conv_kernel3.safetensors  the convolution tensors that replace the 2-tap ones in variant `kernel3`
  target.safetensors     the pretend target's embed_tokens.weight and lm_head.weight, fp32
  goldens.safetensors    inputs and reference outputs, per variant and per round
  goldens.json           token ids, variant overrides, tolerances, digests, cross-check results

Three independent computations are compared before anything is called golden:
  torch reference with its incremental cache, a cache-free dense recomputation written here from
  the equations of dflash2.md, and (optional) the MLX reference with its rotating cache.
Exit status 0 only if torch and dense agree on every variant and round.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

SEED = 20260817
V, V_REAL, H, INTER = 304, 297, 64, 96          # 7 padded vocabulary rows on purpose
HEADS, KV, HD = 4, 2, 32                        # HEADS*HD != H on purpose
WINDOW, BLOCK, RANK, TOPK = 12, 8, 8, 5
N_TARGET, TAPS = 8, [1, 3, 6]
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
MASK_ID, EOS_ID = 290, 289
PROMPT = 21                                      # longer than the window on purpose
# rows of context added after each round = accepted + 1; the last round uses a shortened block
ROUNDS = [dict(take=4, block=BLOCK), dict(take=1, block=BLOCK), dict(take=1, block=BLOCK),
          dict(take=BLOCK, block=BLOCK), dict(take=2, block=BLOCK), dict(take=0, block=4)]

BASE = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "attention_bias": False,
    "attention_dropout": 0.0, "dtype": "float32", "hidden_act": "silu", "hidden_size": H,
    "intermediate_size": INTER, "num_hidden_layers": len(LAYER_TYPES),
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD,
    "layer_types": LAYER_TYPES, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": len(LAYER_TYPES),
    "tie_word_embeddings": False, "vocab_size": V, "num_target_layers": N_TARGET,
    "is_causal": False, "bos_token_id": 0, "eos_token_id": EOS_ID,
    "dflash_config": {
        "block_size": BLOCK, "mask_token_id": MASK_ID, "target_layer_ids": TAPS,
        "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": TOPK,
    },
}
VARIANTS = {                                     # (top-level overrides, dflash_config overrides)
    "base": ({}, {}),                            # bidirectional block, as every released DFlash2
    "causal_default": ({"is_causal": None}, {}),  # sliding layers causal, full layers not
    "causal_all": ({"is_causal": True}, {}),
    "scaled": ({}, {"output_multiplier": 0.25, "final_logit_softcapping": 4.0,
                    "input_embedding_scale": 1.5}),
    "kernel3": ({}, {"conv_kernel_size": 3}),
    "all_sliding": ({"layer_types": ["sliding_attention"] * 3}, {}),   # shape of the released drafts
    "v1": ({"architectures": ["DFlashDraftModel"]},               # no convolution, no selector
           {"conv_kernel_size": 0, "conv_group_size": 0, "selector_rank": 0, "selector_top_k": 0}),
}


def merged(name):
    top, nested = VARIANTS[name]
    cfg = json.loads(json.dumps(BASE))
    cfg.update(top)
    cfg["dflash_config"].update(nested)
    return cfg


def sha(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# ----------------------------------------------------------------- cache-free dense recomputation
def dense_block(torch, w, cfg, feats, block_ids, embed, start):
    """Final-norm hidden for one block from ALL context feature rows 0..start-1 and no cache."""
    import torch.nn.functional as F
    dc = cfg["dflash_config"]
    eps, n = cfg["rms_norm_eps"], len(block_ids)
    rms = lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * g
    theta = cfg["rope_parameters"]["rope_theta"]
    inv = theta ** (-torch.arange(0, HD, 2, dtype=torch.float32) / HD)

    def rope(x, pos):                            # x [T, heads, HD], pairs (i, i + HD/2)
        a = pos[:, None].float() * inv
        c, s = torch.cos(a)[:, None], torch.sin(a)[:, None]
        lo, hi = x[..., : HD // 2], x[..., HD // 2:]
        return torch.cat([lo * c - hi * s, hi * c + lo * s], -1)

    taps, gs = dc["conv_kernel_size"], dc["conv_group_size"]

    def coeff(pref, a):                          # both halves come from the sublayer INPUT
        if not taps:
            return None
        return (a @ w[pref + "kernel_projection.weight"].T).view(n, 2, taps, H // gs)

    def conv(pref, which, cf, x):                # out[t,c] = sum_o (base[o,c]+dyn[t,o,c//gs]) x[t-o,c]
        if not taps:
            return x
        base, dyn, out = w[pref + "base_kernel"][which], cf[:, which], torch.zeros_like(x)
        for o in range(taps):
            k = base[o][None] + dyn[:, o].repeat_interleave(gs, -1)
            out[o:] += k[o:] * x[: n - o]
        return out

    x = embed[block_ids] * dc.get("input_embedding_scale", 1.0)
    ctx = rms(feats[:start] @ w["fc.weight"].T, w["hidden_norm.weight"])
    pc, pb = torch.arange(start), start + torch.arange(n)
    for i, kind in enumerate(cfg["layer_types"]):
        p = f"layers.{i}."
        a = rms(x, w[p + "input_layernorm.weight"])
        cf = coeff(p + "attention_conv.", a)
        a = conv(p + "attention_conv.", 0, cf, a)
        q = rms((a @ w[p + "self_attn.q_proj.weight"].T).view(n, HEADS, HD), w[p + "self_attn.q_norm.weight"])
        kv = torch.cat([ctx, a])
        k = rms((kv @ w[p + "self_attn.k_proj.weight"].T).view(-1, KV, HD), w[p + "self_attn.k_norm.weight"])
        v = (kv @ w[p + "self_attn.v_proj.weight"].T).view(-1, KV, HD)
        pos = torch.cat([pc, pb])
        q, k = rope(q, pb), rope(k, pos)
        d = pb[:, None] - pos[None]              # query position minus key position
        causal = (kind == "sliding_attention") if cfg["is_causal"] is None else cfg["is_causal"]
        ok = torch.ones_like(d, dtype=torch.bool)
        if causal:
            ok &= d >= 0
        if kind == "sliding_attention":
            ok &= d.abs() < cfg["sliding_window"] if not causal else d < cfg["sliding_window"]
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        s = torch.einsum("qhd,khd->hqk", q, k) * HD ** -0.5
        s = s.masked_fill(~ok[None], float("-inf")).softmax(-1)
        o = torch.einsum("hqk,khd->qhd", s, v).reshape(n, HEADS * HD) @ w[p + "self_attn.o_proj.weight"].T
        x = x + conv(p + "attention_conv.", 1, cf, o)
        a = rms(x, w[p + "post_attention_layernorm.weight"])
        cf = coeff(p + "mlp_conv.", a)
        a = conv(p + "mlp_conv.", 0, cf, a)
        m = F.silu(a @ w[p + "mlp.gate_proj.weight"].T) * (a @ w[p + "mlp.up_proj.weight"].T)
        x = x + conv(p + "mlp_conv.", 1, cf, m @ w[p + "mlp.down_proj.weight"].T)
    return rms(x, w["norm.weight"])


def dense_select(torch, w, cfg, hidden, head, anchor):
    """hidden [B-1,H] -> sorted candidates, unary, full lattice, path, per-slot path scores."""
    dc = cfg["dflash_config"]
    z = (hidden @ head.T) * dc.get("output_multiplier", 1.0)
    cap = dc.get("final_logit_softcapping")
    if cap:
        z = torch.tanh(z / cap) * cap
    unary, cand = torch.topk(z, dc["selector_top_k"], dim=-1, sorted=True)
    h = hidden @ w["candidate_selector.hidden_projection.weight"].T
    A, B = w["candidate_selector.predecessor_codebook"], w["candidate_selector.successor_codebook"]
    prev_sets = torch.cat([torch.full((1, cand.shape[1]), anchor), cand[:-1]])
    # lattice[t, i, j]: score of candidate j at slot t if slot t-1 holds candidate i
    lattice = unary[:, None, :] + torch.einsum("tir,tr,tjr->tij", A[prev_sets], h, B[cand])
    path, scores, prev = [], [], anchor
    for t in range(len(hidden)):
        s = unary[t] + (A[prev] * h[t]) @ B[cand[t]].T
        prev = int(cand[t, int(s.argmax())])
        path.append(prev)
        scores.append(s)
    return z, cand, unary, lattice, torch.tensor(path), torch.stack(scores)


# ------------------------------------------------------------------------------------------ main
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="tiny_dflash2")
    ap.add_argument("--dflash-src", default=None, help="folder that contains the `dflash` package")
    ap.add_argument("--no-mlx", action="store_true")
    args = ap.parse_args()
    if args.dflash_src:
        sys.path.insert(0, args.dflash_src)
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from dflash import model as ref

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    gen = torch.Generator().manual_seed(SEED)
    rnd = lambda *s, std=1.0: torch.randn(*s, generator=gen) * std

    embed, head = rnd(V, H, std=0.7), rnd(V, H, std=0.35)
    head[V_REAL:] = 0                            # padded rows: zero, as a padded target would have
    total_rows = PROMPT + sum(r["take"] for r in ROUNDS)
    feats = rnd(total_rows, len(TAPS) * H)
    tokens = torch.randint(1, 280, (total_rows + 1,), generator=gen)

    def build(cfg, dtype=torch.float32):
        kw = {k: v for k, v in cfg.items() if k not in ("architectures", "model_type", "dtype")}
        cls = getattr(ref, cfg["architectures"][0])
        return cls(Qwen3Config(**kw, attn_implementation="sdpa")).eval().to(dtype)

    def fresh(shapes):
        sd = {}
        for name, shape in shapes.items():
            if name.endswith("norm.weight"):
                sd[name] = 1 + rnd(*shape, std=0.15)
            elif name.endswith("base_kernel"):
                sd[name] = rnd(*shape, std=0.1)
                sd[name][:, 0] += 1              # near the identity filter, as trained models are
            elif "codebook" in name:
                sd[name] = rnd(*shape, std=0.9)
            else:
                sd[name] = rnd(*shape, std=0.9 / shape[-1] ** 0.5)
        return sd

    def ckpt_names(sd):
        return {k.replace("_codebook.weight", "_codebook"): v.contiguous() for k, v in sd.items()}

    def shapes(m):
        return {k: tuple(v.shape) for k, v in m.state_dict().items()}

    base_sd = fresh(shapes(build(merged("base"))))
    k3_sd = fresh({k: v for k, v in shapes(build(merged("kernel3"))).items() if "_conv." in k})

    def weights_for(name, m):
        sd = dict(base_sd)
        if name == "kernel3":
            sd.update(k3_sd)
        return {k: sd[k] for k in shapes(m)}     # v1 simply lacks the convolution and selector keys

    class Head(torch.nn.Module):
        def forward(self, x):
            return x @ head.to(x.dtype).T

    tensors = {"features": feats, "tokens": tokens}
    meta = {"seed": SEED, "dims": dict(V=V, V_REAL=V_REAL, H=H, window=WINDOW, block=BLOCK,
            top_k=TOPK, rank=RANK, prompt=PROMPT), "rounds": ROUNDS, "variants": {},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                         "dflash": "0.1.0"},
            "tolerance": {"hidden_abs_fp32": 2e-4, "logit_abs_fp32": 5e-4, "score_abs_fp32": 1e-3,
                          "ids": "exact when the recorded margin exceeds 2e-3"}}
    worst, failures = 0.0, []

    for name in VARIANTS:
        cfg = merged(name)
        v2 = cfg["architectures"] == ["DFlash2DraftModel"]
        model = build(cfg)
        sd = weights_for(name, model)
        model.load_state_dict(sd, strict=True)
        w = ckpt_names(sd)
        low = build(cfg, torch.bfloat16)
        low.load_state_dict(sd, strict=True)
        scale = cfg["dflash_config"].get("input_embedding_scale", 1.0)
        cache, low_cache = ref._make_cache(model.config), ref._make_cache(low.config)
        start, done, rounds = PROMPT, 0, []
        for r, rd in enumerate(ROUNDS):
            n = rd["block"]
            ids = torch.tensor([int(tokens[start])] + [MASK_ID] * (n - 1))
            call = lambda m, c, dt: m(
                target_hidden=feats[None, done:start].to(dt), past_key_values=c, use_cache=True,
                noise_embedding=(embed[ids][None].to(dt) * scale),
                position_ids=torch.arange(done, start + n)[None])
            hid, hid16 = call(model, cache, torch.float32), call(low, low_cache, torch.bfloat16)
            ref._crop_to(cache, start)           # drop the block rows, keep the context rows
            ref._crop_to(low_cache, start)
            body = hid[:, 1:]
            anchor = torch.tensor([int(tokens[start])])
            logits = model.compute_logits(body, Head())
            dh = dense_block(torch, w, cfg, feats, ids, embed, start)
            err = float((dh - hid[0]).abs().max())
            worst = max(worst, err)
            pre = f"{name}.r{r}."
            tensors[pre + "hidden"] = hid[0].clone()
            info = dict(start=start, context_from=done, block_ids=ids.tolist(), hidden_err_vs_dense=err,
                        bf16_hidden_err=float((hid16[0].float() - hid[0]).abs().max()))
            if not v2:
                top2 = torch.topk(logits[0], 2, -1).values
                path, ok = logits.argmax(-1), err < 2e-4
                tensors.update({pre + "argmax_logit": top2[:, 0].clone(), pre + "path": path[0].clone()})
                info.update(path=path[0].tolist(), margin_path=float((top2[:, 0] - top2[:, 1]).min()))
            else:
                path, cand, _ = model.propose(body, anchor, Head(), 0.0)
                path16, _, _ = low.propose(hid16[:, 1:], anchor, Head(), 0.0)
                torch.manual_seed(1000 + r)
                spath, scand, q = model.propose(body, anchor, Head(), 0.8)
                dz, dcand, dunary, lat, dpath, dscore = dense_select(
                    torch, w, cfg, dh[1:], head, int(anchor))
                zerr = float((dz - logits[0]).abs().max())
                full = torch.sort(dz, -1, descending=True).values
                top2 = torch.sort(dscore, -1, descending=True).values
                # q rows of the sampled path, re-derived in sorted candidate order
                prev, qs = int(anchor), []
                for t in range(n - 1):
                    i = 0 if t == 0 else int((dcand[t - 1] == prev).nonzero()[0])
                    qs.append(torch.softmax(lat[t, i] / 0.8, -1))
                    prev = int(spath[0, t])
                qs = torch.stack(qs)
                q_ref = torch.stack([q[0, t][(scand[0, t][None] == dcand[t][:, None]).int().argmax(-1)]
                                     for t in range(n - 1)])
                qerr = float((qs - q_ref).abs().max())
                ok = (err < 2e-4 and zerr < 5e-4 and qerr < 1e-4 and torch.equal(path[0], dpath)
                      and torch.equal(torch.sort(cand[0]).values, torch.sort(dcand).values))
                tensors.update({
                    pre + "cand_ids": dcand, pre + "cand_logits": dunary, pre + "lattice": lat,
                    pre + "path": path[0].clone(), pre + "path_scores": dscore,
                    pre + "sampled_path_T0.8": spath[0].clone(), pre + "sampled_q_T0.8": qs})
                info.update(path=path[0].tolist(), argmax=dz.argmax(-1).tolist(),
                            selector_changed=int((path[0] != dz.argmax(-1)).sum()),
                            q_err_vs_dense=qerr, padded_candidates=int((dcand >= V_REAL).sum()),
                            bf16_same_path=bool(torch.equal(path16, path)),
                            margin_topk=float((full[:, TOPK - 1] - full[:, TOPK]).min()),
                            margin_path=float((top2[:, 0] - top2[:, 1]).min()))
            if not ok:
                failures.append((name, r, err))
            rounds.append(info)
            done, start = start, start + rd["take"]
        meta["variants"][name] = {"overrides": VARIANTS[name], "rounds": rounds}

    (out / "config.json").write_text(json.dumps(merged("base"), indent=2) + "\n")
    files = {"model.safetensors": ckpt_names(base_sd), "conv_kernel3.safetensors": ckpt_names(k3_sd),
             "target.safetensors": {"embed_tokens.weight": embed, "lm_head.weight": head},
             "goldens.safetensors": {k: v.contiguous() for k, v in tensors.items()}}
    for fn, t in files.items():
        save_file(t, out / fn, metadata={"format": "pt"})
        (out / fn).chmod(0o644)
    meta["names"] = {k: list(v.shape) for k, v in sorted(ckpt_names(base_sd).items())}
    meta["sha256"] = {p: sha(out / p) for p in ("config.json", *files)}
    meta["mlx"] = None if args.no_mlx else check_mlx(out, tensors, meta, head, embed)
    meta["torch_vs_dense_worst_hidden_abs"] = worst
    (out / "goldens.json").write_text(json.dumps(meta, indent=1) + "\n")

    print(f"torch vs dense, worst |hidden| difference: {worst:.2e}; failures: {failures}")
    for n, v in meta["variants"].items():
        rs = v["rounds"]
        print(f"  {n:15s} selector overrode argmax {[r.get('selector_changed', '-') for r in rs]}"
              f" smallest margin {min(r['margin_path'] for r in rs):.3g}"
              f" bf16 |hidden| {max(r['bf16_hidden_err'] for r in rs):.2g}"
              f" bf16 same path {[int(r['bf16_same_path']) if 'bf16_same_path' in r else '-' for r in rs]}")
    for line in (meta["mlx"] or {}).get("report", []):
        print(line)
    sys.exit(1 if failures else 0)


def check_mlx(out, tensors, meta, head, embed):
    """Replay every round through the MLX reference; report, never fail (see dflash2.md, section 8)."""
    try:
        import mlx.core as mx
        import numpy as np
        from dflash import model_mlx as mref
    except Exception as e:                       # no mlx on this host: still a usable golden set
        return {"report": [f"MLX reference not importable: {type(e).__name__}: {e}"]}
    mx.set_default_device(mx.cpu)
    rep, table = [], {}

    class Emb:
        def __init__(self, t):
            self.t = mx.array(t.numpy())

        def __call__(self, i):
            return self.t[i]

    class Target:
        pass

    for name, var in meta["variants"].items():
        cfg = merged(name)
        v2 = cfg["architectures"] == ["DFlash2DraftModel"]
        dc = cfg["dflash_config"]
        c = mref.DFlashConfig(
            hidden_size=H, num_hidden_layers=len(LAYER_TYPES), num_attention_heads=HEADS,
            num_key_value_heads=KV, head_dim=HD, intermediate_size=INTER, vocab_size=V,
            rms_norm_eps=cfg["rms_norm_eps"], rope_theta=10000.0, max_position_embeddings=4096,
            block_size=BLOCK, target_layer_ids=tuple(TAPS), num_target_layers=N_TARGET,
            mask_token_id=MASK_ID, layer_types=tuple(cfg["layer_types"]), sliding_window=WINDOW,
            is_causal=cfg["is_causal"], conv_kernel_size=dc["conv_kernel_size"],
            conv_group_size=dc["conv_group_size"], selector_rank=dc["selector_rank"],
            selector_top_k=dc["selector_top_k"],
            final_logit_softcapping=dc.get("final_logit_softcapping"),
            input_embedding_scale=dc.get("input_embedding_scale", 1.0),
            output_multiplier=dc.get("output_multiplier", 1.0))
        m = getattr(mref, cfg["architectures"][0])(c)
        w = mx.load(str(out / "model.safetensors"))
        if name == "kernel3":
            w.update(mx.load(str(out / "conv_kernel3.safetensors")))
        if v2:
            for k in ("predecessor_codebook", "successor_codebook"):
                w[f"candidate_selector.{k}.weight"] = w.pop(f"candidate_selector.{k}")
        else:
            w = {k: v for k, v in w.items() if "_conv." not in k and "candidate_selector" not in k}
        m.load_weights(list(w.items()))
        m.eval()
        t = Target()
        t.embed_tokens = Emb(embed)
        hw = mx.array(head.numpy())
        t.lm_head = lambda x, hw=hw: x @ hw.T
        m.bind(t)
        feats = mx.array(tensors["features"].numpy())
        for mode in ("stock", "temporal"):       # temporal: the same cache without in-place rotation
            cache, rows = m.make_cache(), []
            if mode == "temporal":
                for c_ in cache:
                    if hasattr(c_, "_update_concat"):
                        c_.update_and_fetch = c_._update_concat
            for r, rd in enumerate(var["rounds"]):
                ids = mx.array([rd["block_ids"]])
                ctx = feats[None, rd["context_from"]: rd["start"]]
                hid = m.hidden_states(ids, ctx, cache, 0)
                logits = m.compute_logits(hid[:, 1:])
                path = (m.candidate_selector.select(hid[:, 1:], logits, ids[:, 0], 0.0)[0] if v2
                        else mx.argmax(logits, axis=-1))
                mx.eval(hid, path)
                gold = tensors[f"{name}.r{r}.hidden"].numpy()
                rows.append(dict(round=r, new_rows=rd["start"] - rd["context_from"],
                                 hidden_err=float(np.abs(np.array(hid[0]) - gold).max()),
                                 same_path=path[0].tolist() == rd["path"]))
            table[f"{name}.{mode}"] = rows
            rep.append(f"  MLX {mode:8s} {name:15s}" + " ".join(
                f"+{x['new_rows']}:{x['hidden_err']:.0e}{'' if x['same_path'] else '!PATH'}" for x in rows))
    return {"report": rep, "rounds": table, "mlx": mx.__version__}


if __name__ == "__main__":
    main()

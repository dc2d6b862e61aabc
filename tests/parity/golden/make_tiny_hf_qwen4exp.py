# ruff: noqa
# fmt: off
# Copied unchanged from the project's specification folder (spec/make_tiny_hf_qwen4exp.py); only these first lines are new.
# Role: the reference. It builds the tiny checkpoint with torch and runs transformers 5.24 `models/qwen4_exp` on it.
# `generate.py` beside it drives it; nothing in the product or in CI imports it.
#!/usr/bin/env python3
"""Build a random tiny `qwen4_exp` checkpoint in the official on-disk layout and a golden .npz.

Needs: torch, transformers (>= 5.16, with models/qwen4_exp), numpy, safetensors.  CPU only.

    python make_tiny_hf_qwen4exp.py --out DIR [--seed 0] [--dtype float32|bfloat16]
                                    [--tokens 5,9,120,7,...] [--set num_hidden_layers=4 ...]

Writes into DIR
    config.json                      same nesting and key names as the real checkpoint
    generation_config.json
    model-0000N-of-0000M.safetensors official tensor names (model.language_model.*, lm_head, mtp.*)
    model.safetensors.index.json
    golden.npz                       see GOLDEN below

Every tensor is drawn from a generator seeded by (seed, crc32(name)), so the values do not depend on the
order of creation, on the number of layers, or on torch.  All norms, convs, A_log, dt_bias are non-trivial on
purpose: transformers' own init makes the PLE conv and all zero-centred norms exact no-ops.

GOLDEN (float32 arrays unless noted; T = number of tokens, H = hidden_size, S = hc_count)
    tokens [T] i64                      the prompt
    logits [T,V]                        one-shot prefill logits
    logits_step [T,V]                   token-by-token logits through the cache
    logits_chunk [T,V]                  prefill in chunks of `chunk` tokens through the cache
    final_hidden [T,H]                  output of the final hyper_connection_mixer (= lm_head input)
    stream_after [L,T,S*H]              residual stack after each decoder layer (stream-major)
    attn_mixed [L,T,H], mlp_mixed [L,T,H]   HC-contracted inputs of the two halves of each layer
    router_ids [L,T,K] i64              routed experts, sorted by (-weight, id)
    router_w   [L,T,K]                  their normalised weights, same order
    qsa_mask_<layer> [T,T] bool         which key positions the indexer allows for each query
    qsa_scores_<layer> [T,NB]           own vectorised block scores (NaN where the block is not complete for the query)
    qsa_tie_<layer> [T] bool            the top-k cut falls inside equal scores: the selection is implementation-defined
    ngram_rows [T,NH] i64               PLE table rows (own integer arithmetic)
    ple_delta [T,S*H]                   what the PLE layer adds to the stack
    greedy [G] i64                      greedy continuation of the prompt
    mtp_logits [T-1,V], mtp_stream [T-1,S*H]   teacher-forced MTP cells: cell i = (stream_i, token_{i+1}), rope pos i
    mtp_router_ids [T-1,K] i64
    mtp_qsa_mask [T-1,T-1] bool, mtp_qsa_tie [T-1] bool   as above, for the MTP layer's own indexer
"""
from __future__ import annotations

import argparse
import json
import math
import pathlib
import zlib

import numpy as np
import torch

TINY_TEXT = dict(
    attention_bias=False, attention_dropout=0.0, bos_token_id=120, dtype="float32", eos_token_id=120,
    full_attention_interval=4, hc_count=4, hc_lowrank=32, head_dim=64, heads_per_ngram=2, hidden_act="silu",
    hidden_size=64, indexer_budget=16, indexer_compress_ratio=4, indexer_head_dim=32, indexer_kv_heads=1,
    indexer_n_heads=4, initializer_range=0.02, layer_types=None, linear_conv_kernel_dim=4, linear_key_head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=6, linear_value_head_dim=32,
    make_ngram_vocab_size_divisible_by=16, mamba_ssm_dtype="float32", max_position_embeddings=4096,
    model_type="qwen4_exp_text", moe_intermediate_size=64,
    mtp=dict(hybrid=True, layer_types=["full_attention"], mtp_use_hidden_state_from_layer=None,
             num_hidden_layers=1, rope_theta=10000000),
    mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, ngram_size=3, ngram_vocab_size_base=300,
    num_attention_heads=4, num_experts=16, num_experts_per_tok=4, num_hidden_layers=8, num_key_value_heads=2,
    output_gate_type="sigmoid", output_router_logits=False, pad_token_id=None, partial_rotary_factor=0.25,
    ple_conv_kernel_size=4, ple_embed_dim=384, ple_layer_ids=[2], rms_norm_eps=1e-6,
    rope_parameters=dict(mrope_interleaved=True, mrope_section=[3, 3, 2], partial_rotary_factor=0.25,
                         rope_theta=10000000, rope_type="default"),
    router_aux_loss_coef=0.001, shared_expert_intermediate_size=64, split_ngram_parts=8,
    tie_word_embeddings=False, use_cache=True, vocab_size=128,
)
TINY_VISION = dict(
    deepstack_visual_indexes=[], depth=1, hidden_act="gelu_pytorch_tanh", hidden_size=32, in_channels=3,
    initializer_range=0.02, intermediate_size=64, model_type="qwen4_exp", num_heads=2, num_position_embeddings=16,
    out_hidden_size=64, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
)


# ---------------------------------------------------------------- integer side of the n-gram table
def is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, math.isqrt(n) + 1, 2))


def primes_from(lo: int, count: int) -> list[int]:
    """`count` successive primes >= lo."""
    found, n = [], lo
    while len(found) < count:
        if is_prime(n):
            found.append(n)
        n += 1
    return found


def splitmix(v: int) -> int:
    m = (1 << 64) - 1
    v = (v + 0x9E3779B97F4A7C15) & m
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & m
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & m
    return v ^ (v >> 31)


def ngram_constants(tc: dict, ple_index: int = 0) -> dict:
    heads = (tc["ngram_size"] - 1) * tc["heads_per_ngram"]
    vocab = primes_from(tc["ngram_vocab_size_base"], heads * (ple_index + 1))[heads * ple_index:]
    offsets = [0]
    for v in vocab[:-1]:
        offsets.append(offsets[-1] + v)
    half = max(1, (((1 << 63) - 1) // max(tc["vocab_size"], 1)) // 2)
    base = tc.get("seed", 1234) + 10007 * ple_index
    mult = []
    for i in range(tc["ngram_size"]):
        mult.append(2 * (splitmix((base + 0x9E3779B97F4A7C15 * (i + 1)) & ((1 << 64) - 1)) % half) + 1)
    div = tc["make_ngram_vocab_size_divisible_by"]
    rows = -(-sum(vocab) // div) * div
    return dict(heads=heads, vocab=vocab, offsets=offsets, mult=mult, rows=rows,
                width=tc["ple_embed_dim"] // heads)


def ngram_rows(tokens: list[int], tc: dict, k: dict) -> np.ndarray:
    """Row ids [T, heads] for a fresh sequence, plain Python integers."""
    eos = tc["eos_token_id"] if isinstance(tc["eos_token_id"], int) else tc["eos_token_id"][0]
    n, hp = tc["ngram_size"], tc["heads_per_ngram"]
    out = []
    for p, tok in enumerate(tokens):
        ctx, cut = [tok], False
        for s in range(1, n):
            prev = tokens[p - s] if p - s >= 0 else eos
            cut = cut or prev == eos
            ctx.append(eos if cut else prev)
        row, acc = [], ctx[0] * k["mult"][0]
        for order in range(2, n + 1):
            acc ^= ctx[order - 1] * k["mult"][order - 1]
            for h in range((order - 2) * hp, (order - 1) * hp):
                row.append(acc % k["vocab"][h] + k["offsets"][h])
        out.append(row)
    return np.array(out, dtype=np.int64)


# ---------------------------------------------------------------- weights
class Maker:
    def __init__(self, seed: int):
        self.seed, self.tensors = seed, {}

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def put(self, name: str, value: np.ndarray) -> None:
        self.tensors[name] = torch.from_numpy(np.ascontiguousarray(value))

    def mat(self, name: str, *shape: int, gain: float = 1.0) -> None:
        self.put(name, (self.rng(name).standard_normal(shape) * gain / math.sqrt(shape[-1])).astype(np.float32))

    def norm(self, name: str, n: int, centre: float = 0.0) -> None:
        self.put(name, (centre + 0.2 * self.rng(name).standard_normal(n)).astype(np.float32))


def hyper(mk: Maker, p: str, tc: dict, inject: bool = True) -> None:
    wide = tc["hc_count"] * tc["hidden_size"]
    mk.norm(p + ".hc_norm.weight", wide)
    mk.mat(p + ".input_mix_weight_down.weight", tc["hc_lowrank"], wide, gain=4.0)
    mk.mat(p + ".input_mix_weight_up.weight", wide, tc["hc_lowrank"], gain=2.0)
    if inject:
        mk.mat(p + ".block_inject_weight.weight", tc["hc_count"], wide, gain=4.0)


def qsa(mk: Maker, p: str, tc: dict) -> None:
    h, nh, nk, d = tc["hidden_size"], tc["num_attention_heads"], tc["num_key_value_heads"], tc["head_dim"]
    mk.mat(p + ".q_proj.weight", nh * d * 2, h)
    mk.mat(p + ".k_proj.weight", nk * d, h)
    mk.mat(p + ".v_proj.weight", nk * d, h)
    mk.mat(p + ".o_proj.weight", h, nh * d)
    mk.norm(p + ".q_norm.weight", d)
    mk.norm(p + ".k_norm.weight", d)
    di = tc["indexer_head_dim"]
    mk.mat(p + ".indexer.index_qk_proj.weight", (tc["indexer_n_heads"] + tc["indexer_kv_heads"]) * di, h)
    mk.norm(p + ".indexer.q_layernorm.weight", di)
    mk.norm(p + ".indexer.k_layernorm.weight", di)


def gdn(mk: Maker, p: str, tc: dict) -> None:
    h, hv = tc["hidden_size"], tc["linear_num_value_heads"]
    kd = tc["linear_num_key_heads"] * tc["linear_key_head_dim"]
    vd = hv * tc["linear_value_head_dim"]
    mk.mat(p + ".in_proj_qkv.weight", 2 * kd + vd, h)
    mk.mat(p + ".in_proj_z.weight", vd, h)
    mk.mat(p + ".in_proj_b.weight", hv, h)
    mk.mat(p + ".in_proj_a.weight", hv, h)
    mk.mat(p + ".out_proj.weight", h, vd)
    mk.put(p + ".conv1d.weight",
           (0.4 * mk.rng(p + ".conv1d.weight").standard_normal((2 * kd + vd, 1, tc["linear_conv_kernel_dim"])))
           .astype(np.float32))
    mk.put(p + ".A_log", np.log(mk.rng(p + ".A_log").uniform(0.05, 4.0, hv)).astype(np.float32))
    mk.put(p + ".dt_bias", mk.rng(p + ".dt_bias").standard_normal(hv).astype(np.float32))
    mk.norm(p + ".norm.weight", tc["linear_value_head_dim"], centre=1.0)


def moe(mk: Maker, p: str, tc: dict) -> None:
    h, e, m, s = tc["hidden_size"], tc["num_experts"], tc["moe_intermediate_size"], tc["shared_expert_intermediate_size"]
    mk.mat(p + ".gate.weight", e, h, gain=2.0)
    mk.mat(p + ".experts.gate_up_proj", e, 2 * m, h)
    mk.mat(p + ".experts.down_proj", e, h, m)
    mk.mat(p + ".shared_expert.gate_proj.weight", s, h)
    mk.mat(p + ".shared_expert.up_proj.weight", s, h)
    mk.mat(p + ".shared_expert.down_proj.weight", h, s)
    mk.mat(p + ".shared_expert_gate.weight", 1, h)


def build_tensors(tc: dict, seed: int) -> dict[str, torch.Tensor]:
    mk, h, s = Maker(seed), tc["hidden_size"], tc["hc_count"]
    root = "model.language_model."
    mk.put(root + "embed_tokens.weight",
           mk.rng("embed").standard_normal((tc["vocab_size"], h)).astype(np.float32))
    mk.mat("lm_head.weight", tc["vocab_size"], h, gain=2.0)
    for i, kind in enumerate(tc["layer_types"]):
        p = f"{root}layers.{i}"
        hyper(mk, p + ".attn_hyper_connection", tc)
        hyper(mk, p + ".mlp_hyper_connection", tc)
        gdn(mk, p + ".linear_attn", tc) if kind == "linear_attention" else qsa(mk, p + ".self_attn", tc)
        moe(mk, p + ".mlp", tc)
        if i + 1 in tc["ple_layer_ids"]:
            q = p + ".ple"
            k = ngram_constants(tc, tc["ple_layer_ids"].index(i + 1))
            mk.mat(q + ".key_proj.weight", s * h, tc["ple_embed_dim"])
            mk.mat(q + ".value_proj.weight", h, tc["ple_embed_dim"])
            for n in ("key", "query", "conv"):
                mk.norm(f"{q}.norm_{n}.weight", s * h)
            mk.put(q + ".conv1d.weight",
                   (0.4 * mk.rng(q + ".conv1d.weight").standard_normal((s * h, 1, tc["ple_conv_kernel_size"])))
                   .astype(np.float32))
            e = q + ".ple_embedding"
            mk.put(e + ".layer_multipliers", np.array(k["mult"], np.int64))
            mk.put(e + ".ngram_heads_vocab_sizes", np.array(k["vocab"], np.int64))
            mk.put(e + ".ngram_heads_offsets", np.array(k["offsets"], np.int64))
            table = mk.rng(e + ".table").standard_normal((k["rows"], k["width"])).astype(np.float32)
            parts = tc["split_ngram_parts"]
            if k["rows"] % parts:
                raise SystemExit(f"padded rows {k['rows']} not divisible by split_ngram_parts {parts}")
            for j, block in enumerate(np.split(table, parts)):
                mk.put(f"{e}.ngram_embedding.shard_{j}.weight", block)
    hyper(mk, root + "hyper_connection_mixer", tc, inject=False)
    if tc["mtp_num_hidden_layers"]:
        mk.norm("mtp.pre_fc_norm_embedding.weight", h)
        mk.norm("mtp.pre_fc_norm_hidden.weight", s * h)
        mk.mat("mtp.fc_embedding.weight", h, h)
        mk.mat("mtp.fc_hidden.weight", h, h)
        hyper(mk, "mtp.layers.0.attn_hyper_connection", tc)
        hyper(mk, "mtp.layers.0.mlp_hyper_connection", tc)
        qsa(mk, "mtp.layers.0.self_attn", tc)
        moe(mk, "mtp.layers.0.mlp", tc)
        hyper(mk, "mtp.hyper_connection_mixer", tc, inject=False)
    return mk.tensors


def write_checkpoint(out: pathlib.Path, tensors: dict, tc: dict, vision: dict, shards: int) -> None:
    from safetensors.torch import save_file

    names = sorted(tensors)
    index = {"metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
             "weight_map": {}}
    for j in range(shards):
        part = names[j::shards]
        file = f"model-{j + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, str(out / file), metadata={"format": "pt"})
        index["weight_map"].update({n: file for n in part})
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    config = dict(architectures=["Qwen4ExpForConditionalGeneration"], image_token_id=121, language_model_only=False,
                  model_type="qwen4_exp", text_config=tc, tie_word_embeddings=False, video_token_id=122,
                  vision_config=vision, vision_end_token_id=124, vision_start_token_id=123)
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    (out / "generation_config.json").write_text(json.dumps(dict(
        bos_token_id=tc["bos_token_id"], do_sample=True, eos_token_id=[tc["eos_token_id"]],
        pad_token_id=tc["eos_token_id"], temperature=1.0, top_k=20, top_p=0.95), indent=1))


# ---------------------------------------------------------------- reference run
def text_model(tc: dict, tensors: dict, dtype: torch.dtype, attn: str, experts: str):
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    cfg = Qwen4ExpTextConfig(**{k: v for k, v in tc.items() if k not in ("dtype", "model_type")})
    cfg._attn_implementation = attn
    cfg._experts_implementation = experts
    model = Qwen4ExpForCausalLM(cfg).eval()
    state, tables = {}, {}
    for name, t in tensors.items():
        if name.startswith("mtp."):
            continue
        name = name.replace("model.language_model.", "model.")
        if ".ngram_embedding.shard_" in name:
            head, tail = name.split(".shard_")
            tables.setdefault(head + ".weight", {})[int(tail.split(".")[0])] = t
        else:
            state[name] = t
    for name, parts in tables.items():
        state[name] = torch.cat([parts[i] for i in range(len(parts))])
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if "inv_freq" not in m]
    if missing or unexpected:
        raise SystemExit(f"state mismatch: missing={missing} unexpected={unexpected}")
    model.to(dtype)
    for m in model.modules():            # keep the integer hash buffers and rope frequencies exact
        if hasattr(m, "layer_multipliers"):
            k = ngram_constants(tc, m.ple_layer_index)
            m.layer_multipliers = torch.tensor(k["mult"]); m.ngram_heads_vocab_sizes = torch.tensor(k["vocab"])
            m.ngram_heads_offsets = torch.tensor(k["offsets"])
    return model


class Recorder:
    """Forward hooks on the interesting submodules of the text stack."""

    def __init__(self, model):
        self.model, self.handles, self.data = model, [], {}
        for i, layer in enumerate(model.model.layers):
            self.hook(layer, f"stream/{i}", lambda o: o)
            self.hook(layer.attn_hyper_connection, f"amix/{i}", lambda o: o[0])
            self.hook(layer.mlp_hyper_connection, f"mmix/{i}", lambda o: o[0])
            self.hook(layer.mlp.gate, f"router/{i}", lambda o: (o[2], o[1]))
            if hasattr(layer, "self_attn"):
                self.hook(layer.self_attn.indexer, f"qsa/{i}", lambda o: o)
                self.handles.append(layer.self_attn.indexer.register_forward_pre_hook(
                    lambda _m, a, i=i: self.data.__setitem__(f"qsa_in/{i}", (a[0], a[1]))))
            if getattr(layer, "ple", None) is not None:
                self.hook(layer.ple, f"ple/{i}", lambda o: o)
        self.hook(model.model.hyper_connection_mixer, "final", lambda o: o)

    def hook(self, module, key, pick):
        def fn(_m, _a, out):
            self.data[key] = pick(out)
        self.handles.append(module.register_forward_hook(fn))

    def close(self):
        for h in self.handles:
            h.remove()


def index_scores(ix, x: torch.Tensor, rope) -> tuple[np.ndarray, np.ndarray]:
    """Block scores of a fresh unpadded sequence, all queries at once, and the rows whose cut is ambiguous."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    cos, sin = rope
    t, r, d, nh = x.shape[1], ix.compress_ratio, ix.index_head_dim, ix.index_n_heads
    nb = t // r
    qk = ix.index_qk_proj(x)[0].view(t, nh + 1, d)
    q = apply_rotary_pos_emb(ix.q_layernorm(qk[None, :, :nh]), cos=cos, sin=sin, unsqueeze_dim=2)[0]
    pooled = qk[: nb * r, nh].view(nb, r, d).float().mean(1).to(x.dtype)
    pooled = apply_rotary_pos_emb(ix.k_layernorm(pooled)[None, :, None], cos=cos[:, : nb * r: r],
                                  sin=sin[:, : nb * r: r], unsqueeze_dim=2)[0, :, 0]
    score = torch.relu(torch.einsum("thd,bd->tbh", q.float(), pooled.float())).sum(-1) / math.sqrt(d)
    done = (torch.arange(t)[:, None] + 1) // r > torch.arange(nb)[None]
    score = score.masked_fill(~done, float("nan")).numpy()
    tie = np.zeros(t, bool)
    for p in range(t):
        s = np.sort(score[p][~np.isnan(score[p])])[::-1]
        tie[p] = len(s) > ix.block_topk and s[ix.block_topk - 1] == s[ix.block_topk]
    return score, tie


def order_routes(ids: torch.Tensor, w: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    ids, w = ids.numpy().astype(np.int64), w.float().numpy()
    key = np.lexsort((ids, -w), axis=-1)
    return np.take_along_axis(ids, key, -1), np.take_along_axis(w, key, -1)


def mtp_reference(tc: dict, tensors: dict, model, stream: torch.Tensor, tokens: list[int], dtype, attn, experts):
    """Teacher-forced MTP: not part of transformers; built from its decoder layer (see the spec, section 2.9)."""
    from transformers.masking_utils import create_causal_mask
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import (
        Qwen4ExpTextDecoderLayer, Qwen4ExpTextGatedResidual, Qwen4ExpTextRMSNorm)

    one = {k: v for k, v in tc.items() if k not in ("dtype", "model_type", "ple_layer_ids", "layer_types",
                                                    "num_hidden_layers", "mtp")}
    cfg = Qwen4ExpTextConfig(**one, ple_layer_ids=[], layer_types=["indexed_attention"], num_hidden_layers=1)
    cfg._attn_implementation, cfg._experts_implementation = attn, experts
    h, s = tc["hidden_size"], tc["hc_count"]
    box = torch.nn.ModuleDict(dict(layer=Qwen4ExpTextDecoderLayer(cfg, 0),
                                   mixer=Qwen4ExpTextGatedResidual(cfg, use_combine=False),
                                   ne=Qwen4ExpTextRMSNorm(h, eps=tc["rms_norm_eps"]),
                                   nh=Qwen4ExpTextRMSNorm(s * h, eps=tc["rms_norm_eps"]),   # ONE norm over s*h
                                   fe=torch.nn.Linear(h, h, bias=False), fh=torch.nn.Linear(h, h, bias=False)))
    ren = {"mtp.layers.0.": "layer.", "mtp.hyper_connection_mixer.": "mixer.", "mtp.pre_fc_norm_embedding.": "ne.",
           "mtp.pre_fc_norm_hidden.": "nh.", "mtp.fc_embedding.": "fe.", "mtp.fc_hidden.": "fh."}
    state = {}
    for name, t in tensors.items():
        for a, b in ren.items():
            if name.startswith(a):
                state[b + name[len(a):]] = t
    box.load_state_dict(state)
    box = box.to(dtype).eval()
    got = {}
    box["layer"].mlp.gate.register_forward_hook(lambda _m, _a, o: got.update(r=(o[2], o[1])))
    ix = box["layer"].self_attn.indexer
    ix.register_forward_hook(lambda _m, a, o: got.update(mask=o, args=(a[0], a[1])))
    nxt = torch.tensor([tokens[1:]])
    prev = stream[:, :-1]
    emb = box["fe"](box["ne"](model.model.embed_tokens(nxt)))
    hid = box["fh"](box["nh"](prev).unflatten(-1, (s, h)))
    x = (hid + emb.unsqueeze(-2)).flatten(-2)
    pos = torch.arange(x.shape[1])[None]
    rope = model.model.rotary_emb(x, pos[None].expand(3, -1, -1))
    mask = create_causal_mask(config=cfg, inputs_embeds=x[..., :h], attention_mask=None, cache=None,
                              position_ids=pos, allow_is_causal_skip=False)
    x = box["layer"](x, position_embeddings=rope, attention_mask=mask)
    t = len(tokens) - 1
    return (model.lm_head(box["mixer"](x)), x, got["r"], np.tril(got["mask"][0, 0].numpy()[:t, :t]),
            index_scores(ix, *got["args"])[1])


@torch.no_grad()
def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True, type=pathlib.Path)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    ap.add_argument("--tokens", default="", help="comma separated ids; default: a fixed 61-token sequence with eos inside")
    ap.add_argument("--chunk", type=int, default=7)
    ap.add_argument("--generate", type=int, default=16)
    ap.add_argument("--shards", type=int, default=3)
    ap.add_argument("--attn", default="eager", choices=("eager", "sdpa"))
    ap.add_argument("--experts", default="eager", choices=("eager", "grouped_mm", "batched_mm"))
    ap.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="override text_config fields")
    args = ap.parse_args()
    torch.manual_seed(0)

    tc = json.loads(json.dumps(TINY_TEXT))
    for item in args.set:
        key, value = item.split("=", 1)
        tc[key] = json.loads(value)
    tc["dtype"] = args.dtype
    if tc["layer_types"] is None:
        step = tc["full_attention_interval"]
        tc["layer_types"] = ["full_attention" if (i + 1) % step == 0 else "linear_attention"
                             for i in range(tc["num_hidden_layers"])]
    dtype = getattr(torch, args.dtype)
    if args.tokens:
        tokens = [int(t) for t in args.tokens.split(",")]
    else:
        tokens = [int(t) for t in np.random.default_rng(7).integers(0, 118, 61)]
        tokens[20] = tokens[21] = tokens[40] = tc["eos_token_id"]       # exercise the n-gram cut

    args.out.mkdir(parents=True, exist_ok=True)
    tensors = build_tensors(tc, args.seed)
    tensors = {k: (v.to(dtype) if v.is_floating_point() else v) for k, v in tensors.items()}
    write_checkpoint(args.out, tensors, tc, dict(TINY_VISION, out_hidden_size=tc["hidden_size"]), args.shards)

    model = text_model(tc, tensors, dtype, args.attn, args.experts)
    rec = Recorder(model)
    ids = torch.tensor([tokens])
    logits = model(input_ids=ids, use_cache=False).logits
    d, n = rec.data, tc["num_hidden_layers"]
    stream = [d[f"stream/{i}"] for i in range(n)]
    gold = dict(
        tokens=np.array(tokens, np.int64), logits=logits[0].float().numpy(), final_hidden=d["final"][0].float().numpy(),
        stream_after=np.stack([x[0].float().numpy() for x in stream]),
        attn_mixed=np.stack([d[f"amix/{i}"][0].float().numpy() for i in range(n)]),
        mlp_mixed=np.stack([d[f"mmix/{i}"][0].float().numpy() for i in range(n)]),
    )
    routes = [order_routes(*d[f"router/{i}"]) for i in range(n)]
    gold["router_ids"], gold["router_w"] = np.stack([r[0] for r in routes]), np.stack([r[1] for r in routes])
    for i in range(n):
        if f"qsa/{i}" in d:
            t = len(tokens)
            gold[f"qsa_mask_{i}"] = np.tril(d[f"qsa/{i}"][0, 0].numpy()[:t, :t])
            ix = model.model.layers[i].self_attn.indexer
            score, tie = index_scores(ix, *d[f"qsa_in/{i}"])
            gold[f"qsa_scores_{i}"], gold[f"qsa_tie_{i}"] = score, tie
            for p in range(t):                                     # own selection rule must reproduce the reference
                nb = (p + 1) // ix.compress_ratio
                best = np.lexsort((np.arange(nb), -score[p, :nb]))[: ix.block_topk]
                keep = np.zeros(t, bool)
                keep[(best[:, None] * ix.compress_ratio + np.arange(ix.compress_ratio)).ravel()] = True
                keep[nb * ix.compress_ratio: p + 1] = True
                assert tie[p] or args.dtype != "float32" or np.array_equal(keep, gold[f"qsa_mask_{i}"][p]), (i, p)
        if f"ple/{i}" in d:
            gold["ple_delta"] = d[f"ple/{i}"][0].float().numpy()
    if tc["ple_layer_ids"]:
        k = ngram_constants(tc, 0)
        gold["ngram_rows"] = ngram_rows(tokens, tc, k)
        emb = model.model.layers[tc["ple_layer_ids"][0] - 1].ple.ple_embedding
        want = emb(ids, None)[0]
        mine = emb.ngram_embedding.weight[torch.from_numpy(gold["ngram_rows"])].flatten(-2)
        assert torch.equal(want, mine), "own n-gram hash disagrees with transformers"
        assert emb.layer_multipliers.tolist() == k["mult"] and emb.ngram_embedding.num_embeddings == k["rows"]
    if tc["mtp_num_hidden_layers"] and len(tokens) > 1:
        ml, ms, (mi, mw), gold["mtp_qsa_mask"], gold["mtp_qsa_tie"] = mtp_reference(tc, tensors, model, stream[-1], tokens, dtype, args.attn, args.experts)
        gold["mtp_logits"], gold["mtp_stream"] = ml[0].float().numpy(), ms[0].float().numpy()
        gold["mtp_router_ids"] = order_routes(mi, mw)[0]
    rec.close()

    def through_cache(sizes):
        from transformers import DynamicCache
        cache, outs, at = DynamicCache(config=model.config), [], 0
        for s in sizes:
            o = model(input_ids=ids[:, at:at + s], cache=cache, use_cache=True)
            outs.append(o.logits[0].float()); at += s
        return torch.cat(outs).numpy()

    t = len(tokens)
    gold["logits_step"] = through_cache([1] * t)
    gold["logits_chunk"] = through_cache([args.chunk] * (t // args.chunk) + ([t % args.chunk] if t % args.chunk else []))
    if args.generate:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=args.generate, eos_token_id=None, pad_token_id=tc["eos_token_id"])
        gold["greedy"] = out[0, t:].numpy()
    np.savez_compressed(args.out / "golden.npz", **gold)

    np.set_printoptions(precision=5, suppress=True, linewidth=120)
    print("tokens", tokens)
    print("logits[-1][:8]", gold["logits"][-1][:8])
    print("argmax", gold["logits"].argmax(-1).tolist())
    print("router layer0 last token", gold["router_ids"][0, -1], gold["router_w"][0, -1])
    print("max|step - prefill|", float(np.abs(gold["logits_step"] - gold["logits"]).max()),
          " max|chunk - prefill|", float(np.abs(gold["logits_chunk"] - gold["logits"]).max()))
    if args.generate:
        print("greedy", gold["greedy"].tolist())
    if "mtp_logits" in gold:
        print("mtp logits[-1][:8]", gold["mtp_logits"][-1][:8])
    ties = {k[8:]: np.flatnonzero(v).tolist() for k, v in gold.items() if k.startswith("qsa_tie_") and v.any()}
    print("ambiguous QSA rows (equal scores at the cut), per layer:", ties or "none")
    print("parameters", sum(v.numel() for v in tensors.values()), "->", args.out)


if __name__ == "__main__":
    main()

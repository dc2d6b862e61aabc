"""Make the committed goldens: run transformers on every case and keep what the tests compare.

    python -m tests.parity.golden.generate [CASE | rope ...]      with torch and transformers 5.24 installed

Provenance: transformers 5.24.0 `models/qwen4_exp`, torch 2.13.0 CPU, float32, eager attention and eager
experts; the MTP cell, which transformers lacks, is composed from its decoder layer as qwen4exp.md 2.9 says.
Tolerance of the tests: 1e-4 at the logits (the reference's own step-against-prefill difference is 7e-6).

Keys, with T tokens, L layers, S streams, H hidden, K experts per token, V vocabulary:
    tokens [T]; logits [T,V]; stream_after [L,R,S*H] of the last R rows; router_ids [L,T,K] by descending
    weight; router_w [L,T,K]; qsa_mask_<layer> [T,T]; ngram_rows [T,N]; ple_delta [T,S*H]; greedy [16];
    mtp_logits [T-1,V]; mtp_router_ids [T-1,K]; mtp_qsa_mask [T-1,T-1]; mtp_qsa_tie [T-1]
and for `full` cases the inputs and outputs of every sub-module:
    attn_mixed, mixer_out, mlp_mixed, moe_out [L,T,H]; hyper_in [T,S*H], hyper_mixed [T,H], hyper_inject [T,S]
    of the second layer's mlp_hyper_connection; final_hidden [T,H]; mtp_stream [T-1,S*H]; ple_in [T,S*H]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.parity.golden import make_tiny_hf_qwen4exp as reference
from tests.parity.golden.cases import CASES, Case

HERE = Path(__file__).parent
ALWAYS = (
    "tokens",
    "logits",
    "router_ids",
    "router_w",
    "ngram_rows",
    "greedy",
    "mtp_logits",
    "mtp_router_ids",
)
FULL = ("ple_delta", "attn_mixed", "mlp_mixed", "final_hidden", "mtp_stream")


class BlockRecorder(reference.Recorder):
    """The reference's recorder, which also keeps what each sub-module receives and returns."""

    latest: BlockRecorder

    def __init__(self, model) -> None:
        super().__init__(model)
        BlockRecorder.latest = self
        for i, layer in enumerate(model.model.layers):
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            self.hook(mixer, f"mixer/{i}", lambda o: o[0] if isinstance(o, tuple) else o)
            self.hook(layer.mlp, f"moe/{i}", lambda o: o)
            self.hook(layer.mlp_hyper_connection, f"hyper/{i}", lambda o: o)
            if getattr(layer, "ple", None) is not None:
                self.handles.append(layer.ple.register_forward_pre_hook(self.keep_ple_input))

    def keep_ple_input(self, _module, args) -> None:
        """Keep the stack that enters the PLE layer."""
        self.data["ple_in"] = args[0]


def generate(name: str, case: Case) -> None:
    """Run one case and write `<name>.npz`."""
    reference.Recorder = BlockRecorder
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"num_hidden_layers": 4, **case.overrides}
        sys.argv = [
            "make",
            "--out",
            folder,
            "--seed",
            str(case.seed),
            "--tokens",
            ",".join(map(str, case.tokens)),
        ]
        sys.argv += ["--set", *(f"{key}={json.dumps(value)}" for key, value in overrides.items())]
        reference.main()
        run = dict(np.load(Path(folder) / "golden.npz"))
    # A tie in the MTP layer touches its own row only (nothing after it reads that row): the tests skip such
    # rows.
    ties = [key for key, value in run.items() if key.startswith("qsa_tie") and value.any()]
    if ties:
        raise SystemExit(f"{name}: tied scores in {ties}; choose another seed")
    masks = [key for key in run if "qsa_mask" in key]
    kept = {key: run[key] for key in (*ALWAYS, *masks, "mtp_qsa_tie")}
    rows = case.stack_rows or len(case.tokens)
    kept["stream_after"] = run["stream_after"][:, -rows:]
    if case.full:
        kept |= {key: run[key] for key in FULL}
        data = BlockRecorder.latest.data
        layers = range(overrides["num_hidden_layers"])
        kept["mixer_out"] = np.stack([_array(data[f"mixer/{i}"]) for i in layers])
        kept["moe_out"] = np.stack([_array(data[f"moe/{i}"]) for i in layers])
        mixed, stack, inject = data["hyper/1"]
        kept |= {"hyper_in": _array(stack), "hyper_mixed": _array(mixed), "hyper_inject": _array(inject)}
        kept["ple_in"] = _array(data["ple_in"])
    np.savez_compressed(HERE / f"{name}.npz", **kept)


def rope_golden() -> None:
    """Write `rope.npz`: the reference's rotary tables applied at the real model's positions and widths."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import (
        Qwen4ExpTextRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    text = dict(
        reference.TINY_TEXT,
        head_dim=256,
        indexer_head_dim=128,
        num_hidden_layers=2,
        layer_types=["full_attention", "linear_attention"],
    )
    text["rope_parameters"] = dict(text["rope_parameters"], mrope_section=[11, 11, 10])
    config = Qwen4ExpTextConfig(**{k: v for k, v in text.items() if k not in ("dtype", "model_type")})
    positions = torch.tensor([0, 1, 2, 3, 1000, 2051, 30000, 200000, 262000, 262143])
    rng = np.random.default_rng(5)
    queries = rng.standard_normal((1, 2, len(positions), 256)).astype(np.float32)
    index_keys = rng.standard_normal((1, 1, len(positions), 128)).astype(np.float32)
    rotary = Qwen4ExpTextRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), positions[None, None].expand(3, 1, -1))
    out = {"positions": positions.numpy(), "queries": queries, "index_keys": index_keys}
    for name in ("queries", "index_keys"):
        rotated = apply_rotary_pos_emb(torch.from_numpy(out[name]), cos=cos, sin=sin, unsqueeze_dim=1)
        out[name + "_rotated"] = rotated.numpy()
    np.savez_compressed(HERE / "rope.npz", **out)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor[0].detach().float().numpy()


if __name__ == "__main__":
    for case_name in sys.argv[1:] or [*CASES, "rope"]:
        if case_name == "rope":
            rope_golden()
        else:
            generate(case_name, CASES[case_name])

"""One model for every peer, exact in each of their formats. Entry point: `build`.

    python -m bench.studies.peers.checkpoint large OUT --layout mlx

Codes lie on a grid whose points bfloat16, MLX's affine 4 bits and GGUF's Q4_0 all hold exactly
(`bench.synth.values`). Scales are stored as float32, because every MLX engine computes in float32 on a CPU:
none has to widen them. `large` has the released number of experts and top-k, in layers of two fifths of the
released width: with the released one a token takes a second of two cores, and no answer gets long enough to
fill a cache. `small` is short of experts, so that the Hugging Face reference holds it in float32. A
smallest vision tower is there because mlx-vlm will not load without one.

`--mtp with` adds an MTP module that often proposes what the model then says; every other tensor stays as it
is without. `--mtp alone` writes that module by itself, as mlx-vlm wants its drafter: names without their
prefix and a config of its own.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Final, Literal

from bench.synth.layouts import Stored, quantization_config, stored_tensors
from bench.synth.presets import PRESETS, Layout, Preset, text_config, whole_config
from bench.synth.tensors import text_tensors, vision_tensors
from bench.synth.tokenizer import write_tokenizer
from bench.synth.writer import split_files, write_checkpoint

# 576 and not 512: mlx-vlm 0.7.10 takes a shared expert as wide as there are experts for a routed layer.
_NARROW: Final = {
    "vocab_size": 8192, "hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "moe_intermediate_size": 576,
    "shared_expert_intermediate_size": 576, "hc_lowrank": 128, "ple_embed_dim": 1024, "num_hidden_layers": 8,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [6, 5, 5], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
SIZES: Final = {
    "large": {**_NARROW, "num_experts": 512},
    "small": {**_NARROW, "num_experts": 64},
    "tiny": {**PRESETS["small"].overrides},
}
"""What each size changes of the synthetic `medium` preset."""

_VISION: Final = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def preset_of(size: str, layout: Layout) -> Preset:
    """Return what to write."""
    medium = PRESETS["medium"]
    overrides = {**medium.overrides, **SIZES[size]}
    floats = "F32" if layout == "mlx" else "BF16"
    return dataclasses.replace(medium, layout=layout, overrides=overrides, float_dtype=floats)


Mtp = Literal["without", "with", "alone"]
MTP_MODULE: Final = "language_model.mtp."


def build(size: str, layout: Layout, directory: Path, mtp: Mtp = "without") -> Path:
    """Write one size in one layout; return its directory. A size is the same model in every layout."""
    preset = preset_of(size, layout)
    text = text_config(preset)
    vision = {**_VISION, "out_hidden_size": text["hidden_size"]}
    tensors = [*text_tensors(text, mtp=mtp != "without", is_mtp_apt=True), *vision_tensors(vision)]
    quantization = quantization_config(tensors, preset) if layout == "mlx" else None
    config: dict[str, Any] = whole_config(preset, text, quantization)
    config["language_model_only"] = False
    config["vision_config"] = {**vision, "model_type": "qwen4_exp_vision"}
    if layout == "mlx":
        config["vision_config"] |= {"model_type": "qwen4_exp", "deepstack_visual_indexes": []}
    stored = list(stored_tensors(tensors, preset, 0))
    if mtp == "alone":
        stored = [_inside(one) for one in stored if one.name.startswith(MTP_MODULE)]
        config = drafter_config(config)
    write_checkpoint(
        directory,
        split_files(stored, preset.split),
        config,
        sparse=False,
        metadata_format="mlx" if layout == "mlx" else "pt",
    )
    write_tokenizer(directory, text["vocab_size"])
    return directory


def _inside(stored: Stored) -> Stored:
    return dataclasses.replace(stored, name=stored.name.removeprefix(MTP_MODULE))


def drafter_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the MTP module alone, from that of the checkpoint that holds it."""
    quantization = {
        key.removeprefix(MTP_MODULE): value
        for key, value in config["quantization"].items()
        if key.startswith(MTP_MODULE) or not isinstance(value, dict | bool)
    }
    return {
        "model_type": "qwen4_exp_mtp", "text_config": config["text_config"], "block_size": 2,
        "tie_word_embeddings": False, "quantization": quantization, "quantization_config": quantization,
    }  # fmt: skip


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", choices=("mlx", "hf"), default="mlx")
    parser.add_argument("--mtp", choices=("without", "with", "alone"), default="without")
    options = parser.parse_args()
    if options.mtp == "alone" and options.layout != "mlx":
        parser.error(f"--mtp alone is a drafter of mlx-vlm: it has no layout {options.layout}")
    directory = build(options.size, options.layout, options.out, options.mtp)
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    print(json.dumps({"directory": directory.name, "bytes": total}))


if __name__ == "__main__":
    main()

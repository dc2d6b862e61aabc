"""Quantise an official-layout directory into the MLX pack that ships in `mlx_flashnext/demo`.

    python -m bench.demo.pack --source SCRATCH/hf --out mlx_flashnext/demo

Runs in an environment with MLX (no torch).  Routed experts and the n-gram table are affine 4-bit,
everything else that is a matrix 8-bit; group 64 where the input width allows, else 32.  Scales and biases
are float32, because bfloat16 ones are about ten times slower on MLX's CPU backend.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from typing import Any

import mlx.core as mx

TRUNK = "model.language_model."
Format = dict[str, Any]


def pack_name(name: str) -> str:
    """Return the pack's name of an official tensor."""
    if name.startswith(TRUNK):
        name = "language_model.model." + name.removeprefix(TRUNK)
    else:
        name = "language_model." + name
    return name.replace(".shard_", ".shards.")


def rename(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors under pack names: split experts, conv taps in the middle axis."""
    out: dict[str, mx.array] = {}
    for name, value in tensors.items():
        path = pack_name(name)
        if path.endswith("experts.gate_up_proj"):
            head = path.removesuffix("experts.gate_up_proj") + "switch_mlp."
            out[head + "gate_proj.weight"], out[head + "up_proj.weight"] = mx.split(value, 2, axis=1)
        elif path.endswith("experts.down_proj"):
            out[path.removesuffix("experts.down_proj") + "switch_mlp.down_proj.weight"] = value
        elif path.endswith("conv1d.weight"):
            out[path] = value.transpose(0, 2, 1)
        else:
            out[path] = value
    return out


def quant_format(path: str, width: int) -> Format:
    """Return the format of a matrix with this input width."""
    bits = 4 if ".switch_mlp." in path or ".ngram_embedding." in path else 8
    return {"group_size": 64 if width % 64 == 0 else 32, "bits": bits, "mode": "affine"}


def is_matrix(path: str, value: mx.array) -> bool:
    """Return whether a tensor is quantised."""
    return path.endswith(".weight") and value.ndim >= 2 and "conv1d" not in path


def quantise(tensors: dict[str, mx.array]) -> tuple[dict[str, mx.array], Format]:
    """Return the stored tensors and the `quantization` section of the config."""
    default = {"group_size": 64, "bits": 4, "mode": "affine"}
    stored: dict[str, mx.array] = {}
    section: Format = dict(default)
    for path, value in tensors.items():
        if not is_matrix(path, value):
            stored[path] = mx.contiguous(value)
            continue
        fmt = quant_format(path, value.shape[-1])
        module = path.removesuffix(".weight")
        packed, scales, biases = mx.quantize(value.astype(mx.float32), **fmt)
        stored |= {path: packed, module + ".scales": scales, module + ".biases": biases}
        if fmt != default:
            section[module] = fmt
    return stored, section


def main() -> None:
    """Write the pack and copy the tokenizer beside it."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--source", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    args = ap.parse_args()
    mx.set_default_device(mx.cpu)
    stored, section = quantise(rename(mx.load(str(args.source / "model.safetensors"))))
    args.out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(args.out / "model.safetensors"), stored, metadata={"format": "mlx"})
    config = json.loads((args.source / "config.json").read_text())
    config |= {"quantization": section, "quantization_config": section}
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.source / name, args.out / name)
    total = sum(f.stat().st_size for f in args.out.iterdir() if f.is_file())
    print(f"{len(stored)} tensors, {total / 2**20:.2f} MiB in {args.out.name}")


if __name__ == "__main__":
    main()

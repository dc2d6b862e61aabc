"""Read an MLX pack back into the torch model by dequantising, to measure what quantisation costs."""

from __future__ import annotations

import json
import pathlib

import torch
from safetensors.torch import load_file
from torch import Tensor

from . import net
from .checkpoint import TRUNK, from_official


def dequantise(packed: Tensor, scales: Tensor, biases: Tensor, bits: int) -> Tensor:
    """Return float32 values of an affine-quantised tensor with 4 or 8 bits per entry."""
    words = packed.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    shifts = torch.arange(0, 32, bits)
    codes = (words.unsqueeze(-1) >> shifts & (2**bits - 1)).flatten(-2).float()
    groups = codes.unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.unsqueeze(-1) + biases.unsqueeze(-1)).flatten(-2)


def official_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """Return a pack's tensors as float32 under official names."""
    section = json.loads((folder / "config.json").read_text())["quantization"]
    stored = load_file(str(folder / "model.safetensors"))
    plain: dict[str, Tensor] = {}
    for name, value in stored.items():
        module = name.rpartition(".")[0]
        if name.endswith((".scales", ".biases")):
            continue
        if module + ".scales" in stored:
            bits = section.get(module, section)["bits"]
            value = dequantise(value, stored[module + ".scales"], stored[module + ".biases"], bits)
        elif name.endswith("conv1d.weight"):
            value = value.transpose(1, 2).contiguous()
        plain[name] = value
    out: dict[str, Tensor] = {}
    for name, value in plain.items():
        path = name.replace("language_model.model.", TRUNK).removeprefix("language_model.")
        path = path.replace(".shards.", ".shard_")
        if ".switch_mlp." in path:
            if ".gate_proj." in path:
                other = plain[name.replace(".gate_proj.", ".up_proj.")]
                out[path.partition("switch_mlp")[0] + "experts.gate_up_proj"] = torch.cat((value, other), 1)
            elif ".down_proj." in path:
                out[path.partition("switch_mlp")[0] + "experts.down_proj"] = value
        else:
            out[path] = value
    return out


def read_pack(folder: pathlib.Path) -> net.DemoModel:
    """Return the torch model with the pack's dequantised weights."""
    model = net.build(json.loads((folder / "config.json").read_text())["text_config"])
    model.load_state_dict(from_official(official_tensors(folder)))
    return model.eval()

"""Checkpoints: the training state to the official file layout and back.

    python -m bench.demo.checkpoint --work SCRATCH --out SCRATCH/hf [--dtype bfloat16] [--random]

Official names: the trunk under `model.language_model.`, the n-gram table in `split_ngram_parts` parts,
everything else as in `bench.demo.net`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import net
from .config import full_config
from .tokenizer import token_ids

TRUNK = "model.language_model."
TABLE = "ngram_embedding."


def to_official(state: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """Return the tensors of a model state under official names."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        name = name if name.startswith(("lm_head.", "mtp.")) else TRUNK + name
        if name.endswith(TABLE + "weight"):
            for i, part in enumerate(value.chunk(parts)):
                out[f"{name.removesuffix('weight')}shard_{i}.weight"] = part.contiguous()
        else:
            out[name] = value.contiguous()
    return out


def from_official(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Invert `to_official`."""
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        name = name.removeprefix(TRUNK)
        if ".shard_" in name:
            head, tail = name.split("shard_")
            parts.setdefault(head + "weight", {})[int(tail.split(".")[0])] = value
        else:
            out[name] = value
    return out | {name: torch.cat([p[i] for i in range(len(p))]) for name, p in parts.items()}


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """Return `generation_config.json`; a small model wants cooler sampling than the official default."""
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.9,
    }


def write_official(
    out: pathlib.Path, state: dict[str, Tensor], tokenizer: pathlib.Path, dtype: torch.dtype
) -> None:
    """Write a directory in the official layout."""
    out.mkdir(parents=True, exist_ok=True)
    ids = token_ids(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    config = full_config(ids)
    config["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    tensors = to_official(state, config["text_config"]["split_ngram_parts"])
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation_config(ids), indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


def read_official(folder: pathlib.Path) -> net.DemoModel:
    """Return the model stored in a directory of the official layout."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    model = net.build(config)
    model.load_state_dict(from_official(load_file(str(folder / "model.safetensors"))))
    return model.eval()


def randomise_vectors(model: net.DemoModel) -> None:
    """Give norms and decays values that are not neutral, so that a parity check sees them."""
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.data.add_(0.2 * torch.randn_like(p))
        elif "conv1d" in name:
            p.data.copy_(0.4 * torch.randn_like(p))


def main() -> None:
    """Export the last training checkpoint, or random weights for a parity check."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    ap.add_argument("--random", action="store_true", help="random weights with non-neutral norms")
    args = ap.parse_args()
    tokenizer = args.work / "tokenizer"
    if args.random:
        config = full_config(token_ids(Tokenizer.from_file(str(tokenizer / "tokenizer.json"))))
        model = net.build(config["text_config"])
        randomise_vectors(model)
        state, step = model.state_dict(), 0
    else:
        saved = torch.load(args.work / "run" / "checkpoint.pt", weights_only=True)
        state, step = saved["model"], saved["step"]
    write_official(args.out, state, tokenizer, getattr(torch, args.dtype))
    print("wrote", args.out, "from step", step)


if __name__ == "__main__":
    main()

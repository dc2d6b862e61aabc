"""Writes a checkpoint anew with another's converter: `python convert_with.py KIND SOURCE TARGET [JSON]`.

Run by `test_converters.py` in an interpreter that has the converter; imports nothing of this project.

    transformers    `from_pretrained`, then `save_pretrained`
    mlx-vlm         what `mlx_vlm.convert` does, without the processor that tiny checkpoints lack
    mlx-vlm-open    nothing is written: SOURCE is opened as it is

Beside the checkpoint, `logits.npy` is what the converter's own model makes of the tokens of the options.
"""

import json
import sys
from pathlib import Path

import numpy as np


def with_transformers(source: Path, target: Path, options: dict) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(source, dtype=getattr(torch, options["dtype"]))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([options["tokens"]])).logits[0]
    np.save(target / "logits.npy", logits.float().numpy())
    model.save_pretrained(target, max_shard_size=options.get("max_shard_size", "50GB"))


def compute_in_float32() -> None:
    """Let MLX dequantise into float32: in the micro-scaled modes it gives bfloat16, which layers keep."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    dequantise = mx.dequantize
    mx.dequantize = lambda *parts, **how: dequantise(*parts, **how).astype(mx.float32)


def with_mlx_vlm(source: Path, target: Path, options: dict) -> None:
    import mlx.core as mx
    from mlx_vlm.convert import mixed_quant_predicate_builder
    from mlx_vlm.quant_utils import quantize_model
    from mlx_vlm.utils import load_config, load_model, save_config, save_weights, skip_multimodal_module

    compute_in_float32()
    model, config = load_model(source, lazy=True), load_config(source)

    def predicate(path, module):
        return False if skip_multimodal_module(path) else model.quant_predicate(path, module)

    if "recipe" in options:
        predicate = mixed_quant_predicate_builder(options["recipe"], model)
    if "bits" in options:
        model, config = quantize_model(
            model,
            config,
            options["group_size"],
            options["bits"],
            mode=options.get("mode", "affine"),
            quant_predicate=predicate,
        )
    logits = model.language_model(mx.array([options["tokens"]])).logits[0]
    np.save(target / "logits.npy", np.array(logits.astype(mx.float32)))
    save_weights(target, model, donate_weights=True)
    save_config(config, config_path=target / "config.json")


def open_with_mlx_vlm(source: Path, target: Path, options: dict) -> None:
    import mlx.core as mx
    from mlx_vlm.utils import load_model

    compute_in_float32()
    logits = load_model(source, lazy=True).language_model(mx.array([options["tokens"]])).logits[0]
    np.save(target / "logits.npy", np.array(logits.astype(mx.float32)))


if __name__ == "__main__":
    kind, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    target.mkdir(parents=True, exist_ok=True)
    settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    work = {
        "transformers": with_transformers,
        "mlx-vlm": with_mlx_vlm,
        "mlx-vlm-open": open_with_mlx_vlm,
    }
    work[kind](source, target, settings)

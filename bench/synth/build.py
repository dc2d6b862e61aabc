"""Build a synthetic checkpoint from a preset. Entry point: `build`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bench.synth.layouts import quantization_config, stored_tensors
from bench.synth.presets import REAL_CONFIG, Preset, text_config, whole_config
from bench.synth.tensors import text_tensors, vision_tensors
from bench.synth.tokenizer import write_tokenizer
from bench.synth.writer import split_files, write_checkpoint


def build(
    preset: Preset,
    directory: Path,
    *,
    sparse: bool = False,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> Path:
    """Write one synthetic checkpoint and return its directory.

    Args:
        preset: What to write; change one of `PRESETS` with `dataclasses.replace`.
        directory: Where; made if missing.
        sparse: Leave holes instead of values: real sizes, seconds instead of hours.
        seed: The same seed gives the same bytes.
        progress: Called with each finished file's name and its bytes.
    """
    text = text_config(preset)
    tensors = list(text_tensors(text, mtp=preset.mtp))
    if preset.vision:
        vision = json.loads(REAL_CONFIG.read_bytes())["vision_config"]
        tensors += vision_tensors({**vision, "out_hidden_size": text["hidden_size"]})
    quantization = quantization_config(tensors, preset) if preset.layout == "mlx" else None
    write_checkpoint(
        directory,
        split_files(list(stored_tensors(tensors, preset, seed)), preset.split),
        whole_config(preset, text, quantization),
        sparse=sparse,
        metadata_format="mlx" if preset.layout == "mlx" else "pt",
        progress=progress,
    )
    if not preset.is_real_size:
        write_tokenizer(directory, text["vocab_size"])
    return directory

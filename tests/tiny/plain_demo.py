"""The trained demo model with its numbers spelled out in float32: what a conversion can be judged on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flashnext.demo import demo_dir


def build_plain_demo(directory: Path) -> Path:
    """Write the demo as an unquantised MLX checkpoint, and return its directory."""
    shutil.copytree(demo_dir(), directory, ignore=shutil.ignore_patterns("*.py", "__pycache__", "CARD.md"))
    config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    section = config.pop("quantization")
    config.pop("quantization_config", None)
    stored: dict[str, mx.array] = mx.load(str(directory / "model.safetensors"))  # type: ignore[assignment]
    plain: dict[str, mx.array] = {}
    for name, value in stored.items():
        stem, _, part = name.rpartition(".")
        if f"{stem}.scales" not in stored:
            plain[name] = value if value.dtype == mx.int64 else value.astype(mx.float32)
        elif part == "weight":
            spec = {**section, **section.get(stem, {})}
            factors = [stored[f"{stem}.{kind}"].astype(mx.float32) for kind in ("scales", "biases")]
            plain[name] = mx.dequantize(value, *factors, group_size=spec["group_size"], bits=spec["bits"])
    mx.eval(plain)
    mx.save_safetensors(str(directory / "model.safetensors"), plain)
    (directory / "config.json").write_text(json.dumps(config))
    return directory

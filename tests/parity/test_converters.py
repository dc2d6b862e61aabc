"""Checkpoints that transformers and mlx-vlm themselves write open as they are, and agree with their writers.

Both are test-only and heavy; where the interpreter that runs the tests lacks one, FLASHNEXT_CONVERTER_PYTHON
may name another that has it. Run with transformers 5.24 (torch 2.13) and mlx-vlm 0.7.10.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.conversion.recipe import Recipe, parse_spec
from mlx_flashnext.conversion.writing import convert_checkpoint
from tests.parity.test_streamed_equals_resident import run
from tests.tiny.checkpoints import build_hf
from tests.tiny.engines import open_tiny, prompt_of

SCRIPT = Path(__file__).with_name("convert_with.py")
NEEDS = {
    "transformers": ("torch", "transformers"),
    "mlx-vlm": ("mlx_vlm",),
    "mlx-vlm-open": ("mlx_vlm",),
}
TOKENS = prompt_of(30)


@cache
def interpreter(kind: str) -> str | None:
    """Return a Python that has what a converter needs."""
    if all(importlib.util.find_spec(name) for name in NEEDS[kind]):
        return sys.executable
    other = os.environ.get("FLASHNEXT_CONVERTER_PYTHON")
    if other is None:
        return None
    program = f"import {', '.join(NEEDS[kind])}"
    probe = subprocess.run([other, "-c", program], capture_output=True, check=False)
    return other if probe.returncode == 0 else None


def converted(kind: str, source: Path, target: Path, **options: Any) -> np.ndarray:
    """Convert; return the logits of the converter's own model."""
    python = interpreter(kind)
    if python is None:
        pytest.skip(f"no interpreter with {' and '.join(NEEDS[kind])}: set FLASHNEXT_CONVERTER_PYTHON")
    settings = json.dumps({"tokens": TOKENS, **options})
    done = subprocess.run(
        [python, str(SCRIPT), kind, str(source), str(target), settings],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    logits = np.load(target / "logits.npy")
    (target / "logits.npy").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, target / name)
    return logits


def streamed(directory: Path) -> np.ndarray:
    checkpoint = open_checkpoint(directory)
    names = [name for line in checkpoint.account() for name in line.names]
    assert sorted(names) == sorted(checkpoint.table.tensors)
    with open_tiny(directory, slots=5) as engine:
        return np.array(run(engine.target.model, TOKENS, len(TOKENS), engine.target.experts)[0])


@pytest.mark.parametrize(("dtype", "max_shard_size"), [("float32", "200KB"), ("bfloat16", "50GB")])
def test_what_transformers_saves_opens_and_agrees(tmp_path: Path, dtype: str, max_shard_size: str) -> None:
    source = build_hf(tmp_path / "model", dtype=dtype)
    theirs = converted("transformers", source, tmp_path / "saved", dtype=dtype, max_shard_size=max_shard_size)
    ours = streamed(tmp_path / "saved")
    assert mx.array_equal(mx.array(ours), mx.array(streamed(source)))
    if dtype == "float32":
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


QUANTISATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "affine 4, group 64": {"bits": 4, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "mixed 3 and 6": {"bits": 3, "group_size": 64, "recipe": "mixed_3_6"},
}


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_what_mlx_vlm_converts_opens_and_agrees(tmp_path: Path, name: str) -> None:
    source = build_hf(tmp_path / "model")
    theirs = converted("mlx-vlm", source, tmp_path / "pack", **QUANTISATIONS[name])
    ours = streamed(tmp_path / "pack")
    if name == "none":
        assert mx.array_equal(mx.array(ours), mx.array(streamed(source)))
    # The two sum in other orders; at three bits of a random model that tips a near-tied expert now and then
    # (seen: 1 of 30 rows). A wrong tensor, bit width or group would change every row.
    is_close = np.isclose(ours, theirs, rtol=2e-3, atol=2e-3).all(axis=1)
    assert is_close.mean() >= 0.9


def tensors_of(directory: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for path in directory.glob("*.safetensors"):
        found |= mx.load(str(path))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("dtype", "spec"), [("bfloat16", "4:64"), ("float32", "4:64"), ("bfloat16", "mxfp4")]
)
def test_our_own_conversion_has_the_bits_of_mlx_vlms(tmp_path: Path, dtype: str, spec: str) -> None:
    source, wanted = build_hf(tmp_path / "model", dtype=dtype), parse_spec(spec)
    assert wanted is not None
    options = {"bits": wanted.bits, "group_size": wanted.group_size, "mode": wanted.mode}
    converted("mlx-vlm", source, tmp_path / "theirs", **options)
    router, table = parse_spec("8:64"), parse_spec("4:32" if spec == "4:64" else spec)
    assert router is not None
    also = {"router": router, "hyper": wanted, "indexer": wanted, "embedding": wanted}
    recipe = Recipe(experts=wanted, trunk=wanted, table=table, keep_mtp=False, also=also)
    ours = tensors_of(convert_checkpoint(source, tmp_path / "ours", recipe).directory)
    theirs = tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert mx.array_equal(ours[name], value), name


def test_mlx_vlm_opens_our_own_conversion_and_agrees(tmp_path: Path) -> None:
    """With every tensor of the official layout, vision and MTP among them, and some matrices plain."""
    source = build_hf(tmp_path / "model")
    converted("transformers", source, tmp_path / "saved", dtype="float32")
    recipe = Recipe(experts=parse_spec("8:64"))
    made = convert_checkpoint(tmp_path / "saved", tmp_path / "ours", recipe).directory
    categories = {line.category for line in open_checkpoint(made).account()}
    assert categories >= {"trunk", "experts", "ngram", "vision"}
    theirs = converted("mlx-vlm-open", made, tmp_path / "nothing")
    is_close = np.isclose(streamed(made), theirs, rtol=2e-3, atol=2e-3).all(axis=1)
    assert is_close.mean() >= 0.9

"""Files of a synthetic checkpoint: which tensor goes where, headers, real or sparse data.

Entry points: `split_files`, `write_checkpoint`. Source: qwen4exp.md 3.1 (facts of the official files).
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.synth.layouts import Stored
from bench.synth.presets import Split

FILE_LIMIT = 5_000_000_000
NUM_OFFICIAL_FILES = 131
_LAYER = re.compile(r"layers\.(\d+)\.")
_TABLE_PART = re.compile(r"ngram_embedding\.shards?[._](\d+)\.")


def split_files(tensors: Sequence[Stored], split: Split) -> list[list[Stored]]:
    """Return the tensors of each file, in file order.

    The official splits keep the published facts: 131 files; every `gate_up_proj` alone in its own; table
    parts in files 5 to 37 in numeric order; vision and layer 0 in file 1; embedding in 130, head in 131; MTP
    experts in 60 and 62. What is not published is spread evenly.
    """
    if split == "by-size":
        return _by_size(tensors)
    if split == "by-layer":
        return _by_key(tensors, _layer_key)
    return _official(tensors, is_fp8=split == "official-fp8")


def _by_size(tensors: Sequence[Stored]) -> list[list[Stored]]:
    files: list[list[Stored]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + tensor.length > FILE_LIMIT:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.length
    return files


def _layer_key(name: str) -> str:
    match = _LAYER.search(name)
    return "top" if match is None else ("mtp." if "mtp." in name else "") + match[0]


def _by_key(tensors: Sequence[Stored], key: Callable[[str], str]) -> list[list[Stored]]:
    files: dict[str, list[Stored]] = {}
    for tensor in tensors:
        files.setdefault(key(tensor.name), []).append(tensor)
    return list(files.values())


def _official(tensors: Sequence[Stored], *, is_fp8: bool) -> list[list[Stored]]:
    files: list[list[Stored]] = [[] for _ in range(NUM_OFFICIAL_FILES)]
    # Numbers from 1, as in the file names.
    free = [n for n in range(2, 130) if not 5 <= n <= 37 and n not in (60, 62)]
    # FP8: two files a layer; BF16: one for each gate_up_proj, the rest shared by layers.
    alone, shared = (free[:0], free) if is_fp8 else (free[-47:], free[:-47])
    for tensor in tensors:
        name = tensor.name
        part, layer_match = _TABLE_PART.search(name), _LAYER.search(name)
        layer = -1 if layer_match is None else int(layer_match[1])
        if name == "lm_head.weight":
            number = 131
        elif name.endswith("embed_tokens.weight"):
            number = 130
        elif part is not None:
            number = 5 + (int(part[1]) + 2) // 4
        elif name.startswith("mtp.") and ".experts." in name:
            number = 60 if "gate" in name else 62
        elif is_fp8 and ".mlp.experts." in name:
            number = (
                shared[layer * 2 % len(shared)]
                if "down_proj" in name
                else shared[(layer * 2 + 1) % len(shared)]
            )
        elif name.endswith(".experts.gate_up_proj"):
            number = alone[layer - 1] if layer else free[0]
        elif layer > 0:
            number = shared[1 + layer % (len(shared) - 1)]
        else:
            number = 1 if not name.startswith("mtp.") else shared[-1]
        files[number - 1].append(tensor)
    return [file for file in files if file]


def write_checkpoint(
    directory: Path,
    files: Sequence[Sequence[Stored]],
    config: Mapping[str, Any],
    *,
    sparse: bool,
    metadata_format: str,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write data files, index, config.json and generation_config.json.

    Args:
        directory: Where; made if missing.
        files: Tensors of each file.
        config: The whole config.json.
        sparse: Leave holes for all but integer buffers.
        metadata_format: The `format` entry of the header: `pt` or `mlx`.
        progress: Called with each finished file's name and its bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        length = _write_file(directory / name, tensors, sparse=sparse, metadata_format=metadata_format)
        weight_map.update((tensor.name, name) for tensor in tensors)
        if progress is not None:
            progress(name, length)
    total = sum(tensor.length for tensors in files for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    text = config["text_config"]
    generation = {"eos_token_id": text["eos_token_id"], "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))


def _write_file(path: Path, tensors: Sequence[Stored], *, sparse: bool, metadata_format: str) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": metadata_format}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.length)
        }  # fmt: skip
        at += tensor.length
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in tensors:
            start = file.tell()
            if sparse and not tensor.is_kept_when_sparse:
                file.seek(tensor.length, os.SEEK_CUR)
                continue
            file.writelines(tensor.blocks())
            if file.tell() - start != tensor.length:
                raise SystemExit(f"{tensor.name}: wrote {file.tell() - start} bytes of {tensor.length}")
        file.truncate(8 + len(raw) + at)
    return 8 + len(raw) + at

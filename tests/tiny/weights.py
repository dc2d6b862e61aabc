"""The independent reference path: weights, experts and table rows of a tiny checkpoint, all in memory.

Entry point: `TinyModel.open`. Reads with `mx.load`, maps names by itself, and never touches `expert_store`,
`checkpoint.py` or `weights.py`: comparing it with the product's path checks all of those.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_flashnext.config import ModelConfig, QuantSpec, read_config
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.model.mtp import MtpCell
from mlx_flashnext.model.quant import (
    DenseEmbedding,
    DenseLinear,
    Embedding,
    ExpertBank,
    ExpertMatrix,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
    dequantize_rows,
    expert_glu,
)

PREFIXES = ("language_model.model.", "model.language_model.", "language_model.")


class TinyTensors:
    """All tensors of a directory under canonical names, with their quantisation."""

    def __init__(self, directory: Path) -> None:
        self.arrays: dict[str, mx.array] = {}
        for path in sorted(directory.glob("*.safetensors")):
            loaded = mx.load(str(path))
            assert isinstance(loaded, dict)
            self.arrays.update({_strip(name): array for name, array in loaded.items()})
        config = json.loads((directory / "config.json").read_text())
        self._quantization = {_strip(key): value for key, value in config.get("quantization", {}).items()}

    def get(self, stem: str) -> tuple[list[mx.array], QuantSpec | None]:
        """Return weight, scales and biases of a module, as many as there are."""
        if stem + ".weight" not in self.arrays:
            return [self.arrays[stem]], None
        parts = [
            self.arrays[f"{stem}.{part}"]
            for part in ("weight", "scales", "biases")
            if f"{stem}.{part}" in self.arrays
        ]
        if len(parts) == 1:
            return parts, None
        spec = self._quantization.get(stem) or self._quantization
        return parts, QuantSpec(spec["mode"], spec["bits"], spec["group_size"])


class TinyWeights:
    """A `WeightSource` over `TinyTensors`; remembers what was asked for."""

    def __init__(self, tensors: TinyTensors, dtype: mx.Dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self.asked: list[str] = []

    def array(self, name: str, shape: tuple[int, ...]) -> mx.array:
        self.asked.append(name)
        parts, _ = self._tensors.get(name)
        array = parts[0].astype(mx.float32)
        if name.endswith("conv1d"):
            array = array.reshape(shape)
        assert array.shape == shape, (name, array.shape, shape)
        return array

    def array_or_matrix(self, name: str) -> mx.array:
        """Return any unquantised tensor as it is stored, for computing by hand."""
        return self._tensors.get(name)[0][0]

    def linear(self, name: str, out_features: int, in_features: int) -> Linear:
        parts, spec = self._matrix(name, out_features, in_features)
        if spec is None:
            return DenseLinear(parts[0])
        return QuantizedLinear(parts[0], parts[1], parts[2] if len(parts) > 2 else None, spec)

    def embedding(self, name: str, num: int, dim: int) -> Embedding:
        parts, spec = self._matrix(name, num, dim)
        if spec is None:
            return DenseEmbedding(parts[0], self._dtype)
        return QuantizedEmbedding(parts[0], parts[1], parts[2] if len(parts) > 2 else None, spec, self._dtype)

    def _matrix(self, name: str, rows: int, columns: int) -> tuple[list[mx.array], QuantSpec | None]:
        self.asked.append(name)
        parts, spec = self._tensors.get(name)
        assert parts[0].shape == (rows, columns if spec is None else columns * spec.bits // 32), name
        return _in_dtype(parts, self._dtype), spec


class TinyExperts:
    """An `ExpertProvider` with every expert in memory.

    Args:
        resident: What `is_resident` says; False makes the model read ids back, as when streaming.
    """

    def __init__(
        self, tensors: TinyTensors, config: ModelConfig, dtype: mx.Dtype, *, resident: bool = True
    ) -> None:
        self._resident = resident
        self.calls: list[tuple[int, object]] = []
        stems = [f"layers.{i}.mlp" for i in range(config.num_hidden_layers)]
        stems += ["mtp.layers.0.mlp"] * config.num_mtp_layers
        width = config.moe_intermediate_size
        self.banks: list[ExpertBank] = []
        for stem in stems:
            if f"{stem}.experts.gate_up_proj" in tensors.arrays:
                fused = tensors.arrays[f"{stem}.experts.gate_up_proj"].astype(dtype)
                down = tensors.arrays[f"{stem}.experts.down_proj"].astype(dtype)
                halves = [ExpertMatrix(fused[:, :width]), ExpertMatrix(fused[:, width:]), ExpertMatrix(down)]
            elif f"{stem}.switch_mlp.up_proj.weight" in tensors.arrays:
                halves = []
                for projection in ("gate", "up", "down"):
                    parts, spec = tensors.get(f"{stem}.switch_mlp.{projection}_proj")
                    parts = _in_dtype(parts, dtype)
                    halves.append(ExpertMatrix(*parts, **({"spec": spec} if spec else {})))
            else:
                continue  # an MLX pack without its MTP module
            self.banks.append(ExpertBank(*halves))

    def is_resident(self, layer: int) -> bool:
        return self._resident

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        return ()

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        raise AssertionError("nobody wanted to know")

    def device_busy(self) -> None:
        pass

    def run(self, layer: int, x_TD: mx.array, ids_TK: mx.array | Sequence[Sequence[int]]) -> mx.array:
        self.calls.append((layer, ids_TK))
        ids = ids_TK if isinstance(ids_TK, mx.array) else mx.array(ids_TK, mx.int32)
        return expert_glu(x_TD, ids, self.banks[layer])


@dataclass
class TinyPending:
    """Rows that were there all along."""

    rows: mx.array

    def wait(self) -> mx.array:
        return self.rows


class TinyRows:
    """A `RowSource` over the whole table, parts in numeric order."""

    def __init__(self, tensors: TinyTensors, config: ModelConfig, dtype: mx.Dtype) -> None:
        stem = f"layers.{config.ple_layer}.ple.ple_embedding.ngram_embedding"
        stems = [f"{stem}.shard_{i}" for i in range(config.split_ngram_parts)]
        if stems[0] + ".weight" not in tensors.arrays:
            stems = [f"{stem}.shards.{i}" for i in range(config.split_ngram_parts)]
        blocks = []
        for part in stems:
            parts, spec = tensors.get(part)
            blocks.append(dequantize_rows(parts, spec, dtype))
        self._table = mx.concatenate(blocks)
        assert self._table.shape == (config.ngram.num_rows, config.ngram.width)
        self.issued: list[Sequence[Sequence[int]]] = []

    def issue(self, rows_TN: Sequence[Sequence[int]]) -> TinyPending:
        self.issued.append(rows_TN)
        return TinyPending(self._table[mx.array(rows_TN)])


@dataclass
class TinyModel:
    """A whole model on the reference path."""

    config: ModelConfig
    model: FlashNext
    mtp: MtpCell | None
    weights: TinyWeights
    experts: TinyExperts
    rows: TinyRows
    sync: HostSync

    @classmethod
    def open(cls, directory: Path, *, dtype: mx.Dtype = mx.float32, resident: bool = True) -> TinyModel:
        """Load everything of a tiny checkpoint."""
        config = read_config(directory)
        tensors = TinyTensors(directory)
        weights, sync = TinyWeights(tensors, dtype), HostSync()
        experts = TinyExperts(tensors, config, dtype, resident=resident)
        rows = TinyRows(tensors, config, dtype)
        model = FlashNext(config, weights, experts, rows, sync, compute_dtype=dtype)
        mtp = None
        if len(experts.banks) > config.num_hidden_layers:
            mtp = model.mtp_cell(weights, experts, sync)
        return cls(config, model, mtp, weights, experts, rows, sync)


def _strip(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _in_dtype(parts: list[mx.array], dtype: mx.Dtype) -> list[mx.array]:
    return [part.astype(dtype) if mx.issubdtype(part.dtype, mx.floating) else part for part in parts]

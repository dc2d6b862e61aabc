"""The resident weights of a checkpoint, read from their files straight into MLX memory.

Entry point: `CheckpointWeights`, which implements `model.weight_source.WeightSource`.

Invariants:
1. A tensor is read once, in chunks, into the memory the model computes from. It is widened chunk by chunk on
   the way: beside the weights themselves there is never more than `STAGING_BYTES`.
2. Every trunk tensor is read exactly once; `check_all_used` refuses what the model left over.
3. A value that is NaN or infinite is refused with the tensor's name and their number. Nothing is substituted.
4. Zero-centred norm weights are handed out as the official checkpoint stores them, whatever the pack stores.
5. Memory of an array is written before any graph names it, and never again.

All methods run on the thread that computes: MLX streams belong to threads.

Source: FEASIBILITY.md 1 and 7 (zero-copy arrays, allocation); qwen4exp.md 3.6 (norms).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from expert_store.errors import CheckpointCorrupt
from expert_store.safetensors_index import TensorInfo
from expert_store.source import ByteSource
from mlx_flashnext.checkpoint import Checkpoint, StoredTensor
from mlx_flashnext.config import Fp8Blocks, QuantSpec
from mlx_flashnext.errors import ModelError, UnsupportedCheckpoint, WeightMismatch
from mlx_flashnext.model.quant import (
    DenseEmbedding,
    DenseLinear,
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)
from mlx_flashnext.norms import ONES_MEAN, NormConvention, is_evidence, is_zero_centred, norm_convention
from mlx_flashnext.stored_numbers import (
    KEPT,
    NATIVE,
    STORED,
    array_memory,
    convert,
    e4m3_values,
    float32_memory,
    num_not_finite,
)

CHUNK_BYTES = 4 << 20
# A chunk as stored, its conversion, and the comparison that looks for NaN.
STAGING_BYTES = 4 * CHUNK_BYTES
FLOAT32_BYTES = 4
E4M3_VALUES = e4m3_values()

Allocate = Callable[[tuple[int, ...], mx.Dtype], mx.array]


class CheckpointWeights:
    """Hands out the trunk, and the MTP module if it is asked for.

    Args:
        checkpoint: Where everything lies.
        source: Its files, in the order of `checkpoint.table.files`.
        compute_dtype: Type of matrices, scales and biases in memory: float32 or bfloat16. Vectors and
            convolutions are always float32.
        progress: Called with (bytes read, bytes of the trunk) after each tensor.
        allocate: Makes a zero-filled array whose memory exists; for tests.

    Raises:
        UnsupportedCheckpoint: An unknown compute type, or norms around neither 0 nor 1.
        WeightMismatch: The stored hash constants are not those of the config, or a value is not finite.
        StoreError: A file could not be read, or changed since it was indexed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: ByteSource,
        *,
        compute_dtype: mx.Dtype,
        progress: Callable[[int, int], None] | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        if compute_dtype not in (mx.float32, mx.bfloat16):
            raise UnsupportedCheckpoint(
                f"Weights cannot be loaded as {compute_dtype}", hint="float32 and bfloat16 are implemented"
            )
        self._checkpoint = checkpoint
        self._source = source
        self._dtype = compute_dtype
        self._progress = progress
        self._allocate = allocate or _zeros
        self._used: set[str] = set()
        self._waiting: dict[str, mx.array] = {}
        self._num_bytes_read = 0
        self._total_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        self._check_hash_constants()
        self._norms: NormConvention = self._read_convention()

    @property
    def num_bytes_read(self) -> int:
        """Return the bytes read from files so far."""
        return self._num_bytes_read

    @property
    def norm_convention(self) -> NormConvention:
        """Return how this checkpoint stores its zero-centred norms."""
        return self._norms

    def array(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """Return an unquantised tensor in float32; see `WeightSource`."""
        tensor = self._take(name, shape)
        if tensor.spec is not None:
            raise WeightMismatch(
                f"{tensor.weight.name} is quantised, plain numbers were expected",
                hint="convert the model again without quantising norms and convolutions",
                tensor=tensor.weight.name,
            )
        array = self._waiting.pop(name, None)
        if array is None:
            array = self._read(tensor.weight, tensor.shape, mx.float32)
        if self._norms == "ones-centred" and is_zero_centred(name):
            values = float32_memory(array)
            if float(values.mean(dtype=np.float64)) > ONES_MEAN:
                values -= 1
        self._report()
        return array

    def linear(self, name: str, out_features: int, in_features: int) -> Linear:
        """Return the product with a matrix; see `WeightSource`."""
        tensor = self._take(name, (out_features, in_features))
        weight, scales, biases = self._matrix(tensor)
        if not isinstance(tensor.spec, QuantSpec) or scales is None:
            return DenseLinear(weight)
        return QuantizedLinear(weight, scales, biases, tensor.spec)

    def embedding(self, name: str, num: int, dim: int) -> Embedding:
        """Return the row look-up of a matrix; see `WeightSource`."""
        tensor = self._take(name, (num, dim))
        weight, scales, biases = self._matrix(tensor)
        if not isinstance(tensor.spec, QuantSpec) or scales is None:
            return DenseEmbedding(weight, self._dtype)
        return QuantizedEmbedding(weight, scales, biases, tensor.spec, self._dtype)

    def ngram_scale(self) -> float | None:
        """Return the one scale of an FP8 n-gram table, None for every other table."""
        scale = self._checkpoint.ngram.scale
        if scale is None:
            return None
        return float(float32_memory(self._read(scale, (1,), mx.float32))[0])

    def check_all_used(self) -> None:
        """Refuse a model that left weights of the checkpoint unused.

        Raises:
            WeightMismatch: A trunk tensor, or a part of an MTP module that was begun, was never asked for.
        """
        wanted = set(self._checkpoint.tensors)
        if not self._used.isdisjoint(self._checkpoint.mtp):
            wanted |= set(self._checkpoint.mtp)
        left = sorted(wanted - self._used)
        if left:
            raise WeightMismatch(
                f"{len(left)} tensors of the checkpoint were never used, the first is {left[0]}",
                hint="this is a fault in the program: report it with the output of `flashnext show`",
                left=tuple(left),
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._checkpoint.tensors.get(name) or self._checkpoint.mtp.get(name)
        if tensor is None:
            raise WeightMismatch(
                f"Tensor missing: {name}",
                hint=f"flashnext show {self._checkpoint.directory} lists every tensor",
                tensor=name,
            )
        if name in self._used:
            raise WeightMismatch(f"Tensor asked for twice: {name}", hint="this is a fault in the program")
        if tensor.shape != shape:
            raise WeightMismatch(
                f"{tensor.weight.name}: shape {list(tensor.shape)}, the model asks for {list(shape)}",
                hint="config.json does not belong to these files: get both from one place",
                tensor=tensor.weight.name,
            )
        self._used.add(name)
        return tensor

    def _matrix(self, tensor: StoredTensor) -> tuple[mx.array, mx.array | None, mx.array | None]:
        if tensor.spec is None or tensor.scales is None:
            weight = self._read(tensor.weight, tensor.shape, self._dtype)
            self._report()
            return weight, None, None
        if isinstance(tensor.spec, Fp8Blocks):
            weight = self._read_blocks(tensor.weight, tensor.scales, tensor.spec)
            self._report()
            return weight, None, None
        weight = self._read(tensor.weight, tensor.weight.shape, mx.uint32)
        scales = self._read(tensor.scales, tensor.scales.shape, self._dtype, tensor.spec)
        biases = None
        if tensor.biases is not None:
            biases = self._read(tensor.biases, tensor.biases.shape, self._dtype)
        self._report()
        return weight, scales, biases

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._num_bytes_read, self._total_bytes)

    def _read(
        self, info: TensorInfo, shape: tuple[int, ...], dtype: mx.Dtype, spec: QuantSpec | None = None
    ) -> mx.array:
        """Read one stored tensor into a new array of `dtype`; uint32 and uint8 stay what they are."""
        dtype = KEPT.get(info.dtype, dtype)
        array = self._new(info.name, shape, dtype)
        target = array_memory(array)
        stored = STORED[info.dtype]
        direct = dtype == NATIVE[info.dtype]
        width = dtype.size
        chunk = CHUNK_BYTES // stored.itemsize
        staging = bytearray(0 if direct else min(info.length, CHUNK_BYTES))
        count, num_bad = info.length // stored.itemsize, 0
        for start in range(0, count, chunk):
            end = min(count, start + chunk)
            out = target[start * width : end * width]
            raw = out if direct else memoryview(staging)[: (end - start) * stored.itemsize]
            self._fill(info, start * stored.itemsize, raw)
            bits = np.frombuffer(raw, stored)
            num_bad += num_not_finite(bits, info.dtype, spec)
            if not direct:
                convert(bits, info.dtype, out, dtype)
        self._check_finite(info, num_bad, count)
        return array

    def _read_blocks(self, info: TensorInfo, scales: TensorInfo, blocks: Fp8Blocks) -> mx.array:
        """Read a matrix of E4M3 values and their block scales into a new array of the compute type."""
        block_factors = float32_memory(self._read(scales, scales.shape, mx.float32)).reshape(scales.shape)
        rows, columns = info.shape
        array = self._new(info.name, info.shape, self._dtype)
        target, width = array_memory(array), self._dtype.size * columns
        chunk = max(1, CHUNK_BYTES // (FLOAT32_BYTES * columns))
        staging, num_bad = bytearray(min(rows, chunk) * columns), 0
        for first in range(0, rows, chunk):
            end = min(rows, first + chunk)
            raw = memoryview(staging)[: (end - first) * columns]
            self._fill(info, first * columns, raw)
            codes = np.frombuffer(raw, np.uint8)
            num_bad += num_not_finite(codes, info.dtype, None)
            values = E4M3_VALUES[codes].reshape(end - first, columns)
            factors = block_factors[np.arange(first, end) // blocks.rows]
            values *= np.repeat(factors, blocks.columns, axis=1)[:, :columns]
            out = target[first * width : end * width]
            if self._dtype == mx.float32:
                np.copyto(np.frombuffer(out, np.float32), values.reshape(-1))
            else:
                convert(values.reshape(-1).view(np.uint32), "F32", out, self._dtype)
        self._check_finite(info, num_bad, rows * columns)
        return array

    def _check_finite(self, info: TensorInfo, num_bad: int, count: int) -> None:
        if num_bad:
            raise WeightMismatch(
                f"{info.name}: {num_bad} of {count} values are not finite (NaN or infinite)",
                hint="the file is damaged: fetch it again",
                tensor=info.name,
                num_not_finite=num_bad,
            )

    def _fill(self, info: TensorInfo, at: int, view: memoryview) -> None:
        got = self._source.read_into(info.file, info.offset + at, [view])
        self._num_bytes_read += got
        if got != view.nbytes:
            file = self._source.name(info.file)
            raise CheckpointCorrupt(
                f"{file} ended early: {info.name} wanted {view.nbytes} bytes, got {got}",
                hint="fetch the file again",
                file=file,
                tensor=info.name,
                offset=info.offset + at,
            )

    def _new(self, name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        try:
            return self._allocate(shape, dtype)
        except (RuntimeError, MemoryError, ValueError) as error:
            self._waiting.clear()
            mx.clear_cache()
            num_bytes = math.prod(shape) * dtype.size
            raise ModelError(
                f"Cannot allocate {num_bytes} bytes for {name}: {error}",
                hint="close other programs, or run `flashnext plan` with a smaller --memory",
                tensor=name,
                num_bytes=num_bytes,
            ) from error

    def _check_hash_constants(self) -> None:
        """Compare the n-gram hash buffers with what the config computes; other constants read other rows."""
        ngram = self._checkpoint.config.ngram
        for leaf, expected in (
            ("layer_multipliers", ngram.multipliers),
            ("ngram_heads_vocab_sizes", ngram.sizes),
            ("ngram_heads_offsets", ngram.offsets),
        ):
            name = f"layers.{self._checkpoint.config.ple_layer}.ple.ple_embedding.{leaf}"
            info = self._take(name, (len(expected),)).weight
            raw = bytearray(info.length)
            self._fill(info, 0, memoryview(raw))
            stored = tuple(int(value) for value in np.frombuffer(raw, "<i8"))
            if stored != expected:
                index = next(i for i, value in enumerate(expected) if stored[i] != value)
                raise WeightMismatch(
                    f"{info.name}[{index}] is {stored[index]}, config.json gives {expected[index]} "
                    "(from seed, vocab_size and the ngram fields)",
                    hint="config.json does not belong to these files: get both from one place",
                    tensor=info.name,
                )

    def _read_convention(self) -> NormConvention:
        means: list[float] = []
        for name, tensor in self._checkpoint.tensors.items():
            if is_evidence(name):
                array = self._waiting[name] = self._read(tensor.weight, tensor.shape, mx.float32)
                means.append(float(float32_memory(array).mean(dtype=np.float64)))
        return norm_convention(means)


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array

"""Weights arrive in memory as stored: once, whole, widened exactly, and with the norms the model expects."""

import itertools
import tracemalloc
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from bench.synth import PRESETS, build
from expert_store.source import FileSource
from mlx_flashnext import weights as weights_module
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.errors import UnsupportedCheckpoint, WeightMismatch
from mlx_flashnext.model.quant import DenseEmbedding, DenseLinear, QuantizedEmbedding, QuantizedLinear
from mlx_flashnext.weights import STAGING_BYTES, CheckpointWeights
from tests.tampering import floats, load, save, store
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.fp8 import build_fp8

EIGHT_LAYERS = {"num_hidden_layers": 8}


class RecordingSource:
    """A file source that remembers every run it read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._inner = FileSource(checkpoint.table.files)
        self.runs: list[tuple[int, int, int]] = []

    def read_into(self, file: int, offset: int, views: Sequence[memoryview]) -> int:
        got = self._inner.read_into(file, offset, views)
        self.runs.append((file, offset, got))
        return got

    def name(self, file: int) -> str:
        return self._inner.name(file)

    def close(self) -> None:
        self._inner.close()


def open_weights(directory, dtype=mx.float32, **options):
    checkpoint = open_checkpoint(directory)
    return checkpoint, CheckpointWeights(
        checkpoint, FileSource(checkpoint.table.files), compute_dtype=dtype, **options
    )


def take_all(checkpoint: Checkpoint, weights: CheckpointWeights, *, mtp: bool = False) -> dict[str, object]:
    """Ask for every tensor as the model does."""
    taken: dict[str, object] = {}
    for name, tensor in {**checkpoint.tensors, **(checkpoint.mtp if mtp else {})}.items():
        if name == "embed_tokens":
            taken[name] = weights.embedding(name, *tensor.shape)
        elif tensor.role == "matrix":
            taken[name] = weights.linear(name, *tensor.shape)
        elif tensor.role != "integer":
            taken[name] = weights.array(name, tensor.shape)
    return taken


def memory(array: mx.array) -> bytes:
    return bytes(memoryview(array).cast("B"))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_plain_weights_are_the_stored_numbers_in_the_compute_type(tmp_path, stored, dtype):
    tensors, _ = load(build_hf(tmp_path, dtype=stored))
    checkpoint, weights = open_weights(tmp_path, dtype)
    taken = take_all(checkpoint, weights, mtp=True)
    weights.check_all_used()
    for name, value in taken.items():
        tensor = checkpoint.tensors.get(name) or checkpoint.mtp[name]
        expected = mx.array(floats(tensors[tensor.weight.name]).reshape(tensor.shape))
        if tensor.role == "matrix":
            assert isinstance(value, DenseLinear | DenseEmbedding)
            assert value.weight.dtype == dtype
            assert mx.array_equal(value.weight, expected.astype(dtype)), name
        else:
            assert isinstance(value, mx.array)
            assert value.dtype == mx.float32
            assert mx.array_equal(value, expected), name


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [("affine", 4, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_packed_weights_keep_their_codes_and_widen_their_scales(tmp_path, mode, bits, group_size):
    tensors, _ = load(
        build_mlx(tmp_path, mode=mode, bits=bits, group_size=group_size, scale_dtype="bfloat16")
    )
    checkpoint, weights = open_weights(tmp_path)
    taken = take_all(checkpoint, weights, mtp=True)
    weights.check_all_used()
    num_packed = 0
    for name, value in taken.items():
        tensor = checkpoint.tensors.get(name) or checkpoint.mtp[name]
        if tensor.spec is None:
            continue
        num_packed += 1
        assert isinstance(value, QuantizedLinear | QuantizedEmbedding)
        assert value.spec == tensor.spec
        assert memory(value.weight) == tensors[tensor.weight.name].data
        assert tensor.scales is not None
        scales = tensors[tensor.scales.name]
        if tensor.spec.mode == "affine":
            assert tensor.biases is not None
            assert value.biases is not None
            assert mx.array_equal(value.scales, mx.array(floats(scales)))
            assert mx.array_equal(value.biases, mx.array(floats(tensors[tensor.biases.name])))
        else:
            assert value.biases is None
            assert memory(value.scales) == scales.data
    assert num_packed > 40


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_chunks_do_not_show(tmp_path, monkeypatch, stored, dtype):
    build_hf(tmp_path, dtype=stored)
    whole = take_all(*open_weights(tmp_path, dtype))
    monkeypatch.setattr(weights_module, "CHUNK_BYTES", 1000)
    chunked = take_all(*open_weights(tmp_path, dtype))
    for name, value in whole.items():
        pair = [getattr(v, "weight", v) for v in (value, chunked[name])]
        assert mx.array_equal(*pair), name


def test_every_trunk_byte_is_read_exactly_once(tmp_path):
    checkpoint = open_checkpoint(build_mlx(tmp_path))
    source = RecordingSource(checkpoint)
    seen: list[tuple[int, int]] = []
    weights = CheckpointWeights(
        checkpoint, source, compute_dtype=mx.float32, progress=lambda *at: seen.append(at)
    )
    take_all(checkpoint, weights)
    runs = sorted(source.runs)
    for (file, offset, length), after in itertools.pairwise(runs):
        assert (file, offset + length) <= after[:2]
    total = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert sum(length for _, _, length in runs) == weights.num_bytes_read == total
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_peak_of_loading_is_the_plan_and_a_fixed_staging_area(tmp_path, monkeypatch, stored):
    """P24: what the plan counts for the trunk is all that loading takes."""
    build_hf(tmp_path, dtype=stored, overrides={"vocab_size": 20000})
    monkeypatch.setattr(weights_module, "CHUNK_BYTES", 1 << 16)
    checkpoint = open_checkpoint(tmp_path)
    planned = sum(tensor.loaded_bytes(4) for tensor in checkpoint.tensors.values())
    largest = max(tensor.loaded_bytes(4) for tensor in checkpoint.tensors.values())
    staging = STAGING_BYTES * (1 << 16) // (4 << 20)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.start()
    try:
        kept = take_all(*open_weights(tmp_path))
        _, python_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mx.get_peak_memory() - before <= planned + 4096
    assert mx.get_active_memory() - before >= planned
    # Objects of the tiny checkpoint take about 1 MB; a second copy of the vocabulary would take 5.
    assert python_peak < 2_000_000 + staging < largest
    assert kept


def shifted(directory, names):
    tensors, config = load(directory)
    for name in names(tensors):
        tensors[name] = store(floats(tensors[name]) + np.float32(1))
    return save(directory, tensors, config)


# Written out, so that the program's own list is tested too (qwen4exp.md, statement 3).
ZERO_CENTRED = (
    ".hc_norm", ".q_norm", ".k_norm", ".q_layernorm", ".k_layernorm", ".norm_key", ".norm_query",
    ".norm_conv", ".pre_fc_norm_embedding", ".pre_fc_norm_hidden",
)  # fmt: skip


def zero_centred(tensors):
    return [name for name in tensors if name.removesuffix(".weight").endswith(ZERO_CENTRED)]


def test_norms_stored_around_one_reach_the_model_around_zero(tmp_path):
    """P61: such packs load, and their output is garbage unless this is seen."""
    official = take_all(*open_weights(build_hf(tmp_path / "zero", overrides=EIGHT_LAYERS)), mtp=True)
    build_hf(tmp_path / "one", overrides=EIGHT_LAYERS)
    checkpoint, weights = open_weights(shifted(tmp_path / "one", zero_centred))
    assert weights.norm_convention == "ones-centred"
    num_shifted = 0
    for name, value in take_all(checkpoint, weights, mtp=True).items():
        expected = official[name]
        if isinstance(expected, mx.array):
            if name.endswith(ZERO_CENTRED):
                num_shifted += 1
                expected = (expected + 1) - 1  # what float32 keeps of it
            assert isinstance(value, mx.array)
            assert mx.array_equal(value, expected), name
    assert num_shifted > 30


def test_a_norm_that_is_around_zero_in_such_a_pack_is_left_alone(tmp_path):
    build_hf(tmp_path, overrides=EIGHT_LAYERS)
    kept = "model.language_model.layers.3.self_attn.q_norm.weight"
    tensors, _ = load(tmp_path)
    checkpoint, weights = open_weights(shifted(tmp_path, lambda t: [n for n in zero_centred(t) if n != kept]))
    value = weights.array("layers.3.self_attn.q_norm", (64,))
    assert checkpoint.config.num_hidden_layers == 8
    assert mx.array_equal(value, mx.array(floats(tensors[kept])))


def test_official_norms_are_official(tmp_path):
    assert open_weights(build_hf(tmp_path))[1].norm_convention == "zero-centred"


@pytest.mark.parametrize("layers", [8, 4])
def test_norms_around_neither_are_refused(tmp_path, layers):
    build_hf(tmp_path, overrides={"num_hidden_layers": layers})
    tensors, config = load(tmp_path)
    by = 0.5 if layers == 8 else 1.0  # four tensors are too few to prove a pack ones-centred
    for name in zero_centred(tensors):
        tensors[name] = store(floats(tensors[name]) + np.float32(by))
    with pytest.raises(UnsupportedCheckpoint, match="around neither 0 nor 1"):
        open_weights(save(tmp_path, tensors, config))


def test_a_tensor_the_model_never_asked_for_is_an_error(tmp_path):
    checkpoint, weights = open_weights(build_hf(tmp_path))
    left = "layers.2.linear_attn.dt_bias"
    for name, tensor in checkpoint.tensors.items():
        if tensor.role == "matrix":
            weights.linear(name, *tensor.shape)
        elif tensor.role != "integer" and name != left:
            weights.array(name, tensor.shape)
    with pytest.raises(WeightMismatch, match=left):
        weights.check_all_used()


def test_an_mtp_module_is_used_whole_or_not_at_all(tmp_path):
    checkpoint, weights = open_weights(build_hf(tmp_path))
    take_all(checkpoint, weights)
    weights.check_all_used()
    weights.linear("mtp.fc_hidden", 64, 64)
    with pytest.raises(WeightMismatch, match=r"mtp\."):
        weights.check_all_used()


def test_asking_twice_or_for_another_shape_or_for_nothing_is_refused(tmp_path):
    _, weights = open_weights(build_hf(tmp_path))
    weights.linear("lm_head", 128, 64)
    with pytest.raises(WeightMismatch, match="twice"):
        weights.linear("lm_head", 128, 64)
    with pytest.raises(WeightMismatch, match=r"\[16, 64\].*\[16, 32\]"):
        weights.linear("layers.0.mlp.gate", 16, 32)
    with pytest.raises(WeightMismatch, match=r"layers\.9\.mlp\.gate"):
        weights.linear("layers.9.mlp.gate", 16, 64)


def test_a_quantised_norm_is_refused(tmp_path):
    _, weights = open_weights(build_mlx(tmp_path))
    with pytest.raises(WeightMismatch, match="is quantised"):
        weights.array("lm_head", (128, 64))


@pytest.mark.parametrize("damage", [0x7F, 0xFF])
def test_an_fp8_matrix_with_a_value_that_is_no_number_is_refused(tmp_path, damage):
    tensors, config = load(build_fp8(tmp_path / "fp8", tmp_path / "twin", trunk=True))
    name = "model.language_model.layers.0.linear_attn.out_proj.weight"
    data = bytearray(tensors[name].data)
    data[7] = data[-1] = damage
    tensors[name] = tensors[name]._replace(data=bytes(data))
    _, weights = open_weights(save(tmp_path / "fp8", tensors, config))
    with pytest.raises(WeightMismatch, match=r"out_proj\.weight: 2 of \d+ values are not finite"):
        weights.linear("layers.0.linear_attn.out_proj", *tensors[name].shape)


@pytest.mark.parametrize("chunk", [1 << 22, 1 << 10])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_an_fp8_matrix_of_the_trunk_is_its_values(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr("mlx_flashnext.weights.CHUNK_BYTES", chunk)
    directory = build_fp8(tmp_path / "fp8", tmp_path / "twin", trunk=True, block=(48, 40))
    name, shape = "layers.3.self_attn.q_proj", (512, 64)
    _, weights = open_weights(directory, dtype)
    _, twin = open_weights(tmp_path / "twin", dtype)
    assert mx.array_equal(weights.linear(name, *shape).weight, twin.linear(name, *shape).weight)


def test_layouts_of_one_synthetic_model_hold_the_same_numbers(tmp_path):
    import dataclasses

    packed = take_all(*open_weights(build(PRESETS["small"], tmp_path / "mlx")))
    dense_preset = dataclasses.replace(PRESETS["small"], layout="hf", float_dtype="BF16")
    dense = take_all(*open_weights(build(dense_preset, tmp_path / "hf")))
    for name, value in packed.items():
        other = dense[name]
        if isinstance(value, QuantizedLinear | QuantizedEmbedding):
            spec = value.spec
            unpacked = mx.dequantize(
                value.weight, value.scales, value.biases, group_size=spec.group_size, bits=spec.bits
            )
            assert isinstance(other, DenseLinear | DenseEmbedding)
            assert mx.array_equal(unpacked, other.weight), name
        elif isinstance(value, mx.array):
            assert isinstance(other, mx.array)
            assert mx.array_equal(value, other), name

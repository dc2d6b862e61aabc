"""A checkpoint that is not what its config says is refused: the wrong thing named, its value, and a hint."""

import dataclasses
import os

import mlx.core as mx
import numpy as np
import pytest

from bench.synth import PRESETS, build
from expert_store.errors import CheckpointCorrupt, SourceChanged, StoreError
from expert_store.source import FileSource
from mlx_flashnext.checkpoint import inspect_checkpoint, open_checkpoint
from mlx_flashnext.errors import ModelError, UnsupportedCheckpoint, WeightMismatch
from mlx_flashnext.weights import CheckpointWeights
from tests.tampering import floats, load, save, store
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.fp8 import build_fp8
from tests.tiny.safetensors_io import Stored

HF, PACK = "model.language_model.", "language_model.model."


def refused(directory, tensors, config, *words):
    with pytest.raises((ModelError, StoreError)) as caught:
        open_checkpoint(save(directory, tensors, config))
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.gate.weight",
        "layers.3.self_attn.indexer.q_layernorm.weight",
        "layers.0.linear_attn.A_log",
        "layers.1.ple.ple_embedding.layer_multipliers",
        "layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight",
        "layers.2.mlp.experts.gate_up_proj",
        "layers.2.mlp.experts.down_proj",
        "embed_tokens.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors, config = load(build_hf(tmp_path))
    del tensors[HF + name]
    expected = name.removesuffix(".weight")
    if "shard_" in name:
        expected = "part 3 of layers.1.ple.ple_embedding.ngram_embedding"
    refused(tmp_path, tensors, config, "Tensor missing", expected)


@pytest.mark.parametrize("name", ["mtp.fc_hidden.weight", "mtp.layers.0.mlp.experts.down_proj"])
def test_an_incomplete_mtp_module_is_refused(tmp_path, name):
    tensors, config = load(build_hf(tmp_path))
    del tensors[name]
    refused(tmp_path, tensors, config, "Tensor missing", name.removesuffix(".weight"))


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize(
    "module",
    [
        "layers.0.mlp.gate",
        "layers.0.mlp.switch_mlp.up_proj",
        "layers.1.ple.ple_embedding.ngram_embedding.shards.5",
    ],
)
def test_missing_scales_or_biases_of_a_packed_matrix_are_refused(tmp_path, module, part):
    tensors, config = load(build_mlx(tmp_path))
    del tensors[f"{PACK}{module}.{part}"]
    refused(tmp_path, tensors, config, "Tensor missing", part)


@pytest.mark.parametrize(
    "name",
    [
        HF + "layers.0.mlp.gate.bias",
        HF + "layers.0.input_layernorm.weight",
        HF + "norm.weight",
        HF + "layers.0.mlp.gate.scales",
        HF + "layers.0.mlp.experts.down_proj.bitmap",
        "adapter.lora_a",
        "mtp.norm.weight",
    ],
)
def test_a_tensor_with_no_place_is_named(tmp_path, name):
    tensors, config = load(build_hf(tmp_path))
    tensors[name] = store(np.zeros(64, np.float32))
    refused(tmp_path, tensors, config, "Tensor not known", name)


def test_rotary_tables_are_skipped_not_refused(tmp_path):
    tensors, config = load(build_hf(tmp_path))
    name = HF + "layers.3.self_attn.rotary_emb.inv_freq"
    tensors[name] = store(np.zeros(8, np.float32))
    assert name in open_checkpoint(save(tmp_path, tensors, config)).skipped


@pytest.mark.parametrize("name", ["lm_head.weight", HF + "layers.0.mlp.experts.down_proj"])
def test_one_tensor_under_two_spellings_is_refused(tmp_path, name):
    tensors, config = load(build_hf(tmp_path))
    other = "language_model." + name.replace(HF, "layers.").replace("layers.layers.", "layers.")
    tensors[other] = tensors[name]
    refused(tmp_path, tensors, config, "stored twice", name, other)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layers.0.mlp.gate.weight", "F64"),
        ("layers.0.mlp.gate.weight", "I32"),
        ("layers.0.linear_attn.norm.weight", "I32"),
        ("layers.1.ple.ple_embedding.ngram_heads_offsets", "F64"),
        ("layers.2.mlp.experts.down_proj", "I32"),
        ("layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight", "I32"),
    ],
)
def test_a_wrong_dtype_is_named(tmp_path, name, dtype):
    tensors, config = load(build_hf(tmp_path))
    shape = tensors[HF + name].shape
    size = {"F64": 8, "I32": 4}[dtype]
    tensors[HF + name] = Stored(dtype, shape, bytes(size * int(np.prod(shape))))
    refused(tmp_path, tensors, config, HF + name, dtype)


def test_a_gap_in_the_table_parts_is_refused(tmp_path):
    tensors, config = load(build_hf(tmp_path))
    stem = HF + "layers.1.ple.ple_embedding.ngram_embedding.shard_"
    tensors[stem + "8.weight"] = tensors.pop(stem + "2.weight")
    refused(tmp_path, tensors, config, "part 2 of")


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
@pytest.mark.parametrize(
    "module",
    [
        "layers.0.mlp.gate",
        "layers.0.mlp.switch_mlp.up_proj",
        "layers.1.ple.ple_embedding.ngram_embedding.shards.0",
    ],
)
def test_a_scalar_where_a_packed_matrix_should_be_is_refused(tmp_path, module, part):
    tensors, config = load(build_mlx(tmp_path))
    name = f"{PACK}{module}.{part}"
    tensors[name] = Stored(tensors[name].dtype, (), bytes(4))
    refused(tmp_path, tensors, config, name, "shape []")


@pytest.mark.parametrize("mode", ["int4", "MXFP4", 7])
def test_an_unknown_quantisation_mode_is_refused_by_value(tmp_path, mode):
    tensors, config = load(build_mlx(tmp_path))
    config["quantization"]["mode"] = mode
    error = refused(tmp_path, tensors, config, repr(mode))
    assert isinstance(error, UnsupportedCheckpoint)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_an_unknown_quantisation_method_is_refused_by_value(tmp_path, method):
    tensors, config = load(build_hf(tmp_path))
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    assert isinstance(refused(tmp_path, tensors, config, method), UnsupportedCheckpoint)


@pytest.mark.parametrize(("bits", "group_size"), [(7, 64), (4, 48), (16, 64), ("4", 64)])
def test_bits_and_groups_without_a_kernel_are_refused(tmp_path, bits, group_size):
    tensors, config = load(build_mlx(tmp_path))
    config["quantization"].update(bits=bits, group_size=group_size)
    refused(tmp_path, tensors, config, repr(bits), repr(group_size))


def test_shapes_that_contradict_the_quantisation_config_are_refused(tmp_path):
    tensors, config = load(build_mlx(tmp_path, bits=4, group_size=32))
    config["quantization"]["bits"] = 8
    refused(tmp_path, tensors, config, "4-bit group 32", "8-bit group 32")


def test_expert_widths_that_disagree_are_refused(tmp_path):
    tensors, config = load(build_mlx(tmp_path, bits=None))
    for name, axis in (("gate_proj", 1), ("down_proj", 2)):
        key = f"{PACK}layers.0.mlp.switch_mlp.{name}.weight"
        padding = [(0, 192 if i == axis else 0) for i in range(3)]
        tensors[key] = store(np.pad(floats(tensors[key]), padding))
    refused(tmp_path, tensors, config, "layers.0.mlp.switch_mlp.up_proj", "64", "256")


def test_a_padding_that_is_none_is_refused(tmp_path):
    tensors, config = load(build_mlx(tmp_path, bits=None))
    for name, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        key = f"{PACK}layers.0.mlp.switch_mlp.{name}.weight"
        padding = [(0, 32 if i == axis else 0) for i in range(3)]
        tensors[key] = store(np.pad(floats(tensors[key]), padding))
    refused(tmp_path, tensors, config, "expert width is 96", "moe_intermediate_size = 64")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["layers.0.mlp.gate", "layers.3.self_attn.q_norm"])
def test_a_trunk_value_that_is_not_finite_is_refused_with_name_and_number(tmp_path, name, dtype, value):
    tensors, config = load(build_hf(tmp_path, dtype=dtype))
    values = floats(tensors[f"{HF}{name}.weight"]).copy()
    values.flat[[3, 5]] = value
    stored = store(values)
    if dtype == "bfloat16":
        stored = Stored("BF16", values.shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    tensors[f"{HF}{name}.weight"] = stored
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    weights = CheckpointWeights(checkpoint, FileSource(checkpoint.table.files), compute_dtype=mx.float32)
    with pytest.raises(WeightMismatch, match=f"{name}.*2 of {values.size} values"):
        weights.linear(name, 16, 64) if values.ndim == 2 else weights.array(name, (64,))


def test_other_hash_constants_than_the_config_gives_are_refused(tmp_path):
    tensors, config = load(build_hf(tmp_path))
    config["text_config"]["seed"] = 0
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    with pytest.raises(WeightMismatch, match=r"layer_multipliers\[0\] is \d+, config.json gives \d+"):
        CheckpointWeights(checkpoint, FileSource(checkpoint.table.files), compute_dtype=mx.float32)


@pytest.mark.parametrize("edit", ["touch", "bytes", "replace", "truncate"])
def test_a_shard_edited_after_it_was_indexed_stops_the_load(tmp_path, edit):
    """P11: nothing of an older or newer file is served."""
    checkpoint = open_checkpoint(build_hf(tmp_path, shards=1))
    path = checkpoint.table.files[0].path
    if edit == "touch":
        os.utime(path, ns=(1, 1))
    elif edit == "bytes":
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\1" * 8)
        os.utime(path, ns=(1, 1))
    elif edit == "replace":
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    else:
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((SourceChanged, CheckpointCorrupt)) as caught:
        CheckpointWeights(checkpoint, FileSource(checkpoint.table.files), compute_dtype=mx.float32)
    assert path.name in caught.value.message
    assert caught.value.hint


class ShortSource(FileSource):
    """Ends every run early."""

    def read_into(self, file, offset, views):
        return super().read_into(file, offset, views) - 1


def test_a_short_read_of_the_trunk_is_refused_and_nothing_substituted(tmp_path):
    checkpoint = open_checkpoint(build_hf(tmp_path))
    with pytest.raises(CheckpointCorrupt, match="ended early"):
        CheckpointWeights(checkpoint, ShortSource(checkpoint.table.files), compute_dtype=mx.float32)


@pytest.mark.parametrize("after", [0, 3, 20])
def test_an_allocation_that_fails_names_the_tensor_and_leaves_nothing_behind(tmp_path, after):
    """P25."""
    checkpoint = open_checkpoint(build_hf(tmp_path))
    mx.clear_cache()
    before = mx.get_active_memory()
    made: list[int] = []

    def allocate(shape, dtype):
        if len(made) == after:
            raise RuntimeError("[malloc] Unable to allocate")
        made.append(1)
        return mx.zeros(shape, dtype)

    def load_all():
        weights = CheckpointWeights(
            checkpoint, FileSource(checkpoint.table.files), compute_dtype=mx.float32, allocate=allocate
        )
        kept = []
        for name, tensor in checkpoint.tensors.items():
            if tensor.role == "matrix":
                kept.append(weights.linear(name, *tensor.shape))
            elif tensor.role != "integer":
                kept.append(weights.array(name, tensor.shape))

    with pytest.raises(ModelError, match=r"Cannot allocate \d+ bytes for .*\.weight") as caught:
        load_all()
    assert caught.value.context["tensor"] in checkpoint.table.tensors
    assert caught.value.hint
    caught.value.__traceback__ = None
    del caught
    assert mx.get_active_memory() == before


FP8_EXPERTS = "model.language_model.layers.2.mlp.experts."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("drop", ("Tensor missing", "up_proj.weight of expert 3", "num_experts = 16")),
        ("drop scale", ("Tensor missing", "up_proj.weight_scale_inv of expert 3")),
        ("extra", ("number of experts is 17", "num_experts = 16")),
        ("reshape", ("experts.3.up_proj.weight", "[64, 128]")),
        ("no method", ("expert by expert", "quant_method")),
        ("no table scale", ("Tensor missing", "weight_scale")),
    ],
)
def test_faults_of_the_fp8_layout_are_named(tmp_path, change, words):
    preset = dataclasses.replace(PRESETS["small"], layout="hf-fp8", float_dtype="BF16")
    tensors, config = load(build(preset, tmp_path, sparse=True))
    name = FP8_EXPERTS + "3.up_proj.weight"
    if change == "drop":
        del tensors[name]
    elif change == "drop scale":
        del tensors[name + "_scale_inv"]
    elif change == "extra":
        for projection in ("gate", "up", "down"):
            for part in ("weight", "weight_scale_inv"):
                stem = f"{projection}_proj.{part}"
                tensors[f"{FP8_EXPERTS}16.{stem}"] = tensors[f"{FP8_EXPERTS}0.{stem}"]
    elif change == "reshape":
        tensors[name] = Stored("F8_E4M3", (64, 128), bytes(64 * 128))
    elif change == "no method":
        del config["quantization_config"]
    else:
        del tensors[HF + "layers.1.ple.ple_embedding.ngram_embedding.weight_scale"]
    refused(tmp_path, tensors, config, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("two scales", ("weight_scale", "[2]", "one number")),
        ("integer scale", ("weight_scale", "I32")),
        ("plain table", ("weight_scale", "not FP8")),
        ("no block scales", ("Tensor missing", "q_proj.weight_scale_inv")),
        ("block scales of another size", ("q_proj.weight_scale_inv", "dimension 0 is 3")),
        ("no method", ("q_proj.weight", "F8_E4M3", "quant_method")),
        ("block size", ("weight_block_size",)),
        ("block of nothing", ("weight_block_size",)),
    ],
)
def test_fp8_scales_that_do_not_fit_are_refused(tmp_path, change, words):
    tensors, config = load(build_fp8(tmp_path / "fp8", tmp_path / "twin", trunk=True))
    scale = HF + "layers.1.ple.ple_embedding.ngram_embedding.weight_scale"
    matrix = HF + "layers.3.self_attn.q_proj.weight"
    if change == "two scales":
        tensors[scale] = Stored("BF16", (2,), bytes(4))
    elif change == "integer scale":
        tensors[scale] = Stored("I32", (1,), bytes(4))
    elif change == "plain table":
        for name in [name for name in tensors if ".ngram_embedding.shard_" in name]:
            tensors[name] = Stored("BF16", tensors[name].shape, bytes(2 * len(tensors[name].data)))
    elif change == "no block scales":
        del tensors[matrix + "_scale_inv"]
    elif change == "block scales of another size":
        tensors[matrix + "_scale_inv"] = Stored("BF16", (3, 4), bytes(24))
    elif change == "no method":
        del config["quantization_config"]
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]
    elif change == "block size":
        config["quantization_config"]["weight_block_size"] = None
    else:
        config["quantization_config"]["weight_block_size"] = [0, 128]
    with pytest.raises((ModelError, StoreError)):
        open_checkpoint(save(tmp_path / "fp8", tensors, config))
    if "block_size" in words[0]:
        refused(tmp_path / "fp8", tensors, config, *words)
        return
    problems = inspect_checkpoint(tmp_path / "fp8").problems
    assert any(all(word in problem.message for word in words) for problem in problems), problems
    assert all(problem.hint for problem in problems)


def test_an_inspection_lists_all_that_is_wrong(tmp_path):
    tensors, config = load(build_hf(tmp_path))
    del tensors[HF + "layers.0.mlp.gate.weight"]
    del tensors[HF + "layers.1.mlp.gate.weight"]
    del tensors[HF + "layers.2.mlp.experts.down_proj"]
    tensors["stray"] = store(np.zeros(1, np.float32))
    inspection = inspect_checkpoint(save(tmp_path, tensors, config))
    assert inspection.checkpoint is None
    assert inspection.missing == (
        "layers.0.mlp.gate",
        "layers.1.mlp.gate",
        "layers.2.mlp.experts.down_proj",
    )
    assert inspection.unknown == ("stray",)
    assert any("and 1 more" in problem.message for problem in inspection.problems)
    assert len(inspection.problems) == 3
    names = [name for line in inspection.accounts for name in line.names]
    assert sorted(names) == sorted(tensors)

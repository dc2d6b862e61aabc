"""Checkpoints of every layout open, and say truly where everything lies."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from bench.synth import PRESETS, build
from expert_store.source import FileSource
from mlx_flashnext.checkpoint import Checkpoint, Layout, open_checkpoint
from mlx_flashnext.checkpoint.quantization import AFFINE_BITS, AFFINE_GROUPS, MICRO_SCALED
from mlx_flashnext.config import QuantSpec
from tests.tampering import floats, load, rename, save, store
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.safetensors_io import Stored

EXPERTS = "layers.{}.mlp.experts."
MODES = [
    ("affine", 4, 32),
    ("affine", 3, 32),
    ("affine", 8, 64),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def stored_names(checkpoint: Checkpoint) -> Counter[str]:
    return Counter(name for line in checkpoint.account() for name in line.names)


def assert_accounted_once(checkpoint: Checkpoint) -> None:
    assert stored_names(checkpoint) == Counter(dict.fromkeys(checkpoint.table.tensors, 1))
    assert sum(line.num_bytes for line in checkpoint.account()) == sum(
        info.length for info in checkpoint.table.tensors.values()
    )


def record(checkpoint: Checkpoint, layer: int, expert: int) -> dict[str, bytes]:
    layout = checkpoint.experts[layer]
    lengths = layout.record.component_lengths
    buffers = [bytearray(length) for length in lengths]
    with FileSource(checkpoint.table.files) as source:
        for read in layout.record.reads(expert):
            views = [memoryview(buffer) for buffer in buffers[read.first : read.end]]
            assert source.read_into(read.file, read.offset, views) == read.length
    return {part.name: bytes(data) for part, data in zip(layout.components, buffers, strict=True)}


def row(checkpoint: Checkpoint, number: int) -> list[bytes]:
    out = []
    with FileSource(checkpoint.table.files) as source:
        for span in checkpoint.ngram.record.spans(number):
            buffer = bytearray(span.length)
            source.read_into(span.file, span.offset, [memoryview(buffer)])
            out.append(bytes(buffer))
    return out


def piece(stored: Stored, index: int, rows: slice = slice(None)) -> bytes:
    """Return the bytes of one expert of a stacked tensor, or some of its rows."""
    size = len(stored.data) // stored.shape[0]
    data = stored.data[index * size : (index + 1) * size]
    width = size // stored.shape[1]
    start, stop, _ = rows.indices(stored.shape[1])
    return data[start * width : stop * width]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_experts_are_the_halves_of_one_read(tmp_path, dtype):
    tensors, _ = load(build_hf(tmp_path, dtype=dtype, vision=True))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "hf"
    assert_accounted_once(checkpoint)
    assert {line.category for line in checkpoint.account()} == {
        "trunk", "experts", "ngram", "mtp", "mtp experts", "vision",
    }  # fmt: skip
    layout = checkpoint.experts[2]
    assert [part.name for part in layout.components] == [
        "gate_proj.weight", "up_proj.weight", "down_proj.weight",
    ]  # fmt: skip
    assert [len(layout.record.reads(expert)) for expert in (0, 15)] == [2, 2]
    prefix = "model.language_model.layers.2.mlp.experts."
    for expert in (0, 7, 15):
        got = record(checkpoint, 2, expert)
        assert got["gate_proj.weight"] == piece(tensors[prefix + "gate_up_proj"], expert, slice(0, 64))
        assert got["up_proj.weight"] == piece(tensors[prefix + "gate_up_proj"], expert, slice(64, 128))
        assert got["down_proj.weight"] == piece(tensors[prefix + "down_proj"], expert)


@pytest.mark.parametrize(("mode", "bits", "group_size"), MODES)
def test_packed_experts_rows_and_matrices_of_every_mode(tmp_path, mode, bits, group_size):
    tensors, _ = load(build_mlx(tmp_path, mode=mode, bits=bits, group_size=group_size))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "mlx"
    assert_accounted_once(checkpoint)
    spec = QuantSpec(mode, bits, group_size)
    layout = checkpoint.experts[3]
    assert dict(layout.specs) == {"gate": spec, "up": spec, "down": spec}
    parts = ["weight", "scales"] + ["biases"] * (mode == "affine")
    assert [part.name for part in layout.components] == [
        f"{projection}_proj.{part}" for projection in ("gate", "up", "down") for part in parts
    ]
    for name, data in record(checkpoint, 3, 11).items():
        assert data == piece(tensors[f"language_model.model.layers.3.mlp.switch_mlp.{name}"], 11)
    tensor = checkpoint.tensors["layers.0.linear_attn.in_proj_z"]
    assert (tensor.spec, tensor.shape) == (spec, (192, 64))
    assert checkpoint.tensors["layers.0.mlp.gate"].spec == QuantSpec("affine", 8, 64)
    assert checkpoint.ngram.width == 96
    assert set(checkpoint.mtp) >= {"mtp.fc_hidden", "mtp.layers.0.self_attn.q_proj"}
    assert checkpoint.mtp_experts is not None


def test_a_pack_without_mtp_opens_and_says_so(tmp_path):
    checkpoint = open_checkpoint(build_mlx(tmp_path, mtp=False))
    assert not checkpoint.mtp
    assert checkpoint.mtp_experts is None
    assert_accounted_once(checkpoint)


def test_layers_of_differing_quantisation_have_records_of_their_own_size(tmp_path):
    override = {"layers.1.mlp.switch_mlp.down_proj": {"bits": 8, "group_size": 32, "mode": "affine"}}
    checkpoint = open_checkpoint(build_mlx(tmp_path, quant_overrides=override))
    sizes = [checkpoint.experts[layer].record.record_bytes for layer in range(4)]
    assert sizes[0] == sizes[2] == sizes[3] < sizes[1]
    assert checkpoint.experts[1].specs["down"] == QuantSpec("affine", 8, 32)
    assert checkpoint.experts[1].specs["up"] == QuantSpec("affine", 4, 32)


def test_overrides_in_official_spelling_count(tmp_path):
    build_mlx(tmp_path, quant_overrides={"layers.1.mlp.switch_mlp.down_proj": {"bits": 8, "group_size": 32}})
    tensors, config = load(tmp_path)
    section = config["quantization"]
    config["quantization"] = config["quantization_config"] = {
        key.replace("language_model.model.", "model.language_model.")
        .replace("switch_mlp", "experts")
        .replace("shards.", "shard_"): value
        for key, value in section.items()
    }
    assert config["quantization"] != section
    assert open_checkpoint(save(tmp_path, tensors, config)).experts[1].specs["down"] == QuantSpec(
        "affine", 8, 32
    )


def test_table_parts_are_joined_in_numeric_order(tmp_path):
    # 16 parts: in text order part 10 would follow part 1.
    overrides = {"split_ngram_parts": 16}
    tensors, _ = load(build_hf(tmp_path, overrides=overrides))
    checkpoint = open_checkpoint(tmp_path)
    stem = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    rows = tensors[stem.format(0)].shape[0]
    for part in (1, 2, 9, 10, 15):
        stored = tensors[stem.format(part)]
        assert row(checkpoint, part * rows + 3) == [stored.data[3 * 96 * 4 : 4 * 96 * 4]]


@pytest.mark.parametrize("quantised", [True, False])
def test_one_undivided_table_is_the_same_table(tmp_path, quantised):
    build_mlx(tmp_path) if quantised else build_hf(tmp_path)
    before = open_checkpoint(tmp_path)
    wanted = [row(before, number) for number in (0, 200, before.ngram.num_rows - 1)]
    tensors, config = load(tmp_path)
    stem = ".ngram_embedding.shards." if quantised else ".ngram_embedding.shard_"
    for part in ("weight", "scales", "biases") if quantised else ("weight",):
        names = [name for number in range(8) for name in tensors if name.endswith(f"{stem}{number}.{part}")]
        parts = [tensors.pop(name) for name in names]
        whole = names[0].replace(f"{stem}0.", ".ngram_embedding.")
        shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
        tensors[whole] = Stored(parts[0].dtype, shape, b"".join(p.data for p in parts))
    if quantised:
        del config["quantization_config"]
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    assert [row(checkpoint, number) for number in (0, 200, checkpoint.ngram.num_rows - 1)] == wanted
    assert_accounted_once(checkpoint)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."])
def test_mtp_tensors_never_stand_in_for_trunk_layers(tmp_path, prefix):
    tensors, config = load(build_hf(tmp_path))
    renamed = {prefix + n.removeprefix("mtp.") if n.startswith("mtp.") else n: t for n, t in tensors.items()}
    checkpoint = open_checkpoint(save(tmp_path, renamed, config))
    assert checkpoint.mtp["mtp.layers.0.mlp.gate"].weight.name == prefix + "layers.0.mlp.gate.weight"
    trunk = checkpoint.tensors["layers.0.mlp.gate"].weight.name
    assert trunk == "model.language_model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("form", ["C1K", "CK1", "CK"])
def test_convolutions_of_three_shapes_are_channels_by_taps(tmp_path, form):
    tensors, config = load(build_hf(tmp_path))
    for name, stored in tensors.items():
        if name.endswith("conv1d.weight"):
            channels, _, taps = stored.shape
            shape = {"C1K": (channels, 1, taps), "CK1": (channels, taps, 1), "CK": (channels, taps)}[form]
            tensors[name] = stored._replace(shape=shape)
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    assert checkpoint.tensors["layers.1.ple.conv1d"].shape == (256, 4)
    assert checkpoint.tensors["layers.0.linear_attn.conv1d"].shape == (320, 4)


def test_a_pack_without_inner_prefix_with_fused_quantised_experts_opens(tmp_path):
    """The spelling of JANGQ packs (qwen4exp.md 3.4)."""
    tensors, config = load(build_mlx(tmp_path, mtp=False))
    wanted = record(open_checkpoint(tmp_path), 0, 5)
    tensors = rename(
        tensors,
        ("language_model.model.", "language_model."),
        (".ple.ple_embedding.", ".ple."),
        (".ple.conv1d.weight", ".ple.conv1d_weight"),
        (".switch_mlp.down_proj", ".experts.down_proj"),
    )
    for name in [name for name in tensors if ".switch_mlp.gate_proj." in name]:
        gate, up = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
        fused = b"".join(piece(half, expert) for expert in range(16) for half in (gate, up))
        shape = (gate.shape[0], 2 * gate.shape[1], gate.shape[2])
        tensors[name.replace("switch_mlp.gate_proj", "experts.gate_up_proj")] = Stored(
            gate.dtype, shape, fused
        )
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    assert_accounted_once(checkpoint)
    assert record(checkpoint, 0, 5) == wanted
    # Halves of weight, scales and biases, and three parts of down: six runs instead of nine.
    assert len(checkpoint.experts[0].record.reads(5)) == 6


def test_experts_stored_wider_than_the_config_are_accepted_when_all_three_agree(tmp_path):
    """P66: packs may pad the expert width to a multiple of 256."""
    tensors, config = load(build_mlx(tmp_path, bits=None, mtp=False))
    for name, stored in tensors.items():
        if ".switch_mlp." in name:
            axis = 2 if "down_proj" in name else 1
            padding = [(0, 192 if i == axis else 0) for i in range(3)]
            tensors[name] = store(np.pad(floats(stored), padding))
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    assert checkpoint.experts[0].width == 256
    assert [part.shape for part in checkpoint.experts[0].components] == [(256, 64), (256, 64), (64, 256)]
    assert checkpoint.config.moe_intermediate_size == 64


def test_the_digest_follows_config_and_headers(tmp_path):
    one = open_checkpoint(build_hf(tmp_path / "one")).digest
    assert open_checkpoint(build_hf(tmp_path / "same")).digest == one
    assert open_checkpoint(build_hf(tmp_path / "shards", shards=2)).digest != one
    path = tmp_path / "one" / "config.json"
    path.write_text(
        path.read_text().replace('"max_position_embeddings": 4096', '"max_position_embeddings": 2048')
    )
    assert open_checkpoint(tmp_path / "one").digest != one


def test_loaded_bytes_are_those_of_the_compute_type(tmp_path):
    checkpoint = open_checkpoint(build_mlx(tmp_path, scale_dtype="bfloat16"))
    packed = checkpoint.tensors["layers.0.linear_attn.in_proj_z"]
    codes, factors = 192 * 64 // 2, 2 * 192 * 2
    assert packed.num_bytes == codes + 2 * factors
    assert packed.loaded_bytes(4) == codes + 4 * factors
    assert checkpoint.tensors["layers.0.linear_attn.A_log"].loaded_bytes(2) == 4 * 6
    assert checkpoint.tensors["layers.1.ple.ple_embedding.layer_multipliers"].loaded_bytes(4) == 0


SMALL_FP8 = dataclasses.replace(
    PRESETS["small"],
    layout="hf-fp8",
    float_dtype="BF16",
    overrides={**PRESETS["small"].overrides, "moe_intermediate_size": 192},
)


def test_the_fp8_layout_lists_every_expert(tmp_path):
    tensors, _ = load(build(SMALL_FP8, tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "hf-fp8"
    assert_accounted_once(checkpoint)
    layout = checkpoint.experts[1]
    shapes = {part.name: (part.dtype, part.shape) for part in layout.components}
    assert shapes["gate_proj.weight"] == ("F8_E4M3", (192, 256))
    assert shapes["gate_proj.weight_scale_inv"] == ("BF16", (2, 2))
    for name, data in record(checkpoint, 1, 9).items():
        assert data == tensors[f"model.language_model.layers.1.mlp.experts.9.{name}"].data
    assert checkpoint.ngram.scale is not None
    assert checkpoint.ngram.record_bytes == 256 // 8


@pytest.mark.parametrize("name", ["small"])
def test_synthetic_layouts_open(tmp_path, name):
    for layout in ("mlx", "hf"):
        preset = dataclasses.replace(PRESETS[name], layout=layout)
        assert_accounted_once(open_checkpoint(build(preset, tmp_path / layout, sparse=True)))


def test_the_table_of_what_opens_has_every_layout_and_quantisation() -> None:
    page = (Path(__file__).parents[3] / "docs/FORMATS.md").read_text()
    section = page.split("What opens, and runs without being converted:")[1].split("\n## ")[0]
    rows = [row.split("`")[1] for row in section.splitlines() if row.startswith("| `")]
    assert rows == list(get_args(Layout))
    for mode in (*MICRO_SCALED, "affine " + ", ".join(map(str, AFFINE_BITS[:-1]))):
        assert mode in section, mode
    assert " or ".join((", ".join(map(str, AFFINE_GROUPS[:-1])), str(AFFINE_GROUPS[-1]))) in section

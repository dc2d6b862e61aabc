"""The generator writes what it says: the same bytes again, one model in every layout, skewed routes."""

import dataclasses
import hashlib

import mlx.core as mx
import numpy as np
import pytest

from bench.synth import PRESETS, build
from bench.synth.__main__ import main
from bench.synth.presets import REAL_CONFIG, text_config
from bench.synth.tensors import text_tensors
from bench.synth.values import Grid, NearIdentity, bfloat16_round, e4m3_values
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.config import QuantSpec
from tests.tampering import floats, load

SMALL = PRESETS["small"]


def digests(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    assert digests(build(SMALL, tmp_path / "a")) == digests(build(SMALL, tmp_path / "b"))


def test_another_seed_changes_every_tensor_but_the_hash_constants(tmp_path):
    (one, _), (two, _) = (load(build(SMALL, tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    assert one.keys() == two.keys()
    # Scales are few distinct numbers, so those of a small matrix may agree; its codes may not.
    drawn = [
        name
        for name, stored in one.items()
        if stored.dtype != "I64" and not name.endswith(("scales", "biases"))
    ]
    assert len(drawn) > 100
    assert [name for name in drawn if one[name] == two[name]] == []


def test_a_sparse_checkpoint_has_the_headers_and_sizes_of_the_real_one(tmp_path):
    real, sparse = build(SMALL, tmp_path / "real"), build(SMALL, tmp_path / "sparse", sparse=True)
    assert open_checkpoint(real).digest == open_checkpoint(sparse).digest
    name = "language_model.model.layers.1.ple.ple_embedding.layer_multipliers"
    (one, _), (two, _) = load(real), load(sparse)
    assert one[name] == two[name]
    assert not any(two["language_model.lm_head.weight"].data)


AFFINE = [("affine", bits, group) for bits, group in ((2, 64), (3, 32), (4, 32), (5, 64), (6, 64), (8, 64))]


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_values_of_every_mode_are_finite_and_spread_as_asked(mode, bits, group_size):
    grid = Grid(0, "x", 512, 256, 0.02, bits, group_size, mode)
    weight = mx.array(np.frombuffer(b"".join(grid.packed()), np.uint32).reshape(512, -1))
    if mode == "affine":
        scales = mx.array(np.concatenate(list(grid.scales())))
        biases = -grid.middle * scales
    else:
        scales = mx.array(np.frombuffer(b"".join(grid.coded_scales()), np.uint8).reshape(512, -1))
        biases = None
    value = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits, mode=mode).astype(
        mx.float32
    )
    assert mx.isfinite(value).all()
    # Scales of 8-bit grids and of the micro-scaled modes are powers of two or as coarse.
    assert 0.012 < mx.std(value).item() < 0.042
    assert abs(mx.mean(value).item()) < 0.001


def test_the_e4m3_table_is_that_of_mlx():
    codes = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    assert mx.array_equal(mx.from_fp8(mx.array(codes), dtype=mx.float32), mx.array(e4m3_values()[codes]))


def test_router_rows_are_unequal_so_that_some_experts_are_popular(tmp_path):
    preset = dataclasses.replace(SMALL, layout="hf", float_dtype="BF16")
    tensors, _ = load(build(preset, tmp_path))
    norms = np.linalg.norm(floats(tensors["model.language_model.layers.0.mlp.gate.weight"]), axis=1)
    assert norms.max() > 2 * norms.min()


def test_the_head_prefers_another_token_for_each_token(tmp_path):
    preset = dataclasses.replace(SMALL, layout="hf", float_dtype="BF16")
    tensors, _ = load(build(preset, tmp_path))
    head, embedding = (
        floats(tensors["lm_head.weight"]),
        floats(tensors["model.language_model.embed_tokens.weight"]),
    )
    best = (embedding[8:] @ head.T).argmax(axis=1)
    assert len(set(best.tolist())) > 0.9 * len(best)
    assert not np.any(best == np.arange(8, 512))


def test_a_near_identity_hands_on_what_it_is_given_and_lies_on_its_grid():
    grid = NearIdentity(0, "x", 256, 256, 0.1 / 16, diagonal=1.5)
    value = np.concatenate(list(grid.dense()))
    assert np.array_equal(bfloat16_round(value), value)
    assert np.abs(np.diag(value) - 1.5).max() < 0.1
    given = np.random.default_rng(0).standard_normal((8, 256))
    handed = given @ value.T
    cosine = (given * handed).sum(1) / np.linalg.norm(given, axis=1) / np.linalg.norm(handed, axis=1)
    assert cosine.min() > 0.99
    assert np.any(value - np.diag(np.diag(value)))


def test_an_apt_mtp_module_differs_in_what_it_makes_of_the_embedding_alone():
    text = text_config(SMALL)
    plain, apt = (list(text_tensors(text, mtp=True, is_mtp_apt=is_apt)) for is_apt in (False, True))
    assert [two.name for one, two in zip(plain, apt, strict=True) if one != two] == ["mtp.fc_embedding"]


def test_blocks_of_rows_do_not_show(monkeypatch):
    whole = [b"".join(Grid(3, "y", 300, 128, 1.0).packed()), *Grid(3, "y", 300, 128, 1.0).scales()]
    monkeypatch.setattr("bench.synth.values.BLOCK_BYTES", 1 << 10)
    blocks = [
        b"".join(Grid(3, "y", 300, 128, 1.0).packed()),
        np.concatenate(list(Grid(3, "y", 300, 128, 1.0).scales())),
    ]
    assert len(list(Grid(3, "y", 300, 128, 1.0).packed())) > 10
    assert whole[0] == blocks[0]
    assert np.array_equal(whole[1], blocks[1])


def test_the_real_config_is_the_official_file():
    digest = hashlib.sha256(REAL_CONFIG.read_bytes()).hexdigest()
    assert digest == "889658f2508e8c61d409b02e70e0d78d8d4452ec65aaafbe129805d213d2e74b"


@pytest.mark.parametrize(("float_dtype", "record_bytes"), [("BF16", 2_764_800), ("F32", 3_072_000)])
def test_records_of_the_medium_preset_have_the_real_size(tmp_path, float_dtype, record_bytes):
    preset = dataclasses.replace(PRESETS["medium"], float_dtype=float_dtype)
    checkpoint = open_checkpoint(build(preset, tmp_path, sparse=True))
    sizes = [layout.record.record_bytes for layout in checkpoint.experts.values()]
    assert sizes == [record_bytes] * 4
    assert sum(sizes) * checkpoint.config.num_experts > 2_000_000_000


def test_the_command_line_replaces_layout_quantisation_and_fields(tmp_path, monkeypatch, capsys):
    flags = ["--sparse", "--mode", "mxfp8", "--no-mtp", "--set", "num_experts=8", "moe_intermediate_size=96"]
    monkeypatch.setattr("sys.argv", ["bench.synth", "small", str(tmp_path / "out"), *flags])
    main()
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.experts[0].specs["gate"] == QuantSpec("mxfp8", 8, 32)
    assert (checkpoint.experts[0].record.num_experts, checkpoint.experts[0].width) == (8, 96)
    assert not checkpoint.mtp
    assert "model-00001-of-00005" in capsys.readouterr().out

"""Every known spelling of a tensor name leads to one canonical name."""

import pytest

from mlx_flashnext.names import TensorName, layer_of, parse_name, parse_override

TABLE = "layers.1.ple.ple_embedding.ngram_embedding"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("lm_head.weight", TensorName("trunk", "lm_head", "weight")),
        ("language_model.lm_head.scales", TensorName("trunk", "lm_head", "scales")),
        ("model.language_model.embed_tokens.weight", TensorName("trunk", "embed_tokens", "weight")),
        ("language_model.model.embed_tokens.biases", TensorName("trunk", "embed_tokens", "biases")),
        ("language_model.layers.3.mlp.gate.weight", TensorName("trunk", "layers.3.mlp.gate", "weight")),
        ("model.layers.3.mlp.gate.weight", TensorName("trunk", "layers.3.mlp.gate", "weight")),
        (
            "model.language_model.layers.0.linear_attn.A_log",
            TensorName("trunk", "layers.0.linear_attn.A_log", "weight"),
        ),
        (
            "language_model.layers.1.ple.conv1d_weight",
            TensorName("trunk", "layers.1.ple.conv1d", "weight"),
        ),
        (
            "language_model.layers.1.ple.layer_multipliers",
            TensorName("trunk", "layers.1.ple.ple_embedding.layer_multipliers", "weight"),
        ),
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("vision_tower.pos_embed.weight", "vision"),
        ("visual.merger.norm.bias", "vision"),
    ],
)
def test_spellings_lead_to_the_canonical_name(stored, expected):
    parsed = parse_name(stored)
    if expected == "vision":
        assert parsed.space == "vision"
    else:
        assert parsed == expected


@pytest.mark.parametrize(
    "prefix",
    ["mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.", "language_model.model.mtp."],
)
@pytest.mark.parametrize("rest", ["layers.0.mlp.gate.weight", "layers.0.mlp.experts.7.up_proj.weight"])
def test_a_layer_of_the_mtp_module_is_never_a_trunk_layer(prefix, rest):
    parsed = parse_name(prefix + rest)
    assert parsed.space == "mtp"
    assert parsed.module.startswith("mtp.layers.0.")


@pytest.mark.parametrize(
    ("stored", "projection", "part", "expert"),
    [
        ("model.language_model.layers.5.mlp.experts.gate_up_proj", "gate_up_proj", "weight", None),
        ("model.language_model.layers.5.mlp.experts.down_proj", "down_proj", "weight", None),
        ("language_model.layers.5.mlp.experts.gate_up_proj.scales", "gate_up_proj", "scales", None),
        ("language_model.model.layers.5.mlp.switch_mlp.up_proj.biases", "up_proj", "biases", None),
        ("model.language_model.layers.5.mlp.experts.511.down_proj.weight", "down_proj", "weight", 511),
        (
            "model.language_model.layers.5.mlp.experts.0.gate_proj.weight_scale_inv",
            "gate_proj",
            "weight_scale_inv",
            0,
        ),
    ],
)
def test_expert_tensors_of_every_layout(stored, projection, part, expert):
    assert parse_name(stored) == TensorName("trunk", f"layers.5.mlp.experts.{projection}", part, expert)


@pytest.mark.parametrize(
    ("stored", "part", "number"),
    [
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_12.weight", "weight", 12),
        ("language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shards.127.scales", "scales", 127),
        ("language_model.layers.1.ple.ngram_embedding.shards.3", "weight", 3),
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight", "weight", None),
        (
            "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale",
            "weight_scale",
            None,
        ),
    ],
)
def test_table_parts_carry_their_number(stored, part, number):
    assert parse_name(stored) == TensorName("trunk", TABLE, part, table_part=number)


@pytest.mark.parametrize(
    ("pack", "official"),
    [
        (
            "language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shards.0",
            "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0",
        ),
        ("language_model.model.layers.9.mlp.gate", "model.language_model.layers.9.mlp.gate"),
        ("language_model.lm_head", "lm_head"),
        (
            "language_model.model.layers.9.mlp.switch_mlp.down_proj",
            "model.language_model.layers.9.mlp.experts.down_proj",
        ),
        ("language_model.mtp.fc_hidden", "mtp.fc_hidden"),
    ],
)
def test_override_keys_mean_the_same_in_pack_and_official_spelling(pack, official):
    assert parse_override(pack) == parse_override(official)


def test_unknown_names_are_kept_not_dropped():
    assert parse_name("model.language_model.layers.2.extra.thing") == TensorName(
        "trunk", "layers.2.extra.thing", "weight"
    )
    assert parse_name("odd") == TensorName("trunk", "odd", "weight")


def test_layers_are_counted_within_their_namespace():
    assert layer_of("layers.47.mlp.gate") == 47
    assert layer_of("mtp.layers.0.mlp.gate") == 0
    assert layer_of("embed_tokens") is None

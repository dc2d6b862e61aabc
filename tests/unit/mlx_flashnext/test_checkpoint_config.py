"""Every size in config.json is checked against the tensors, and a wrong one is refused by name and value."""

import json

import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.errors import ModelError
from tests.tampering import load, save
from tests.tiny.checkpoints import build_hf, build_mlx

LINEAR, FULL = "linear_attention", "full_attention"

# Field and a wrong value that is a possible configuration in itself.
WRONG = [
    ("vocab_size", 256),
    ("hidden_size", 32),
    ("hidden_size", 128),
    ("num_hidden_layers", 3),
    ("num_hidden_layers", 5),
    ("layer_types", [FULL, LINEAR, LINEAR, FULL]),
    ("layer_types", [LINEAR] * 4),
    ("hc_count", 2),
    ("hc_count", 8),
    ("hc_lowrank", 16),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 1),
    ("head_dim", 128),
    ("indexer_n_heads", 2),
    ("indexer_kv_heads", 2),
    ("indexer_head_dim", 64),
    ("linear_num_key_heads", 3),
    ("linear_num_value_heads", 4),
    ("linear_key_head_dim", 64),
    ("linear_value_head_dim", 64),
    ("linear_conv_kernel_dim", 3),
    ("num_experts", 8),
    ("num_experts", 32),
    ("moe_intermediate_size", 32),
    ("moe_intermediate_size", 128),
    ("shared_expert_intermediate_size", 128),
    ("ple_layer_ids", [3]),
    ("ple_embed_dim", 192),
    ("ple_conv_kernel_size", 3),
    ("ngram_size", 2),
    ("heads_per_ngram", 4),
    ("ngram_vocab_size_base", 400),
    ("make_ngram_vocab_size_divisible_by", 128),
    ("split_ngram_parts", 4),
    ("split_ngram_parts", 16),
    ("mtp_num_hidden_layers", 0),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        "hf": load(build_hf(tmp_path_factory.mktemp("hf"))),
        "mlx": load(build_mlx(tmp_path_factory.mktemp("mlx"))),
    }


@pytest.mark.parametrize("layout", ["hf", "mlx"])
@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_size_that_disagrees_with_the_tensors_is_refused_by_name_and_value(
    tmp_path, checkpoints, layout, field, value
):
    tensors, config = checkpoints[layout]
    config = json.loads(json.dumps(config))
    text = config["text_config"]
    assert text[field] != value
    text[field] = value
    if field == "num_hidden_layers":
        text["layer_types"] = (text["layer_types"] + [LINEAR])[:value]
    with pytest.raises(ModelError) as caught:
        open_checkpoint(save(tmp_path, tensors, config))
    message = caught.value.message
    said = (
        f"{field} = {value!r}" if field != "layer_types" else repr(value[0] if value[0] == FULL else LINEAR)
    )
    assert field in message
    assert said in message
    assert caught.value.hint


def test_the_unchanged_configs_open(tmp_path, checkpoints):
    for layout, (tensors, config) in checkpoints.items():
        assert open_checkpoint(save(tmp_path / layout, tensors, config)).layout == layout

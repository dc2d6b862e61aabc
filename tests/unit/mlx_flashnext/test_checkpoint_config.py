"""Every size in config.json is checked against the tensors, and a wrong one is refused by name and value."""

import json
from pathlib import Path

import pytest

from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.errors import ModelError, WeightMismatch
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


FOUR_BITS = {"bits": 4, "group_size": 32, "mode": "affine"}
TABLE = "layers.1.ple.ple_embedding.ngram_embedding.shards.3"
MODULES = [
    "layers.0.mlp.switch_mlp.up_proj",
    "layers.1.linear_attn.out_proj",
    TABLE,
    "mtp.layers.0.mlp.switch_mlp.down_proj",
]


@pytest.mark.parametrize("module", MODULES)
def test_a_matrix_that_is_quantised_where_the_config_says_it_is_not_is_refused(
    tmp_path: Path, module: str
) -> None:
    """P41: what the config says of one matrix is what it must be."""
    directory = build_mlx(tmp_path / "model")
    config = json.loads((directory / "config.json").read_bytes())
    prefix = "language_model." if module.startswith("mtp.") else "language_model.model."
    for section in ("quantization", "quantization_config"):
        config[section][prefix + module] = False
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMismatch, match=r"stored quantised, config\.json quantization says it is not"):
        open_checkpoint(directory)


@pytest.mark.parametrize("module", MODULES)
def test_a_matrix_that_is_plain_where_the_config_says_how_it_is_quantised_is_refused(
    tmp_path: Path, module: str
) -> None:
    """P41, as it happened: experts of the MTP module built unquantised; every draft was refused."""
    is_table = ".ngram_embedding." in module  # of one form as a whole

    def quantise(name: str) -> bool:
        return name != module and not (is_table and ".ngram_embedding." in name)

    directory = build_mlx(tmp_path / "model", quantise=quantise)
    config = json.loads((directory / "config.json").read_bytes())
    prefix = "language_model." if module.startswith("mtp.") else "language_model.model."
    for section in ("quantization", "quantization_config"):
        for entry in [key for key in config[section] if key.endswith(module)]:
            del config[section][entry]
    (directory / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(directory), "without an entry of its own a plain matrix is no contradiction"
    for section in ("quantization", "quantization_config"):
        config[section][prefix + module] = FOUR_BITS
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMismatch, match=r"stored as F32, config\.json quantization says affine 4-bit"):
        open_checkpoint(directory)

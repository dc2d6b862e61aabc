"""The config parser: the real file gives the real model; everything else is refused by name and value."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from mlx_flashnext.config import ModelConfig, QuantSpec, read_config
from mlx_flashnext.errors import MAX_MESSAGE, DocumentCorrupt, UnsupportedCheckpoint
from tests.tiny.checkpoints import tiny_config

REAL = Path(__file__).parents[3] / "mlx_flashnext/checkpoint/qwen3.8-flash-next.config.json"
# Training, initialisation, or said by another field.
UNREAD = {
    "attention_dropout",
    "dtype",
    "full_attention_interval",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "partial_rotary_factor",  # also in rope_parameters
    "router_aux_loss_coef",
    "use_cache",
}


def parse(**fields: object) -> ModelConfig:
    config = tiny_config()
    config["text_config"].update(fields)
    return ModelConfig.from_dict(config)


def test_the_real_file_parses_to_the_real_model() -> None:
    config = ModelConfig.from_dict(json.loads(REAL.read_text()))
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (48, 512, 10)
    assert config.qsa_layers == tuple(range(3, 48, 4))
    assert (config.hidden_size, config.stack_size, config.moe_intermediate_size) == (2560, 10240, 640)
    assert (config.linear_key_dim, config.linear_value_dim, config.linear_conv_dim) == (2048, 6144, 10240)
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert (config.num_select_blocks, config.max_dense_tokens) == (512, 2051)
    assert (config.ple_layer, config.ple_conv_rows) == (1, 9)
    assert (config.ngram_separator, config.eos_token_ids) == (248044, (248044,))
    assert config.norm_topk_prob is True
    assert config.ngram.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert config.ngram.sizes[0] == 20000003
    assert config.ngram.sizes[-1] == 20000171
    assert config.ngram.offsets[-1] == 300001275
    assert (config.ngram.num_rows, config.ngram.width, config.ngram.num_heads) == (320001536, 160, 16)


@pytest.mark.parametrize("field", sorted(set(tiny_config()["text_config"]) - UNREAD))
def test_any_missing_field_is_refused_by_name(field: str) -> None:
    config = tiny_config()
    del config["text_config"][field]
    with pytest.raises(UnsupportedCheckpoint, match=f"text_config.{field}$") as caught:
        ModelConfig.from_dict(config)
    assert caught.value.hint


@pytest.mark.parametrize("field", sorted(UNREAD))
def test_fields_without_influence_may_be_missing(field: str) -> None:
    config = tiny_config()
    del config["text_config"][field]
    assert ModelConfig.from_dict(config) == ModelConfig.from_dict(tiny_config())


def test_the_two_absent_fields_have_the_class_defaults() -> None:
    assert parse(seed=1234, norm_topk_prob=True) == parse()
    assert parse(seed=0).ngram.multipliers != parse().ngram.multipliers
    assert parse(norm_topk_prob=False).norm_topk_prob is False


@pytest.mark.parametrize("name", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_all_three_spellings_of_sparse_attention_are_accepted(name: str) -> None:
    kinds = ["linear_attention"] * 3 + [name]
    assert parse(layer_types=kinds).layer_kinds == ("gdn", "gdn", "gdn", "qsa")


def test_a_text_config_alone_is_accepted() -> None:
    config = tiny_config()
    assert ModelConfig.from_dict(config["text_config"]) == ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("value", "separator"),
    [(120, 120), ([120], 120), ([120, 126], 120), ([126, 120], 120), ([126, 125], 126)],
)
def test_the_ngram_separator_is_the_text_configs_own(value: object, separator: int) -> None:
    assert parse(eos_token_id=value).ngram_separator == separator


REFUSED = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "mamba", "linear_attention", "full_attention"],
    "hidden_act": "gelu",
    "output_gate_type": "silu",
    "mamba_ssm_dtype": "bfloat16",
    "attention_bias": True,
    "tie_word_embeddings": True,
    "mtp_use_dedicated_embeddings": True,
    "indexer_kv_heads": 2,
    "mtp_num_hidden_layers": 2,
    "ple_layer_ids": [1, 2],
    "hidden_size": 0,
    "vocab_size": "128",
    "num_experts": True,
    "rms_norm_eps": -1e-6,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "linear_num_value_heads": 7,
    "indexer_budget": 18,
    "num_experts_per_tok": 17,
    "ple_embed_dim": 385,
    "split_ngram_parts": 7,
    "eos_token_id": 128,
    "norm_topk_prob": "yes",
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp": {"layer_types": ["full_attention"], "num_hidden_layers": 1, "rope_theta": 10000},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_implemented_is_refused_with_its_value(field: str) -> None:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        parse(**{field: REFUSED[field]})
    error = caught.value
    assert error.hint
    assert "\n" not in error.message
    assert "Unsupported config: text_config." in error.message or "missing" in error.message
    if not isinstance(REFUSED[field], dict):
        assert repr(REFUSED[field]) in error.message


def test_an_unknown_model_is_refused() -> None:
    config = copy.deepcopy(tiny_config())
    config["model_type"] = "llama"
    with pytest.raises(UnsupportedCheckpoint, match="model_type = 'llama'"):
        ModelConfig.from_dict(config)


def test_an_unknown_quantisation_mode_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="'q4_k'"):
        QuantSpec("q4_k", 4, 32)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"No config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DocumentCorrupt, match="Cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DocumentCorrupt, match="not an object"):
        read_config(tmp_path)


HOSTILE = {
    "head_dim": 10**400,
    "hidden_size": 1 << 31,
    "heads_per_ngram": 1 << 20,
    "indexer_budget": 10**30,
    "layer_types": [["full_attention"], {}, None, 1],
    "make_ngram_vocab_size_divisible_by": 10**400,
    "max_position_embeddings": 1 << 63,
    "ngram_size": 1 << 30,
    "ngram_vocab_size_base": 10**30,
    "partial_rotary_factor": 1e300,
    "rms_norm_eps": 10**400,
    "seed": 1 << 64,
}


@pytest.mark.parametrize("field", HOSTILE)
def test_what_no_computer_could_hold_is_refused_by_name_in_a_short_line(field: str) -> None:
    config = tiny_config()
    rope = config["text_config"]["rope_parameters"]
    if field == "partial_rotary_factor":
        rope[field] = HOSTILE[field]
    with pytest.raises(UnsupportedCheckpoint, match=f"text_config.{field} = ") as caught:
        parse(**{field: HOSTILE[field], "rope_parameters": rope})
    assert caught.value.hint
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan")])
def test_a_base_of_the_rotation_that_is_no_finite_number_is_refused(value: float) -> None:
    rope = {**tiny_config()["text_config"]["rope_parameters"], "rope_theta": value}
    with pytest.raises(UnsupportedCheckpoint, match="rope_theta"):
        parse(rope_parameters=rope)


def test_an_mtp_layer_type_that_is_no_name_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="layer_types"):
        parse(mtp={**tiny_config()["text_config"]["mtp"], "layer_types": [[]]})


def test_sizes_that_do_not_divide_name_both_fields() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"indexer_budget = 16.*indexer_compress_ratio = 3"):
        parse(indexer_compress_ratio=3)


def test_the_rows_of_the_table_are_counted_in_whole_numbers() -> None:
    assert (
        parse(make_ngram_vocab_size_divisible_by=2**31 - 1, split_ngram_parts=1).ngram.num_rows == 2**31 - 1
    )


def test_a_config_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(DocumentCorrupt, match="Cannot read"):
        read_config(tmp_path)


def test_an_error_repeats_no_million_characters_of_a_hostile_file() -> None:
    for hostile, most in (("x " * 1_000_000, MAX_MESSAGE), (f"it is {'9' * 1_000_000} wide", 150)):
        error = UnsupportedCheckpoint(hostile, hint="y")
        assert len(str(error)) == len(error.message) <= most
        assert "..." in error.message
    assert UnsupportedCheckpoint("short").message == "short"

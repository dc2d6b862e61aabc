"""The gate: every single thing that does not fit is answered with its own code; only what fits comes in."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from typing import Any

import msgspec
import pytest

from drafter import calibration
from drafter import contract as contract_module
from drafter.calibration import Acceptance
from drafter.compat import GOLDEN_DIGEST, Verdict, check_draft, check_sidecar
from drafter.config import expected_tensors, num_parameters
from drafter.config_reader import default_taps, read_config
from drafter.facts import DraftListing, SidecarFacts, TensorFacts
from drafter.reasons import Reason, Report
from tests.parity.dflash2_goldens import META
from tests.tiny.drafts import contract, document, draft_config, listing, record, row_digest, target_facts


def verdict(changes: dict[str, Any] | None = None, *, wanted: int | None = None, **about: Any) -> Verdict:
    """Ask the gate about a draft with contract and record, some fields of its config changed."""
    given = {"contract": contract(), "record": record()} | about
    target = given.pop("target", target_facts())
    return check_draft(listing(changes, **given), target, wanted=wanted)


def codes(answer: Verdict, *consequences: str) -> set[str]:
    return {reason.code for reason in answer.reasons if reason.consequence in (consequences or ("refuse",))}


def by_code(answer: Verdict, code: str) -> list[Reason]:
    return [reason for reason in answer.reasons if reason.code == code]


def test_a_draft_that_fits_comes_in_and_is_described() -> None:
    answer = verdict()
    assert answer.refusals == ()
    assert codes(answer, "warn", "clamp") == set()
    assert (answer.contraction, answer.max_proposals) == ("mean", 7)
    assert answer.config == draft_config()
    assert answer.weight_bytes == 2 * sum(
        math.prod(shape) for shape in expected_tensors(draft_config()).values()
    )
    assert 0 < answer.context_bytes < answer.weight_bytes


def test_an_answer_is_plain_values_for_programs() -> None:
    for answer in (verdict(), verdict({"head_dim": ...})):
        told = json.loads(json.dumps(answer.as_document()))
        assert [row["code"] for row in told["reasons"]] == [reason.code for reason in answer.reasons]
        assert (told["config"] is None) == (answer.config is None)
        assert told["max_proposals"] == answer.max_proposals


def test_without_contract_and_record_the_answer_says_what_to_run() -> None:
    answer = verdict(contract=None, record=None)
    assert codes(answer) == {"G14"}
    assert answer.max_proposals == 0
    assert answer.contraction is None
    (reason,) = answer.refusals
    assert "flashnext draft calibrate" in reason.hint
    assert codes(answer, "warn") == {"G06"}


def test_either_of_them_is_enough_and_the_authors_word_alone_is_said_to_be_that() -> None:
    measured = verdict(contract=None)
    assert (codes(measured), codes(measured, "warn"), measured.contraction) == (set(), set(), "mean")
    declared = verdict(record=None)
    assert (codes(declared), codes(declared, "warn"), declared.contraction) == (set(), {"G14"}, "mean")


def leaves(value: Any, prefix: str = "") -> list[str]:
    """Return the path of every field of a document."""
    if not isinstance(value, dict):
        return [prefix]
    return [path for name in value for path in leaves(value[name], f"{prefix}.{name}".lstrip("."))]


CONFIG_FAULTS: list[tuple[str, object, str]] = [
    ("architectures", ["Qwen3ForCausalLM"], "G01"),
    ("architectures", ["Qwen3DSparkModel"], "G01"),
    ("architectures", ["LlamaForCausalLMEagle3"], "G01"),
    ("architectures", [], "G01"),
    ("architectures", ["DFlashDraftModel"], "G17"),
    ("model_type", "llama", "G01"),
    ("markov_rank", 256, "G01"),
    ("sample_from_anchor", True, "G01"),
    ("quantization", {"bits": 4}, "G01"),
    ("hidden_size", 64, "G02"),
    ("hidden_size", "32", "G02"),
    ("num_target_layers", 9, "G03"),
    ("num_target_layers", ..., "G03"),
    ("dflash_config.target_layer_ids", [1, 3, 8], "G04"),
    ("dflash_config.target_layer_ids", [-1, 3, 6], "G04"),
    ("dflash_config.target_layer_ids", [3, 1, 6], "G04"),
    ("dflash_config.target_layer_ids", [1, 1, 6], "G04"),
    ("dflash_config.target_layer_ids", [1, 3], "G04"),
    ("dflash_config.target_layer_ids", [1, 3, 5], "G04"),
    ("dflash_config.target_layer_ids", "1,3,6", "G04"),
    ("dflash_config.target_layer_ids", [1, True, 6], "G04"),
    ("vocab_size", 256, "G05"),
    ("dflash_config.mask_token_id", 128, "G07"),
    ("dflash_config.mask_token_id", -1, "G07"),
    ("dflash_config.mask_token_id", ..., "G07"),
    ("dflash_config.mask_token_id", 120, "G07"),
    ("dflash_config.mask_token_id", 119, "G07"),
    ("dflash_config.mask_token_id", 12, "G07"),
    ("num_hidden_layers", 3, "G11"),
    ("num_attention_heads", 3, "G11"),
    ("num_attention_heads", 8, "G11"),
    ("num_key_value_heads", 0, "G11"),
    ("num_key_value_heads", 4, "G11"),
    ("head_dim", 15, "G11"),
    ("head_dim", 8, "G11"),
    ("head_dim", ..., "G11"),
    ("intermediate_size", 64, "G11"),
    ("rms_norm_eps", 0, "G11"),
    ("rms_norm_eps", True, "G11"),
    ("attention_bias", True, "G11"),
    ("hidden_act", "gelu", "G11"),
    ("layer_types", ["sliding_attention", "full_attention"], "G11"),
    ("layer_types", ["sliding_attention", "chunked_attention"], "G11"),
    ("layer_types", ["sliding_attention"], "G11"),
    ("layer_types", ..., "G11"),
    ("sliding_window", 7, "G11"),
    ("sliding_window", 32, "G11"),
    ("sliding_window", ..., "G11"),
    ("use_sliding_window", False, "G12"),
    ("is_causal", True, "G13"),
    ("is_causal", ..., "G13"),
    ("is_causal", "no", "G13"),
    ("rope_parameters.rope_type", "yarn", "G15"),
    ("rope_parameters.mrope_section", [1, 2, 3], "G15"),
    ("rope_parameters.rope_theta", 5e5, "G15"),
    ("rope_parameters.rope_theta", ..., "G15"),
    ("rope_parameters", [], "G15"),
    ("rope_theta", 5e5, "G15"),
    ("rope_scaling", {"type": "linear", "factor": 2}, "G15"),
    ("partial_rotary_factor", 0.25, "G15"),
    ("max_position_embeddings", 0, "G15"),
    ("block_size", 16, "G16"),
    ("dflash_config.block_size", 1, "G16"),
    ("dflash_config.block_size", 33, "G16"),
    ("dflash_config.block_size", 9, "G16"),
    ("dflash_config.conv_kernel_size", 9, "G17"),
    ("dflash_config.conv_kernel_size", 3, "G17"),
    ("dflash_config.conv_kernel_size", ..., "G17"),
    ("dflash_config.conv_group_size", 5, "G17"),
    ("dflash_config.conv_group_size", 8, "G17"),
    ("dflash_config.selector_rank", 0, "G17"),
    ("dflash_config.selector_rank", 4, "G17"),
    ("dflash_config.selector_top_k", 129, "G17"),
    ("dflash_config.selector_top_k", 4, "G17"),
    ("dflash_config.selector_vocab_size", 4, "G17"),
    ("dflash_config.sample_slots", 4, "G17"),
    ("dflash_config", 7, "G17"),
    ("dflash_config.output_multiplier", "1", "G18"),
    ("dflash_config.final_logit_softcapping", -1, "G18"),
    ("dflash_config.input_embedding_scale", [], "G18"),
]


@pytest.mark.parametrize(("field", "value", "code"), CONFIG_FAULTS)
def test_one_changed_field_of_the_config_is_refused_by_its_code(field: str, value: object, code: str) -> None:
    answer = verdict({field: value})
    assert code in codes(answer)
    assert answer.max_proposals == 0


def test_every_field_of_the_config_is_among_the_faults() -> None:
    tried = {field.split(".")[0] for field, _, _ in CONFIG_FAULTS}
    nested = {field.split(".")[1] for field, _, _ in CONFIG_FAULTS if field.startswith("dflash_config.")}
    good = document()
    assert set(good) <= tried
    assert set(good["dflash_config"]) <= nested


def test_what_the_config_leaves_open_is_said() -> None:
    assert codes(verdict({"use_sliding_window": ...}), "warn") == {"G12"}
    neutral = by_code(verdict({"dflash_config.output_multiplier": 0.5}), "G18")
    assert [reason.consequence for reason in neutral] == ["info"]
    assert "0.5" in neutral[0].message
    assert "sliding/non-causal x2" in by_code(verdict(), "G13")[0].message
    unused = by_code(verdict(), "G07")
    assert [reason.consequence for reason in unused] == ["info"]
    assert codes(verdict(target=target_facts(context_tokens=5000)), "warn") == {"G15"}


def _tensors() -> dict[str, TensorFacts]:
    return {name: TensorFacts("BF16", shape) for name, shape in expected_tensors(draft_config()).items()}


@pytest.mark.parametrize("name", list(_tensors()))
def test_any_tensor_missing_misshapen_or_packed_is_refused_by_name(name: str) -> None:
    """P41, defect 30."""
    good = _tensors()
    wide = TensorFacts("BF16", (good[name].shape[0] + 1, *good[name].shape[1:]))
    for change in (None, wide, TensorFacts("U32", good[name].shape), TensorFacts("I64", good[name].shape)):
        tensors = dict(good)
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change
        answer = verdict(tensors=tensors)
        assert "G10" in codes(answer)
        assert any(name in reason.message for reason in by_code(answer, "G10"))


def test_a_tensor_too_many_is_refused_and_codebooks_have_one_alias() -> None:
    assert codes(verdict(tensors=_tensors() | {"lm_head.weight": TensorFacts("BF16", (128, 32))})) == {"G10"}
    book = "candidate_selector.predecessor_codebook"
    renamed = _tensors()
    renamed[f"{book}.weight"] = renamed.pop(book)
    assert codes(verdict(tensors=renamed)) == set()
    both = _tensors()
    both[f"{book}.weight"] = both[book]
    assert codes(verdict(tensors=both)) == {"G10"}
    short = _tensors() | {book: TensorFacts("BF16", (127, 8))}
    assert codes(verdict(tensors=short)) == {"G05", "G10"}


# Every field of a contract, with a value that is not so, and the code that answers.
CONTRACT_FAULTS: dict[str, tuple[object, str]] = {
    "format": ("flashnext-chat", "G00"),
    "version": (2, "G00"),
    "draft.architecture": ("DFlashDraftModel", "G01"),
    "draft.digest": ("e" * 64, "G10"),
    "draft.licence": ("mit", "G23"),
    "target.name": ("another", "G19"),
    "target.revision": ("r2", "G19"),
    "target.digest": ("u" * 64, "G19"),
    "target.quantisation": ("4 bits", "G19"),
    "target.num_layers": (9, "G03"),
    "target.hidden_size": (64, "G02"),
    "target.num_streams": (1, "G14"),
    "tokenizer.revision": ("r2", "G06"),
    "tokenizer.digest": ("l" * 64, "G06"),
    "tokenizer.vocab_size": (256, "G05"),
    "tokenizer.num_ids": (125, "G05"),
    "tokenizer.stop_ids": ([120], "G09"),
    "tokenizer.pad_id": (None, "G07"),
    "tokenizer.mask_token_id": (124, "G07"),
    "tokenizer.mask_row_digest": ("m" * 64, "G08"),
    "features.taps": ([0, 2, 5], "G04"),
    "features.contraction": ("final_mix", "G14"),
    "features.stage": ("layer_input", "G14"),
    "dimensions.num_layers": (3, "G11"),
    "dimensions.num_heads": (8, "G11"),
    "dimensions.num_kv_heads": (1, "G11"),
    "dimensions.head_dim": (32, "G11"),
    "dimensions.intermediate_size": (96, "G11"),
    "dimensions.conv_kernel": (3, "G17"),
    "dimensions.conv_group": (8, "G17"),
    "dimensions.rank": (16, "G17"),
    "attention.layer_types": (["full_attention", "sliding_attention"], "G11"),
    "attention.is_causal": ([True, False], "G13"),
    "attention.window": (None, "G11"),
    "attention.rope_theta": (1e7, "G15"),
    "attention.positions": ("multi_axis", "G15"),
    "proposal.block_size": (16, "G16"),
    "proposal.max_proposals": (8, "G16"),
    "proposal.candidates": (16, "G17"),
    "proposal.probabilities": ("point", "G17"),
    "proposal.rules": (["sampled"], "G17"),
    "cache.owner": ("target", "G00"),
    "cache.rows": ("block_too", "G00"),
    "cache.rollback": ("trim", "G00"),
}
OF_ANOTHER_BUILD = {"target.name", "target.revision"}
WARNED = {
    "draft.licence",
    "target.name",
    "target.revision",
    "target.digest",
    "target.quantisation",
    "tokenizer.revision",
    "tokenizer.stop_ids",
    "tokenizer.pad_id",
    "tokenizer.mask_row_digest",
}


def changed(value: Any, path: str, new: object) -> Any:
    result = copy.deepcopy(value)
    *outer, name = path.split(".")
    place = result
    for part in outer:
        place = place[part]
    place[name] = new
    return result


CONTRACT = msgspec.to_builtins(contract())


def test_the_faults_cover_every_field_of_a_contract() -> None:
    assert sorted(CONTRACT_FAULTS) == sorted(leaves(CONTRACT))


@pytest.mark.parametrize("path", CONTRACT_FAULTS)
def test_one_changed_field_of_the_contract_is_answered_by_its_code(path: str) -> None:
    value, code = CONTRACT_FAULTS[path]
    said = changed(CONTRACT, path, value)
    if path in OF_ANOTHER_BUILD:  # of the same build another name says nothing: it was copied, or packed
        assert (codes(verdict(contract=said)), codes(verdict(contract=said), "warn")) == (set(), set())
        said = changed(said, "target.digest", "u" * 64)
        assert f"contract.{path}" in {reason.compared for reason in verdict(contract=said).reasons}
    answer = verdict(contract=said)
    if path in WARNED:
        assert (codes(answer), codes(answer, "warn")) == (set(), {code})
        return
    assert code in codes(answer)


@pytest.mark.parametrize("path", CONTRACT_FAULTS)
def test_a_field_of_another_type_or_a_missing_one_makes_no_contract(path: str) -> None:
    of_another_type = changed(CONTRACT, path, {"a": 1})
    missing = copy.deepcopy(CONTRACT)
    *outer, name = path.split(".")
    place = missing
    for part in outer:
        place = place[part]
    del place[name]
    for broken in (of_another_type, missing, CONTRACT | {"surprise": 1}):
        assert "G00" in codes(verdict(contract=broken))


RECORD = msgspec.to_builtins(record())
TRIALS = RECORD["trials"]
RECORD_FAULTS: list[tuple[str, object, str, str]] = [
    ("format", "flashnext-draft-contract", "G00", "refuse"),
    ("version", 2, "G00", "refuse"),
    ("date", "yesterday", "G00", "refuse"),
    ("runtime_version", "0.2.0", "G19", "warn"),
    ("draft_digest", "e" * 64, "G14", "refuse"),
    ("target_digest", "u" * 64, "G19", "warn"),
    ("tokenizer_digest", "l" * 64, "G06", "refuse"),
    ("mask_row_digest", "m" * 64, "G08", "warn"),
    ("taps", [0, 2, 5], "G04", "refuse"),
    ("contraction", "final_mix", "G14", "refuse"),
    ("contraction", "streams4", "G14", "refuse"),
    ("num_tokens", 3999, "G14", "refuse"),
    ("num_tokens", -1, "G00", "refuse"),
    ("trials", [], "G14", "refuse"),
    ("trials", TRIALS[:1], "G14", "refuse"),
    ("trials", [t for t in TRIALS if t["tap_shift"] != 1], "G14", "refuse"),
    ("trials", [t for t in TRIALS if t["contraction"] in ("mean", "sum")], "G14", "refuse"),
    ("trials", [{**t, "agreement": t["agreement"][:6]} for t in TRIALS], "G14", "refuse"),
    ("trials", [{**t, "agreement": [0.7] * 7} for t in TRIALS], "G14", "refuse"),
    ("trials", [{**t, "agreement": [a * 0.7 for a in t["agreement"]]} for t in TRIALS], "G14", "refuse"),
    ("trials", [{**t, "agreement": [1.1] * 7} for t in TRIALS], "G00", "refuse"),
    ("acceptance", {"prompt_set": "p", "tokens_per_cycle": 0.5}, "G00", "refuse"),
]


@pytest.mark.parametrize(("path", "value", "code", "consequence"), RECORD_FAULTS)
def test_one_changed_field_of_the_record_is_answered(
    path: str, value: object, code: str, consequence: str
) -> None:
    assert code in codes(verdict(record=RECORD | {path: value}), consequence)


def test_the_faults_cover_every_field_of_a_record() -> None:
    assert {path for path, *_ in RECORD_FAULTS} == set(RECORD)


def test_a_record_of_another_build_is_none_and_lowers_k_where_the_author_declared() -> None:
    other = record(target_digest="u" * 64)
    assert codes(verdict(contract=None, record=other)) == {"G14"}
    declared = verdict(record=other)
    assert declared.refusals == ()
    assert declared.max_proposals == 3
    assert codes(declared, "clamp") == {"G19"}


def test_mean_and_sum_are_one_and_shifts_beyond_the_layers_are_not_asked_for() -> None:
    assert codes(verdict(contract=None, record=record(contraction="sum"))) == {
        "G14"
    }  # not one of the target's
    target = target_facts(contractions=("mean", "sum"))
    assert codes(verdict(contract=None, record=record(contraction="sum"), target=target)) == set()


def test_acceptance_and_date_are_shown() -> None:
    shown = verdict(record=record(acceptance=Acceptance("held-out-60", 3.2))).reasons
    assert any("2026-11-29" in r.message and "3.2 a cycle on held-out-60" in r.message for r in shown)


TARGET_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden_size": 64}, "G02", "refuse"),
    ({"num_layers": 9}, "G03", "refuse"),
    ({"num_layers": 6}, "G04", "refuse"),
    ({"vocab_size": 256}, "G05", "refuse"),
    ({"num_ids": 126}, "G05", "refuse"),
    ({"tokenizer_digest": "l" * 64}, "G06", "refuse"),
    ({"stop_ids": (120, 121, 125)}, "G07", "refuse"),
    ({"row_digest": lambda token: "x" * 64}, "G08", "warn"),
    ({"stop_ids": (120,)}, "G09", "warn"),
    ({"contractions": ("final_mix",)}, "G14", "refuse"),
    ({"num_streams": 1}, "G14", "refuse"),
    ({"digest": "u" * 64}, "G19", "warn"),
    ({"quantisation": "4 bits"}, "G19", "warn"),
    ({"memory_left": 1000}, "G24", "refuse"),
    ({"is_release": True}, "G21", "refuse"),
    ({"is_release": True, "parity_digest": "0" * 64}, "G21", "refuse"),
]


@pytest.mark.parametrize(("changes", "code", "consequence"), TARGET_FAULTS)
def test_another_target_is_answered(changes: dict[str, Any], code: str, consequence: str) -> None:
    assert code in codes(verdict(target=target_facts(**changes)), consequence)


def test_a_release_that_passed_the_goldens_comes_in() -> None:
    assert verdict(target=target_facts(is_release=True, parity_digest=GOLDEN_DIGEST)).refusals == ()


def test_the_golden_digest_is_that_of_the_committed_goldens() -> None:
    digest = hashlib.sha256()
    for name in sorted(META["sha256"]):
        digest.update(f"{name}\0{META['sha256'][name]}\n".encode())
    assert digest.hexdigest() == GOLDEN_DIGEST


def test_memory_is_refused_with_both_numbers_and_fits_to_the_byte() -> None:
    whole = verdict()
    need = whole.weight_bytes + whole.context_bytes
    assert verdict(target=target_facts(memory_left=need)).refusals == ()
    short = verdict(target=target_facts(memory_left=need - 1))
    assert codes(short) == {"G24"}
    large = verdict(target=target_facts(memory_left=2**28, context_tokens=10, itemsize=2**18))
    (reason,) = by_code(large, "G24")
    assert reason.message.endswith("0.25 GiB left before experts")


def test_the_next_mix_is_undefined_after_the_last_layer() -> None:
    for last, expected in ((6, set()), (7, {"G14"})):
        taps = [1, 3, last]
        mixed = record(contraction="next_attn_mix", taps=taps, trials=_won_by("next_attn_mix"))
        answer = verdict({"dflash_config.target_layer_ids": taps}, contract=None, record=mixed)
        assert codes(answer) == expected


def _won_by(name: str) -> list[Any]:
    other = {"mean": name, "sum": name, name: "mean"}
    return [
        msgspec.structs.replace(trial, contraction=other.get(trial.contraction, trial.contraction))
        for trial in record().trials
    ]


def test_more_proposals_than_the_block_has_are_clamped_and_said() -> None:
    answer = verdict(wanted=9)
    assert (answer.max_proposals, codes(answer, "clamp")) == (7, {"G16"})
    assert verdict(wanted=3).max_proposals == 3


@pytest.mark.parametrize(
    ("licence", "consequence", "words"),
    [
        ("apache-2.0", "info", "apache-2.0"),
        ("cc-by-nc-nd-4.0", "warn", "no commercial use"),
        ("CC BY-NC-ND 4.0", "warn", "no commercial use"),
        ("Open Model License", "warn", "Open Model License"),
    ],
)
def test_the_licence_is_said_once(licence: str, consequence: str, words: str) -> None:
    own = msgspec.structs.replace(
        contract(), draft=msgspec.structs.replace(contract().draft, licence=licence)
    )
    (reason,) = by_code(verdict(contract=own, licence=licence), "G23")
    assert reason.consequence == consequence
    assert words in reason.message


def test_a_draft_without_licence_says_so() -> None:
    answer = verdict(contract=None, licence=None)
    assert [r.message for r in by_code(answer, "G23")] == ["the draft states no licence"]


def test_a_sidecar_that_does_not_fit_loses_its_hints_and_the_draft_stays() -> None:
    target = target_facts(router_digest="q" * 64, num_experts=8)
    good = SidecarFacts("q" * 64, "d" * 64, 8, 8)
    assert check_sidecar(good, "d" * 64, target).reasons == ()
    for change in (
        ("p" * 64, "d" * 64, 8, 8),
        ("q" * 64, "e" * 64, 8, 8),
        ("q" * 64, "d" * 64, 9, 8),
        ("q" * 64, "d" * 64, 8, 16),
    ):
        answer = check_sidecar(SidecarFacts(*change), "d" * 64, target)
        assert codes(answer, "refuse hints") == {"G20"}
        assert answer.refusals == ()


NOT_JSON = [
    b"",
    b"[]",
    b"\xff{}",
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b'{"a": 1, "a": 2}',
    b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 10_000 + b"}",
    b" " * (1 << 20) + b"{}",
]


@pytest.mark.parametrize("data", NOT_JSON, ids=range(len(NOT_JSON)))
def test_hostile_documents_are_refused_by_name(data: bytes) -> None:
    for name in ("config", "contract", "calibration"):
        hostile = dataclasses.replace(listing(contract=contract(), record=record()), **{name: data})
        answer = check_draft(hostile, target_facts())
        assert "G00" in codes(answer)
        assert all(len(r.message) < 1000 and r.message.isprintable() for r in answer.reasons)


HOSTILE = [None, True, -1, 0, 7, 2**70, 1e308, "", "7", [], [[]], [None], {}, {"a": []}, "x" * 10_000]


@pytest.mark.parametrize("field", [*leaves(document()), "dflash_config", "rope_parameters", "surprise"])
def test_no_value_of_a_field_is_more_than_a_reason(field: str) -> None:
    """Nothing raises; what is let in is the draft that the contract tells of."""
    for value in HOSTILE:
        answer = verdict({field: value})
        assert all(len(reason.message) < 1000 for reason in answer.reasons)
        if answer.refusals:
            assert answer.max_proposals == 0
            continue
        assert answer.config is not None
        kept = dataclasses.replace(answer.config, max_positions=4096, rms_norm_eps=1e-6)
        assert kept == draft_config(), (field, value)


def test_a_hostile_value_is_shown_short_and_on_one_line() -> None:
    answer = verdict({"architectures": ["x\n\x1b[31m" + "y" * 100_000]})
    (reason,) = by_code(answer, "G01")
    assert len(reason.message) < 1000
    assert reason.message.isprintable()
    assert json.dumps(reason.as_row())


PUBLIC = json.loads((pathlib.Path(__file__).parent / "public_drafts.json").read_text())
FLASH_NEXT = target_facts(
    num_layers=48, hidden_size=2560, vocab_size=248320, num_ids=248077, stop_ids=(248046, 248044), pad_id=None
)


@pytest.mark.parametrize("draft", PUBLIC, ids=lambda draft: draft["name"])
def test_public_drafts_are_answered_with_the_whole_list(draft: dict[str, Any]) -> None:
    answer = check_draft(public_listing(draft), FLASH_NEXT)
    assert sorted(codes(answer)) == draft["refused"]
    assert answer.max_proposals == 0


def test_sizes_of_public_drafts_are_those_that_were_published() -> None:
    counted = 0
    for draft in (draft for draft in PUBLIC if draft["config"] is not None):
        config = answer_config(json.dumps(draft["config"]).encode())
        if config is not None and draft["parameters"] is not None:
            shapes = expected_tensors(config)
            assert sum(map(math.prod, shapes.values())) == num_parameters(config) == draft["parameters"]
            assert len(shapes) == draft["tensors"]
            counted += 1
    assert counted == 3


FOR_THIS_TARGET = [draft for draft in PUBLIC if draft["refused"] == ["G14"]]


def test_two_public_drafts_want_nothing_but_a_calibration() -> None:
    assert [draft["name"].partition(" ")[0] for draft in FOR_THIS_TARGET] == [
        "Qwen3.8-Flash-Next",
        "Qwen3.8-Flash-Next-DFlash2",
    ]
    for draft in FOR_THIS_TARGET:
        (reason,) = check_draft(public_listing(draft), FLASH_NEXT).refusals
        assert "flashnext draft calibrate" in reason.hint


@pytest.mark.parametrize("draft", FOR_THIS_TARGET, ids=lambda draft: draft["name"])
def test_a_public_draft_for_this_target_comes_in_once_it_is_calibrated(draft: dict[str, Any]) -> None:
    taps = draft["config"]["dflash_config"]["target_layer_ids"]
    most = draft["config"]["dflash_config"]["block_size"] - 1
    trials = [
        msgspec.structs.replace(trial, agreement=(trial.agreement * 3)[:most])
        for trial in _won_by("final_mix")
    ]
    settled = record(contraction="final_mix", taps=taps, trials=trials, mask_row_digest=row_digest(248077))
    calibrated = dataclasses.replace(public_listing(draft), calibration=msgspec.json.encode(settled))
    answer = check_draft(calibrated, FLASH_NEXT)
    assert answer.refusals == ()
    assert (answer.contraction, answer.max_proposals) == ("final_mix", most)
    elsewhere = dataclasses.replace(FLASH_NEXT, digest="u" * 64)
    assert codes(check_draft(calibrated, elsewhere)) == {"G14"}, "a record of another build is none"


def test_taps_that_are_not_listed_follow_the_rule_of_the_source() -> None:
    assert default_taps(48, 5) == (1, 12, 23, 34, 45)
    assert default_taps(64, 5) == (1, 16, 31, 46, 61)
    assert default_taps(32, 5) == (1, 8, 15, 22, 29)
    assert default_taps(48, 1) == (24,)


def public_listing(draft: dict[str, Any]) -> DraftListing:
    if draft["config"] is None:  # a place without files, or names without configurations
        return DraftListing(b"", None, None, {}, "d" * 64, draft["licence"])
    raw = json.dumps(draft["config"]).encode()
    return DraftListing(raw, None, None, draft_tensors(answer_config(raw)), "d" * 64, draft["licence"])


def answer_config(raw: bytes) -> Any:
    return read_config(json.loads(raw), Report())


def draft_tensors(config: Any) -> dict[str, TensorFacts]:
    if config is None:
        return {}
    return {name: TensorFacts("BF16", shape) for name, shape in expected_tensors(config).items()}


ROOT = pathlib.Path(__file__).parents[3]
FORMATS = (ROOT / "docs/FORMATS.md").read_text()


@pytest.mark.parametrize(("module", "example"), [(contract_module, CONTRACT), (calibration, RECORD)])
def test_the_formats_page_lists_every_field(module: Any, example: dict[str, Any]) -> None:
    heading = f"## {module.FORMAT}, version {module.VERSION} "
    assert heading in FORMATS
    section = FORMATS.split(heading)[1].split("\n## ")[0]
    assert module.FILE in section
    named = set(re.findall(r"`([a-z_]+)`", section))
    fields = {part for path in leaves(example) for part in path.split(".")}
    fields |= set(TRIALS[0]) | {"prompt_set", "tokens_per_cycle"} if module is calibration else set()
    assert fields - named == set()


def test_the_formats_page_lists_every_code() -> None:
    rows = re.findall(r"^\| (G\d\d) \|", FORMATS, flags=re.MULTILINE)
    assert rows == [f"G{number:02}" for number in range(25)]


def test_every_test_that_the_table_of_defects_names_exists() -> None:
    section = (ROOT / "docs/SPECULATION.md").read_text().split("## DFlash and DFlash2 drafts")[1]
    section = section.split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", section)
    assert len(named) > 20
    for file, name in named:
        (path,) = [*ROOT.glob(file)] or [*(ROOT / "tests").rglob(file)]
        assert f"def {name}(" in path.read_text(), (file, name)
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)}
    assert rows == set(range(1, 43))

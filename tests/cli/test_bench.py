"""`flashnext bench` on a tiny checkpoint: every form says the same, and says under what conditions."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.bench_options import Share, counts, parse_duration, parse_rate, shares
from cli.engine_factory import Services
from cli.errors import UsageProblem
from cli.tree import app
from tests.tiny.checkpoints import build_mlx

SMALL = ("-p", "6", "-n", "3", "-r", "2", "--slots", "5", "--seed", "4")
# What METRICS.md asks every report to state, the commit left out: an installed program has none.
STATED = {
    "model_digest", "quantisation", "budget_bytes", "slots_per_layer", "num_experts", "page_cache",
    "page_cache_how", "prompt_set", "sampling", "machine", "backend", "kernels", "mlx", "flashnext", "disk",
    "hints", "draft", "record_bytes", "samples", "n_prompt", "n_gen", "n_depth",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("bench") / "model")


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def test_json_states_everything_that_a_figure_needs(model):
    result = flashnext("bench", "--model", model, *SMALL, "-d", "0,4", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["test"] for row in rows] == ["pp6", "pp6 @ d4", "tg3", "tg3 @ d4"]
    for row in rows:
        assert row.keys() >= STATED
        assert row["format"] == "flashnext-bench"
        assert len(row["samples"]) == 2
        tokens = {sample["num_tokens"] for sample in row["samples"]}
        assert tokens == {row["n_prompt"] + row["n_gen"]}, "prefill and decode are never mixed in one number"
        assert row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]


def test_the_forms_agree(model):
    lines = flashnext("bench", "--model", model, *SMALL, "-o", "jsonl").stdout.splitlines()
    documents = [json.loads(line) for line in lines]
    table = list(
        csv.DictReader(io.StringIO(flashnext("bench", "--model", model, *SMALL, "-o", "csv").stdout))
    )
    shown = flashnext("bench", "--model", model, *SMALL).stdout
    assert [document["test"] for document in documents] == [row["test"] for row in table] == ["pp6", "tg3"]
    assert {row["model_digest"] for row in table} == {documents[0]["model_digest"]}
    assert shown.splitlines()[1].startswith("|---")
    assert "5 of 16" in shown
    assert documents[0]["model_digest"][:16] in shown


def test_no_prompt_comes_twice_whatever_the_seed(model):
    """P56: a benchmark that repeats its prompt measures a cache."""
    rows = json.loads(flashnext("bench", "--model", model, *SMALL, "--json").stdout)
    salts = [sample["salt"] for sample in rows[0]["samples"]]
    assert len(set(salts)) == len(salts)
    again = json.loads(flashnext("bench", "--model", model, *SMALL[:-2], "--json").stdout)
    assert not set(salts) & {sample["salt"] for sample in again[0]["samples"]}


def test_a_throttled_row_says_that_its_disk_is_simulated(model):
    words = ("--throttle", "100MB/s", "--latency", "0.1ms")
    rows = json.loads(flashnext("bench", "--model", model, *SMALL, *words, "--json").stdout)
    assert {row["disk"] for row in rows} == {"simulated disk: 0.1 GB/s, 0.1 ms more a read"}
    shown = flashnext("bench", "--model", model, *SMALL, *words).stdout.splitlines()
    assert all("as-is, simulated disk" in line for line in shown[2:4])
    assert "simulated" not in "".join(flashnext("bench", "--model", model, *SMALL).stdout)


def test_a_cold_page_cache_is_made_and_stated(model):
    rows = json.loads(flashnext("bench", "--model", model, *SMALL, "--page-cache", "cold", "--json").stdout)
    assert {row["page_cache"] for row in rows} == {"cold"}
    assert all("before every repetition" in row["page_cache_how"] for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-p", "0", "-n", "0"), "Nothing to measure"),
        (("-p", "six"), "--n-prompt: not a whole number"),
        (("-p", "-1"), "--n-prompt: must be positive"),
        (("--throttle", "0"), "a size must be positive"),
        (("--throttle", "fast"), "not a size"),
        (("--latency", "2"), "not a duration"),
        (("-p", "1,2", "-o", "xml"), "Invalid value"),
        (("-n", ",".join(["1"] * 65)), "at most 64 values"),
    ],
)
def test_senseless_flags_are_refused_before_anything_is_loaded(model, words, message):
    result = flashnext("bench", "--model", model, *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_two_forms_at_once_are_refused_as_a_document(model):
    result = flashnext("bench", "--model", model, "--json", "-o", "csv")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"].startswith("Two forms of output")


def test_what_people_type_is_read():
    assert parse_rate("3GB/s") == 3_000_000_000
    assert parse_rate("512MiB") == 512 << 20
    assert parse_duration("0.2ms") == pytest.approx(0.0002)
    assert counts("-p", "0, 128,4k") == [0, 128, 4096]
    assert shares("--budgets", "25%,24") == [Share("25%", percent=25.0), Share("24", slots=24)]
    assert [share.slots_of(64, 4) for share in shares("--budgets", "25%,1%,100%,24")] == [16, 4, 64, 24]
    with pytest.raises(UsageProblem):
        shares("--budgets", "120%")

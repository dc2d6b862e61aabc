"""`flashnext bench --report ssd-wait` on a tiny checkpoint: its figures fit together."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from mlx_flashnext.engine import ssd_wait_run
from mlx_flashnext.engine.ssd_wait_run import DifferentText, Recorded
from tests.tiny.checkpoints import build_mlx

HINTS = ("off", "oracle")
SMALL = ("--report", "ssd-wait", "-r", "1", "-n", "4", "--prompts", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("wait") / "model")


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


@pytest.fixture(scope="module")
def document(model: Path) -> dict:
    words = ("--budgets", "50%", "--hints", ",".join(HINTS), "--drafts", "none,oracle:2", "--json")
    result = flashnext("bench", "--model", model, *SMALL, *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def named(document: dict, slots: int, draft: str, hints: str) -> dict:
    return next(
        one
        for one in document["variants"]
        if (one["variant"]["slots"], one["variant"]["draft"], one["variant"]["hints"])
        == (slots, draft, hints)
    )


def test_there_is_a_row_for_every_budget_drafter_and_source_of_hints(document):
    assert document["format"] == "flashnext-ssd-wait"
    assert len(document["variants"]) == 2 * len(HINTS)
    assert document["conditions"]["page_cache"] == "cold"
    assert document["disk"]["num_readers"] == document["conditions"]["num_readers"]


def test_every_row_fits_together(document):
    for one in document["variants"]:
        waits = one["waits"]
        assert one["exposed_wait_ns"] == pytest.approx(sum(waits.values()))
        assert sum(one["layer_waits"].values()) <= one["exposed_wait_ns"] + 1
        assert one["token_ns_range"][0] <= one["token_ns"] <= one["token_ns_range"][1]
        bound = max(one["bounds"]["compute_ns"], one["storage_ns"])
        assert one["attainment"] == pytest.approx(bound / one["token_ns"])
        assert one["storage_ns"] == pytest.approx(
            one["required_bytes"] / document["disk"]["bytes_per_s"] * 1e9
        )
        if one["variant"]["hints"] == "off":
            assert one["predicted_bytes"] == one["prefetched_recall"] == 0
            assert one["physical_bytes"] == one["exact_bytes"] == one["required_bytes"]
            assert one["hit_rate"] <= one["bounds"]["belady_hit_rate"]
        else:
            assert 0 <= one["resident_recall"] + one["prefetched_recall"] <= 1
            assert one["rejected_bytes"] <= one["predicted_bytes"]


def test_right_hints_bring_more_in_time_than_none(document):
    oracle = named(document, 8, "none", "oracle")
    assert oracle["prefetched_recall"] > 0
    timely = {
        hints: (one := named(document, 8, "none", hints))["resident_recall"] + one["prefetched_recall"]
        for hints in HINTS
    }
    assert timely["oracle"] > timely["off"]


def test_verified_blocks_commit_more_than_one_token_a_cycle(document):
    assert named(document, 8, "oracle", "off")["acceptance_length"] == 2
    assert named(document, 8, "none", "off")["acceptance_length"] == 1


def test_people_see_the_same_of_any_budget_and_disk(model):
    words = ("--budgets", "50%,100%", "--throttle", "50MB/s", "--latency", "0.1ms", "--hints", "oracle-draft")
    result = flashnext("bench", "--model", model, *SMALL, *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("simulated disk: 0.05 GB/s, 0.1 ms more a read")
    for heading in ("exposed wait of a token by cause", "storage bound: records of", "Belady: 8 experts"):
        assert heading in result.stdout


def test_figures_of_another_text_are_refused(model, monkeypatch):
    """A hint or draft that changed an answer would make the work different, and the figure worthless."""
    honest = ssd_wait_run._record

    def altered(*rest) -> Recorded:
        one = honest(*rest)
        return Recorded(one.prompt, (*one.tokens[:-1], one.tokens[-1] ^ 1), one.routes)

    monkeypatch.setattr(ssd_wait_run, "_record", altered)
    result = flashnext("bench", "--model", model, *SMALL, "--budgets", "50%")
    assert result.exit_code == 1
    assert DifferentText.__name__ in result.stderr


def test_the_gain_of_a_warm_start_is_shown(model):
    words = ("--report", "warm-start", "-r", "1", "-n", "3", "--slots", "9")
    document = json.loads(flashnext("bench", "--model", model, *words, "--json").stdout)
    assert [one["way"] for one in document] == ["cold", "at once", "warmed"]
    assert [one["num_hints"] > 0 for one in document] == [False, True, True]
    shown = flashnext("bench", "--model", model, *words)
    assert shown.exit_code == 0, shown.output
    assert "against cold" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hints", "near"), "--hints does not know: near"),
        (("--drafts", "dflash"), "--drafts does not know: dflash"),
        (("--budgets", "0%"), "not a share of the experts"),
        (("-n", "4,8"), "A report takes one length"),
        (("-o", "csv"), "A report is a document or a page"),
        (("--throttle", "0GB/s"), "a size must be positive"),
    ],
)
def test_senseless_reports_are_refused(model, words, message):
    result = flashnext("bench", "--model", model, *SMALL, *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_only_a_report_can_replay(model):
    result = flashnext("bench", "--model", model, "-n", "4", "--hints", "oracle")
    assert result.exit_code == 2
    assert "--report ssd-wait" in result.stderr

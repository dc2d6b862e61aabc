"""`flashnext bench --report ssd-wait` on a tiny checkpoint: its figures fit together."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.ssd_wait_output import hidden_text
from cli.tree import app
from expert_store.books import Ledger
from expert_store.stats import Fate
from mlx_flashnext.reports import ssd_wait_run
from mlx_flashnext.reports.ssd_wait_run import DifferentText, Recorded
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
        layers = one["layers"].values()
        assert sum(layer["exposed_wait_ns"] for layer in layers) + waits["ngram"] == pytest.approx(
            one["exposed_wait_ns"]
        )
        for cause in ("cold", "evicted", "late_hint", "other", "queueing"):
            assert sum(layer[cause] for layer in layers) == pytest.approx(waits[cause])
        assert one["exposed_wait_per_cycle_ns"] == pytest.approx(
            one["exposed_wait_ns"] * one["acceptance_length"]
        )
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


def test_every_tickets_fate_is_in_the_report_in_records_and_bytes(document):
    for one in document["variants"]:
        classes, unused = one["books"]["classes"], one["books"]["unused"]
        assert classes.keys() == {"exact", "near", "speculative"}
        for unit in ("num", "num_bytes"):
            ended = sum(fate[unit] for kind in classes.values() for fate in kind["fates"].values())
            issued = sum(kind["issued"][unit] for kind in classes.values())
            assert issued == ended + unused[unit] > 0
        assert one["books_add_up"]
        tokens = one["output_tokens"] * one["repetitions"]
        predicted = sum(classes[kind]["issued"]["num_bytes"] for kind in ("near", "speculative"))
        assert one["predicted_bytes"] == pytest.approx(predicted / tokens)
        assert one["exact_bytes"] == pytest.approx(classes["exact"]["issued"]["num_bytes"] / tokens)
        assert one["physical_bytes"] >= one["speculative_bytes"] >= 0


def test_every_field_is_in_the_table_of_formats(document):
    text = (Path(__file__).parents[2] / "docs" / "FORMATS.md").read_text("utf-8")
    section = text[text.index("## flashnext-ssd-wait") :]
    section = section[: section.index("\n## ")]
    named = set(re.findall(r"`\.?([a-z_]+)`", section))
    variant = document["variants"][0]
    short = {"token_ns_range", "token_ns_quantiles", "queue_depth_max"}  # written as `_range` and the like
    assert (document.keys() | variant.keys()) - short <= named
    assert variant["layers"]["0"].keys() <= named
    assert variant["waits"].keys() | variant["bounds"].keys() <= named


def test_an_oracle_is_right_and_sure_of_it(document):
    for draft in ("none", "oracle"):
        oracle, off = (named(document, 8, draft, hints) for hints in ("oracle", "off"))
        assert (off["recall"], off["calibration_error"], off["num_hints"]) == (None, None, 0)
        assert oracle["recall"] > 0.9
        assert oracle["calibration_error"] < 0.1
        assert oracle["precision"] == pytest.approx(oracle["useful_prefetch_ratio"])


def test_a_block_says_how_many_experts_it_needs_and_what_was_accepted_where(document):
    plain, drafted = (named(document, 8, draft, "off") for draft in ("none", "oracle"))
    assert plain["unique_experts"] == plain["break_even_experts"] == 4
    assert plain["per_position_acceptance"] == []
    assert 4 < drafted["unique_experts"] <= 12
    assert drafted["per_position_acceptance"][0] == 1
    assert drafted["break_even_experts"] == pytest.approx(4 * drafted["acceptance_length"])


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
    titles = [
        line for line in result.stdout.splitlines() if line.startswith(("time of", "bytes of", "reads:"))
    ]
    assert len(titles) == 4
    assert all(line.endswith(" (simulated disk)") for line in titles)
    assert "has exactly one fate" in result.stdout


def test_no_table_is_wider_than_a_small_terminal(model):
    words = ("--budgets", "50%", "--drafts", "none,oracle:2", "--hints", "off,oracle-draft")
    words += ("--throttle", "500MB/s")
    result = flashnext("bench", "--model", model, *SMALL, *words)
    assert result.exit_code == 0, result.output
    tables = result.stdout[
        result.stdout.index("time of") : result.stdout.index("exposed wait of a token, the layers")
    ]
    assert max(map(len, tables.splitlines())) <= 80
    assert "8 experts a layer, draft oracle 2" in tables
    assert "break even" in tables


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (1.0, "100%"), (0.0, "0%"), (-0.06, "no 1.1x"), (-15.33, "no 16x"), (-998.7, "no 1000x")],
)
def test_waits_longer_than_reading_are_no_negative_share(value, text):
    assert hidden_text(value) == text


def test_books_that_do_not_add_up_make_the_figures_void(model, monkeypatch):
    """A ticket that loses its fate."""
    close = Ledger.close

    def forgetful(self, read, fate):
        close(self, read, fate)
        self.classes[read.issued_class].fate_nums[fate] -= fate is Fate.IN_TIME

    monkeypatch.setattr(Ledger, "close", forgetful)
    result = flashnext("bench", "--model", model, *SMALL, "--budgets", "50%", "--hints", "oracle")
    assert "THE BOOKS DO NOT ADD UP" in result.stdout
    assert "8 experts a layer, no draft, oracle" in result.stdout


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
    words = ("--report", "warm-start", "-r", "1", "-n", "3", "--slots", "9", "--throttle", "100MB/s")
    document = json.loads(flashnext("bench", "--model", model, *words, "--json").stdout)
    assert document["format"] == "flashnext-warm-start"
    assert document["conditions"]["page_cache"] == "cold"
    assert document["conditions"]["disk"].startswith("simulated disk")
    cold, *warm = document["answers"]
    assert [one["way"] for one in (cold, *warm)] == ["cold", "at once", "warmed"]
    assert [one["num_hints"] > 0 for one in (cold, *warm)] == [False, True, True]
    assert cold["against_cold"] == [1.0]
    for one in warm:
        assert one["against_cold"] == [pytest.approx(one["median_ns"] / cold["median_ns"])]
    shown = flashnext("bench", "--model", model, *words)
    assert shown.exit_code == 0, shown.output
    for text in ("against cold", "(simulated disk: 0.1 GB/s)", "than after a cold start", "model: "):
        assert text in shown.stdout


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

"""`--html`: a page says what its report says, to everybody, and nothing a report says can break it."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.html import waterfall
from cli.html.page import TITLES, render_page
from cli.tree import app
from tests.cli.pages import Element, cells, check_numbers, numbers_of, read
from tests.tiny.checkpoints import build_mlx
from tests.tiny.own_drafts import write_draft
from tests.tiny.route_hints import write_near

HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\x1b]0;\x00&\"'<!-- ]]>"


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build_mlx(tmp_path_factory.mktemp("pages") / "model")
    write_near(directory)
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, tuple[dict, str]]:
    """Of each kind a small real report, and the page that the same run wrote."""
    place = tmp_path_factory.mktemp("pages")
    draft = write_draft(place / "draft", model)
    small = ("-r", 1, "--prompts", 1)
    words = {
        "ssd-wait": ("--budgets", "7,100%", "--drafts", "none,oracle:2", "--hints", "off,near-gate",
                     "-n", 5, "--throttle", "50MB/s"),
        "draft": ("--drafts", "dflash2,oracle:3", "--draft-model", draft, "-n", 8, "--slots", 12),
        "predictors": ("--drafts", "none", "--hints", "near-linear", "-n", 4, "--budgets", "7,9"),
    }  # fmt: skip
    found: dict[str, tuple[dict, str]] = {}
    for kind, more in words.items():
        page = place / f"{kind}.html"
        result = flashnext(
            "bench", "--model", model, "--report", kind, *small, *more, "--json", "--html", page
        )
        assert result.exit_code == 0, result.output
        assert result.stderr.endswith(f"page: {page}\n")
        found[kind] = json.loads(result.stdout), page.read_text("utf-8")
    return found


@pytest.fixture(params=["ssd-wait", "draft", "predictors"])
def run(request: pytest.FixtureRequest, runs: dict[str, tuple[dict, str]]) -> tuple[dict, str]:
    return runs[request.param]


def test_the_page_is_made_of_what_json_prints_and_of_nothing_else(run):
    document, page = run
    assert render_page(document) == page
    assert document["format"] in TITLES
    root = read(page)
    assert root.all("h1")[0].text.startswith(TITLES[document["format"]])


def test_every_number_in_a_table_is_one_of_the_report_and_shown_as_it_is(run):
    document, page = run
    root = read(page)
    assert check_numbers(root, numbers_of(document) | derived(document)) > 30


def derived(document: dict) -> set[float]:
    """Numbers that a page works out: sums, shares, medians, counts, each from the report alone."""
    wait = document if document["format"] == "flashnext-ssd-wait" else document.get("wait") or {}
    found: set[float] = set()
    for one in wait.get("variants", []):
        found |= {one["exposed_wait_ns"] / one["token_ns"], 1 - (one["hidden_fraction"] or 0)}
        if one["resident_recall"] is not None:
            found.add(one["resident_recall"] + one["prefetched_recall"])
        for kind in one["books"]["classes"].values():
            for unit in ("num", "num_bytes"):
                found.add(sum(kind["fates"][name][unit] for name in ("cancelled", "dropped")))
        if one["cycle"]:
            found |= derived_of_cycle(one["cycle"])
    found |= {
        statistics.median(one["ratios"]) for one in wait.get("variants", []) + document.get("variants", [])
    }
    if document["format"] == "flashnext-predictors":
        layers, record = len(document["layers"]), wait["conditions"]["record_bytes"]
        found |= {named * layers * record for named in document["sizes"]}
        found |= {
            kept / rows for kept, rows in zip(document["num_kept"], document["num_rows"], strict=True) if rows
        }
    return {float(number) for number in found}


def derived_of_cycle(cycle: dict) -> set[float]:
    found: set[float] = {0.0}
    phases = {one["phase"]: (one["began_ns"], one["ended_ns"]) for one in cycle["phases"]}
    turns = [(one["began_ns"], one["ended_ns"]) for one in cycle["layers"]]
    turns += [phases[name] for name in ("draft", "commit", "observe")]
    after = max((one["ended_ns"] for one in cycle["layers"]), default=phases["verify"][0])
    turns.append((after, phases["verify"][1]))
    for began, ended in turns:
        inside = [w["ended_ns"] - w["began_ns"] for w in cycle["waits"] if began <= w["began_ns"] <= ended]
        found |= {sum(inside), ended - began - sum(inside)}
    by_layer: dict[Any, list[dict]] = {}
    for read_ in cycle["reads"]:
        by_layer.setdefault(read_["layer"], []).append(read_)
    for reads in [*by_layer.values(), cycle["row_reads"]]:
        found.add(sum(one["num_bytes"] for one in reads))
        for kind in ("exact", "near", "speculative"):
            found.add(sum(one.get("read_class", "exact") == kind for one in reads))
    return found


def test_a_number_that_is_not_the_reports_is_found(runs):
    """The checks see what they are for."""
    document, page = runs["ssd-wait"]
    exact = repr(document["variants"][0]["token_ns"]).removesuffix(".0")
    known = numbers_of(document) | derived(document)
    with pytest.raises(AssertionError, match="where is"):
        check_numbers(read(page.replace(f'value="{exact}"', 'value="1234567.25"')), known)
    shown = f'value="{exact}">'
    at = page.index(shown) + len(shown)
    with pytest.raises(AssertionError, match=r"9\d"):
        check_numbers(read(page[:at] + "9" + page[at:]), known)


def test_the_tables_of_waiting_say_what_each_row_was(runs):
    document, page = runs["ssd-wait"]
    root, variants = read(page), document["variants"]
    times, causes, recall = (cells(root, name) for name in ("t-token-time", "t-causes", "t-recall"))
    for one, time, cause, known in zip(variants, times, causes, recall, strict=True):
        named = one["variant"]
        draft = (
            "no draft" if named["draft"] == "none" else f"draft {named['draft']} {named['num_draft_tokens']}"
        )
        assert time["row"] == f"{named['slots']} of 16 experts, {draft}, hints {named['hints']}"
        assert time["time, ms"] == one["token_ns"]
        assert [time["from"], time["to"]] == one["token_ns_range"]
        assert [time["p95"], time["p99"]] == one["token_ns_quantiles"][1:]
        assert (time["waited"], time["compute bound"]) == (
            one["exposed_wait_ns"],
            one["bounds"]["compute_ns"],
        )
        assert (time["storage bound"], time["attained"]) == (one["storage_ns"], one["attainment"])
        assert cause["evicted"] == one["waits"]["evicted"]
        assert cause["late hint"] == one["waits"]["late_hint"]
        assert known["read a token"] == one["physical_bytes"]
        assert known["required"] == one["required_bytes"]
        assert known["precision"] == one["precision"]
    assert [row["waited, ms"] for row in cells(root, "t-budget")] == [
        one["exposed_wait_ns"] for one in variants
    ]


def test_waits_longer_than_reading_are_told_in_words(runs):
    document = copy.deepcopy(runs["ssd-wait"][0])
    for one, hidden in zip(document["variants"], (0.25, -0.5, -15.33), strict=False):
        one["hidden_fraction"] = hidden
    root = read(render_page(document))
    shown = [row.all("td")[-1].text for row in root.one("t-causes").all("tr")[1:4]]
    assert shown == ["25%", "1.5 times the reading: none", "16.3 times the reading: none"]
    assert "nothing is hidden: compute waited 16.3 times as long as" in root.text
    check_numbers(root, numbers_of(document) | derived(document))


def test_the_tables_of_tickets_and_layers_say_what_each_row_was(runs):
    document, page = runs["ssd-wait"]
    root, variants = read(page), document["variants"]
    rows = cells(root, "t-fates")
    issued = sum(kind["issued"]["num"] for one in variants for kind in one["books"]["classes"].values())
    assert sum(row["issued"] or 0 for row in rows) == issued
    ends = [row[name] or 0 for row in rows for name in row if name not in ("row", "class", "issued")]
    assert sum(ends) == issued, "every ticket of the table has one fate"
    for one, row in zip(variants, cells(root, "t-layers"), strict=True):
        assert [row[f"layer {layer}"] for layer in one["layers"]] == [
            layer["exposed_wait_ns"] for layer in one["layers"].values()
        ]
    drafted = [one for one in variants if one["per_position_acceptance"]]
    for one, row in zip(drafted, cells(root, "t-acceptance"), strict=True):
        assert [row["slot 1"], row["slot 2"]] == one["per_position_acceptance"]
        assert row["tokens a cycle"] == one["acceptance_length"]


def test_the_tables_of_drafters_and_predictors_say_what_each_row_was(runs):
    document, page = runs["draft"]
    root = read(page)
    for one, rate, phase in zip(
        document["variants"], cells(root, "t-rates"), cells(root, "t-phases"), strict=True
    ):
        assert rate["tokens/s"] == one["tokens_per_s"]
        assert rate["over target-only"] == statistics.median(one["ratios"])
        assert phase["verify 1 row"] == one["costs"]["verify_ns"].get("1")
        assert phase["rollback"] == one["costs"]["rollback_ns"]
    lost = [row["experts lost"] for row in cells(root, "t-memory")]
    assert lost == [one["budget"]["slots_lost"] for one in document["variants"]]
    document, page = runs["predictors"]
    root = read(page)
    for one, row in zip(document["figures"], cells(root, "t-predictors"), strict=True):
        assert [row[f"@{named}"] for named in document["sizes"]] == one["recall"]
        assert (row["precision"], row["off by"]) == (one["precision"], one["calibration_error"])
    for one, row in zip(document["served"], cells(root, "t-served"), strict=True):
        assert (row["hints"], row["timely"], row["read"], row["ms"]) == (
            one["hints"],
            one["timely"],
            one["physical_bytes"],
            one["token_ns"],
        )


def test_an_oracle_is_not_called_the_fastest_drafter(runs):
    document = copy.deepcopy(runs["draft"][0])
    own, oracle = (
        next(one for one in document["variants"] if one["draft"] == name) for name in ("dflash2", "oracle")
    )
    own["tokens_per_s"], oracle["tokens_per_s"] = 1e3, 1e6
    page = render_page(document)
    assert "fastest: dflash2" in page
    assert "Fastest: dflash2" in page
    assert "oracle 3 is no drafter" in page
    document["variants"] = [oracle]
    assert "fastest: oracle 3" in render_page(document)


def test_the_bar_of_a_cycle_that_proposes_is_told_with_the_tokens_of_such_cycles(runs):
    document = copy.deepcopy(runs["draft"][0])
    own = next(one for one in document["variants"] if one["draft"] == "dflash2")
    # 100 cycles: 75 say one token without a proposal, 25 propose and say four each.
    for tokens, share, words in (
        (1.75, 0.25, "4.00 tokens, in 25% of cycles"),
        (1.75, 1.0, "1.75 tokens"),
    ):
        own["tokens_per_cycle"], own["proposing_share"] = tokens, share
        told = dict(text.text.split(" ms for ") for text in read(render_page(document)).all("text")
                    if " ms for " in text.text)  # fmt: skip
        assert [after for before, after in told.items() if before.startswith("dflash2")] == [words]


def test_a_bar_of_a_cycle_has_what_verifying_took_or_is_not_drawn(runs):
    def told(**changes: Any) -> list[str]:
        document = copy.deepcopy(runs["draft"][0])
        own = next(one for one in document["variants"] if one["draft"] == "dflash2")
        own |= {"tokens_per_cycle": 2.0, "proposing_share": 1.0} | changes
        own["costs"] |= {"draft_ns": 3e6, "commit_ns": 1e6, "observe_ns": 2e6} | changes.get("costs", {})
        texts = [text.text for text in read(render_page(document)).all("text")]
        return [text.split(": ", 1)[1] for text in texts if " ms for " in text and "dflash2" in text]

    blocks = {"1": 20e6, "3": 30e6, "10": 40e6}
    assert told(costs={"verify_ns": blocks, "verify_rows": 3}) == ["36.00 ms for 2.00 tokens"]
    # None of them was common: the widest.
    assert told(costs={"verify_ns": blocks, "verify_rows": None}) == ["46.00 ms for 2.00 tokens"]
    assert told(costs={"verify_ns": {"1": 20e6}, "verify_rows": None}) == []
    assert told(costs={"verify_ns": {"9" * 5000: 20e6}, "verify_rows": None}) == []
    never = {"tokens_per_cycle": 1.0, "proposing_share": 0.0}
    assert told(**never, costs={"verify_ns": {"1": 20e6}, "verify_rows": None, "draft_ns": None}) == [
        "23.00 ms for 1.00 tokens: it never proposed"
    ]


def test_most_of_a_wait_is_more_than_half_of_it(runs):
    document = copy.deepcopy(runs["ssd-wait"][0])
    for one in document["variants"]:
        one["exposed_wait_ns"] = 10e6
        one["waits"] = {**dict.fromkeys(one["waits"], 3e6), "evicted": 4e6}
    assert "The largest part of it, 4.00 ms, is put down to: evicted." in render_page(document)
    for one in document["variants"]:
        one["waits"]["evicted"] = 6e6
    assert "Most of it, 6.00 ms, is put down to: evicted." in render_page(document)


def test_a_small_report_cannot_make_a_large_page(runs):
    """Rows times columns: 4,096 of each come to a gigabyte."""
    draft, waits = copy.deepcopy(runs["draft"][0]), copy.deepcopy(runs["ssd-wait"][0])
    own = draft["variants"][-1]
    own["acceptance_by_slot"] = [0.5] * 4096
    draft["variants"] = [own] + [{"num_draft_tokens": 1, "acceptance_by_slot": [1]}] * 4000
    waits["variants"] = [
        {"layers": {f"{row}-{layer}": {"exposed_wait_ns": 1.0} for layer in range(64)},
         "hints": {f"h{row}": 1}, "books": {"classes": {"near": {}}}}
        for row in range(600)
    ]  # fmt: skip
    for document in (draft, waits):
        page = render_page(document)
        tables = read(page).all("table")
        assert max(len(table.all("tr")) for table in tables) <= 1 + 512
        assert max(len(table.all("tr")[0].all("th")) for table in tables) <= 128 + 5
        assert len(page) < 16 << 20


def test_a_layer_that_a_report_names_again_and_again_has_one_turn(runs):
    document = copy.deepcopy(runs["ssd-wait"][0])
    one = next(one for one in document["variants"] if one["cycle"]["reads"])
    usual = len(re.findall("<rect", render_page({**document, "variants": [one]})))
    one["cycle"]["layers"] = [layer for layer in one["cycle"]["layers"] for _ in range(50)]
    assert len(re.findall("<rect", render_page({**document, "variants": [one]}))) == usual


def test_bars_of_guesses_say_how_many_served_in_few_words(runs):
    document, page = runs["ssd-wait"]
    shown = [text.text for text in read(page).all("text")]
    told = [text for text in shown if re.match("hints .*(served|no guesses)$", text)]
    assert len(told) == len(document["variants"])
    for one, text in zip(document["variants"], told, strict=True):
        classes = one["books"]["classes"]
        fates = [classes[kind]["fates"] for kind in ("near", "speculative")]
        served = sum(fate[name]["num"] for fate in fates for name in ("in_time", "joined"))
        guessed = sum(kind["num"] for fate in fates for kind in fate.values()) + one["books"]["unused"]["num"]
        words = f"{served} of {guessed} guesses served" if guessed else "no guesses"
        assert text == f"hints {one['variant']['hints']}: {words}".replace("of 1 guesses", "of 1 guess")


def test_what_is_known_of_the_anchor_before_the_draft_is_told_and_of_no_other_row(runs):
    document, _ = runs["predictors"]
    whole = next(one for one in document["figures"] if one["name"] == "oracle")
    early = {**whole, "name": "sidecar-early", "recall": [0.5] * 4, "by_row": [0.375, None]}
    page = render_page({**document, "figures": [whole, early], "num_rows": [3, 2], "num_kept": [3, 1]})
    by_row = {row["predictor"]: row for row in cells(read(page), "t-by-row")}
    assert (by_row["sidecar-early"]["anchor"], by_row["sidecar-early"]["row 1"]) == (0.375, None)
    assert "before the draft runs" in page
    assert "37.5% of what that row" in page
    assert "before the draft runs" not in runs["predictors"][1], "without a sidecar nothing is said"


def test_a_cycle_is_drawn_to_scale(runs):
    """Bars of waits are as long, and lie where, the report says; turns fill the cycle."""
    document, page = runs["ssd-wait"]
    root = read(page)
    number = max(range(len(document["variants"])), key=lambda at: document["variants"][at]["exposed_wait_ns"])
    cycle = document["variants"][number]["cycle"]
    (picture,) = [one for one in root.all("svg") if one.attributes.get("data-table") == f"t-cycle-{number}"]
    took = cycle["took_ns"]
    drawn = [bar for bar in picture.all("rect") if bar.attributes["class"] == "f-wait"]
    expected = [
        (100 * w["began_ns"] / took, 100 * (w["ended_ns"] - w["began_ns"]) / took) for w in cycle["waits"]
    ]
    assert sorted(expected) == [
        (pytest.approx(x, abs=0.001), pytest.approx(width, abs=0.001))
        for x, width in sorted(map(placed, drawn))
    ]
    reads = [bar for bar in picture.all("rect") if bar.attributes["class"].removeprefix("hollow ") in (
        "f-exact", "f-near", "f-speculative")]  # fmt: skip
    assert len(reads) == len(cycle["reads"]) + len(cycle["row_reads"])
    turns = [bar for bar in picture.all("rect") if bar.attributes["class"] == "f-compute"]
    assert sum(placed(bar)[1] for bar in turns) > 90


def placed(bar: Element) -> tuple[float, float]:
    return float(bar.attributes["x"].rstrip("%")), float(bar.attributes["width"].rstrip("%"))


def test_figures_of_a_simulated_drive_say_so_in_every_title(runs):
    root = read(runs["ssd-wait"][1])
    titles = [one.text for one in root.all("h1") + root.all("h2")]
    assert all(title.endswith(" (simulated disk)") for title in titles[:-1])
    assert titles[-1] == "What these figures rest on"
    assert "simulated disk: 0.05 GB/s; nothing below is a figure" in root.all("header")[0].text
    assert "simulated" not in "".join(one.text for one in read(runs["draft"][1]).all("h2"))


def test_books_that_do_not_add_up_make_the_page_say_so(runs):
    document = copy.deepcopy(runs["ssd-wait"][0])
    assert "DO NOT ADD UP" not in render_page(document)
    document["variants"][1]["books_add_up"] = False
    root = read(render_page(document))
    assert "THE BOOKS DO NOT ADD UP" in root.all("header")[0].text
    assert "hints near-gate" in root.all("header")[0].text


def test_no_text_of_a_report_can_become_markup(run):
    document, page = run
    hostile = mapped(
        document, lambda value: f"{value}{HOSTILE}" if isinstance(value, str) else value, keep="format"
    )
    root = read(render_page(hostile))
    assert {one.tag for one in root.every()} == {one.tag for one in read(page).every()}
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\x00", "\ufffd")
    assert shown in root.all("title")[0].text
    assert root.text.count(shown) > 20


def mapped(document: Any, change: Callable[[Any], Any], *, keep: str = "") -> Any:
    if isinstance(document, dict):
        return {key: value if key == keep else mapped(value, change) for key, value in document.items()}
    if isinstance(document, list):
        return [mapped(value, change) for value in document]
    return change(document)


@pytest.mark.parametrize(
    "number", [0, -1, 1e300, -1e300, math.nan, math.inf, None, "many", True, 10**400, 5e-324, 2e-323, 1e-317]
)
def test_numbers_that_no_run_would_have_make_a_page_all_the_same(run, number):
    document, _ = run

    def replaced(value: Any) -> Any:
        return number if isinstance(value, int | float) and not isinstance(value, bool) else value

    page = render_page(mapped(document, replaced))
    read(page)
    assert "nan" not in page.lower().replace("dominant", "")
    assert "inf%" not in page


def paths(document: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(document, dict | list):
        return []
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    return [place for key, value in inner for place in ((*above, key), *paths(value, (*above, key)))]


def test_parts_that_are_missing_or_something_else_are_left_out(run):
    document, _ = run
    draws = random.Random(7)
    places = paths(document)
    places.remove(("format",))
    shallow = [place for place in places if len(place) <= 3]
    for place in draws.sample(shallow, 15) + draws.sample(places, 15):
        changed = copy.deepcopy(document)
        parent = changed
        for key in place[:-1]:
            parent = parent[key]
        if draws.random() < 0.5:
            del parent[place[-1]]
        else:
            parent[place[-1]] = draws.choice([None, math.nan, "x", -1, [], {}, [[1]], {"a": 1}, True])
        assert read(render_page(changed)).all("h1"), (
            "read is strict: whatever is left out, the rest is a page"
        )


def test_a_report_of_nothing_but_its_format_makes_a_page_that_says_so_little():
    for name in TITLES:
        root = read(render_page({"format": name}))
        assert [one.text for one in root.all("h2")] == ["What these figures rest on"]
    with pytest.raises(ValueError, match="no page of this format: flashnext-bench"):
        render_page({"format": "flashnext-bench"})


def test_more_cycles_than_a_page_should_hold_are_counted(runs, monkeypatch):
    monkeypatch.setattr(waterfall, "MOST_FOLDED", 3)
    document, page = runs["ssd-wait"]
    root = read(render_page(document))
    drawn = sum(one["cycle"] is not None for one in document["variants"])
    assert len(root.all("details")) < len(read(page).all("details"))
    assert f"{drawn - 2 - 3} more cycles can be had from --json." in root.one("waterfall").text + root.text

"""Costs of drafting from run to run: the next run begins where the last ended, and trusts no stranger."""

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_flashnext.engine.governor import DEBT_STEPS, OPENING_STEPS, TRUST_STEPS, TRY_SHARE, Governor
from mlx_flashnext.engine.kept_tables import FILE_BYTES_MAX, HALF_LIFE_S, MOST_RUNS, KeptTables, TablesKey
from mlx_flashnext.engine.learned import NOTHING_LEARNED, SURVIVAL_TRUST, Learned

PLAIN_NS = 1_000_000
KEY = TablesKey("m" * 64, "dflash2", "d" * 64, "off", "some machine, 2 processors", 0.25)
PAYS = Learned((1.0, 1.1, 1.2), (8.0, 8.0, 8.0), (8.0, 6.0), (7.0, 5.0), 1.0, 40)
LOSES = Learned((1.0, 1.9, 2.9), (8.0, 8.0, 8.0), (8.0, 2.0), (2.0, 0.5), 0.0, 40)
NOW = 1.8e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "x.drafting.json"


def tables(path: Path, key: TablesKey = KEY, now: float = NOW) -> KeptTables:
    return KeptTables(path, key, lambda: now)


def decode(governor: Governor, num_tokens: int, *, slope: float, accept: float, seed: int = 0) -> list[int]:
    """Return the widths of the cycles of an answer, each cycle a cost of 1 + slope x width plain steps."""
    rng, widths, tokens = random.Random(seed), list[int](), 0
    governor.begin_answer()
    while tokens < num_tokens:
        width = governor.width(num_tokens - tokens)
        accepted = 0
        while accepted < width and rng.random() < accept:
            accepted += 1
        cycle_ns = int(PLAIN_NS * (1 + slope * width) * rng.lognormvariate(0, 0.05))
        governor.count(width, accepted, accepted + 1, cycle_ns)
        widths.append(width)
        tokens += accepted + 1
    return widths


@pytest.mark.parametrize(("slope", "accept"), [(0.1, 0.8), (0.9, 0.3)])
def test_the_second_run_drafts_or_rests_at_once_as_the_first_ended(path, slope, accept):
    first = Governor(4, earlier=tables(path).begin())
    widths = decode(first, 600, slope=slope, accept=accept)
    tables(path).save(first.learned())
    second = Governor(4, earlier=tables(path).begin())
    if slope > accept:
        assert any(widths[:4]), "the control: the first had to find out"
        assert second.is_resting, "not even a prompt's rows are looked at"
        assert second.learned() == tables(path).begin(), "before the first step it knows what it was told"
        assert sum(decode(second, 60, slope=slope, accept=accept)) <= 2
    else:
        assert max(widths[:4]) < 3, "the control: the first had to find out"
        assert min(decode(second, 60, slope=slope, accept=accept)[1:8]) >= 2


def test_a_run_that_only_rests_leaves_the_purse_and_no_younger_date(path):
    tables(path).save(LOSES)
    governor = Governor(2, earlier=tables(path, now=NOW + 9).begin())
    for _ in range(30):
        governor.count(0, 0, 1, PLAIN_NS)
    late = tables(path, now=NOW + 9)
    late.begin()
    late.save(governor.learned())
    [run] = json.loads(path.read_bytes())["runs"]
    assert run["measured_at"] == NOW
    assert run["purse"] == pytest.approx(0.3, rel=0.01)
    assert tables(path).begin().purse == run["purse"]


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "another machine"},
        {"machine": "some machine, 8 processors"},
        {"slots_share": 0.5},
        {"hints": "both"},
    ],
)
def test_another_machine_or_budget_counts_its_costs_as_one_observation(path, other):
    tables(path).save(PAYS)
    here = tables(path).begin()
    there = tables(path, replace(KEY, **other)).begin()
    assert here == PAYS
    assert (there.costs, there.times, there.purse) == (PAYS.costs, (1.0, 1.0, 1.0), 0.0)
    assert there.reached == PAYS.reached, "what a drafter is worth does not depend on it"
    measured = Governor(2, earlier=there)
    for width in (0, 0, 1, 1, 1, 1):
        measured.count(width, width, 1 + width, PLAIN_NS * (1 + 4 * width))
    assert measured.learned().costs[1] == 5.0, "three of one's own outvote it"


@pytest.mark.parametrize(("plain", "drafting"), [(1, 5_000), (5_000, 1)])
def test_a_machine_that_slept_in_a_cycle_loses_nobodys_figures(path, plain, drafting):
    tables(path).save(PAYS)
    governor = Governor(1)
    for width, steps in ((0, plain), (1, 1), (1, drafting)):
        governor.count(width, width, 1 + width, steps * PLAIN_NS)
    assert governor.learned().times[1] == 1
    assert not 1e-3 <= governor.learned().costs[1] <= 1e3, "the control: no entry may say so"
    slept = replace(KEY, draft="mtp")
    tables(path, slept).save(governor.learned())
    again = tables(path, slept)
    kept = again.begin()
    assert (again.note, kept.times[1]) == ("", 0.0), "what it took then says nothing of its cost"
    assert kept.reached == governor.learned().reached
    assert tables(path).begin() == PAYS


@pytest.mark.parametrize("other", [{"draft": "mtp"}, {"draft_digest": "e" * 64}])
def test_another_draft_inherits_nothing(path, other):
    tables(path).save(PAYS)
    assert tables(path, replace(KEY, **other)).begin() == NOTHING_LEARNED
    assert tables(path).begin() == PAYS, "the control"


def test_trust_ages_whichever_way_the_clock_is_wrong(path):
    tables(path).save(PAYS)
    for sign in (1, -1):
        half = tables(path, now=NOW + sign * HALF_LIFE_S).begin()
        assert half.times == (4.0, 4.0, 4.0)
        assert half.reached[0] == 4.0
        assert tables(path, now=NOW + sign * 40 * HALF_LIFE_S).begin() == NOTHING_LEARNED


def test_an_entry_that_is_too_old_to_be_trusted_lends_no_date_either(path):
    tables(path).save(PAYS)
    late = tables(path, now=NOW + 40 * HALF_LIFE_S)
    assert late.begin() == NOTHING_LEARNED
    late.save(PAYS)  # as many cycles as that one, all of them measured now
    assert json.loads(path.read_bytes())["runs"][0]["measured_at"] == NOW + 40 * HALF_LIFE_S


def test_acceptance_counts_no_more_whichever_slot_says_so(path):
    tables(path).save(replace(PAYS, reached=(8.0, 900.0), passed=(7.0, 900.0)))
    kept = tables(path).begin()
    assert max(kept.reached) == SURVIVAL_TRUST
    assert kept.passed[0] / kept.reached[0] == pytest.approx(7 / 8)


def test_entries_are_bounded_and_the_newest_stay(path):
    for number in range(MOST_RUNS + 5):
        tables(path, replace(KEY, machine=f"machine {number}"), NOW + number).save(PAYS)
    runs = json.loads(path.read_bytes())["runs"]
    assert len(runs) == MOST_RUNS
    assert runs[0]["machine"] == f"machine {MOST_RUNS + 4}"
    assert "machine 0" not in {run["machine"] for run in runs}
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_was_seen_at_each_moment_is_kept(path):
    governor = Governor(2)
    for width, kept in ((0, 0), (2, 1), (0, 0), (2, 2), (2, 2)):
        governor.count(width, kept, kept + 1, PLAIN_NS * (1 + width))
    tables(path).save(governor.learned())
    kept = tables(path).begin()
    assert kept.moments == governor.learned().moments
    passed = [counts[1] for counts in kept.moments]
    assert passed[0] == (1.0, 1.0), "after a whole block"
    assert passed[5][0] == pytest.approx(0.99**2), "a plain step after the beginning; it fades unseen"
    assert passed[2] == pytest.approx((0.99, 0.99)), "a plain step after a block that was not kept whole"
    assert sum(map(sum, passed)) == pytest.approx(2 + 1.98 + 0.99**2)
    assert tables(path, now=NOW + HALF_LIFE_S).begin().moments[0][1][0] == pytest.approx(1.0)


def test_nothing_is_left_where_nobody_proposed(path):
    tables(path).save(Learned((1.0,), (8.0,), (0.0,), (0.0,), 1.0, 0))
    KeptTables(None, KEY).save(PAYS)
    assert not path.exists()


def _broken(**changes: object) -> bytes:
    run = {
        "draft": "dflash2", "draft_digest": "d" * 64, "hints": "off", "machine": KEY.machine,
        "slots_share": 0.25, "measured_at": NOW, "costs": [1.0, 1.1], "times": [8.0, 8.0],
        "reached": [8.0], "passed": [7.0], "purse": 0.5, "num_drafting": 3, **changes,
    }  # fmt: skip
    document = {"format": "flashnext-draft-costs", "version": 1, "model_digest": "m" * 64, "runs": [run]}
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"null", b"\xff\x00", b"[" * 100_000, b" " * (FILE_BYTES_MAX + 1),
        _broken().replace(b"flashnext-draft-costs", b"flashnext-popularity"),
        _broken().replace(b'"version": 1', b'"version": 2'),
        _broken().replace(b"mmmm", b"nnnn"),
        _broken(costs=[1.0, -1.0]), _broken(costs=[1.0, 1e300]), _broken(costs=[1.0, 0.0]),
        _broken(costs=[1.0] * 99, times=[8.0] * 99), _broken(times=[8.0]), _broken(times=[8.0, -1.0]),
        _broken(passed=[9.0]), _broken(reached=[1e300], passed=[0.0]), _broken(purse=1e9),
        _broken(measured_at=1e300), _broken(num_drafting=-1), _broken(machine="x" * 1000),
        _broken(costs=["1", None]), _broken(slots_share=-1.0),
        _broken(moments=[[[1.0], [2.0]]]), _broken(moments=[[[1.0], []]]), _broken(moments=[[[1.0]]]),
        _broken(moments=[[[], []]] * 8), _broken(moments=[[[1.0] * 99, [1.0] * 99]]), _broken(moments=7),
        _broken(moments=[[[1e300], [0.0]]]), _broken(moments=[[[-1.0], [-2.0]]]),
    ],
)  # fmt: skip
def test_a_hostile_file_is_a_note_and_is_written_anew(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    kept = tables(path)
    assert kept.begin() == NOTHING_LEARNED
    assert "No costs of drafting from x.drafting.json" in kept.note
    assert len(kept.note) < 600
    kept.save(PAYS)
    again = tables(path)
    assert (again.begin(), again.note) == (PAYS, "")


def test_the_control_of_the_hostile_files_is_read(path):
    path.parent.mkdir()
    path.write_bytes(_broken())
    kept = tables(path)
    assert (kept.begin().costs, kept.note) == ((1.0, 1.1), "")


def test_a_pipe_or_a_directory_in_its_place_is_a_note(path):
    path.parent.mkdir()
    os.mkfifo(path)
    kept = tables(path)
    assert kept.begin() == NOTHING_LEARNED
    assert "Not a regular file" in kept.note
    path.unlink()
    path.mkdir()
    kept = tables(path)
    kept.begin()
    kept.save(PAYS)
    assert "not kept" in kept.note
    assert list(path.iterdir()) == []


def test_a_full_disk_is_a_note_and_leaves_the_old_file(path, monkeypatch):
    tables(path).save(PAYS)
    before = path.read_bytes()

    def full(_number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    kept = tables(path)
    kept.save(LOSES)
    assert "No space left on device" in kept.note
    assert (path.read_bytes(), list(path.parent.iterdir())) == (before, [path])


@pytest.mark.parametrize("costs", [0.01, 1.0])
def test_a_lying_table_costs_no_more_than_it_is_trusted_with(costs):
    """V2: it says that everything pays; nothing is ever accepted and a proposal costs as much as a step."""
    lie = Learned((1.0, *[costs] * 4), (8.0,) * 5, (8.0,) * 4, (8.0,) * 4, 1.0, 99)
    governor, spent, tokens = Governor(4, earlier=lie), 0.0, 0
    while tokens < 400:
        width = governor.width(400)
        governor.count(width, 0, 1, PLAIN_NS * (1 + width))
        spent += 1 + width
        tokens += 1
    lost_by_one = 4
    first_and_last, later = 2 * lost_by_one, 400 * TRY_SHARE / DEBT_STEPS * lost_by_one
    assert spent - tokens <= OPENING_STEPS + TRUST_STEPS + first_and_last + later

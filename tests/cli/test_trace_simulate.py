"""`flashnext trace simulate` on a trace of a tiny checkpoint, and on files from strangers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.commands.trace_simulate import _answers, _layouts, notes_of
from cli.engine_factory import Services
from cli.tree import app
from mlx_flashnext.engine.guess import Guess
from mlx_flashnext.simulation.simulated_machine import FREE
from mlx_flashnext.simulation.simulated_report import Sweep, sweep
from mlx_flashnext.simulation.simulation import RoutedBlock
from tests.tiny.checkpoints import build_mlx

WORDS = ("--ctx-size", "256", "--temp", "0", "-m", "12", "--no-think")
MACHINE = """\
format = "flashnext-machine"
version = 1
name = "slow"
about = "made up"
[drive]
bytes_per_s = 1e5
[compute]
layer_us = 500
"""


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("simulate") / "model")


@pytest.fixture(scope="module")
def traces(model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace with routes and guesses, and one of a model whose experts were all in memory."""
    place = tmp_path_factory.mktemp("traces")
    made = {"routed": place / "routed.trace", "resident": place / "resident.trace"}
    for name, more in (("routed", ("--slots", "5", "--hints", "near-gate")), ("resident", ())):
        words = ("trace", "record", "--model", model, "-o", made[name], "the the the", *more, *WORDS)
        result = flashnext(*words)
        assert result.exit_code == 0, result.output
    (place / "slow.toml").write_text(MACHINE)
    return {**made, "machine": place / "slow.toml"}


def simulate(traces, *words: object, trace: str = "routed"):
    return flashnext("trace", "simulate", traces[trace], *words)


def test_a_table_says_that_it_is_simulated_and_of_what(model, traces):
    shown = simulate(
        traces, "--model", model, "--machine", traces["machine"], "--hints", "off,recorded,oracle"
    )
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("SIMULATED, nothing here was measured: 1 answer, 12 blocks of the trace")
    assert "slow: made up" in shown.stdout
    assert "tokens/s" in shown.stdout
    free = simulate(traces, "--model", model)
    assert "tokens/s" not in free.stdout
    assert "--machine FILE adds times" in free.stdout


def test_a_document_has_every_combination_and_the_same_result_twice(model, traces):
    words = (
        "--model", model, "--machine", traces["machine"], "--budgets", "4,100%", "--hints", "off,oracle",
        "--widths", "0,2", "--acceptance", "0.5", "--warm", "2", "--json",
    )  # fmt: skip
    first = simulate(traces, *words)
    assert first.exit_code == 0, first.output
    document = json.loads(first.stdout)
    assert (document["format"], document["version"], document["simulated"]) == (
        "flashnext-simulation",
        1,
        True,
    )
    assert document["machines"][0]["drive"]["bytes_per_s"] == 1e5
    cells = {(c["slots"], c["hints"], c["width"]): c for c in document["cells"]}
    assert len(cells) == 8
    for width in (0, 2):
        everything = next(c for (slots, _, w), c in cells.items() if slots > 4 and w == width)
        assert everything["wait_ns"] == everything["token_bytes"] == 0
        assert cells[4, "off", width]["wait_ns"] > 0
        assert cells[4, "off", width]["token_ns"] > cells[4, "off", width]["wait_ns"]
    assert json.loads(simulate(traces, *words).stdout) == document


def test_sizes_may_be_told_instead_of_a_model(model, traces):
    told = simulate(traces, "--experts", "64", "--record", "1MB", "--budgets", "8", "--json")
    cell = json.loads(told.stdout)["cells"][0]
    assert (cell["num_experts"], cell["slots"]) == (64, 8)
    assert cell["token_bytes"] % 1e6 < 1e6
    of_model = json.loads(simulate(traces, "--model", model, "--budgets", "8", "--json").stdout)["cells"][0]
    assert cell["hit_rate"] == of_model["hit_rate"]  # the size of a record does not change what is found


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--budgets", "0%"), 2, "not a share of the experts: '0%'"),
        (("--budgets", "25%,x"), 2, "neither a share of the experts nor slots of a layer: 'x'"),
        (("--budgets", "x%"), 2, "neither a share of the experts nor slots of a layer: 'x%'"),
        (("--hints", "near-gate"), 2, "--hints does not know: near-gate"),
        (("--widths", "99"), 2, "at most 17 rows: 99"),
        (("--widths", "-1"), 2, "'-1'"),
        (("--acceptance", "nan"), 2, "--acceptance is a share: nan"),
        (("--acceptance", "1.5"), 2, "--acceptance is a share: 1.5"),
        (("--acceptance", "0.5"), 2, "Nothing reads --acceptance without --widths: 0.5"),
        (("--warm", "99"), 2, "12 blocks are too few to leave out the first 99"),
        (("--warm", "1,2"), 2, "--warm takes one number: 1,2"),
        (("--experts", "8"), 2, "--experts and --record go together"),
        (("--experts", "8", "--record", "1MB", "--model", "demo"), 2, "--model and --experts"),
        (("--experts", "0", "--record", "1MB"), 2, "--experts must be from 1 to 4096: 0"),
        (("--experts", "2", "--record", "1MB"), 3, "which has 2"),
        (("--experts", "8", "--record", "9GiB"), 2, "more than 1 GiB: 9GiB"),
        (("--experts", "8", "--record", "much"), 2, "'much'"),
        (("--machine", "nowhere.toml"), 1, "Cannot read the machine nowhere.toml: No such file"),
        (("--machine", "."), 5, "Not a machine: .: Is a directory"),
        (("--model", "demo"), 3, ""),
        ((), 3, ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(words, code, said, model, traces):
    own = () if any(flag in words for flag in ("--experts", "--model")) or not words else ("--model", model)
    result = simulate(traces, *words, *own)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "hint:" in result.stderr
    assert not result.stdout


def test_budgets_that_cannot_be_had_are_said_to_be_others(model, traces):
    result = simulate(traces, "--model", model, "--budgets", "1,5%,8,50%,999", "--json")
    assert result.exit_code == 0, result.output
    assert [cell["slots"] for cell in json.loads(result.stdout)["cells"]] == [4, 8, 16]
    assert result.stderr.splitlines() == [
        "note: budget 1 is less than a token needs of a layer: taken as 4 slots",
        "note: budget 5% of 16 (1) is less than a token needs of a layer: taken as 4 slots",
        "note: budget 999 is more than a layer has: taken as all 16 experts",
    ]


def test_slots_begin_empty_but_where_everything_fits(model, traces):
    shown = simulate(traces, "--model", model, "--budgets", "15,16", "--json")
    almost, whole = json.loads(shown.stdout)["cells"]
    assert almost["token_bytes"] > 0
    assert (whole["token_bytes"], whole["hit_rate"]) == (0, 1)


def test_guesses_of_a_trace_that_are_held_back_are_counted(model, traces):
    """The tiny model's router is not asked in vain; guesses that are always wrong are not let in."""
    words = ("--model", model, "--budgets", "5,100%", "--hints", "off,recorded")
    assert "held back" not in simulate(traces, *words).stderr
    blocks = _answers(Services(), str(traces["routed"]), str(model), has_sizes=False)
    wrong = [
        [replace(block, guesses={layer: _never(block, layer) for layer in block.guesses}) for block in answer]
        for answer in blocks
    ]
    layouts, _ = _layouts(Services(), wrong, str(model), None, None)
    cells = list(sweep(wrong, layouts, [FREE], Sweep([5, 16], ["off", "recorded"])))
    (note,) = notes_of(cells)
    row = cells[1]
    assert f"5 slots: of {row.num_recorded} guesses of the trace {row.num_guesses} were let in" in note
    assert f"led to {row.num_guessed_reads} reads: as in a run" in note
    assert row.num_recorded > 2 * row.num_guesses >= 2 * row.num_guessed_reads
    nothing = [[replace(block, guesses={}) for block in answer] for answer in blocks]
    nothing[0][0] = wrong[0][0]  # or there would be nothing to replay
    warm = Sweep([5], ["recorded"], num_warm=1)
    assert "no guess is left" in notes_of(list(sweep(nothing, layouts, [FREE], warm)))[0]


def _never(block: RoutedBlock, layer: int) -> list[Guess]:
    chosen = {expert for row in block.routes[layer] for expert in row}
    return [Guess(layer, expert, 0.9) for expert in range(16) if expert not in chosen]


def test_more_than_a_desk_full_is_refused(model, traces):
    many = ",".join(map(str, range(1, 64)))
    result = simulate(
        traces, "--experts", "4096", "--record", "1MB", "--budgets", many, "--widths", "1,2,3", "--hints",
        "off,frequency,previous",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "combinations are more than 512" in result.stderr


def test_a_trace_without_routes_says_how_to_get_them(model, traces):
    result = simulate(traces, "--model", model, trace="resident")
    assert result.exit_code == 3
    assert "it has no routes" in result.stderr
    assert "trace record --slots N" in result.stderr


def test_a_damaged_trace_is_refused_whole(model, traces, tmp_path):
    data = traces["routed"].read_bytes().splitlines(keepends=True)
    damaged = tmp_path / "damaged.trace"
    damaged.write_bytes(b"".join([*data[:4], data[4].replace(b"1", b"2", 1), *data[5:]]))
    result = flashnext("trace", "simulate", damaged, "--model", model)
    assert result.exit_code == 5
    assert not result.stdout


def test_hostile_machine_files_are_named_and_refused(model, traces, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(MACHINE.replace("1e5", "-1"))
    result = simulate(traces, "--model", model, "--machine", traces["machine"], "--machine", bad)
    assert result.exit_code == 5
    assert "bad.toml" in result.stderr
    assert "bytes_per_s" in result.stderr
    bad.write_text(MACHINE.replace("500", "[1, 2, 3, 4, 5, 6, 7]"))
    other = simulate(traces, "--model", model, "--machine", traces["machine"], "--machine", bad)
    assert other.exit_code == 3
    assert f"{bad}: layer_us has 7 values, the trace has" in " ".join(other.stderr.split())
    bad.write_text(MACHINE.replace("version = 1", "version = 2"))
    newer = simulate(traces, "--model", model, "--machine", bad)
    assert newer.exit_code == 3
    assert "version 2" in newer.stderr

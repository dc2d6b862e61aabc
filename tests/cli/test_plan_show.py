"""`flashnext plan` and `flashnext show` on real tiny checkpoints: tables, documents, refusals, broken
files.
"""

import functools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.safetensors_io import read_safetensors


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hf(tmp_path_factory.mktemp("hf") / "model", vision=True)


@pytest.fixture(scope="module")
def mlx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("mlx") / "model")


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def test_the_plan_gives_a_reason_for_every_line_and_the_lines_sum_up(mlx):
    document = json.loads(flashnext("plan", mlx, "--json").stdout)
    lines = document["plan"]["lines"]
    assert all(line["reason"] for line in lines)
    assert sum(line["bytes"] for line in lines) == document["plan"]["total_bytes"]
    assert document["plan"]["total_bytes"] <= document["plan"]["budget_bytes"]
    table = flashnext("plan", mlx).stdout
    for line in lines:
        assert line["name"] in table
        assert " ".join(line["reason"].split()[:3]) in table


def test_the_plan_names_the_largest_context_and_the_smallest_budget(mlx):
    table = flashnext("plan", mlx, "--ctx-size", "512").stdout
    plan = json.loads(flashnext("plan", mlx, "--ctx-size", "512", "--json").stdout)["plan"]
    assert "context          512 tokens" in table
    assert f"{plan['max_context_tokens']} tokens with these slots" in table
    assert "smallest budget" in table


@pytest.mark.parametrize("drafter", [[], ["--draft", "lookup"], ["--draft", "mtp"]])
def test_a_draft_that_nothing_would_read_is_refused(mlx, tmp_path, drafter):
    refused = flashnext("plan", mlx, "--draft-model", tmp_path, *drafter)
    assert refused.exit_code == 2
    assert "Nothing reads --draft-model" in refused.output
    missing = flashnext("plan", mlx, "--draft-model", tmp_path / "none", "--draft", "auto")
    assert missing.exit_code == 3


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--ctx-size", "1k"], "context_tokens", 1024),
        (["--max-kv-size", "512"], "context_tokens", 512),
        (["--slots", "6"], "slots_per_layer", 6),
        (["--prefill-step-size", "32"], "prefill_step", 32),
        (["--readers", "2"], "num_readers", 2),
        (["--memory", "4GiB"], "budget_bytes", 4 << 30),
    ],
)
def test_every_flag_shows_in_the_plan(mlx, flags, field, value):
    """P56: no flag, the context's least of all, is read and then ignored."""
    result = flashnext("plan", mlx, "--json", *flags)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"][field] == value


def test_what_does_not_fit_is_refused_with_the_smallest_budget_that_would(mlx):
    flashnext("plan", mlx)  # imports what a plan does: this process is the next one too, and must not grow
    result = flashnext("plan", mlx, "--memory", "1MiB")
    assert result.exit_code == 4
    assert result.stdout == ""
    assert "error: " in result.stderr
    assert "hint: --memory " in result.stderr
    suggested = result.stderr.split("hint: --memory ")[1].split(",")[0].split()[0]
    assert flashnext("plan", mlx, "--memory", suggested).exit_code == 0


@pytest.mark.parametrize("flags", [["--memory", "1000TiB"], ["--ctx-size", "999999k"], ["--slots", "1"]])
def test_what_no_machine_or_model_offers_is_refused(mlx, flags):
    result = flashnext("plan", mlx, *flags)
    assert result.exit_code in (2, 4)
    assert result.stderr.startswith("error: ")
    assert "hint: " in result.stderr


def test_a_refusal_is_a_document_for_programs(mlx):
    result = flashnext("plan", mlx, "--json", "--memory", "1MiB")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"]["type"] == "BudgetTooSmall"


@pytest.mark.parametrize("build", ["hf", "mlx"])
def test_show_accounts_for_every_tensor(build, request):
    directory = request.getfixturevalue(build)
    stored = read_safetensors(directory)
    document = json.loads(flashnext("show", directory, "--json", "--tensors").stdout)
    named = [tensor["name"] for line in document["tensors"].values() for tensor in line["tensors"]]
    assert sorted(named) == sorted(stored)
    assert document["missing"] == document["unknown"] == document["problems"] == []
    assert document["model"]["layout"] == build
    assert sum(line["count"] for line in document["tensors"].values()) == len(stored)


def test_show_tells_layout_sizes_quantisation_and_that_nothing_is_missing(mlx, hf):
    table = flashnext("show", mlx).stdout
    assert "mlx, 2 files" in table
    assert "affine 4-bit group 32" in table
    assert "missing: nothing" in table
    table = flashnext("show", hf).stdout
    assert "experts none (F32)" in table
    assert "vision" in table


def test_show_lists_every_tensor_on_demand(hf):
    table = flashnext("show", hf, "--tensors").stdout
    assert all(name in table for name in read_safetensors(hf))


def test_show_describes_a_checkpoint_that_does_not_open_and_fails(tmp_path):
    directory = build_hf(tmp_path / "model", overrides={"num_hidden_layers": 4})
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (directory / "config.json").write_text(json.dumps(config))
    result = flashnext("show", directory)
    assert result.exit_code == 3
    assert "error: " in result.stderr
    assert "vocab_size" in result.stderr
    assert "trunk" in result.stdout
    document = json.loads(flashnext("show", directory, "--json").stdout)
    assert document["problems"][0]["type"] == "WeightMismatch"


@pytest.mark.parametrize("command", ["show", "plan"])
def test_a_damaged_file_is_refused_by_name(tmp_path, command):
    directory = build_hf(tmp_path / "model", shards=1)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    result = flashnext(command, directory)
    assert result.exit_code == 5
    assert "model.safetensors" in result.stderr


@pytest.mark.parametrize("command", ["show", "plan"])
def test_tables_fit_forty_columns_without_colour(mlx, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("cli.console._is_terminal", lambda _: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(mlx.parent)
    result = flashnext(command, mlx.name)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    table = result.stdout.split("\n\n")[0 if command == "plan" else 1]
    assert all(len(line) <= 40 for line in table.splitlines())


def test_names_in_a_file_cannot_move_the_cursor(tmp_path, monkeypatch):
    monkeypatch.setattr("cli.console._is_terminal", lambda _: True)
    directory = build_hf(tmp_path / "a\x1b[2Jb", shards=1)
    result = flashnext("show", directory, "--no-color")
    assert "\x1b" not in result.output
    assert "a\\x1b[2Jb" in result.output


def test_two_names_for_one_command_are_refused(mlx, hf):
    result = flashnext("show", mlx, "--model", hf)
    assert result.exit_code == 2
    assert flashnext("show", mlx, "--model", mlx).exit_code == 0


def test_the_table_needs_no_model_and_says_what_it_rests_on(monkeypatch):
    from mlx_flashnext.reports import plan_table

    few = functools.partial(plan_table.plan_table, memory_gib=(16, 128))
    monkeypatch.setattr(plan_table, "plan_table", few)
    result = flashnext("plan", "--table", "--drive", "6.5GB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if line.strip().startswith(("16 GB", "128 GB"))]
    assert {(row[2], row[3]) for row in rows} == {
        (build, context)
        for build in ("4-bit", "3-bit", "2-bit", "FP8", "BF16")
        for context in ("8k", "32k", "128k", "256k")
    }
    assert any("needs" in row for row in rows)
    assert any("all" in row for row in rows)
    assert "drive: 6.50 GB/s, as told" in result.stdout
    assert "published" in result.stdout


def test_a_case_shows_its_arithmetic_and_a_measured_drive(mlx, monkeypatch):
    result = flashnext("plan", mlx, "--drive", "2GB", "--resident-rate", "100", "--slots", "8")
    assert result.exit_code == 0, result.output
    assert "experts in memory   8 of 16 = 0.500" in result.stdout
    assert "10.0 ms computed" in result.stdout
    assert "expected, not measured" in result.stdout
    document = json.loads(flashnext("plan", mlx, "--drive", "2GB", "--json").stdout)["expected"]
    assert document["storage_s"]["worse"] == document["token_bytes"]["worse"] / 2e9
    monkeypatch.setattr("mlx_flashnext.reports.doctor.cached_share", lambda *_: 0.0)
    measured = json.loads(flashnext("plan", mlx, "--drive", "measure", "--json").stdout)["expected"]
    assert measured["storage_s"]["worse"] > 0
    monkeypatch.setattr("mlx_flashnext.reports.doctor.cached_share", lambda *_: 1.0)
    warm = flashnext("plan", mlx, "--drive", "measure")
    assert warm.exit_code == 1
    assert "pages are in memory" in warm.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drive", "quick"], "not a size"),
        (["--resident-rate", "9"], "--resident-rate 9 is of no use without --drive"),
        (["--resident-rate", "-1", "--drive", "1GB"], "must be above zero"),
        (["--table", "--memory", "9GiB"], "--table has its own machines"),
        (["--table", "--drive", "measure"], "there is none here"),
    ],
)
def test_an_expectation_that_has_no_basis_is_refused(flags, message):
    result = flashnext("plan", *flags)
    assert result.exit_code == 2
    assert message in result.stderr

"""`flashnext convert` and `flashnext compare`: what they print, where, and with which exit code."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.tree import app
from expert_store.errors import NotEnoughSpace
from mlx_flashnext.engine.errors import BudgetTooSmall
from tests.tiny.checkpoints import build_hf, build_mlx


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hf(tmp_path_factory.mktemp("hf") / "model", dtype="bfloat16", vision=True)


def flashnext(*words: object, services: Services | None = None):
    return CliRunner().invoke(app, [str(word) for word in words], obj=services or Services())


def test_a_conversion_is_made_shown_and_compared(source, tmp_path):
    out = tmp_path / "out"
    made = flashnext("convert", source, out, "--experts", "3:32")
    assert (made.exit_code, made.stderr) == (0, ""), made.output
    assert "3.5 MiB to 1.5 MiB" in made.stdout
    assert f"flashnext compare {source} {out}" in made.stdout
    lines = made.stdout.splitlines()
    [table_end] = [at for at, line in enumerate(lines) if line.startswith(" none")]
    assert re.fullmatch(
        r"greedy agreement  \d+ of 32 positions \(\d+\.\d %\), 2 prompts", lines[table_end + 2]
    )
    assert "golden: 32 greedy tokens, kept to be compared with next time" in lines
    checked = flashnext("doctor", out, "--json")
    assert json.loads(checked.stdout)["golden"]["outcome"] == "same"
    shown = flashnext("show", out)
    assert shown.exit_code == 0
    assert "missing: nothing" in shown.stdout
    assert "experts affine 3-bit group 32" in shown.stdout
    document = json.loads(flashnext("show", out, "--json").stdout)
    assert document["model"]["layout"] == "mlx"
    assert (document["missing"], document["unknown"]) == ([], [])
    compared = flashnext(
        "compare", source, out, "--slots", "8", "-c", "256", "--prompts", "1", "--tokens", "4"
    )
    assert compared.exit_code == 0, compared.output
    assert "of 4 positions" in compared.stdout
    assert "1 prompt" in compared.stdout
    assert len([line for line in compared.stdout.splitlines() if line.strip()[:1].isdigit()]) == 4


def test_documents_for_programs(source, tmp_path):
    words = ("--mtp", "drop", "--no-vision", "--also", "router", "--also", "hyper=6:32", "--table", "nvfp4")
    words = (*words, "--no-agreement", "--no-golden")
    made = json.loads(flashnext("convert", source, tmp_path / "out", *words, "--json").stdout)
    assert made["agreement"] == {"why_none": "left out"}
    assert made["golden"] == {"outcome": "not checked", "reason": "left out"}
    assert made["recipe"] == {
        "experts": "4:64",
        "trunk": "8:64",
        "table": "nvfp4",
        "mtp_experts": "dropped",
        "mtp_trunk": "dropped",
        "vision": "dropped",
        "also": {"hyper": "6:32", "router": "8:64"},
    }
    assert {error["part"] for error in made["errors"]} == {"experts", "trunk", "table", "head"}
    assert len(made["dropped"]) == 31 + 4
    same = flashnext(
        "compare", source, source, "--slots", "8", "-c", "256", "--prompts", "1", "--tokens", "2", "--json"
    )
    assert json.loads(same.stdout)["agreement"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--experts", "9"), "--experts: Not a quantisation: '9'"),
        (("--mtp", "keep"), "--mtp: Not a quantisation: 'keep'"),
        (("--also", "norms"), "No such group of matrices: 'norms'"),
        (("--also", "router=none"), "--also router=none: nothing to quantise it to"),
        (("--trunk", "none", "--also", "router"), "--also router: nothing to quantise it to"),
    ],
)
def test_what_cannot_be_meant_is_an_error_of_usage(source, tmp_path, words, message):
    result = flashnext("convert", source, tmp_path / "out", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "hint:" in result.stderr
    assert not list(tmp_path.glob("out*"))


def test_refusals_have_their_exit_codes_and_hints(source, tmp_path):
    taken = flashnext("convert", source, source)
    assert (taken.exit_code, taken.stdout) == (1, "")
    assert "hint:" in taken.stderr
    quantised = build_mlx(tmp_path / "pack")
    for words in (
        ("convert", quantised, tmp_path / "out"),
        ("convert", source, tmp_path / "out", "--table", "4:64"),
    ):
        refused = flashnext(*words)
        assert refused.exit_code == 3, refused.output
        assert "hint:" in refused.stderr

    def full(*_: object):
        raise NotEnoughSpace("no room", hint="make some")

    services = Services(convert_checkpoint=full)
    document = flashnext("convert", source, tmp_path / "x", "--json", services=services)
    assert document.exit_code == 4
    assert json.loads(document.stdout)["error"]["type"] == "NotEnoughSpace"


def test_a_conversion_that_cannot_be_run_here_is_made_all_the_same(source, tmp_path):
    def refuse(*_: object):
        raise BudgetTooSmall("the model needs 30 GiB", hint="")

    services = Services(compare_builds=refuse, check_golden=refuse)
    made = flashnext("convert", source, tmp_path / "out", services=services)
    assert made.exit_code == 0, made.output
    assert "greedy agreement: not measured, the model needs 30 GiB" in made.stdout
    assert "golden: not checked, the model needs 30 GiB" in made.stdout
    document = json.loads(flashnext("convert", source, tmp_path / "2", "--json", services=services).stdout)
    assert document["agreement"] == {"why_none": "the model needs 30 GiB"}


def test_agreement_is_with_the_source_and_not_of_the_output_with_itself(source, tmp_path):
    asked: list[tuple[Path, Path]] = []

    def spy(reference: Path, other: Path, *_: object):
        asked.append((reference, other))
        raise BudgetTooSmall("enough seen", hint="")

    services = Services(compare_builds=spy)
    flashnext("convert", source, tmp_path / "out", "--no-golden", services=services)
    assert asked == [(source, tmp_path / "out")]


def test_two_models_are_not_two_builds_of_one(source, tmp_path):
    other = build_hf(tmp_path / "other", overrides={"num_hidden_layers": 3})
    result = flashnext(
        "compare", source, other, "--slots", "8", "-c", "256", "--prompts", "1", "--tokens", "1"
    )
    assert result.exit_code == 2
    assert "Not two builds of one model" in result.stderr

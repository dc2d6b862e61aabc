"""doctor beside the drive: facts around a run as each system tells them, and the golden of a model."""

import json
import os
import plistlib
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.engine_factory import Services
from cli.settings import goldens
from cli.tree import app
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.machine import GIB, detect_machine
from mlx_flashnext.reports import surroundings
from mlx_flashnext.reports.golden import NUM_TOKENS, check_golden
from mlx_flashnext.reports.surroundings import look_around
from tests.tiny.checkpoints import build_mlx

PMSET = b"""System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 lowpowermode         %d
 hibernatemode        3
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_mlx(tmp_path / "model")


@pytest.fixture(autouse=True)
def _few_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive is test_doctor.py's subject; here it is read once."""
    monkeypatch.setattr("mlx_flashnext.reports.doctor.READERS", (2,))


def flashnext(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], obj=Services())


def mac(
    low_power: int = 0,
    *,
    internal: bool = True,
    bus: str = "Apple Fabric",
    solid: bool = True,
    wired: int = 0,
):
    """A Mac's tools, in the form of their manuals."""

    def ask(words: Sequence[str]) -> bytes:
        if words[0] == "pmset":
            return PMSET % low_power
        if words[0] == "diskutil":
            return plistlib.dumps({"Internal": internal, "BusProtocol": bus, "SolidState": solid})
        assert words == ("sysctl", "-n", "iogpu.wired_limit_mb")
        return f"{wired}\n".encode()

    return ask


def facts(tmp_path: Path, **rest: object) -> dict[str, tuple[str, str]]:
    around = look_around(tmp_path, platform="darwin", ask=mac(**rest))  # type: ignore[arg-type]
    assert around.unmeasured == ()
    return {fact.name: (fact.value, fact.advice) for fact in around.facts}


def test_a_mac_in_order_needs_no_advice(tmp_path):
    found = facts(tmp_path)
    assert found["low power mode"] == ("off", "")
    assert found["drive"] == ("internal, Apple Fabric", "")
    assert found["wired limit"] == ("the system's own", "")


@pytest.mark.parametrize(
    ("rest", "name", "value", "advice"),
    [
        ({"low_power": 1}, "low power mode", "on", "switch it off"),
        ({"internal": False, "bus": "USB"}, "drive", "external, USB", "--mirror"),
        ({"internal": False, "bus": "USB", "solid": False}, "drive", "turning disks", "SSD"),
        ({"wired": 24576}, "wired limit", "24.0 GiB, set by hand", "0 gives"),
    ],
)
def test_what_slows_a_mac_is_told_with_advice(tmp_path, rest, name, value, advice):
    found = facts(tmp_path, **rest)
    assert value in found[name][0]
    assert advice in found[name][1]


@pytest.mark.parametrize(
    "broken",
    [
        lambda _words: b"",
        lambda _words: b"\xff\xfe nonsense",
        lambda words: (_ for _ in ()).throw(FileNotFoundError(2, "No such file", words[0])),
        lambda words: (_ for _ in ()).throw(subprocess.TimeoutExpired(words, 10)),
        lambda words: (_ for _ in ()).throw(subprocess.CalledProcessError(1, words)),
    ],
)
def test_a_tool_that_does_not_answer_is_not_measured_and_nothing_is_guessed(tmp_path, broken):
    around = look_around(tmp_path, platform="darwin", ask=broken)
    assert {fact.name for fact in around.facts} <= {"swap", "power", "file system"}
    assert len(around.unmeasured) == 3


def test_elsewhere_what_only_a_mac_says_is_listed_as_not_measured(tmp_path):
    around = look_around(tmp_path, platform="linux")
    assert "low power mode: only a Mac says" in around.unmeasured
    assert "the wired limit: only a Mac says" in around.unmeasured
    assert any(fact.name == "file system" and "unknown" not in fact.value for fact in around.facts)


def test_swap_battery_and_a_slow_file_system_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(surroundings, "swap_bytes", lambda: (3 * GIB, 4 * GIB))
    monkeypatch.setattr(surroundings, "is_on_battery", lambda: True)
    monkeypatch.setattr(surroundings, "filesystem_of", lambda _path: ("exfat", "/Volumes/stick"))
    found = {fact.name: fact for fact in look_around(tmp_path, platform="linux").facts}
    assert found["swap"].value == "3.0 of 4.0 GiB in use"
    assert "memory is short" in found["swap"].advice
    assert "plug it in" in found["power"].advice
    assert found["file system"].value == "exfat at /Volumes/stick"
    assert found["file system"].advice
    monkeypatch.setattr(surroundings, "filesystem_of", lambda _path: ("smbfs", "/Volumes/nas"))
    found = {fact.name: fact for fact in look_around(tmp_path, platform="linux").facts}
    assert "a network is no drive" in found["file system"].advice


def spoil_experts(model: Path) -> None:
    """Change the weights of every expert; headers, and so the digest, stay."""
    checkpoint = open_checkpoint(model)
    for layout in checkpoint.experts.values():
        for expert in range(layout.record.num_experts):
            for component, span in zip(layout.components, layout.record.spans(expert), strict=True):
                if component.name.endswith(".weight"):
                    with checkpoint.table.files[span.file].path.open("r+b") as stream:
                        stream.seek(span.offset)
                        old = stream.read(span.length)
                        stream.seek(span.offset)
                        stream.write(bytes(byte ^ 0x88 for byte in old))


def test_a_model_that_does_not_load_is_said_so_and_is_no_success(model):
    (model / "tokenizer.json").write_text("{}")
    result = flashnext("doctor", model)
    assert result.exit_code == 5
    assert "golden: not checked, " in result.stdout
    assert "tokenizer" in result.stdout


def test_p61_the_first_golden_is_kept_and_the_next_one_compared(model):
    document = json.loads(flashnext("doctor", model, "--json").stdout)
    assert document["golden"]["outcome"] == "kept"
    assert len(document["golden"]["tokens"]) == NUM_TOKENS
    assert Path(document["golden"]["file"]).parent == goldens()
    again = flashnext("doctor", model)
    assert again.exit_code == 0, again.output
    assert "the same as the first time" in again.stdout


def test_p61_a_model_that_says_something_else_is_found_and_stays_found(model):
    machine = detect_machine()
    first = check_golden(model, machine, goldens())
    spoil_experts(model)
    result = flashnext("doctor", model)
    assert result.exit_code == 5, result.output
    assert "golden: DIFFERS from the first time after" in result.stdout
    assert str(first.path) in result.stdout.replace("\n", "")
    document = json.loads(flashnext("doctor", model, "--json").stdout)
    assert document["golden"]["outcome"] == "differs"


def test_p61_other_conditions_replace_the_golden_instead_of_blaming_the_model(model, monkeypatch):
    machine = detect_machine()
    assert check_golden(model, machine, goldens()).outcome == "kept"
    monkeypatch.setattr("mlx_flashnext.reports.golden.version_of", lambda _name: "9.9")
    assert check_golden(model, machine, goldens()).outcome == "new conditions"
    assert check_golden(model, machine, goldens()).outcome == "same"


def test_p61_a_golden_is_compared_with_the_slots_it_was_said_with(model, monkeypatch):
    """What fits changes from day to day; where slots matter, another number would never compare anything."""
    metal = replace(detect_machine(), backend="metal")
    opened: list[int | None] = []
    original = Engine.open

    def spy(directory, request, **rest):
        opened.append(request.slots_per_layer)
        few = request if opened[1:] else replace(request, slots_per_layer=6)
        return original(directory, few, **{**rest, "machine": detect_machine()})

    monkeypatch.setattr(Engine, "open", spy)
    assert check_golden(model, metal, goldens()).golden.slots_per_layer == 6
    assert check_golden(model, metal, goldens()).outcome == "same"
    assert opened == [None, 6]


@pytest.mark.parametrize("damage", [b"\xff", b'{"format": 1}', b'{"x": ' * 100_000])
def test_a_damaged_golden_is_kept_anew(model, damage):
    machine = detect_machine()
    path = check_golden(model, machine, goldens()).path
    path.write_bytes(damage)
    assert check_golden(model, machine, goldens()).outcome == "kept"
    assert check_golden(model, machine, goldens()).outcome == "same"


def test_a_pipe_in_the_place_of_a_golden_is_not_waited_for(model):
    path = check_golden(model, detect_machine(), goldens()).path
    path.unlink()
    os.mkfifo(path)
    result = flashnext("doctor", model)
    assert "golden: not checked, Not a regular file" in result.stdout
    path.unlink()


def test_p42_the_acceptance_of_the_next_token_module_is_told(model):
    check = check_golden(model, detect_machine(), goldens())
    assert check.num_proposed > 0
    document = json.loads(flashnext("doctor", model, "--json").stdout)
    assert document["golden"]["num_proposed"] == check.num_proposed
    assert f"of {check.num_proposed} proposals were right" in flashnext("doctor", model).stdout


def test_a_model_that_does_not_fit_is_examined_all_the_same(model, monkeypatch):
    from mlx_flashnext.engine.errors import BudgetTooSmall

    def refuse(*_: object, **__: object):
        raise BudgetTooSmall("no room", hint="")

    monkeypatch.setattr("mlx_flashnext.reports.golden.check_golden", refuse)
    result = flashnext("doctor", model)
    assert result.exit_code == 0
    assert "golden: not checked, no room" in result.stdout
    assert "golden: not checked, left out" in flashnext("doctor", model, "--no-golden").stdout

"""Where a page goes: known before anything is measured, published whole, never over another kind of file."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.commands import bench
from cli.engine_factory import Services
from cli.html import place
from cli.html.page import VERSIONS, render_page
from cli.html.place import PagePlace
from cli.tree import app
from expert_store import published
from mlx_flashnext.reports import draft_report, predictor_report, ssd_wait

REPORT = {"format": "flashnext-ssd-wait", "version": 3, "conditions": {"model": "tiny"}, "variants": []}


class NothingIsMeasured:
    """Services of which any use is a failure: the refusal must come before."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"measured before the place was looked at: {name}")


def flashnext(*words: object, services: Any = None):
    obj = NothingIsMeasured() if services is None else services
    return CliRunner().invoke(app, [str(word) for word in words], obj=obj)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with nothing in it."""
    inner = tmp_path / "pages"
    inner.mkdir()
    return inner


@pytest.fixture
def saved(folder: Path) -> Path:
    path = folder / "saved.json"
    path.write_text(json.dumps(REPORT))
    return path


def test_a_place_that_cannot_be_is_refused_before_anything_is_measured(folder):
    other = folder / "weights.safetensors"
    other.write_bytes(b"precious")
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    for path, code, message, hint in (
        (folder / "none" / "page.html", 2, "There is no such directory", f"mkdir -p {folder / 'none'}"),
        (folder, 2, "A page is a file, this is a directory", "report.html"),
        (other, 1, "The file exists and is not a page of flashnext", "choose another name"),
        (folder / f"{'b' * 245}.html", 1, f"Cannot write {folder}", "choose another place"),
        (pipe, 1, "The file exists and is not a page of flashnext", "choose another name"),
        (other / "page.html", 2, "There is no such directory", "mkdir"),
        (folder / ("x" * 300), 1, "Cannot write", "choose another place for --html"),
        ("/proc/page.html", 1, "Cannot write /proc/page.html", "choose another place for --html"),
    ):
        result = flashnext("bench", "--report", "ssd-wait", "--html", path)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: {message}")
        assert f"hint: {hint}" in result.stderr or hint in result.stderr.split("hint: ")[1]
    assert other.read_bytes() == b"precious"
    assert sorted(one.name for one in folder.iterdir()) == ["pipe", "weights.safetensors"]


def test_a_directory_that_nobody_may_write_to_is_refused(folder, monkeypatch):
    """As root may write anywhere, the system's refusal is made."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    result = flashnext("bench", "--report", "draft", "--html", folder / "page.html")
    assert (result.exit_code, list(folder.iterdir())) == (1, [])
    assert "Permission denied" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--html", "x.html"), "Nothing reads --html without --report"),
        (("--report", "verify", "--html", "x.html"), "Nothing reads --html with --report verify"),
        (("--report", "warm-start", "--html", "x.html"), "Nothing reads --html with --report warm-start"),
        (("--from-json", "x.json"), "Nothing reads --from-json without --html: x.json"),
        (("--from-json", "x.json", "--html", "x.html", "--report", "draft"), "Nothing reads --report with"),
        (("--from-json", "x.json", "--html", "x.html", "-n", "4"), "Nothing reads --n-gen with --from-json"),
    ],
)
def test_senseless_requests_for_a_page_are_refused(words, message):
    result = flashnext("bench", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "hint: " in result.stderr


def test_a_saved_report_becomes_the_page_it_would_have_been(folder, saved):
    page = folder / "page.html"
    result = flashnext("bench", "--from-json", saved, "--html", page)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"page: {page}\n")
    assert page.read_text("utf-8") == render_page(REPORT)
    quiet = flashnext("bench", "--from-json", saved, "--html", page, "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{", 5, "Not a JSON document"),
        ("[" * 100_000, 5, "Not a JSON document"),
        ('{"format": "\xff"}', 5, "Not a JSON document"),
        ("[]", 3, "There is no page of this document"),
        ('{"format": "flashnext-bench"}', 3, "format 'flashnext-bench'"),
        ('{"format": ["flashnext-ssd-wait"]}', 3, "format none"),
        ('{"format": "flashnext-ssd-wait", "version": 4}', 3, "version 4 of flashnext-ssd-wait"),
        ('{"format": "flashnext-draft-report", "version": 2}', 3, "reads up to 1"),
    ],
)
def test_what_is_no_report_is_refused_and_leaves_no_page(folder, text, code, message):
    path = folder / "saved.json"
    path.write_bytes(text.encode("latin-1"))
    result = flashnext("bench", "--from-json", path, "--html", folder / "page.html")
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "hint: " in result.stderr
    assert [one.name for one in folder.iterdir()] == ["saved.json"]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_no_file_is_no_report(folder, make):
    path = folder / "saved.json"
    make(path)
    result = flashnext("bench", "--from-json", path, "--html", folder / "page.html")
    assert result.exit_code == 5
    assert result.stderr.startswith(f"error: Cannot read {path}: ")


def test_a_report_that_is_not_there_is_refused(folder):
    result = flashnext("bench", "--from-json", folder / "none.json", "--html", folder / "page.html")
    assert result.exit_code == 1
    assert "hint: save one: flashnext bench --report ssd-wait --json > FILE" in result.stderr


def test_a_page_replaces_a_page_and_a_link_stays_a_link(folder, saved):
    page, link = folder / "page.html", folder / "latest.html"
    assert flashnext("bench", "--from-json", saved, "--html", page).exit_code == 0
    link.symlink_to(page.name)
    saved.write_text(json.dumps({**REPORT, "conditions": {"model": "another"}}))
    assert flashnext("bench", "--from-json", saved, "--html", link).exit_code == 0
    assert link.is_symlink()
    assert "another" in page.read_text("utf-8")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(page.stat().st_mode) == 0o666 & ~mask


def test_a_file_that_appears_meanwhile_is_not_written_over(folder):
    page = folder / "page.html"
    found = PagePlace(page)
    page.write_text("somebody else's")
    with pytest.raises(place.CommandError, match="not a page of flashnext"):
        found.publish(REPORT)
    assert page.read_text() == "somebody else's"


def test_what_was_measured_is_printed_though_the_page_cannot_be_written(folder, monkeypatch):
    page = folder / "page.html"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Measured:
        def to_dict(self) -> dict[str, object]:
            return REPORT

    monkeypatch.setattr(place, "publish", full)
    monkeypatch.setattr(bench, "ssd_wait_report", lambda *_: Measured())
    result = flashnext("bench", "--report", "ssd-wait", "--json", "--html", page, services=Services())
    assert result.exit_code == 4
    assert json.loads(result.stdout) == REPORT
    assert result.stderr.startswith(f"error: Cannot write {page}: No space left on device")
    assert not page.exists()


def test_versions_are_those_that_reports_have():
    assert VERSIONS == {
        "flashnext-ssd-wait": ssd_wait.VERSION,
        "flashnext-predictors": predictor_report.VERSION,
        "flashnext-draft-report": draft_report.VERSION,
    }


def test_a_report_that_was_printed_stays_one_document_when_its_page_is_interrupted(folder, monkeypatch):
    page = folder / "page.html"

    class Measured:
        def to_dict(self) -> dict[str, object]:
            return REPORT

    def pressed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(published.os, "fsync", pressed)
    monkeypatch.setattr(bench, "ssd_wait_report", lambda *_: Measured())
    result = flashnext("bench", "--report", "ssd-wait", "--json", "--html", page, services=Services())
    assert result.exit_code == 130
    assert json.loads(result.stdout) == REPORT
    assert result.stderr == "interrupted: the report is whole, there is no page of it\n"
    assert list(folder.iterdir()) == []


def test_an_interrupted_page_of_a_saved_report_leaves_nothing(folder, saved, monkeypatch):
    def pressed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(published.os, "fsync", pressed)
    result = flashnext("bench", "--from-json", saved, "--html", folder / "page.html")
    assert (result.exit_code, result.stdout) == (130, "")
    assert list(folder.iterdir()) == [saved]

"""Every reader of a format against hostile files: no crash, no hang, no large allocation, no partial load."""

import pytest

from tests import fuzzing
from tests.fuzzed_formats import formats
from tests.fuzzing import Format, run_cases

CASES = 2000
NAMES = [
    "flashnext-trace",
    "replayed trace",
    "draft contract",
    "draft calibration",
    "draft config",
    "pack manifest",
    "popularity",
    "draft costs",
    "chat",
    "safetensors header",
    "safetensors index",
    "model config",
    "generation config",
    "capture manifest",
    "capture index",
    "training run",
    "near map",
    "route sidecar",
    "draft training",
    "draft promotion",
    "draft prompts",
    "build note",
    "fit state",
    "fit state's words",
]


def test_every_format_is_fuzzed(tmp_path):
    assert [form.name for form in formats(tmp_path)] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_hostile_files_are_read_whole_or_refused(name, tmp_path):
    form = next(form for form in formats(tmp_path) if form.name == name)
    assert form.read(form.seeds[0]) is not None
    counts = run_cases(form, CASES, seed=1)
    # Neither side is empty: what refuses everything is no reader, what accepts everything reads nothing.
    assert counts["refused"] > CASES // 4
    assert sum(counts.values()) == CASES


@pytest.mark.parametrize(
    ("read", "rewrite", "what"),
    [
        (lambda data: int(data), None, "ValueError"),
        (lambda data: {}, lambda value: b"{}", "loaded in part"),
        (lambda data: b"x" * (80 << 20), None, "[0-9]+ bytes"),
        (lambda data: sum(range(1 << 22)), None, r"[0-9.]+ s$"),
    ],
)
def test_a_bad_reader_is_found(read, rewrite, what, monkeypatch):
    monkeypatch.setattr(fuzzing, "MOST_SECONDS", 0.01 if what.endswith("s$") else 10)
    form = Format("bad", [b'{"a": 1, "b": [2, 3]}'], read, (KeyError,), rewrite=rewrite)
    with pytest.raises(AssertionError, match=what):
        run_cases(form, 20, seed=1)

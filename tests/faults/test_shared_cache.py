"""P73: processes that share every folder of the user's cache, and none gives another one's answer."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from expert_store.popularity import load_popularity
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.machine import detect_machine
from mlx_flashnext.reports.golden import Golden, check_golden
from tests.cli.conftest import ROOT
from tests.tiny.checkpoints import build_mlx

PROMPTS = ("red, yellow and", "the cat sat on")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("shared") / "model")


def start(model: Path, prompt: str, cache: Path) -> subprocess.Popen[str]:
    flags = ("--ignore-chat-template", "--temp", "0", "-m", "12", "--slots", "6", "-c", "256", "--json")
    words = [sys.executable, "-m", "cli", "run", "--model", str(model), *flags, prompt]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
    return subprocess.Popen(words, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output)["text"]


def test_p73_runs_at_once_say_what_each_says_alone(model, tmp_path):
    alone = [said(start(model, prompt, tmp_path / f"own-{at}")) for at, prompt in enumerate(PROMPTS)]
    shared = tmp_path / "shared"
    together = [start(model, prompt, shared) for prompt in PROMPTS]
    assert [said(process) for process in together] == alone
    assert len(set(alone)) == len(alone)
    [left] = (shared / ".cache" if (shared / ".cache").is_dir() else shared).rglob("popularity/*.json")
    checkpoint = open_checkpoint(model)
    counts = {layer: one.record.num_experts for layer, one in checkpoint.experts.items()}
    assert load_popularity(left, model_digest=checkpoint.digest, num_experts=counts)
    assert [path.name for path in left.parent.iterdir()] == [left.name], "nothing half-written is left"


def test_p73_goldens_kept_at_once_leave_one_whole_file(model, tmp_path):
    import msgspec

    machine, failures = detect_machine(), []

    def keep() -> None:
        try:
            check_golden(model, machine, tmp_path / "goldens")
        except Exception as error:  # noqa: BLE001  told below
            failures.append(error)

    threads = [threading.Thread(target=keep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    [path] = (tmp_path / "goldens").iterdir()
    assert msgspec.json.decode(path.read_bytes(), type=Golden).model_digest

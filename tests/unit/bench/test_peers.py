"""The comparison with peers: what is asked of whom, what rows and bars say, the process that answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.studies.peers import answer, legs
from bench.studies.peers.checkpoint import build
from bench.studies.peers.legs import LEGS, budget_of, prompt_ids
from bench.studies.peers.run import answers, apart, read_runs
from bench.studies.peers.table import agreement, judge, of, table
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.plan import PlanRequest
from tests.tiny.engines import greedy


def run_of(
    leg: str, name: str, number: int, *, token_s: float, mb: float = 0.0, tokens: tuple[int, ...] = (1, 2, 3)
):
    answered = {
        "prefill_s": 4 * token_s, "decode_s": token_s * 2, "decode_bytes": mb * 2e6, "decode_cpu_s": 1.0,
        "steps": [token_s] * 2, "tokens": list(tokens), "box_peak_bytes": 10**9,
    }  # fmt: skip
    return {
        "round": number, "leg": leg, "name": name, "cap_bytes": None, "bytes_per_s": None,
        "checkpoint_bytes": 10**9, "load_s": 1.0, "first": answered, "next": answered,
    }  # fmt: skip


def a_comparison(peer_s: float, **changes: Any) -> list[dict[str, Any]]:
    runs = []
    for number, drift in enumerate(
        (1.0, 3.0, 2.0)
    ):  # the machine's pace changes; a ratio within a round does not
        runs.append(run_of("half", "flashnext", number, token_s=drift, mb=5.0))
        runs.append(run_of("half", "mlx-vlm moe_offload", number, token_s=peer_s * drift, mb=7.0, **changes))
        runs.append(run_of("resident", "flashnext", number, token_s=0.9 * drift))
    return runs


def verdicts(runs: list[dict[str, Any]]) -> dict[str, bool]:
    return {bar["bar"]: bar["met"] for bar in judge(runs)["bars"]}


def test_ratios_are_formed_within_a_round_and_held_against_their_bars():
    met = verdicts(a_comparison(1.5))
    assert met["half: decode over mlx-vlm moe_offload"]
    assert met["half: prefill over mlx-vlm moe_offload"]
    assert met["half: MB a token"]
    assert not met["half: decode over our own resident"]  # 0.90
    said = table(a_comparison(1.5))
    assert "1.50 [1.50 to 1.50]" in said
    assert "**missed**" in said


def test_a_peer_that_wins_stays_in_the_table():
    runs = a_comparison(0.5)
    assert not verdicts(runs)["half: decode over mlx-vlm moe_offload"]
    assert "| mlx-vlm moe_offload | 3 | 1.000 |" in table(runs)
    assert "0.50 [0.50 to 0.50]" in table(runs)


def test_other_tokens_are_said_with_their_place():
    runs = a_comparison(1.5, tokens=(1, 2, 4))
    ours, peer = of(runs, "half", "flashnext"), of(runs, "half", "mlx-vlm moe_offload")
    assert agreement(ours, ours) == "all 18 equal"
    assert agreement(ours, peer) == "part in round 0, first, token 2"
    assert "part in round 0" in table(runs)


def test_caps_are_the_same_for_all_and_a_cap_that_leaves_nothing_is_refused():
    leg = LEGS["half"]
    ours, peer = leg.contenders
    assert leg.cap_bytes(4 * 10**9) == 2 * 10**9
    assert budget_of(leg, ours, 4 * 10**9, 6 * 10**8) == 2 * 10**9 - legs.MARGIN_BYTES
    assert budget_of(leg, peer, 4 * 10**9, 6 * 10**8) == 14 * 10**8
    assert budget_of(LEGS["resident"], peer, 4 * 10**9, 6 * 10**8) is None
    with pytest.raises(SystemExit, match="leaves mlx-vlm moe_offload nothing"):
        budget_of(leg, peer, 10**9, 6 * 10**8)


def test_prompts_are_the_same_for_all_and_others_in_every_round():
    assert prompt_ids(500, 16, "next 1") == prompt_ids(500, 16, "next 1") != prompt_ids(500, 16, "next 2")
    assert min(prompt_ids(500, 400, "x")) >= 8


def test_the_process_answers_as_the_engine_does(tmp_path: Path):
    model = build("tiny", "mlx", tmp_path / "tiny-mlx")
    prompt = prompt_ids(512, 12, "test")
    wishes = [
        {"engine": "flashnext", "model": str(model), "budget_bytes": None, "options": {"experts": 16}},
        {"prompt": prompt}, {"more": 3}, {"more": 1}, {"prompt": prompt[:7]}, {"more": 2},
    ]  # fmt: skip
    told = subprocess.run(
        [sys.executable, answer.__file__], input="\n".join(map(json.dumps, wishes)) + "\n", text=True,
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    events = [json.loads(line) for line in told.splitlines()]
    said = [event["event"].split()[0] for event in events]
    assert said == ["loaded", "prompt", "decoded", "decoded", "prompt", "decoded"]
    with Engine.open(model, PlanRequest(context_tokens=256, slots_per_layer=16)) as engine:
        first, second = (
            [token for one in events[at] for token in one["tokens"]] for at in (slice(1, 4), slice(4, 6))
        )
        assert first == greedy(engine, prompt, 5)
        assert second == greedy(engine, prompt[:7], 3)
    assert events[0]["load_bytes"] >= 0
    assert [len(one["steps"]) for one in events if "steps" in one] == [3, 1, 2]


class _Talker:
    """Stands for a process: says tokens that count up, and keeps who was asked when."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name, self.asked, self.said = name, asked, 0

    def begin(self, prompt: list[int]) -> dict[str, Any]:
        self.asked.append((self.name, len(prompt)))
        return {"prefill_s": 1.0, "tokens": [0]}

    def decode(self, num_tokens: int, bytes_per_s: int | None) -> dict[str, Any]:
        self.asked.append((self.name, num_tokens))
        self.said += num_tokens
        tokens = list(range(self.said - num_tokens + 1, self.said + 1))
        steps = [float(bytes_per_s or 1)] * num_tokens
        return {"steps": steps, "decode_bytes": 7, "decode_cpu_s": 0.5, "tokens": tokens, "facts": {}}

    def peak_bytes(self) -> int:
        return 3


def test_answers_are_decoded_in_turns_there_and_back():
    asked: list[tuple[str, int]] = []
    talkers: Any = {(name, "0.5"): _Talker(name, asked) for name in "ab"}
    said = answers(talkers, [1] * 16, 11, {("b", "0.5"): 2})
    pieces = [("a", 4), ("b", 4), ("b", 4), ("a", 4), ("a", 2), ("b", 2)]
    assert asked == [("a", 16), ("b", 16), *pieces]
    assert said["a", "0.5"]["tokens"] == list(range(11))
    assert (said["a", "0.5"]["decode_s"], said["b", "0.5"]["decode_s"]) == (10.0, 20.0)
    assert said["a", "0.5"]["decode_bytes"] == 21


def test_legs_that_share_a_process_do_not_take_turns_with_each_other():
    asked = [(leg, one) for leg in ("resident", "two fifths", "slow drive") for one in LEGS[leg].contenders]
    groups = apart(asked)
    assert len(groups) == 2
    assert sorted((one for group in groups for one in group), key=str) == sorted(asked, key=str)
    for group in groups:
        keys = [(one.name, LEGS[leg].share) for leg, one in group]
        assert len(set(keys)) == len(keys)


def test_results_are_read_back(tmp_path: Path):
    assert read_runs(tmp_path / "none") == []
    (tmp_path / "some").write_text('{"a": 1}\n{"a": 2}\n')
    assert read_runs(tmp_path / "some") == [{"a": 1}, {"a": 2}]

"""The comparison with peers: what is asked of whom, what rows and bars say, the process that answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.studies.peers import answer, legs
from bench.studies.peers.checkpoint import MTP_MODULE, build
from bench.studies.peers.engines import FlashNext
from bench.studies.peers.legs import LEGS, budget_of, prompt_ids
from bench.studies.peers.run import answers, apart, bytes_of_experts, read_runs
from bench.studies.peers.table import agreement, judge, of, table
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.plan import PlanRequest
from tests.tampering import load
from tests.tiny.engines import greedy


def run_of(
    leg: str, name: str, number: int, *, token_s: float, mb: float = 0.0, tokens: tuple[int, ...] = (1, 2, 3)
):
    answered = {
        "prefill_s": 4 * token_s, "decode_s": token_s * 2, "decode_bytes": mb * 2e6, "decode_cpu_s": 1.0,
        "steps": [token_s] * 2, "tokens": list(tokens), "box_peak_bytes": 10**9,
        "passes": 2, "pass_tokens": 2, "fetched_bytes": 0,
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
        counts = {"passes": 2, "pass_tokens": num_tokens, "fetched_bytes": 5}
        said = {"steps": steps, "decode_bytes": 7, "decode_cpu_s": 0.5, "tokens": tokens, "facts": {}}
        return said | counts

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
    assert [said["b", "0.5"][name] for name in ("passes", "pass_tokens", "fetched_bytes")] == [6, 10, 15]


def test_legs_that_share_a_process_do_not_take_turns_with_each_other():
    asked = [(leg, one) for leg in ("resident", "two fifths", "slow drive") for one in LEGS[leg].contenders]
    groups = apart(asked)
    assert len(groups) == 2
    assert sorted((one for group in groups for one in group), key=str) == sorted(asked, key=str)
    for group in groups:
        keys = [LEGS[leg].process_of(one.name) for leg, one in group]
        assert len(set(keys)) == len(keys)


def test_a_process_is_its_name_and_what_it_may_hold():
    assert LEGS["slow drive"].process_of("a") == LEGS["two fifths"].process_of("a")
    assert LEGS["mtp"].process_of("a") != LEGS["resident"].process_of("a")
    assert LEGS["half"].process_of("a") != LEGS["half"].process_of("b")


def test_results_are_read_back(tmp_path: Path):
    assert read_runs(tmp_path / "none") == []
    (tmp_path / "some").write_text('{"a": 1}\n{"a": 2}\n')
    assert read_runs(tmp_path / "some") == [{"a": 1}, {"a": 2}]


def test_half_of_the_experts_is_slots_for_us_and_bytes_for_a_peer(tmp_path: Path):
    leg = LEGS["mtp"]
    model = build("tiny", "mlx", tmp_path / "tiny-mlx")
    checkpoint = open_checkpoint(model)
    every = sum(one.record.num_experts * one.record.record_bytes for one in checkpoint.experts.values())
    assert bytes_of_experts(model) == every
    budgets = {one.name: budget_of(leg, one, 10**9, 6 * 10**8, every) for one in leg.contenders}
    assert set(budgets.values()) == {None, every // 2}
    assert all((budget is None) == name.startswith("flashnext") for name, budget in budgets.items())


def test_an_mtp_module_changes_nothing_of_the_checkpoint_it_is_added_to(tmp_path: Path):
    plain, _ = load(build("tiny", "mlx", tmp_path / "plain"))
    both, _ = load(build("tiny", "mlx", tmp_path / "both", "with"))
    alone, _ = load(build("tiny", "mlx", tmp_path / "alone", "alone"))
    inside = {name.removeprefix(MTP_MODULE) for name in both if name.startswith(MTP_MODULE)}
    assert plain.keys() == {name for name in both if not name.startswith(MTP_MODULE)}
    assert [name for name in plain if plain[name] != both[name]] == []
    assert inside == alone.keys()
    assert [name for name in alone if alone[name] != both[MTP_MODULE + name]] == []
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert (config["model_type"], config["block_size"]) == ("qwen4_exp_mtp", 2)
    eight = {name for name, spec in config["quantization"].items() if isinstance(spec, dict)}
    assert eight == {"layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"}


def test_drafts_of_the_mtp_module_are_counted_and_change_no_token(tmp_path: Path):
    model = build("tiny", "mlx", tmp_path / "tiny-mtp", "with")
    said = {}
    for name, options in ({one.name: one.options for one in LEGS["mtp"].contenders if one.is_ours}).items():
        engine = FlashNext(model, None, {**options, "experts": 8})
        running = engine.answer(prompt_ids(512, 12, "test"))
        first, before = next(running), engine.counts()
        tokens = [first, *(next(running) for _ in range(24))]
        said[name] = tokens, {count: end - before[count] for count, end in engine.counts().items()}
        running.close()  # pyright: ignore[reportAttributeAccessIssue]
        engine.close()
    (plain, ones), (drafted, counts) = said["flashnext"], said["flashnext, MTP"]
    assert plain == drafted
    assert ones["passes"] == ones["pass_tokens"] == 24
    # A module that is not apt is accepted about never with so large a vocabulary.
    assert counts["passes"] < 20
    assert counts["pass_tokens"] in (23, 24, 25)
    assert min(ones["fetched_bytes"], counts["fetched_bytes"]) > 0


def a_speculation(**changes: Any) -> list[dict[str, Any]]:
    runs = []
    of_its = {
        "flashnext": (1.0, 2, 40), "flashnext, MTP": (1.25, 1, 44), "mlx-vlm moe_offload": (2.0, 2, 60),
        "mlx-vlm moe_offload, MTP": (5.0, 1, 90),
    }  # fmt: skip
    for number, drift in enumerate((1.0, 3.0, 2.0)):
        for name, (token_s, passes, fetched) in of_its.items():
            run = run_of("mtp", name, number, token_s=token_s * drift)
            run["next"] |= {"passes": passes, "fetched_bytes": fetched * 10**6}
            run["next"] |= changes if name == "flashnext, MTP" else {}
            runs.append(run)
    return runs


def test_speculation_is_judged_between_those_that_draft_and_shown_against_those_that_do_not():
    said, met = table(a_speculation()), verdicts(a_speculation())
    rows = {line.split(" | ")[0]: line.split(" | ") for line in said.splitlines()}
    assert "0.5 of the experts each" in said
    assert rows["| flashnext, MTP"][2:5] == ["0.400", "2.00", "22.0"]
    assert rows["| flashnext, MTP"][7:9] == ["-", "0.80 [0.80 to 0.80]"]
    assert rows["| mlx-vlm moe_offload"][7:9] == ["2.00 [2.00 to 2.00]", "-"]
    assert rows["| mlx-vlm moe_offload, MTP"][7:9] == ["4.00 [4.00 to 4.00]", "0.40 [0.40 to 0.40]"]
    assert met == {
        "mtp: decode over mlx-vlm moe_offload, both with MTP": True,
        "mtp: tokens a pass": True,
        "mtp: MB of experts a token": True,
    }


def test_a_peer_that_speculates_better_is_said_to():
    met = verdicts(a_speculation(passes=2, fetched_bytes=91 * 10**6, decode_s=99.0))
    assert set(met.values()) == {False}

"""From a target's own answers to a draft that serves it: captured, proved, trained, exported, judged,
promoted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from drafter.config import num_parameters
from drafter.errors import DrafterError
from drafter.train.captures import CaptureSet
from drafter.train.evaluate import cycles_of
from drafter.train.runs import TrainSettings
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import IncompatibleDrafter, InvalidRequest, TargetDiffers
from mlx_flashnext.engine.events import Finished
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.training import draft_capture, draft_promote
from mlx_flashnext.training.draft_calibrate import calibrate
from mlx_flashnext.training.draft_capture import (
    CaptureRequest,
    ReplayDiffers,
    capture,
    facts_of,
    replay,
)
from mlx_flashnext.training.draft_promote import Ladder, chi_square, promote
from mlx_flashnext.training.draft_training import (
    check_build,
    default_config,
    evaluate_draft,
    export_run,
    judge,
    load_draft,
    train_draft,
)
from mlx_flashnext.training.prompt_files import Prompt
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.route_hints import write_sidecar

GREEDY = SamplingParams(temperature=0.0)
TAPS, CONTRACTION, ANSWER = (0, 1, 2), "mean", 24
PROMPTS = [Prompt(prompt_of(5 + number % 4, seed=number), f"kind {number % 2}") for number in range(12)]
REQUEST = CaptureRequest(TAPS, CONTRACTION, GREEDY, max_tokens=ANSWER, held_out_every=3, shard_bytes=1 << 15)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Iterator[Engine]:
    with open_tiny(tiny_dir, slots=8, step=7, draft_tokens=6) as engine:
        yield engine


@pytest.fixture(scope="module")
def captures(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> CaptureSet:
    directory = tmp_path_factory.mktemp("captures") / "set"
    done = capture(engine, PROMPTS, directory, REQUEST)
    assert (done.num_new, done.num_replayed, done.largest_difference, done.num_route_differences) == (
        12,
        3,
        0,
        0,
    )
    return CaptureSet.open(directory)


@pytest.fixture(scope="module")
def draft_dir(engine: Engine, captures: CaptureSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("draft")
    config = default_config(captures, num_hidden_layers=1, selector_rank=8, selector_top_k=6)
    settings = TrainSettings(num_steps=60, num_documents=4, num_anchors=8, rate=8e-3, save_every=1000)
    run = train_draft(engine, captures, work / "run", config, settings)
    made = export_run(engine, run, work / "draft", licence="mit", dtype="float32")
    assert made.num_parameters == num_parameters(run.description.draft_config())
    return work / "draft"


def same_files(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()}
    return names == {path.name for path in other.iterdir()} and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def test_every_document_read_as_a_prompt_gives_what_saying_it_gave(
    engine: Engine, captures: CaptureSet
) -> None:
    for info in captures.documents[:4]:
        document = captures.read(info)
        features, routes = replay(engine, document.tokens.tolist(), captures.identity)
        assert features.tobytes() == document.features.tobytes()
        assert routes.shape == (
            len(features),
            engine.config.num_hidden_layers,
            engine.config.num_experts_per_tok,
        )
        assert (routes == document.routes).all()


def test_a_replay_that_differs_stops_the_capture(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = draft_capture.replay

    def shifted(*arguments):
        features, routes = original(*arguments)
        features[3, 5] = np.nextafter(features[3, 5], np.float32(9))
        return features, routes

    monkeypatch.setattr(draft_capture, "replay", shifted)
    with pytest.raises(ReplayDiffers, match="differ by up to"):
        capture(engine, PROMPTS[:1], tmp_path / "set", REQUEST)

    def rerouted(*arguments):
        features, routes = original(*arguments)
        routes[2, 1, 0] ^= 1
        return features, routes

    monkeypatch.setattr(draft_capture, "replay", rerouted)
    with pytest.raises(ReplayDiffers, match="other experts in 1 "):
        capture(engine, PROMPTS[:1], tmp_path / "other", REQUEST)


def test_guesses_and_interruptions_change_no_byte(
    engine: Engine, captures: CaptureSet, tmp_path: Path
) -> None:
    said = {
        tuple(captures.read(info).tokens[: info.num_prompt]): captures.read(info)
        for info in captures.documents
    }
    guessed = [
        # Half right, then a gap, then right again.
        prompt._replace(guess=[*tokens[:9], 3, 3, *tokens[12:]])
        for prompt in PROMPTS
        for tokens in [said[tuple(prompt.tokens)].tokens[len(prompt.tokens) :].tolist()]
    ]

    def interrupted(done: int, _total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(engine, guessed, tmp_path / "set", REQUEST, interrupted)
    num_whole = len(CaptureSet.open(tmp_path / "set").documents)
    assert num_whole == 5
    done = capture(engine, guessed, tmp_path / "set", REQUEST)
    assert (done.num_documents, done.num_new) == (12, 12 - num_whole)
    again = CaptureSet.open(tmp_path / "set")
    assert [info.key for info in again.documents] == [info.key for info in captures.documents]
    for info, other in zip(again.documents, captures.documents, strict=True):
        for name in ("tokens", "features", "routes"):
            left, right = getattr(again.read(info), name), getattr(captures.read(other), name)
            assert left.tobytes() == right.tobytes()


def test_taps_outside_the_target_are_refused(engine: Engine, tmp_path: Path) -> None:
    for taps in ((), (1, 0), (0, 99), (-1, 2)):
        with pytest.raises(InvalidRequest, match="Taps are"):
            capture(
                engine, PROMPTS[:1], tmp_path / "set", CaptureRequest(taps, CONTRACTION, GREEDY, max_tokens=4)
            )


def test_another_build_is_refused(engine: Engine, captures: CaptureSet) -> None:
    check_build(engine, captures.identity.target_digest, "capture set")
    with pytest.raises(TargetDiffers, match="capture set was made with target build uuuu"):
        check_build(engine, "u" * 64, "capture set")


def test_served_acceptance_is_what_the_trainer_says(
    engine: Engine, tiny_dir: Path, captures: CaptureSet, draft_dir: Path
) -> None:
    draft = load_draft(engine, draft_dir)
    request = PlanRequest(
        context_tokens=512, slots_per_layer=8, prefill_step=7, draft="dflash2", draft_directory=draft_dir
    )
    accepted = 0
    with Engine.open(tiny_dir, request) as served:
        for info in captures.documents:
            document = captures.read(info)
            cycles = cycles_of(judge(engine, draft, document), draft.config.max_proposals)
            session = served.session(is_guarded=False)
            prompt = document.tokens[: info.num_prompt].tolist()
            stop = served.tokenizer.eos_ids
            *_, last = session.generate(prompt, GREEDY, max_tokens=ANSWER, stop_ids=stop)
            assert isinstance(last, Finished)
            assert session.tokens == tuple(document.tokens[:-1].tolist())
            assert last.statistics.cycles == len(cycles)
            assert last.statistics.output_tokens == sum(cycle.committed for cycle in cycles)
            accepted += sum(cycle.accepted for cycle in cycles)
    assert accepted > 20


def test_a_draft_is_evaluated_on_documents_that_training_never_saw(
    engine: Engine, captures: CaptureSet, draft_dir: Path
) -> None:
    draft = load_draft(engine, draft_dir)
    found = evaluate_draft(engine, draft, captures)
    held_out = captures.of_split("held_out")
    assert found["num_documents"] == len(held_out) > 0
    assert found["all"]["num_committed"] == sum(info.num_tokens - info.num_prompt for info in held_out)
    assert set(found["by_label"]) == {info.label for info in held_out}
    slots = found["all"]["acceptance_by_slot"]
    assert slots == sorted(slots, reverse=True)
    with pytest.raises(DrafterError, match="the set holds"):
        evaluate_draft(engine, load_draft(engine, draft_dir, contraction="stream0"), captures)


def test_calibration_finds_the_contraction_it_was_trained_with(
    engine: Engine, captures: CaptureSet, draft_dir: Path
) -> None:
    draft = load_draft(engine, draft_dir, contraction="stream0")
    record, faults = calibrate(engine, draft, captures, min_tokens=200)
    ways = {(trial.contraction, trial.tap_shift): trial.agreement[0] for trial in record.trials}
    assert {shift for _, shift in ways} == {0, 1}
    assert record.contraction == CONTRACTION
    assert ways[CONTRACTION, 0] == max(ways.values())
    assert (record.draft_digest, record.target_digest) == (draft.verdict.digest, facts_of(engine).digest)
    assert any("at least 4000 are needed" in fault for fault in faults)
    tried: list[int] = []
    with pytest.raises(DrafterError, match="tokens, 9999 are needed"):
        calibrate(engine, draft, captures, min_tokens=9999, progress=lambda done, _: tried.append(done))
    assert not tried, "what is there can be counted beforehand"


def open_with(tiny_dir: Path, own: Path | None, hints: str = "off") -> Engine:
    draft = "none" if own is None else "dflash2"
    request = PlanRequest(
        context_tokens=512, slots_per_layer=8, prefill_step=7, draft=draft, draft_directory=own, hints=hints
    )
    return Engine.open(tiny_dir, request)


def test_the_ladder_is_climbed_and_its_evidence_kept(
    tiny_dir: Path, captures: CaptureSet, draft_dir: Path
) -> None:
    ladder = Ladder(
        captures, [prompt.tokens for prompt in PROMPTS[:3]], 16, num_samples=20, least_tokens_per_cycle=1.0
    )
    rungs = promote(lambda own, hints: open_with(tiny_dir, own, hints), draft_dir, ladder)
    outcomes = {rung.name: rung.outcome for rung in rungs}
    assert [outcome for outcome in outcomes.values() if outcome == "passed"] == ["passed"] * 7
    assert outcomes["exposed SSD wait"] == outcomes["end-to-end latency"] == "only target hardware"
    said = json.loads((draft_dir / draft_promote.FILE).read_text())
    assert said["is_promoted"]
    assert [rung["name"] for rung in said["rungs"]] == list(outcomes)
    assert outcomes["route hints"] == "not asked", "no sidecar lies beside it"


def climb_with_hints(tiny_dir: Path, draft: Path, ladder: Ladder) -> dict[str, draft_promote.Rung]:
    climb = draft_promote._Climb(lambda own, hints: open_with(tiny_dir, own, hints), draft, ladder)
    rungs = dict(climb.rungs())
    return {name: rungs[name](name) for name in ("greedy equality", "route hints")}


def test_what_hints_read_and_spare_is_in_the_evidence(
    tiny_dir: Path, captures: CaptureSet, draft_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "draft"
    shutil.copytree(draft_dir, own)
    write_sidecar(own, tiny_dir)
    ladder = Ladder(captures, [prompt.tokens for prompt in PROMPTS[:2]], 16)
    rung = climb_with_hints(tiny_dir, own, ladder)["route hints"]
    told, without = rung.evidence["with"], rung.evidence["without"]
    assert (rung.outcome, rung.evidence["hints"], rung.evidence["different"]) == ("passed", "sidecar", [])
    assert told["bytes_per_token"] > told["predicted_bytes_per_token"] > 0
    assert without["predicted_bytes_per_token"] == 0
    assert without["bytes_per_token"] > 0
    assert {*told} == {"bytes_per_token", "predicted_bytes_per_token", "exposed_wait_ns_per_token"}
    original = draft_promote._answer

    def wrong(engine, *arguments):
        answer, statistics = original(engine, *arguments)
        return [*answer[:-1], 0] if engine.plan.hints != "off" else answer, statistics

    monkeypatch.setattr(draft_promote, "_answer", wrong)
    assert climb_with_hints(tiny_dir, own, ladder)["route hints"].outcome == "failed"


def test_a_failed_rung_ends_the_climb(
    tiny_dir: Path, captures: CaptureSet, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = draft_promote._answer

    def wrong(engine, *arguments):
        answer, statistics = original(engine, *arguments)
        return [*answer[:-1], 0] if engine.plan.draft == "dflash2" else answer, statistics

    monkeypatch.setattr(draft_promote, "_answer", wrong)
    ladder = Ladder(captures, [PROMPTS[0].tokens], 8, num_samples=0, least_tokens_per_cycle=1.0)
    rungs = promote(lambda own, hints: open_with(tiny_dir, own, hints), draft_dir, ladder)
    outcomes = [rung.outcome for rung in rungs]
    assert outcomes[4:] == ["failed", *["not reached"] * 5]
    assert not json.loads((draft_dir / draft_promote.FILE).read_text())["is_promoted"]


def test_two_samples_of_one_law_pass_and_of_two_do_not() -> None:
    generator = np.random.default_rng(0)

    def sample(shares: list[float]) -> list[tuple[int, ...]]:
        return [(int(token),) for token in generator.choice(len(shares), 400, p=shares)]

    statistic, degrees = chi_square(sample([0.5, 0.3, 0.2]), sample([0.5, 0.3, 0.2]))
    assert degrees == 2
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5
    statistic, degrees = chi_square(sample([0.5, 0.3, 0.2]), sample([0.3, 0.5, 0.2]))
    assert statistic > degrees + 3.1 * (2 * degrees) ** 0.5


def test_a_draft_that_changed_is_not_loaded(engine: Engine, draft_dir: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "draft"
    shutil.copytree(draft_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5.0
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(IncompatibleDrafter, match=r"G1[05]"):
        load_draft(engine, copy)

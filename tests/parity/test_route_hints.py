"""Trained route hints in the engine: no bit of an answer, no wait, and what was trained is what is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import DraftSampling, RouteHints
from drafter.dflash2 import Dflash2Drafter
from drafter.near import NearMap, decoded
from drafter.sidecar import INPUTS, Sidecar, _unit, trunk
from drafter.train.captures import CaptureSet
from drafter.train.fit_early import early_codes_of
from drafter.train.fit_near import NearSettings
from drafter.train.fit_sidecar import SidecarSettings, codes_of
from expert_store.store import ExpertStore
from mlx_flashnext.engine import hints
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.learned_predictors import Learned
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.route_files import write_routes
from mlx_flashnext.training.draft_capture import CaptureRequest, capture
from mlx_flashnext.training.draft_training import load_draft
from mlx_flashnext.training.prompt_files import Prompt
from mlx_flashnext.training.route_rows import (
    candidate_rows,
    clean_rows,
    early_rows,
    served_paths,
    some_anchors,
)
from mlx_flashnext.training.route_training import (
    RouteRequest,
    near_reads,
    table_of,
    train_near,
    train_sidecar,
)
from tests.parity.test_hints_never_change_answers import GREEDY, SEEDED, Answer, assert_same, collect
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.own_drafts import write_draft
from tests.tiny.route_hints import reference_scores, write_near, write_sidecar

NUM_TOKENS, SLOTS = 16, 7
PROMPT = prompt_of(22)
LEARNED = ("near-linear", "sidecar", "both")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build_mlx(tmp_path_factory.mktemp("tiny"))
    write_near(directory)
    return directory


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    place = write_draft(tmp_path_factory.mktemp("drafts") / "own", tiny_dir, contraction="mean")
    write_sidecar(place, tiny_dir)
    return place


def opened(tiny_dir: Path, draft: Path | None, hints: str, *, slots: int = SLOTS) -> Engine:
    kind = "none" if draft is None else "dflash2"
    request = PlanRequest(
        context_tokens=512, slots_per_layer=slots, draft=kind, draft_directory=draft, hints=hints
    )
    return Engine.open(tiny_dir, request)


def ask(engine: Engine, params: object) -> tuple[Answer, Learned | None, int]:
    session = engine.session(is_guarded=False)
    events = session.generate(PROMPT, params, max_tokens=NUM_TOKENS, rule="coupled")  # type: ignore[arg-type]
    got = collect(events, session)
    own = session._hints
    predictor = None if own is None else own._predictor
    num_guesses = 0 if own is None else own.num_guesses
    return got, predictor if isinstance(predictor, Learned) else None, num_guesses


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_trained_hints_leave_every_bit_and_cost_no_wait_but_the_early_one(tiny_dir, draft_dir, params):
    """The same proposals, tokens, text, state and waits, but for early codes, with every source of hints."""
    with opened(tiny_dir, draft_dir, "off") as engine:
        expected, _, _ = ask(engine, params)
    drafted = expected.end.statistics.draft
    assert drafted.num_proposed > NUM_TOKENS
    for kind in LEARNED:
        with opened(tiny_dir, draft_dir, kind) as engine:
            got, predictor, num_guesses = ask(engine, params)
            assert engine.notices == opened_notices(engine)
        assert_same(got, expected)
        assert got.end.statistics.draft == drafted
        # One read-back a proposal more, of the early code: it was made before the draft began.
        num_early = 0 if kind == "near-linear" else drafted.num_cycles
        assert got.end.statistics.num_syncs == expected.end.statistics.num_syncs + num_early
        assert num_guesses > 0
        assert predictor is not None
        assert predictor.num_drafted == (0 if kind == "near-linear" else drafted.num_cycles)


def opened_notices(engine: Engine) -> tuple[str, ...]:
    """Return the notices without those on hints: there must be none of these."""
    return tuple(one for one in engine.notices if "hints" not in one)


def test_the_count_sees_a_sidecar_that_waits(tiny_dir, draft_dir, monkeypatch):
    with opened(tiny_dir, draft_dir, "off") as engine:
        expected, _, _ = ask(engine, GREEDY)
    codes = Sidecar.codes

    def waiting(self, hidden_RH, before, path_R, embed, context_1H):
        found = codes(self, hidden_RH, before, path_R, embed, context_1H)
        engine.target.sync.num_syncs += 1
        return found

    monkeypatch.setattr(Sidecar, "codes", waiting)
    with opened(tiny_dir, draft_dir, "sidecar") as engine:
        got, _, _ = ask(engine, GREEDY)
    assert_same(got, expected)
    drafted = expected.end.statistics.draft.num_cycles
    assert got.end.statistics.num_syncs == expected.end.statistics.num_syncs + 2 * drafted


def events_of_proposals(tiny_dir: Path, draft_dir: Path, monkeypatch) -> list[list[str]]:
    """Return what happens, in order, in every proposal of an answer with a sidecar's hints."""
    proposals: list[list[str]] = []
    propose = Dflash2Drafter.propose

    def proposing(self, *given):
        proposals.append([])
        found = propose(self, *given)
        proposals[-1].append("proposed")
        return found

    def noted(name, call):
        def noting(*given, **named):
            if proposals and "proposed" not in proposals[-1]:
                proposals[-1].append(name)
            return call(*given, **named)

        return noting

    monkeypatch.setattr(Dflash2Drafter, "propose", proposing)
    monkeypatch.setattr(Dflash2Drafter, "_draft", noted("draft", Dflash2Drafter._draft))
    monkeypatch.setattr(DraftTarget, "to_host", noted("wait", DraftTarget.to_host))
    monkeypatch.setattr(ExpertStore, "prefetch", noted("read ahead", ExpertStore.prefetch))
    with opened(tiny_dir, draft_dir, "sidecar") as engine:
        ask(engine, GREEDY)
    return proposals


IN_ORDER = ["wait", "read ahead", "draft", "wait", "proposed"]


def test_early_hints_are_handed_over_before_the_draft_is_waited_for(tiny_dir, draft_dir, monkeypatch):
    """The early code, submitted when the anchor was known, is read, and its hints go, before the draft."""
    proposals = events_of_proposals(tiny_dir, draft_dir, monkeypatch)
    assert len(proposals) > 10
    assert all(events == IN_ORDER for events in proposals)


def test_planted_a_draft_that_is_waited_for_first_is_seen(tiny_dir, draft_dir, monkeypatch):
    tell, draft = Dflash2Drafter._tell_early, Dflash2Drafter._draft

    def draft_first(self, *given):
        found = draft(self, *given)
        tell(self)
        return found

    monkeypatch.setattr(Dflash2Drafter, "_tell_early", lambda self: None)
    monkeypatch.setattr(Dflash2Drafter, "_draft", draft_first)
    proposals = events_of_proposals(tiny_dir, draft_dir, monkeypatch)
    assert all(events != IN_ORDER for events in proposals)


@pytest.mark.parametrize("says", ["nothing sensible", "another rank", "two rows", "everything"])
def test_whatever_an_early_code_says_the_answer_is_the_same(tiny_dir, draft_dir, monkeypatch, says):
    with opened(tiny_dir, draft_dir, "off") as engine:
        expected, _, _ = ask(engine, SEEDED)
    codes = Sidecar.early_code
    changes = {
        "nothing sensible": lambda code: code * float("nan"),
        "another rank": lambda code: code[:, :-1],
        "two rows": lambda code: mx.concatenate([code, -code]),
        "everything": lambda code: 100 * code,
    }
    monkeypatch.setattr(Sidecar, "early_code", lambda self, *rest: changes[says](codes(self, *rest)))
    with opened(tiny_dir, draft_dir, "both") as engine:
        got, _, _ = ask(engine, SEEDED)
    assert_same(got, expected)
    assert got.end.statistics.draft == expected.end.statistics.draft


def test_without_a_context_row_nothing_is_said_early(tiny_dir, draft_dir):
    with opened(tiny_dir, draft_dir, "sidecar") as engine:
        heard: list[object] = []
        drafter = engine.new_drafter()
        assert isinstance(drafter, Dflash2Drafter)
        drafter.tells_routes, drafter.hears_early = True, heard.append
        drafter.observe([5, 6], 7, None)  # tokens alone
        assert drafter.propose(3, DraftSampling(0.0, 0, 3)).routes is not None
        assert not heard


def test_near_hints_need_no_draft(tiny_dir):
    with open_tiny(tiny_dir, slots=SLOTS) as engine:
        expected, _, _ = ask(engine, GREEDY)
    with opened(tiny_dir, None, "near-linear") as engine:
        got, _, num_guesses = ask(engine, GREEDY)
        assert engine.notices == ()
        assert any(line.name == "route hints" and line.bytes > 0 for line in engine.plan.lines)
    assert_same(got, expected)
    assert got.end.statistics.num_syncs == expected.end.statistics.num_syncs
    assert num_guesses > 0


def test_the_drafter_is_not_asked_for_routes_that_nobody_reads(tiny_dir, draft_dir, monkeypatch):
    asked: list[int] = []
    codes = Sidecar.codes
    monkeypatch.setattr(Sidecar, "codes", lambda *rest: asked.append(1) or codes(*rest))
    with opened(tiny_dir, draft_dir, "sidecar") as engine:
        session = engine.session(is_guarded=False, hints=engine.new_hints("previous"))
        list(session.generate(PROMPT, GREEDY, max_tokens=4))
        assert not asked
        list(engine.session(is_guarded=False).generate(PROMPT, GREEDY, max_tokens=4))
        assert asked


# G20: whatever is wrong with the files, draft and model run without them, and say so.


def damaged(place: Path) -> None:
    data = bytearray((place / "routes.safetensors").read_bytes())
    data[-3] ^= 1
    (place / "routes.safetensors").write_bytes(data)


def edited(**fields: object):
    def change(place: Path) -> None:
        document = json.loads((place / "routes.json").read_text()) | fields
        (place / "routes.json").write_text(json.dumps(document))

    return change


FAULTS = {
    "another router": (edited(router_digest="f" * 64), "G20: route hints were trained for router ffff"),
    "another draft": (edited(draft_digest="e" * 64), "G20: route hints were trained for draft eeee"),
    "another depth": (edited(num_layers=9), "G20: route hints were trained for layers 9"),
    "other experts": (edited(num_experts=99), "cannot be used"),
    "a later version": (edited(version=3), "version 3, wanted"),
    "the version before": (edited(version=1), "(run: flashnext draft train-sidecar DIR --captures SET)"),
    "an unknown field": (edited(surprise=1), "cannot be used"),
    "a share above one": (edited(cut=1.5), "cannot be used"),
    "layers that are not": (edited(layers=[3, 1]), "lists layers"),
    "no document": (lambda place: (place / "routes.json").unlink(), "cannot be used"),
    "no tensors": (lambda place: (place / "routes.safetensors").unlink(), "cannot be used"),
    "a changed byte": (damaged, "has digest"),
    "nothing there": (shutil.rmtree, "there is no route sidecar"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sidecar_that_does_not_fit_disables_hints_and_not_the_drafter(tiny_dir, draft_dir, tmp_path, fault):
    change, said = FAULTS[fault]
    own = tmp_path / "draft"
    shutil.copytree(draft_dir, own)
    change(own / "sidecar")
    with opened(tiny_dir, own, "both") as engine:
        assert engine.routes.sidecar is None
        assert engine.routes.near is not None
        assert any(said in notice for notice in engine.notices), engine.notices
        got, predictor, _ = ask(engine, GREEDY)
    assert got.end.statistics.draft.used == "dflash2"
    assert predictor is not None
    assert predictor.num_drafted == 0


@pytest.mark.parametrize(
    "change",
    [
        edited(router_digest="f" * 5000),
        edited(**{"x" * 5000: 1}),
        edited(cut="9" * 5000),
        edited(version="v" * 5000),
    ],
)
def test_a_notice_about_a_hostile_sidecar_is_a_short_line(tiny_dir, draft_dir, tmp_path, change):
    own = tmp_path / "draft"
    shutil.copytree(draft_dir, own)
    change(own / "sidecar")
    with opened(tiny_dir, own, "sidecar") as engine:
        said = [notice for notice in engine.notices if "hints are off" in notice]
    assert len(said) == 1
    assert len(said[0]) < 350
    assert said[0].isprintable()


def test_a_retrained_draft_has_no_use_for_the_old_ones_sidecar(tiny_dir, draft_dir, tmp_path):
    other = write_draft(tmp_path / "other", tiny_dir, contraction="mean", seed=3)
    shutil.copytree(draft_dir / "sidecar", other / "sidecar")
    with opened(tiny_dir, other, "sidecar") as engine:
        assert engine.new_hints("sidecar")._predictor is None  # type: ignore[union-attr]
        assert "G20: route hints were trained for draft" in " ".join(engine.notices)


def test_a_sidecar_without_its_drafter_is_said_to_be_off(tiny_dir):
    with opened(tiny_dir, None, "sidecar") as engine:
        assert "no such draft proposes: nothing is read ahead" in " ".join(engine.notices)
        assert ask(engine, GREEDY)[2] == 0


def test_of_both_kinds_the_near_map_guesses_where_no_draft_proposes(tiny_dir, tmp_path):
    with opened(tiny_dir, None, "both") as engine:
        assert "no such draft proposes: the near map alone guesses" in " ".join(engine.notices)
        assert engine.routes.near is not None
        assert ask(engine, GREEDY)[2] > 0
    bare = tmp_path / "bare"
    shutil.copytree(tiny_dir, bare)
    shutil.rmtree(bare / "near")
    with opened(bare, None, "both") as engine:
        said = " ".join(engine.notices)
        assert "there is no near map" in said
        assert "no such draft proposes: nothing is read ahead" in said


# What was trained is what is served.


@pytest.fixture(scope="module")
def captures(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CaptureSet:
    directory = tmp_path_factory.mktemp("captures") / "set"
    prompts = [Prompt(prompt_of(5 + number % 4, seed=number)) for number in range(24)]
    request = CaptureRequest((0, 1, 2), "mean", GREEDY, max_tokens=20, held_out_every=4)
    with open_tiny(tiny_dir, slots=8, draft_tokens=6) as engine:
        capture(engine, prompts, directory, request)
    return CaptureSet.open(directory)


def test_codes_in_service_are_those_of_the_trainer(tiny_dir, draft_dir, captures):
    """The drafter at every anchor of a document, against the rows that training would have made of it."""
    with opened(tiny_dir, draft_dir, "sidecar") as engine:
        draft, longest = (
            load_draft(engine, draft_dir),
            max(captures.documents, key=lambda one: one.num_tokens),
        )
        document = captures.read(longest)
        # Where nothing may be proposed, nothing is said of routes either.
        blocks = [one for one in served_paths(engine, document, GREEDY) if len(one.tokens) > 1]
        assert blocks
        rows, counts = candidate_rows(engine, draft, document, 0, blocks)
        place = draft_dir / "sidecar" / "routes.safetensors"
        arrays = {name: np.array(value.astype(mx.float32)) for name, value in mx.load(str(place)).items()}
        expected = codes_of(arrays, rows, table_of(engine, rows))
        starts = [block.position for block in blocks]
        early = early_codes_of(arrays, early_rows(draft, document, starts), table_of(engine, rows))
        drafter, served, position, heard = engine.new_drafter(), [], 0, list[RouteHints]()
        assert isinstance(drafter, Dflash2Drafter)
        drafter.tells_routes, drafter.hears_early = True, heard.append
        for block in blocks:
            if block.position >= len(document.tokens) - 1:
                break
            features = mx.array(document.features[position : block.position])
            tokens = document.tokens[position : block.position].tolist()
            drafter.observe(tokens, block.tokens[0], features_RF=features)
            proposal = drafter.propose(len(block.tokens) - 1, DraftSampling(0.0, 0, block.position + 1))
            assert (block.tokens[0], *proposal.tokens) == block.tokens
            if proposal.routes is not None:
                served.append(proposal.routes.codes)
            position = block.position
        assert counts[1].sum() == len(rows)
        assert np.abs(np.concatenate(served) - expected).max() < 2e-3  # rows are kept as float16
        said_early = np.concatenate([one.codes for one in heard])
        assert np.abs(said_early - early).max() < 2e-3


def test_planted_a_row_of_the_wrong_token_is_seen(tiny_dir, draft_dir, captures, monkeypatch):
    """The sidecar given the token after a row's own."""
    codes = Sidecar.codes

    def shifted(self, hidden_RH, before, path_R, embed, context_1H):
        return codes(self, hidden_RH, before, mx.roll(path_R, -1), embed, context_1H)

    monkeypatch.setattr(Sidecar, "codes", shifted)
    with pytest.raises(AssertionError):
        test_codes_in_service_are_those_of_the_trainer(tiny_dir, draft_dir, captures)


def test_clean_rows_are_the_documents_own(tiny_dir, draft_dir, captures):
    with opened(tiny_dir, draft_dir, "off") as engine:
        draft, document = load_draft(engine, draft_dir), captures.read(captures.documents[1])
        starts = some_anchors(document, 5, np.random.default_rng(0))
        rows = clean_rows(engine, draft, document, 7, starts)
    assert not rows.is_candidate.any()
    assert rows.is_kept.all()
    assert set(rows.document) == {7}
    found = {tuple(route.reshape(-1)) for route in rows.routes}
    assert found <= {tuple(route.reshape(-1)) for route in document.routes}
    for ids, route in zip(rows.ids, rows.routes, strict=True):
        at = [row for row in range(2, len(document.routes)) if (document.routes[row] == route).all()]
        assert any(list(ids) == document.tokens[[row, row - 1, row - 2]].tolist() for row in at) or not at


def test_the_host_scores_as_the_trainer_does_before_and_after_layers_are_seen(tiny_dir, draft_dir):
    with opened(tiny_dir, draft_dir, "sidecar") as engine:
        sidecar = engine.routes.sidecar
    assert sidecar is not None
    place = draft_dir / "sidecar" / "routes.safetensors"
    params = {name: value.astype(mx.float32) for name, value in mx.load(str(place)).items()}
    sizes, draws = sidecar.sizes, np.random.default_rng(3)
    inputs = draws.standard_normal((3, 5 * sizes.hidden_size)).astype(np.float32)
    routes = np.stack([draws.permutation(sizes.num_experts)[: sizes.top_k] for _ in range(3)])
    nothing = np.zeros((3, len(sizes.layers), sizes.num_experts), np.float32)
    second = nothing.copy()
    np.put_along_axis(second[:, 1], routes, 1.0, axis=1)
    parts = [mx.array(part) for part in np.split(inputs, 5, axis=1)]
    parts[1:4] = [_unit(part) for part in parts[1:4]]
    weight = mx.concatenate([params[f"{name}.weight"] for name in INPUTS], axis=1)
    codes = np.array(trunk(weight, params["slot"][:3], parts))
    for seen in (nothing, second):
        expected = reference_scores(
            params, mx.concatenate(parts, axis=1), mx.arange(3), mx.array(seen.reshape(3, -1))
        )
        now = sidecar.head.after(codes, 1, routes.tolist()) if seen.any() else codes
        got = sidecar.head.log_odds(now, is_refreshed=bool(seen.any()))
        assert np.allclose(got, np.array(expected), atol=1e-4)


def test_the_near_map_in_service_says_what_it_says_of_collected_reads(tiny_dir, monkeypatch):
    heard: dict[int, list[list[int]]] = {}
    codes = NearMap.codes

    def overheard(self, layer, x_TD):
        found = codes(self, layer, x_TD)
        heard.setdefault(layer, []).extend(found.tolist())
        return found

    monkeypatch.setattr(NearMap, "codes", overheard)
    monkeypatch.setattr(hints, "IDLE_PASSES", 10**6)  # every pass is looked at, whether reads follow or not
    with opened(tiny_dir, None, "near-linear") as engine:
        got, _, _ = ask(engine, GREEDY)
        near = engine.routes.near
        assert near is not None
        monkeypatch.undo()
        reads = near_reads(engine, [*PROMPT, *got.tokens])
        for layer, rows in heard.items():
            first = len(PROMPT) - 1
            expected = near.codes(layer, mx.array(reads[layer][first:]).astype(mx.float32)).tolist()
            assert len(rows) == len(expected) == NUM_TOKENS
            for one, other in zip(rows, expected, strict=True):  # reads are kept as float16
                chances, others = dict(decoded(one)), dict(decoded(other))
                assert all(
                    abs(chance - others.get(expert, chance)) < 0.01 for expert, chance in chances.items()
                )
    assert sorted(heard) == list(near.layers)


def test_training_writes_files_that_the_engine_takes(tiny_dir, draft_dir, captures, tmp_path):
    """From captures to hints: both trainers, their lineage, and the engine that opens what they wrote."""
    model, own = tmp_path / "model", tmp_path / "draft"
    shutil.copytree(tiny_dir, model)
    shutil.copytree(draft_dir, own)
    request = RouteRequest(num_anchors=3, num_candidates=2)
    with opened(model, own, "off", slots=8) as engine:
        near, maps = train_near(engine, captures, request, NearSettings(num_steps=8, batch=32))
        draft = load_draft(engine, own)
        settings = SidecarSettings(rank=8, num_steps=8, batch=32)
        sidecar, arrays = train_sidecar(engine, draft, captures, request, settings)
    assert near.lineage.clean_rows > near.lineage.calibration_rows > 0
    assert near.lineage.candidate_rows == 0
    assert sidecar.lineage.candidate_rows > 0
    assert sidecar.lineage.captures_digest == captures.digest()
    assert sidecar.lineage.num_documents == len(captures.of_split("train"))
    write_routes(model / "near", near, maps)
    write_routes(own / "sidecar", sidecar, arrays)
    with opened(model, own, "off", slots=8) as engine:
        expected, _, _ = ask(engine, GREEDY)
    with opened(model, own, "both", slots=8) as engine:
        assert opened_notices(engine) == engine.notices
        got, predictor, _ = ask(engine, GREEDY)
    assert_same(got, expected)
    assert predictor is not None
    assert predictor.num_drafted > 0

"""The trainer: its losses are those of the source, its runs resume to the bit, and a draft learns."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from drafter.block import LayerContext, hidden_states
from drafter.config import DraftConfig
from drafter.errors import DrafterError
from drafter.fuse import context_keys_values, fuse
from drafter.layers import rotary_frequencies
from drafter.selector import candidates, project, slot_scores
from drafter.train.batches import StepSampler, anchor_places, blocks_at
from drafter.train.evaluate import cycles_of, judge_document, summarise
from drafter.train.losses import losses
from drafter.train.runs import Run, RunDescription, TrainSettings
from drafter.train.trainer import train
from tests.tiny.drafts import document as config_document
from tests.tiny.drafts import draft_config, random_parameters
from tests.unit.drafter.train.sets import TableHead, document, to_host

NUM_IDS = 124


def description(directory: Path, **settings: object) -> Run:
    """Return a run that trains the small draft."""
    chosen = TrainSettings(**({"num_steps": 6, "num_documents": 2, "num_anchors": 4} | settings))  # type: ignore[arg-type]
    return Run(
        directory,
        RunDescription(config_document(), chosen, "c" * 64, "t" * 64, "k" * 64, "mean", NUM_IDS, "mlx"),
    )


def test_anchors_leave_room_for_their_block_and_speak_of_the_answer() -> None:
    one = document(3, num_tokens=20)
    places = anchor_places(one, 8)
    assert (places.start, places.stop) == (one.num_prompt - 1, 20 - 8 + 1)
    blocks = blocks_at(one, [4, 7], 8)
    assert blocks.features.shape[0] == 7
    for row, start in enumerate(blocks.starts):
        assert blocks.anchors[row] == one.tokens[start]
        assert blocks.targets[row].tolist() == one.tokens[start + 1 : start + 8].tolist()
        assert blocks.predecessors[row].tolist() == one.tokens[start : start + 7].tolist()


def test_a_window_far_into_a_document_gives_the_same_hidden_states() -> None:
    from drafter.train.losses import block_hidden

    config, one = draft_config(), document(5, num_tokens=80)
    params, target = random_parameters(config), TableHead()
    assert config.window == 16
    whole = block_hidden(params, config, target, blocks_at(one, [60, 63], 8))
    cut = block_hidden(params, config, target, blocks_at(one, [60, 63], 8, max_rows=16))
    assert np.abs(np.array(whole) - np.array(cut)).max() < 2e-5
    shorter = block_hidden(params, config, target, blocks_at(one, [60, 63], 8, max_rows=8))
    assert np.abs(np.array(whole) - np.array(shorter)).max() > 1e-3


def test_steps_follow_from_seed_and_number_and_see_every_document() -> None:
    documents = [document(number) for number in range(5)]

    def sampler(seed: int) -> StepSampler:
        return StepSampler(documents, 8, num_documents=2, num_anchors=4, max_rows=99, seed=seed)

    first, again, other = sampler(1), sampler(1), sampler(2)
    assert [b.starts for b in first.step(7)] == [b.starts for b in again.step(7)]
    assert [b.starts for b in first.step(7)] != [b.starts for b in other.step(7)]
    epoch = [blocks.features[0].tobytes() for step in range(5) for blocks in first.step(step)]
    assert {epoch.count(features) for features in epoch} == {2}
    with pytest.raises(DrafterError, match="No document has room"):
        StepSampler([document(1, 10)], 8, num_documents=1, num_anchors=1, max_rows=9, seed=0)


def by_hand(
    config: DraftConfig, params: dict[str, mx.array], target: TableHead, gamma: float
) -> tuple[float, float]:
    """Return base and selector loss slot by slot, block by block, as the source states them."""
    base = weight_sum = chosen = chosen_sum = 0.0
    freqs = rotary_frequencies(config.rope_theta, config.head_dim)
    for number, start in ((0, 9), (0, 20), (1, 5)):
        one = document(number)
        fused = fuse(params, config, mx.array(one.features[:start]))
        contexts = [
            LayerContext(
                *context_keys_values(params, config, i, fused, 0, freqs), np.arange(start, dtype=np.int32)
            )
            for i in range(config.num_layers)
        ]
        ids = mx.array([int(one.tokens[start])] + [config.mask_token_id] * 7)
        hidden = hidden_states(params, config, target.embed(ids)[None], (start,), contexts, freqs)[0]
        for slot in range(1, 8):
            logits = np.array(target.head(hidden[slot])).astype(np.float64)
            logits[NUM_IDS:] = -np.inf
            true, weight = int(one.tokens[start + slot]), np.exp(-(slot - 1) / gamma)
            base += weight * (np.log(np.exp(logits).sum()) - logits[true])
            weight_sum += weight
            top = candidates(mx.array(logits[None].astype(np.float32)), config.top_k)
            if true not in top.ids[0].tolist():
                continue
            scores = np.array(
                slot_scores(
                    params,
                    mx.array(int(one.tokens[start + slot - 1])),
                    project(params, hidden[slot]),
                    top.ids[0],
                    top.logits[0],
                )
            ).astype(np.float64)
            chosen += weight * (np.log(np.exp(scores).sum()) - scores[top.ids[0].tolist().index(true)])
            chosen_sum += weight
    return base / weight_sum, chosen / chosen_sum


def test_losses_are_those_of_the_source() -> None:
    config = draft_config({"dflash_config.selector_top_k": 60})
    params, target = random_parameters(config), TableHead()
    batch = [blocks_at(document(0), [9, 20], 8), blocks_at(document(1), [5], 8)]
    found = losses(params, config, target, batch, gamma=4.0, num_ids=NUM_IDS)
    base, selector = by_hand(config, params, target, 4.0)
    assert found.base.item() == pytest.approx(base, rel=1e-5)
    assert found.selector.item() == pytest.approx(selector, rel=1e-5)
    assert 0 < found.recall.item() < 1
    assert losses(params, config, target, batch, gamma=5.0, num_ids=NUM_IDS).base.item() != pytest.approx(
        base, rel=1e-5
    )


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    documents, target = [document(number) for number in range(4)], TableHead()
    whole = train(description(tmp_path / "whole"), documents, target, to_host)
    steps = iter([False, False, True])
    train(description(tmp_path / "parts"), documents, target, to_host, stop=lambda: next(steps))
    run = description(tmp_path / "parts")
    run.log(
        dict.fromkeys(("step", "seconds", "rate", "base", "selector", "accuracy", "recall", "norm"), 99.0)
    )
    resumed = train(run, documents, target, to_host)
    assert resumed.step == whole.step == 6
    for name, value in whole.params.items():
        assert np.array(value).tobytes() == np.array(resumed.params[name]).tobytes(), name
    assert [row["step"] for row in run.rows()] == [6]
    assert (tmp_path / "parts" / "curve.svg").read_text().startswith("<svg")
    with pytest.raises(DrafterError, match="another settings"):
        description(tmp_path / "parts", rate=1.0)


def test_a_state_of_another_draft_is_refused(tmp_path: Path) -> None:
    documents, target = [document(0)], TableHead()
    train(description(tmp_path / "run", num_steps=1), documents, target, to_host)
    place = tmp_path / "run" / "run.json"
    said = json.loads(place.read_text())
    said["config"]["intermediate_size"] = 64
    place.write_text(json.dumps(said))
    with pytest.raises(DrafterError, match="no state of this draft"):
        train(Run(tmp_path / "run"), documents, target, to_host)
    said["settings"]["rate"] = "fast"
    place.write_text(json.dumps(said))
    with pytest.raises(DrafterError, match="cannot be"):
        Run(tmp_path / "run")


def test_a_draft_learns_a_few_documents_by_heart(tmp_path: Path) -> None:
    documents, target = [document(number) for number in range(2)], TableHead()
    run = description(
        tmp_path / "run", num_steps=80, num_documents=2, num_anchors=24, rate=6e-3, save_every=1000
    )
    params = train(run, documents, target, to_host).params
    config = draft_config()
    judged = [judge_document(params, config, target, to_host, one, num_ids=NUM_IDS) for one in documents]
    learnt = summarise(judged, 7)
    fresh = summarise(
        [
            judge_document(random_parameters(config), config, target, to_host, one, num_ids=NUM_IDS)
            for one in documents
        ],
        7,
    )
    assert learnt["tokens_per_cycle"] > 6 > 2 > fresh["tokens_per_cycle"]
    cycles = cycles_of(judged[0], 7)
    assert sum(cycle.committed for cycle in cycles) == len(documents[0].tokens) - documents[0].num_prompt

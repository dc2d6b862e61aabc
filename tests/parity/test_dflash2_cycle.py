"""A draft at work on a tiny target: whatever is accepted, its context is that of the committed text alone.

The engine's own loop is tested elsewhere; here every step is written out.
"""

from __future__ import annotations

import dataclasses
import functools

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import DraftSampling, Proposal
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.engine.streams import draw_draft
from mlx_flashnext.engine.verify import draft_sampling, verify
from mlx_flashnext.model.flashnext import ForwardOutput
from mlx_flashnext.model.host import HostSync
from tests.parity.goldens import checkpoint_dir
from tests.tiny.drafts import draft_config, random_parameters
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

PROMPT = [5, 9, 40, 7, 7, 61, 33, 2, 90, 17, 4, 4, 71, 23, 8, 50, 12, 3, 66, 29, 31]
TAPS = (0, 2, 3)
NUM_TOKENS = 40


@functools.cache
def tiny() -> TinyModel:
    return TinyModel.open(checkpoint_dir("default"))


def features(output: ForwardOutput, kept: int) -> mx.array:
    """Contract the taps of the rows that stay by the mean of their streams, side by side."""
    return mx.concatenate([output.taps[tap][:kept].mean(axis=1) for tap in TAPS], axis=-1)


class Run:
    """A target, a draft for it, and the text so far; the anchor is the last token."""

    def __init__(self, params: SamplingParams) -> None:
        config = tiny().config
        self.config = draft_config(
            {
                "hidden_size": config.hidden_size,
                "num_target_layers": config.num_hidden_layers,
                "vocab_size": config.vocab_size,
                "dflash_config.target_layer_ids": list(TAPS),
                "dflash_config.mask_token_id": config.vocab_size - 1,
            }
        )
        self.sync = HostSync()
        self.drafter = Dflash2Drafter(
            random_parameters(self.config),
            self.config,
            DraftTarget(tiny().model, self.sync),
            draw_draft,
            dtype=mx.float32,
            contraction="mean",
            options=Dflash2Options(num_ids=config.vocab_size - 1),
        )
        self.state = tiny().model.new_state()
        self.text = list(PROMPT)
        self.sampler = Sampler(params, PROMPT)
        for first in range(0, len(PROMPT) - 1, 8):
            chunk = PROMPT[first : min(first + 8, len(PROMPT) - 1)]
            output = advance(tiny().model, chunk, self.state, logits="none", taps=TAPS)
            self.drafter.observe(
                chunk, PROMPT[first + len(chunk)], None, features_RF=features(output, len(chunk))
            )

    def cycle(self, proposal: Proposal, rule: str) -> int:
        """Verify, commit what was accepted, hand over the rows that stay; return how many were accepted."""
        rows = [self.text[-1], *proposal.tokens]
        with self.state.begin(len(rows)) as block:
            output = tiny().model.forward(rows, block, logits="all", taps=TAPS)
            assert output.logits is not None
            verdict = verify(output.logits, proposal, self.sampler, rule, self.sync)
            kept = verdict.accepted + 1
            block.commit(kept)
        for token in verdict.tokens:
            self.sampler.observe(token)
        self.drafter.observe(rows[:kept], verdict.tokens[-1], None, features_RF=features(output, kept))
        self.text += verdict.tokens
        return verdict.accepted

    def propose(self, rule: str, k: int = 7) -> Proposal:
        return self.drafter.propose(k, draft_sampling(self.sampler, rule))


@functools.cache
def plain(kind: str) -> list[int]:
    """The text without a draft."""
    run = Run(SAMPLING[kind])
    while len(run.text) < len(PROMPT) + NUM_TOKENS:
        run.cycle(Proposal(()), "coupled")
    return run.text


GREEDY = SamplingParams(temperature=0.0)
SAMPLING = {"greedy": GREEDY, "seeded": SamplingParams(temperature=0.9, seed=4)}


def fused_rows(run: Run) -> tuple[np.ndarray, int]:
    mark = run.drafter.snapshot()
    return np.array(mark.context.fused), mark.context.end


@pytest.mark.parametrize("kind", SAMPLING)
def test_with_a_draft_the_text_is_that_without_one(kind: str) -> None:
    run = Run(SAMPLING[kind])
    while len(run.text) < len(PROMPT) + NUM_TOKENS:
        run.cycle(run.propose("coupled"), "coupled")
    assert run.text[: len(PROMPT) + NUM_TOKENS] == plain(kind)[: len(PROMPT) + NUM_TOKENS]


def test_whatever_was_accepted_the_context_is_that_of_the_committed_text() -> None:
    text = plain("greedy")
    run = Run(GREEDY)
    accepted = []
    for wanted in (0, 3, 1, 7, 0, 0, 5, 2):
        at = len(run.text)
        tokens = text[at : at + 7]
        if wanted < 7:
            tokens[wanted] = (tokens[wanted] + 1) % 90
        proposal = run.propose("coupled")
        assert len(proposal.tokens) == 7
        accepted.append(
            run.cycle(dataclasses.replace(proposal, tokens=tuple(tokens), confidence=()), "coupled")
        )
        assert run.drafter.describe()["context_end"] == len(run.text) - 1
    assert accepted == [0, 3, 1, 7, 0, 0, 5, 2]
    assert run.text == text[: len(run.text)]

    fresh = Run(GREEDY)
    fresh.drafter.reset()
    whole = advance(tiny().model, run.text[:-1], tiny().model.new_state(), logits="none", taps=TAPS)
    fresh.drafter.observe(run.text[:-1], run.text[-1], None, features_RF=features(whole, len(run.text) - 1))
    (held, end), (wanted_rows, wanted_end) = fused_rows(run), fused_rows(fresh)
    assert end == wanted_end
    assert np.array_equal(held, wanted_rows)
    sampling = DraftSampling(0.8, 3, len(run.text))
    one, other = run.drafter.propose(7, sampling), fresh.drafter.propose(7, sampling)
    assert one.tokens == other.tokens
    assert one.confidence == other.confidence


def test_taps_one_layer_off_are_another_context() -> None:
    run = Run(GREEDY)
    before = fused_rows(run)[0]
    other = Run(GREEDY)
    other.drafter.reset()
    moved_taps = (0, 1, 2)  # the two later ones one layer early
    moved = advance(tiny().model, PROMPT[:-1], tiny().model.new_state(), logits="none", taps=moved_taps)
    parts = [moved.taps[tap].mean(axis=1) for tap in moved_taps]
    other.drafter.observe(PROMPT[:-1], PROMPT[-1], None, features_RF=mx.concatenate(parts, axis=-1))
    assert np.abs(fused_rows(other)[0] - before).max() > 1e-2


def test_drawn_blocks_are_judged_by_their_rows() -> None:
    """Under `sampled` every kind of cycle works, and a cycle waits once to draft and once to verify."""
    run = Run(SamplingParams(temperature=1.5, seed=11))
    for _ in range(10):
        before = run.sync.num_syncs
        proposal = run.propose("sampled", k=4)
        assert proposal.law == "rows"
        run.cycle(proposal, "sampled")
        assert run.sync.num_syncs == before + 2
    assert run.drafter.counts.num_cycles == 10
    assert run.drafter.counts.num_broken == 0

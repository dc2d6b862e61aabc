"""A tiny target of 12 tokens, the exact law of what it says, and a drafter that draws: laws end to end.

Entry points: `build_small_vocabulary`, `target_law`, `MarkovDrafter`. With `bench.studies.verify_law.fit`
they answer whether an engine with any drafter and rule says what the target alone would say.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from bench.studies.verify_law import joint_law
from drafter.api import DraftSampling, Proposal
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.engine.streams import draw_draft
from tests.tiny.checkpoints import build_hf
from tests.tiny.stepping import advance

VOCAB = 12
END = VOCAB - 1


def build_small_vocabulary(directory: Path, *, seed: int = 2) -> Path:
    """Write a float32 checkpoint with the letters a to k and one end token, and return its directory."""
    overrides = {"vocab_size": VOCAB, "bos_token_id": END, "eos_token_id": END}
    build_hf(directory, seed=seed, overrides=overrides, tokenizer=False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": END, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {**{chr(ord("a") + token): token for token in range(END)}, "<end>": END},
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END]}))
    return directory


def target_law(engine: Engine, prompt: Sequence[int], params: SamplingParams, depth: int) -> np.ndarray:
    """Return the law of the first `depth` tokens after a prompt, one axis each, from plain forward passes.

    Every prefix that can be said is run afresh: with top-k 4 and depth 3 that is 21 runs.
    """

    def logits_after(said: tuple[int, ...]) -> np.ndarray:
        model = engine.target.model
        output = advance(model, [*prompt, *said], model.new_state(), logits="last")
        assert output.logits is not None
        logits = np.array(output.logits.astype(mx.float32)).reshape(-1)
        engine.target.experts.device_idle()
        return logits

    return joint_law(logits_after, prompt, params, depth)


class MarkovDrafter:
    """Draws each token from a fixed random row of the token before it; the best token at temperature 0.

    Args:
        candidates: of a row.
        seed: of the rows.
    """

    kind = "markov"
    needs_stack = False

    def __init__(self, candidates: int = 4, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.law = "rows"
        self._ids = np.stack([rng.permutation(VOCAB)[:candidates] for _ in range(VOCAB)]).astype(np.int32)
        self._scores = (1.5 * rng.standard_normal((VOCAB, candidates))).astype(np.float32)
        self._anchor = 0

    def max_proposals(self) -> int:
        return 8

    def reset(self) -> None:
        self._anchor = 0

    def observe(self, tokens: Sequence[int], next_token: int, stack_TGD: mx.array | None = None) -> None:
        self._anchor = next_token

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        tokens: list[int] = []
        ids, probs, before = [], [], self._anchor
        for slot in range(min(k, self.max_proposals())):
            scores = mx.array(self._scores[before]) / (sampling.temperature or 1.0)
            index = (
                draw_draft(scores, sampling.seed, sampling.position + slot)
                if sampling.temperature
                else mx.argmax(scores)
            )
            ids.append(mx.array(self._ids[before]))
            probs.append(mx.softmax(scores))
            before = int(self._ids[before][int(index)])
            tokens.append(before)
        if not tokens or not sampling.temperature:
            return Proposal(tuple(tokens))
        return Proposal(tuple(tokens), "rows", mx.stack(ids), mx.stack(probs))

    def snapshot(self) -> object:
        return self._anchor

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, int)
        self._anchor = snapshot

    def num_bytes(self) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {"kind": self.kind}

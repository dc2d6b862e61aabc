"""From guesses to hints: what predictors say becomes a bounded list for the store. Entry: `Hints`.

All policy of hints is here: which class a guess is read in, when it is expected to be needed, how many may
be handed over, and that a predictor which fails is left alone from then on. The store decides what is read.

    before a proposal    predictor.early   -> for the anchor's row, where a drafter tells
    after a proposal     predictor.drafted    what the drafter says of the block to come
    at a block's start   predictor.begin   -> for all layers
    after layer l's ids  predictor.expect  -> for a layer soon after l
                         predictor.routed  -> for any layer of this block, or of the next one
    after each of them   predictor.outlook    what makes room: chances of all experts of layers spoken of

Guesses of the block that runs or begins next are `near`, by the order of layers: one that is said late of a
late layer goes behind an earlier one of an earlier layer. Those of the block after it are `speculative`.

Invariants:
    I1  hints move bytes, never decisions: nothing here reaches the model;
    H1  at most one hand-over a layer, after the layer's exact request: while its reads are waited for, or, if
        none are, while the device computes it (experts.py);
    H2  layers are guessed while earlier ones run, and a drafter is asked for routes, only where that leads to
        reads: after `IDLE_PASSES` passes without one it is done in one pass of `REST_PASSES`;
    H3  guesses are handed over only as far as such guesses were right before (worth.py), and as the governor
        finds that cycles gain by it (hint_level.py): a predictor that knows nothing costs nothing;
    H4  prefill chunks get none: the union of a chunk is wider than the slots, and their layers are swept;
    H5  early hints are of the block that begins next, whatever is proposed: its deadlines, its generation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from drafter.api import RouteHints
from expert_store.keys import Prefetch, ReadClass
from expert_store.prefetch import NO_OUTLOOK
from mlx_flashnext.engine.hint_level import USUAL
from mlx_flashnext.engine.predictors import Guess, Predictor, Rows
from mlx_flashnext.engine.routes import RouteLog
from mlx_flashnext.engine.worth import Worth
from mlx_flashnext.experts import HandOver
from mlx_flashnext.model.moe import LookAhead

MAX_HINTS: Final = 2048
"""Hints of one hand-over. The real model chooses 480 records a token; a predictor may be anything."""
IDLE_PASSES: Final = 2
"""Passes without a read after which a predictor that asks routers early rests."""
REST_PASSES: Final = 16
"""Passes from one try to the next. On the demo with all experts but one in memory, asking in every pass costs
a fifth of the decode rate; a change of subject is noticed within a sentence."""
LONGEST_HINT: Final = 1
"""Passes after the running one that a hint may be for; what is further ahead is cut to it."""
_NEAR, _SPECULATIVE = ReadClass.NEAR, ReadClass.SPECULATIVE


class Hints:
    """Listens to one timeline's blocks and says what to read ahead; see `experts.RouteListener`.

    Args:
        predictor: where guesses come from; None for none.
        num_layers: of the model; scales deadlines.
        log: writes the routes down, if somebody wants them.

    Attributes:
        num_guesses: guesses that were handed over.
        stopped: why the predictor is no longer asked, "" while it is.
    """

    def __init__(self, predictor: Predictor | None, num_layers: int, log: RouteLog | None = None) -> None:
        self._predictor = predictor
        self._num_layers = num_layers
        self._log = log
        self._pass = 0
        self._is_open = self._is_predicting = self._is_early = False
        self._expected: list[tuple[int, Rows]] = []
        self._early_guesses: list[Guess] = []
        self._num_accepted = self._num_idle = self._num_resting = 0
        self._least_right = USUAL
        self._worth = Worth()
        self.num_guesses = 0
        self.stopped = ""

    @property
    def num_withheld(self) -> int:
        """Guesses that were not handed over, because such guesses were seldom right."""
        return self._worth.num_withheld

    @property
    def wants_routes(self) -> bool:
        """Whether a drafter that can is to say which experts its next proposal will want (H2)."""
        is_asked = self._predictor is not None and self._predictor.wants_routes and not self.stopped
        return is_asked and self._least_right <= 1 and self._num_resting <= 1

    def set_level(self, least_right: float) -> None:
        """Set the share of guesses that must be right, from the next pass on; above 1 nobody is asked."""
        self._least_right = least_right

    def early(self, routes: RouteHints) -> HandOver:
        """Return what to read ahead for the block that begins next, before there is a proposal (H5).

        Args:
            routes: what the drafter says of the anchor's row.
        """
        if self._is_open:
            return HandOver()
        self._next_pass(is_prefill=False)
        self._is_early = True
        self._early_guesses = self._ask(lambda predictor: predictor.early(routes))
        return self._ahead(self._early_guesses)

    def begin(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        is_prefill: bool,
        routes: RouteHints | None = None,
    ) -> HandOver:
        """Open a block and return what to read ahead for it.

        Args:
            tokens: of the block.
            position: tokens before it.
            is_prefill: a chunk of the prompt (H4).
            routes: what the drafter says of the block's rows, if it does.
        """
        if not self._is_early or is_prefill:
            self._next_pass(is_prefill=is_prefill)
        self._is_open, self._is_early = True, False
        if self._log is not None:
            self._log.begin(position, len(tokens))
            if self._early_guesses:
                self._log.guessed(self._early_guesses)
        self._early_guesses = []
        self._ask(lambda predictor: predictor.drafted(routes) or ())
        guesses = self._ask(lambda predictor: predictor.begin(tokens, position))
        return self._ahead(guesses)

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Return who is to guess later layers while this one runs."""
        del layer
        if not self._is_predicting or self._predictor is None or self._num_resting:
            return ()
        return self._predictor.look_ahead

    def accepted(self, hints: Sequence[Prefetch]) -> None:
        """Hear which hints of the last hand-over have led to reads."""
        self._num_accepted += self._worth.issued(hints)

    def expect(self, layer: int, ids_TN: Rows) -> None:
        """Take an early guess of a layer; `routed` makes hints of it, once exact reads are on their way."""
        self._expected.append((layer, ids_TN))

    def routed(self, layer: int, ids_TK: Rows) -> HandOver:
        """Take a layer's true choice and return what to read ahead now."""
        if not self._is_open or layer >= self._num_layers:
            return HandOver()  # the MTP module's layer: part of no block
        if self._log is not None:
            self._log.routed(layer, ids_TK)
        self._worth.routed(self._pass * self._num_layers + layer, ids_TK)
        expected, self._expected = self._expected, []
        guesses: list[Guess] = []
        for later, ids_TN in expected:
            guesses += self._ask(lambda predictor, at=later, ids=ids_TN: predictor.expect(at, ids))
        guesses += self._ask(lambda predictor: predictor.routed(layer, ids_TK))
        return self._ahead(guesses)

    def commit(self, num_rows: int) -> None:
        """Close the block, if one is open; its first `num_rows` rows stay."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_predicting and not self._num_resting:
            is_idle = not self._num_accepted and not self._worth.is_recovering
            self._num_idle = self._num_idle + 1 if is_idle else 0
            if self._num_idle >= IDLE_PASSES:
                self._num_resting = REST_PASSES
        if self._log is not None:
            self._log.commit(num_rows)
        self._ask(lambda predictor: predictor.commit(num_rows) or ())
        self._is_predicting = False

    def _next_pass(self, *, is_prefill: bool) -> None:
        self._pass += 1
        is_asked = self._predictor is not None and not self.stopped and self._least_right <= 1
        self._is_predicting = is_asked and not is_prefill
        self._expected = []
        self._num_accepted = 0
        if self._is_predicting and self._num_resting:
            self._num_resting -= 1
        deadline = self._pass * self._num_layers
        self._worth.begin(deadline, may_try=not self._num_resting, least_right=self._least_right)

    def _ask(self, question: Callable[[Predictor], Iterable[Guess]]) -> list[Guess]:
        """Return the answer, no longer than a hand-over. What a predictor raises ends prediction alone."""
        if not self._is_predicting or self._predictor is None:
            return []
        try:
            return list(islice(question(self._predictor), MAX_HINTS))
        except Exception as error:  # noqa: BLE001 - a guess may fail in any way, the answer must not
            self._stop(error)
            return []

    def _outlook(self) -> Mapping[int, memoryview]:
        """Return what the predictor's last answers say of whole layers; as `_ask`."""
        if not self._is_predicting or self._predictor is None:
            return NO_OUTLOOK
        try:
            return self._predictor.outlook()
        except Exception as error:  # noqa: BLE001 - as in `_ask`
            self._stop(error)
            return NO_OUTLOOK

    def _ahead(self, guesses: Sequence[Guess]) -> HandOver:
        """Return guesses as hints; those of later passes decide for how long the hand-over is good."""
        outlook = self._outlook()
        if not guesses:
            return HandOver(outlook=outlook)
        hints: list[Prefetch] = []
        furthest = 0
        lets_in, num_layers = self._worth.lets_in, self._num_layers
        now = self._pass * num_layers
        try:
            for layer, expert, confidence, passes_ahead in guesses[:MAX_HINTS]:
                deadline = now + passes_ahead * num_layers + layer
                if not lets_in(deadline, expert, confidence):
                    continue
                if passes_ahead > 0:
                    furthest = LONGEST_HINT
                kind = _SPECULATIVE if passes_ahead else _NEAR
                hints.append(Prefetch(layer, expert, kind, confidence, deadline))
        except Exception as error:  # noqa: BLE001 - predictors may say anything
            self._stop(error)
            return HandOver()
        self.num_guesses += len(hints)
        if self._log is not None and self._is_open:
            self._log.guessed(guesses)
        return HandOver(hints, furthest, outlook)

    def _stop(self, error: Exception) -> None:
        self.stopped = f"{type(error).__name__}: {error}"
        self._is_predicting = False

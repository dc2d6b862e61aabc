"""How many tokens to propose, and how freely to read ahead: what pays, and nothing more. Entry: `Governor`.

Whether a block of k + 1 rows is cheaper than the plain steps it replaces depends on drafter, text,
drive and device (verification costs grow with rows on the CPU backend and with every new expert on a slow
drive). So both sides are measured while the answer runs (`learned.py`), and trying is paid for from a purse
that gains a small share of plain time and whatever speculation saves. A purse that cannot pay what the next
cycle is expected to lose means plain decode. What earlier sessions and runs measured (`kept_tables.py`)
counts as a few observations: with it a session drafts, or rests, from its second cycle on. How sure a guess
of routes must be follows from what cycles take likewise (`hint_level.py`). A text that stumbles now, as one
does at its beginning or behind a word that nobody could foresee, is left alone for some plain steps (a lull).

Invariants:
V1  A width depends on earlier cycles alone, never on a token proposed in this one: no cut by a sampled
    token's own probability (dflash2.md 3.4, rule 8).
V2  What speculation may lose is bounded: what its first cycle makes once, the opening allowance, `TRY_SHARE`
    of plain time, the cycle that empties the purse, and one such cycle more for every `DEBT_STEPS` that plain
    time has earned. An empty purse is overdrawn, by `DEBT_STEPS` at most, only while a width that this
    session measured `WELL_MEASURED` times gains on plain steps by what both really cost here. Where what
    was measured earlier says that it pays, this bound is raised by `TRUST_STEPS`, or by what earlier answers
    left in the purse, `CARRIED_STEPS` at most. What was gained is lost again up to `LARGEST_STEPS`.

How near it comes to the best fixed width is tested on four tables of costs (`test_governor.py`) and
measured by `python -m bench.studies.governor_grid`. Source: dflash2.md 2.8, 2.9 and G22.
"""

from collections import deque
from typing import Final

from mlx_flashnext.engine.hint_level import HintLevel
from mlx_flashnext.engine.learned import (
    HARDLY_MEASURED,
    LULL,
    NOTHING_LEARNED,
    WELL_MEASURED,
    CostTable,
    Learned,
    SurvivalTable,
    learned,
)

TRY_SHARE: Final = 0.01
"""Share of plain decode time that may be spent on finding out whether speculation pays."""
OPENING_STEPS: Final = 1.0
"""Plain steps that an answer may lose before it has gained anything; also the most that a try waits for."""
TRUST_STEPS: Final = 2.0
"""Plain steps more where earlier sessions say that it pays: a few rejections in a row prove nothing."""
CARRIED_STEPS: Final = 6.0
"""Most that an answer leaves to the next ones of what it gained: texts that begin badly pay later on. Tuned
on recorded acceptance of 18 held-out answers (`bench.studies.governor_replay`)."""
FIRST_STEPS: Final = 2.0
"""Most plain steps that a drafter's first cycle is charged: what it makes once is not its price."""
LARGEST_STEPS: Final = 12.0
"""Most plain steps a purse holds: a drafter that stops paying is switched off within as many lost steps."""
DEBT_STEPS: Final = 2.0
"""Most that a purse owes; from there on it must be filled again, by plain steps, before anything is tried."""
PLAIN_EVERY: Final = 96
"""One cycle of so many is plain, so that the cost of a plain step stays known."""
EXPLORE_EVERY: Final = 3
"""One drafting cycle of so many has a width that is not well measured and may be the best."""
REPROBE_EVERY: Final = 12
"""One of so many has one that is well measured and may be the best: costs change with text and residency."""
WORTH: Final = 1.02
"""Gain in tokens a second below which another width is worth neither a change nor a try."""
WORSE: Final = 0.1
"""Tokens of a cycle by which a moment must be worse than others for its steps to be plain, if they lose."""
LONGEST_LULL: Final = 64
"""Most plain steps that a stretch in which proposals fail is waited out before it is looked at again."""
WATCHED_CYCLES: Final = 64
LEAST_ACCEPTED: Final = 0.05
"""Mean accepted tokens over `WATCHED_CYCLES` below which a drafter is a defect, not a hard text (G22)."""


class Governor:
    """Chooses the width of each cycle of one session.

    Not thread-safe; everything on the inference thread.

    Attributes:
        off_reason: why nothing is proposed for the rest of this answer, None while something may be.
    """

    def __init__(
        self,
        max_width: int,
        *,
        is_guarded: bool = True,
        earlier: Learned = NOTHING_LEARNED,
        first_width: int = 1,
    ) -> None:
        """Start knowing nothing but what was measured before.

        Args:
            max_width: most proposals of a cycle.
            is_guarded: False always proposes `max_width`: for tests and for measuring what a width costs.
            earlier: what was measured with this model and drafter, as far as it may be trusted here.
            first_width: to try first, where nothing is known. One proposal costs least, but of a drafter that
                makes its whole block at once it is the worst bargain.
        """
        self.off_reason: str | None = None
        self._is_resting = False
        self._max_width = max_width
        self._is_guarded = is_guarded
        self._earlier = earlier
        self._costs = CostTable(max_width, earlier)
        self._hint_level = HintLevel()
        self._survival = SurvivalTable(max_width, earlier)
        self._since_plain = 0
        self._has_drafted = self._is_spent = self._is_lull = False
        self._patience = LULL
        self._num_drafting = self._drafted_tokens = 0
        self._drafting_steps = 0.0
        self._accepted: deque[int] = deque(maxlen=WATCHED_CYCLES)
        self._width = self._first_width = max(1, min(first_width, max_width))
        self._width, self._hopeful = self._best_and_hopeful(max_width)
        self._purse = self._opening(earlier.purse)  # in plain steps
        self._review()

    def begin_answer(self) -> None:
        """Give a drafter that was switched off another chance; what was measured stays known."""
        self.off_reason = None
        self._accepted.clear()
        self._survival.begin()
        self._patience = LULL
        self._purse = max(self._purse, self._opening(0.0))
        self._review()

    def width(self, room: int) -> int:
        """Return how many tokens to propose.

        Args:
            room: most that the answer's budget and context allow.
        """
        most = min(room, self._max_width)
        if self.off_reason is not None or most < 1:
            return 0
        if not self._is_guarded:
            return most
        if self.is_resting or self._is_lull:
            return 0
        if self._costs.plain_ns is None or self._since_plain >= PLAIN_EVERY:
            return 0
        return self._best_width(most)

    def count(self, num_proposed: int, num_accepted: int, num_tokens: int, cycle_ns: int) -> None:
        """Take note of a cycle.

        Args:
            num_proposed: its proposals.
            num_accepted: those the target agreed with.
            num_tokens: tokens committed.
            cycle_ns: wall time from proposing to committing; of a clock that stood still or went back, the
                least it can tell.
        """
        cycle_ns = max(1, cycle_ns)
        has_waited = self._survival.num_plain >= self._patience
        self._survival.learn(num_proposed, num_accepted)
        if num_proposed:
            self._since_plain += 1
            self._watch(num_accepted)
        # A drafter's first cycle makes its kernels and caches: what it took says nothing of the next one.
        is_first = num_proposed > 0 and not self._has_drafted
        if is_first:
            self._has_drafted = True
        else:
            self._costs.measure(num_proposed, cycle_ns)
            if self._is_guarded:
                self._hint_level.count(cycle_ns / self._costs.typical_ns(num_proposed))
        plain_ns = self._costs.plain_ns
        if plain_ns is None:
            return
        steps = cycle_ns / plain_ns
        if num_proposed == 0:
            self._since_plain = 0
            gained = TRY_SHARE * min(steps, 2.0)
        else:
            gained = num_tokens - (min(steps, FIRST_STEPS) if is_first else steps)
        if num_proposed and not is_first:
            if gained > 0:
                self._patience = LULL
            elif has_waited:
                self._patience = min(2 * self._patience, LONGEST_LULL)
            self._num_drafting += 1
            self._drafting_steps += steps
            self._drafted_tokens += num_tokens
        self._purse = max(-DEBT_STEPS, min(self._purse + gained, LARGEST_STEPS))
        self._review()

    @property
    def is_resting(self) -> bool:
        """Whether nothing is proposed for longer than a lull: trying would cost more than it may."""
        return self._is_resting

    @property
    def least_right(self) -> float:
        """The share of guesses of routes that must be right for such guesses to be read ahead now."""
        return self._hint_level.least_right

    def verdict(self) -> str | None:
        """Return why nothing is proposed now, in words for the statistics line."""
        if self.off_reason is not None or not self.is_resting:
            return self.off_reason
        if self._num_drafting:
            cycles = "1 cycle" if self._num_drafting == 1 else f"{self._num_drafting} cycles"
            took, tokens = f"{self._drafting_steps:.2f}", f"{self._drafted_tokens}"
            return f"does not pay here: {cycles} with proposals took {took} plain steps for {tokens} tokens"
        steps = self._estimate(self._width)
        if steps is None:
            return None
        proposals = "1 proposal" if self._width == 1 else f"{self._width} proposals"
        tokens = self._survival.tokens(self._width)[-1]
        return (
            f"does not pay here, as measured earlier: a cycle with {proposals} takes {steps:.2f} plain steps "
            f"for {tokens:.2f} tokens"
        )

    def learned(self) -> Learned:
        """Return what is known now, for the next session."""
        if self._costs.plain_ns is None:
            return self._earlier
        purse = max(0.0, min(self._purse, CARRIED_STEPS))
        num_drafting = self._earlier.num_drafting + self._num_drafting
        return learned(self._costs, self._survival, purse, num_drafting)

    def _watch(self, num_accepted: int) -> None:
        self._accepted.append(num_accepted)
        if len(self._accepted) == WATCHED_CYCLES:
            mean = sum(self._accepted) / WATCHED_CYCLES
            if mean < LEAST_ACCEPTED and self._is_guarded:
                self.off_reason = f"mean accepted {mean:.2f} over {WATCHED_CYCLES} cycles"

    def _opening(self, left: float) -> float:
        """Return the plain steps to begin with: those `left`, and more where it may or does pay."""
        loss = self._known_loss(always=True)
        if loss is None:
            return OPENING_STEPS
        left = min(left, CARRIED_STEPS)
        return min(left, OPENING_STEPS) if loss > 0 else max(left, OPENING_STEPS + TRUST_STEPS)

    def _estimate(self, width: int) -> float | None:
        return self._costs.estimates[width] if width <= self._max_width else None

    def _known_loss(self, *, always: bool = False) -> float | None:
        """Return the plain steps that a cycle of the best width will lose; None if not known.

        Args:
            always: at all times together, not at this moment.
        """
        steps = self._estimate(self._width)
        # Widths lie in a line: an answer that tried each of three once knows what the best of them costs.
        weight = sum(map(self._costs.weight, self._costs.known))
        is_known = weight >= HARDLY_MEASURED and self._survival.is_known
        if not is_known or steps is None:
            return None
        return steps - self._survival.tokens(self._width, always=always)[-1]

    def _review(self) -> None:
        """Decide on the best width and whether to rest; once a cycle, because a cycle asks several times."""
        self._width, self._hopeful = self._best_and_hopeful(self._max_width)
        loss = 0.0 if self._hopeful is not None else self._known_loss() or 0.0
        can_pay = self._purse > 0 and self._purse >= min(loss, OPENING_STEPS)
        self._is_spent = self._purse <= -DEBT_STEPS or (self._is_spent and not can_pay)
        may_owe = self._is_known_to_pay() and not self._is_spent
        self._is_resting = self._is_guarded and not (can_pay or may_owe)
        self._is_lull = loss > 0 and self._stumbles()

    def _stumbles(self) -> bool:
        """Return whether this moment is worse than others, and not enough plain steps have gone by.

        What is not predicted now will probably be some steps on: a purse that could pay for finding that out
        waits, twice as long each time that the cycle after a wait has lost.
        """
        if self._survival.follows_whole or self._survival.num_plain >= self._patience:
            return False
        usual = self._survival.tokens(self._width, always=True)[-1]
        return usual - self._survival.tokens(self._width)[-1] > WORSE

    def _is_known_to_pay(self) -> bool:
        """Return whether the width in use is well measured by this session and gains on plain steps."""
        steps = self._estimate(self._width)
        if steps is None or self._costs.num_own(self._width) < WELL_MEASURED:
            return False
        return self._survival.tokens(self._width)[-1] > WORTH * steps

    def _best_and_hopeful(self, most: int) -> tuple[int, int | None]:
        """Return the width with the most tokens a step, and one that may turn out to be it, if there is one.

        The best is one whose cost is known, or lies in a line with known ones; the one in use, if that is as
        good. A width is hopeful if it would be best, and gain, at the least it can cost: what does not pay is
        found out where that is cheap, or not at all. Until two costs are known, only a width up to twice the
        one that is: a line needs two points, and a wide block may cost much.
        """
        costs, tokens = self._costs, self._survival.tokens(most, always=True)
        rates = {
            width: tokens[width] / steps for width in range(1, most + 1) if (steps := costs.estimates[width])
        }
        if not rates:
            return min(self._first_width, most), None
        best = max(rates, key=lambda width: rates[width])
        if self._width in rates and rates[best] <= WORTH * rates[self._width]:
            best = self._width
        widest = most if len(costs.known) > 1 else min(most, 2 * costs.known[0])
        enough, hopeful = WORTH * max(rates[best], 1.0), None
        for width in range(1, widest + 1):
            hope = tokens[width] / costs.least_steps(width)
            if hope > enough and (width != best or costs.weight(width) < HARDLY_MEASURED):
                enough, hopeful = hope, width
        return best, hopeful

    def _best_width(self, most: int) -> int:
        """Return the best width, or a hopeful one: always where the best does not gain, else now and then."""
        best, hopeful = (self._width, self._hopeful)
        if most < self._max_width:
            best, hopeful = self._best_and_hopeful(most)
        if hopeful is None:
            return best
        steps = self._estimate(best)
        gains = steps is not None and self._survival.tokens(best)[-1] > WORTH * steps
        every = EXPLORE_EVERY if self._costs.weight(hopeful) < WELL_MEASURED else REPROBE_EVERY
        return hopeful if not gains or self._num_drafting % every == every - 1 else best

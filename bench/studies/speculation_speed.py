"""What does speculation gain, what does it cost where it gains nothing, and what bounds it?

    python -m bench.studies.speculation_speed widths [--model DIR] [--tokens 64] [--rounds 5]
    python -m bench.studies.speculation_speed bare   [--tokens 64] [--rounds 5]
    python -m bench.studies.speculation_speed guard  [--tokens 128] [--rounds 3]

`widths`: decode rate against k with the `oracle` drafter at error 0 (every proposal right), resident and at a
25 % budget of slots. `verify` is the cost of a cycle of k + 1 rows in plain steps, so (k + 1) / verify bounds
the gain of any drafter, and a drafter must commit more than `verify` tokens a cycle to gain anything. On this
CPU backend the cost of verification is nearly linear in its rows; on a Mac it is not, so no row here says
what a Mac would gain.

`bare`: the cycle with nothing to propose against a loop of forward, sample and commit. Bar: 0.98.

`guard`: `lookup` and `mtp` under the governor against plain decode, for every genre of the demo. Bar: 0.97.

Orders are A/B/B/A in one process, ratios are medians over rounds with their spread. The last line of stdout
is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from drafter.oracle import OracleDrafter
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine, Session
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.model.host import fence, to_host

GREEDY = SamplingParams(temperature=0.0)
WIDTHS = (0, 1, 2, 3, 4, 6, 8)
GENRES = {
    "sums": "Tom has 17 apples and buys 25 more. How many apples does he have?",
    "code": "Write a Python function that returns the sum of the even numbers in a list.",
    "stories": "Write a short story about a brave fox.",
}
BARE_BAR, GUARD_BAR = 0.98, 0.97


def prompt_of(engine: Engine, text: str) -> list[int]:
    """Return a chat prompt with open reasoning."""
    return engine.tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n")


def answer(session: Session, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Finished]:
    """Return a greedy answer of exactly `num_tokens` and its figures."""
    events = list(session.generate(prompt, GREEDY, max_tokens=num_tokens))
    end = events[-1]
    assert isinstance(end, Finished)
    return [event.token_id for event in events if isinstance(event, Token)], end


def ns_per_token(end: Finished) -> float:
    """Return decode time per token."""
    return end.statistics.decode_ns / end.statistics.output_tokens


def there_and_back(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run each once forwards and once backwards; return the sums."""
    totals = dict.fromkeys(runs, 0.0)
    for name in [*runs, *reversed(runs)]:
        totals[name] += runs[name]()
    return totals


def spread(values: Sequence[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.3f} [{min(values):.3f} to {max(values):.3f}]"


def widths(options: argparse.Namespace) -> dict[str, object]:
    """Print the table of k for a resident and a streamed engine."""
    found: dict[str, object] = {}
    with Engine.open(options.model, PlanRequest(context_tokens=1024)) as probe:
        experts = probe.plan.num_experts
        top_k = probe.config.num_experts_per_tok
    for name, slots in (("resident", experts), ("25 % of slots", max(top_k, experts // 4))):
        request = PlanRequest(
            context_tokens=1024, slots_per_layer=slots, draft="oracle", num_draft_tokens=max(WIDTHS)
        )
        with Engine.open(options.model, request) as engine:
            prompt = prompt_of(engine, GENRES["sums"])
            recorded, _ = answer(engine.session(), prompt, options.tokens)
            ratios: dict[int, list[float]] = {width: [] for width in WIDTHS}
            costs: dict[int, list[float]] = {width: [] for width in WIDTHS}
            reads: dict[int, float] = {}

            def run(engine: Engine, width: int, recorded: list[int], prompt: list[int]) -> Finished:
                oracle = Narrow([*prompt, *recorded], engine.config.vocab_size, width)
                tokens, end = answer(engine.session(oracle, is_guarded=False), prompt, options.tokens)
                assert tokens == recorded, "a drafted answer differs"
                return end

            for _ in range(options.rounds):
                times = dict.fromkeys(WIDTHS, 0.0)
                cycles = dict.fromkeys(WIDTHS, 0.0)
                for width in (*WIDTHS, *reversed(WIDTHS)):
                    end = run(engine, width, recorded, prompt)
                    times[width] += ns_per_token(end)
                    cycles[width] += end.statistics.decode_ns / end.statistics.cycles
                    reads[width] = end.statistics.read_bytes / end.statistics.output_tokens
                for width in WIDTHS:
                    ratios[width].append(times[0] / times[width])
                    costs[width].append(cycles[width] / cycles[0])
            print(f"{name}: {slots} of {experts} slots, oracle drafts, error 0, {options.tokens} tokens")
            print("  k   rate over k = 0               verify, plain steps           bound   KiB read/token")
            for width in WIDTHS:
                bound = (width + 1) / statistics.median(costs[width])
                print(
                    f"  {width}   {spread(ratios[width]):28}  {spread(costs[width]):28}  {bound:.2f}   "
                    f"{reads[width] / 1024:.0f}"
                )
            found[name] = {str(width): statistics.median(ratios[width]) for width in WIDTHS}
    return found


class Narrow(OracleDrafter):
    """An oracle that proposes at most `width` tokens."""

    def __init__(self, recorded: Sequence[int], vocab_size: int, width: int) -> None:
        super().__init__(recorded, vocab_size)
        self._width = width

    def max_proposals(self) -> int:
        """Return the width."""
        return self._width


def bare(options: argparse.Namespace) -> dict[str, object]:
    """Print the cycle with nothing to propose against the barest loop."""
    ratios = []
    with Engine.open(options.model, PlanRequest(context_tokens=1024)) as engine:
        prompt = prompt_of(engine, GENRES["sums"])
        expected, _ = answer(engine.session(), prompt, options.tokens)

        def bare_loop() -> float:
            target, sampler = engine.target, Sampler(GREEDY, prompt)
            state, token, tokens = target.model.new_state(), prompt[-1], []
            with state.begin(len(prompt) - 1, revocable=False) as block:
                fence(target.sync, target.model.forward(prompt[:-1], block, logits="none").stack)
                block.commit()
            began = time.perf_counter_ns()
            for _ in range(options.tokens):
                with state.begin(1) as block:
                    logits = target.model.forward([token], block, logits="last").logits
                    assert logits is not None
                    token = int(to_host(target.sync, sampler.sample(logits.squeeze(0))))
                    block.commit()
                target.experts.device_idle()
                sampler.observe(token)
                tokens.append(token)
            assert tokens == expected, "the bare loop differs"
            return (time.perf_counter_ns() - began) / options.tokens

        def cycle() -> float:
            return ns_per_token(answer(engine.session(), prompt, options.tokens)[1])

        for _ in range(options.rounds):
            times = there_and_back({"bare": bare_loop, "cycle": cycle})
            ratios.append(times["bare"] / times["cycle"])
    print(f"decode rate of the cycle at k = 0 over a bare loop: {spread(ratios)}, bar {BARE_BAR}")
    return {"ratio": statistics.median(ratios), "bar": BARE_BAR}


def guard(options: argparse.Namespace) -> dict[str, object]:
    """Print guarded drafters against plain decode for every genre."""
    found: dict[str, object] = {}
    request = PlanRequest(context_tokens=1024, slots_per_layer=options.slots)
    with Engine.open(options.model, request) as plain:
        prompts = {genre: prompt_of(plain, text) for genre, text in GENRES.items()}
        expected = {genre: answer(plain.session(), prompts[genre], options.tokens)[0] for genre in GENRES}
        for draft in ("lookup", "mtp"):
            drafted = PlanRequest(context_tokens=1024, slots_per_layer=options.slots, draft=draft)
            with Engine.open(options.model, drafted) as engine:
                for genre in GENRES:
                    ends: list[Finished] = []

                    def with_draft(
                        engine: Engine = engine, genre: str = genre, ends: list[Finished] = ends
                    ) -> float:
                        tokens, end = answer(engine.session(), prompts[genre], options.tokens)
                        assert tokens == expected[genre], "a drafted answer differs"
                        ends.append(end)
                        return ns_per_token(end)

                    def without(genre: str = genre) -> float:
                        return ns_per_token(answer(plain.session(), prompts[genre], options.tokens)[1])

                    ratios = []
                    for _ in range(options.rounds):
                        times = there_and_back({"none": without, draft: with_draft})
                        ratios.append(times["none"] / times[draft])
                    last = ends[-1].statistics.draft
                    print(
                        f"{draft:6} {genre:8} rate over none {spread(ratios)}, bar {GUARD_BAR}; "
                        f"{last.num_accepted} of {last.num_proposed} proposals accepted; "
                        f"{last.reason or 'in use to the end'}"
                    )
                    found[f"{draft} {genre}"] = statistics.median(ratios)
    return found


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("widths", "bare", "guard"))
    parser.add_argument("--model", type=Path, default=demo_dir())
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=None, help="expert slots a layer, for `guard`")
    options = parser.parse_args()
    found = {"widths": widths, "bare": bare, "guard": guard}[options.part](options)
    print(json.dumps({"study": "speculation_speed", "part": options.part, "tokens": options.tokens} | found))


if __name__ == "__main__":
    main()

"""Recorded routes, as a simulation plays them: from a log or a trace, in blocks of another width, or scaled.

Entry points: `blocks_of_passes`, `blocks_of_trace`, `in_width`, `scaled`. A trace knows the blocks of answers
and no prompts: what it is played into is cold where a run would be warm (see `play_answers`, `num_warm`).
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from drafter.record import Answer, Cycle, Line
from mlx_flashnext.engine.guess import Guess
from mlx_flashnext.engine.routes import Pass, RecordedRoutes
from mlx_flashnext.simulation.simulation import RoutedBlock

Answers = list[list[RoutedBlock]]
"""Blocks of each answer, in the order in which they ran."""


class NoRoutes(Exception):
    """There is nothing to play: one line that says why."""


def blocks_of_passes(passes: Sequence[Pass], num_prefill: int = 0) -> list[RoutedBlock]:
    """Return the blocks of a log.

    Args:
        passes: of one answer. What was guessed is what NEAR predictors said of the pass that ran.
        num_prefill: first passes that were chunks of the prompt.
    """
    found: list[RoutedBlock] = []
    for number, one in enumerate(passes):
        guesses: dict[int, list[Guess]] = {}
        for layer, expert, confidence, ahead in (g for said in one.guesses for g in said):
            if not ahead:
                guesses.setdefault(layer, []).append(Guess(layer, expert, confidence))
        if one.routes:
            found.append(RoutedBlock(one.position, one.num_kept, one.routes, guesses, number < num_prefill))
    return found


def blocks_of_trace(lines: Iterable[Line]) -> Answers:
    """Return the blocks of a trace's answers.

    Args:
        lines: of a trace that was checked.

    Raises:
        NoRoutes: no line has routes.
    """
    answers: Answers = []
    for line in lines:
        if isinstance(line, Answer):
            answers.append([])
        elif isinstance(line, Cycle):
            own = [route for route in line.routes if route.target_expert_ids_in_native_rank_order]
            guesses = {
                route.target_route_layer: [
                    Guess(route.target_route_layer, expert, confidence)
                    for expert, confidence in zip(
                        route.predicted_expert_ids, route.prediction_confidence, strict=True
                    )
                ]
                for route in own
                if route.predicted_expert_ids
            }
            routes = {route.target_route_layer: route.target_expert_ids_in_native_rank_order for route in own}
            if routes:
                answers[-1].append(RoutedBlock(line.sequence_position, line.num_committed, routes, guesses))
    answers = [blocks for blocks in answers if blocks]
    if not answers:
        raise NoRoutes("it has no routes: every expert was in memory, or they were not kept")
    layers = sorted(answers[0][0].routes)
    if any(sorted(block.routes) != layers for blocks in answers for block in blocks):
        raise NoRoutes("its cycles have routes of different layers")
    return answers


def has_guesses(answers: Answers) -> bool:
    """Return whether anything was guessed when the routes were recorded."""
    return any(block.guesses for blocks in answers for block in blocks)


def routes_by_position(blocks: Sequence[RoutedBlock]) -> RecordedRoutes:
    """Return the committed routes of one answer, for an oracle."""
    return RecordedRoutes(
        [
            Pass(
                block.position,
                block.num_rows,
                block.num_kept,
                {layer: [list(row) for row in rows] for layer, rows in block.routes.items()},
            )
            for block in blocks
        ]
    )


def in_width(
    blocks: Sequence[RoutedBlock], width: int, acceptance: float, chance: random.Random
) -> list[RoutedBlock]:
    """Return the committed rows of one answer in blocks of another width.

    A block holds the rows of its positions as they were committed in the end; of a row that is rejected here
    the true route stands in for that of the wrong token, which nobody has recorded. The last rows, too few
    for a block, are left out. Chunks of the prompt stay as they are.

    Args:
        blocks: of the answer.
        width: rows of a block.
        acceptance: chance that a row after the first is accepted, if those before it were.
        chance: decides.
    """
    prefill = [block for block in blocks if block.is_prefill]
    rows: list[tuple[int, Mapping[int, Sequence[int]], Mapping[int, Sequence[Guess]]]] = []
    for block in blocks:
        if not block.is_prefill:
            for row in range(block.num_kept):
                chosen = {layer: of_layer[row] for layer, of_layer in block.routes.items()}
                # What was said of several rows together is not what would be said of one.
                rows.append((block.position + row, chosen, block.guesses if block.num_rows == 1 else {}))
    found: list[RoutedBlock] = []
    at = 0
    while at + width <= len(rows):
        kept = 1
        while kept < width and chance.random() < acceptance:
            kept += 1
        found.append(_joined(rows[at : at + width], kept))
        at += kept
    return [*prefill, *found]


def _joined(
    rows: Sequence[tuple[int, Mapping[int, Sequence[int]], Mapping[int, Sequence[Guess]]]], kept: int
) -> RoutedBlock:
    """Return one block of rows; an expert is guessed as surely as the surest row guesses it."""
    guesses: dict[int, list[Guess]] = {}
    for layer in rows[0][1]:
        best: dict[int, float] = {}
        for _, _, said in rows:
            for guess in said.get(layer, ()):
                best[guess.expert] = max(best.get(guess.expert, 0.0), guess.confidence)
        if best:
            guesses[layer] = [Guess(layer, expert, sure) for expert, sure in best.items()]
    routes = {layer: [list(chosen[layer]) for _, chosen, _ in rows] for layer in rows[0][1]}
    return RoutedBlock(rows[0][0], kept, routes, guesses)


def scaled(
    streams: Sequence[Sequence[RoutedBlock]],
    *,
    num_layers: int,
    experts_per_stream: int,
    taken: Sequence[int],
    first_layer: int = 0,
    kept: float = 0.0,
    seed: int = 5,
) -> list[RoutedBlock]:
    """Return routes of a wider and deeper model, made of answers of a small one, side by side.

    Stream s names experts `experts_per_stream * s` and up: of what a layer of answer s chose for a token, the
    `taken[s]` that a shuffle of the layer's own puts first. So each stream recurs as the small model's layers
    do, thinned out; streams know nothing of each other. Layer l takes, for stream s, layer
    `first_layer + (l * 5 + s) mod (L - first_layer)` of the small model's L, its experts renamed by that
    shuffle. Guesses are carried over in the same way, with their confidences: who was right stays right.

    Args:
        streams: one answer each, in blocks of one row.
        num_layers: of the result.
        experts_per_stream: experts of a layer of the small model.
        taken: experts that each stream contributes to a row.
        first_layer: layers of the small model below this one are not used.
        kept: chance that an expert gives way to one that its stream chose for the token before: tokens of a
            small vocabulary recur less from one to the next than those of a large model do.
        seed: of the shuffles, and of that chance.
    """
    places = [_shuffled(experts_per_stream, seed + layer) for layer in range(num_layers)]
    sources = sorted(streams[0][0].routes)[first_layer:]
    chance = random.Random(seed)
    before: dict[tuple[int, int], list[int]] = {}
    found: list[RoutedBlock] = []
    for together in zip(*streams, strict=False):
        routes: dict[int, list[list[int]]] = {}
        guesses: dict[int, list[Guess]] = {}
        for layer in range(num_layers):
            row: list[int] = []
            said: list[Guess] = []
            place = places[layer]
            for stream, (block, count) in enumerate(zip(together, taken, strict=True)):
                source = sources[(layer * 5 + stream) % len(sources)]
                first = experts_per_stream * stream
                chosen: Sequence[int] = block.routes[source][0]
                fresh = sorted([first + place[expert] for expert in chosen])[:count]
                new_name = _recurring(fresh, before.get((layer, stream), ()), kept, chance)
                own = [new_name[expert] for expert in fresh]
                before[layer, stream] = own
                row += own
                ahead = sorted(
                    Guess(layer, first + place[expert], confidence)
                    for _, expert, confidence, _ in block.guesses.get(source, ())
                )
                said += [one._replace(expert=new_name.get(one.expert, one.expert)) for one in ahead[:count]]
            routes[layer] = [sorted(row)]
            if said:
                guesses[layer] = said
        found.append(replace(together[0], routes=routes, guesses=guesses, num_kept=1))
    return found


def _recurring(
    fresh: Sequence[int], before: Sequence[int], kept: float, chance: random.Random
) -> dict[int, int]:
    """Return what stands for each of the experts chosen: itself, or by chance one of the token before."""
    spare = [expert for expert in before if expert not in fresh]
    found: dict[int, int] = {}
    for expert in fresh:
        if expert not in before and spare and chance.random() < kept:
            found[expert] = spare.pop(chance.randrange(len(spare)))
        else:
            found[expert] = expert
    return found


def _shuffled(number: int, seed: int) -> list[int]:
    order = list(range(number))
    random.Random(seed).shuffle(order)
    return order

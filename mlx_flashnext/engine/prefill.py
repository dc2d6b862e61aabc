"""Prefill: the prompt, all but its last token, through the target in chunks.

The last prompt token is the first cycle's anchor, so its logits come from the same one-row block as every
later token's.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from mlx_flashnext.engine.cycle import Timeline

SNAPSHOT_MARGIN = 16
"""Tokens before the end of a prompt at which a turn's snapshot is taken. A chat template ends a prompt with
what opens the answer (`<|im_start|>assistant`, an open or empty think block), and renders that differently
once the answer is history; a snapshot at the very end would never fit the next turn."""


def prefill(
    timeline: Timeline,
    prompt: Sequence[int],
    step: int,
    cancelled: Callable[[], bool],
    at_boundary: Callable[[], None],
) -> Iterator[int]:
    """Bring the timeline to just before the last token of `prompt`.

    Args:
        timeline: has consumed a prefix of the prompt.
        prompt: the whole prompt.
        step: tokens of one chunk.
        cancelled: asked before every chunk; True ends early with the state valid.
        at_boundary: called when all but the last `SNAPSHOT_MARGIN` tokens have just been consumed.

    Yields:
        Prompt tokens consumed so far, after every chunk.
    """
    end, begin = len(prompt) - 1, len(timeline.tokens)
    boundary = len(prompt) - SNAPSHOT_MARGIN
    places = {*range(begin, end, step), end}
    if begin < boundary < end:
        places.add(boundary)
    for first, last in pairwise(sorted(places)):
        if cancelled():
            return
        timeline.consume(prompt[first:last], prompt[last], end - last)
        if last == boundary:
            at_boundary()
        yield last

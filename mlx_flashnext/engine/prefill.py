"""Prefill: the prompt, all but its last token, through the target in chunks.

The last prompt token is the first cycle's anchor, so its logits come from the same one-row block as every
later token's.
"""

from collections.abc import Callable, Iterator, Sequence

from mlx_flashnext.engine.cycle import Timeline


def prefill(
    timeline: Timeline, prompt: Sequence[int], step: int, cancelled: Callable[[], bool]
) -> Iterator[int]:
    """Bring the timeline to just before the last token of `prompt`.

    Args:
        timeline: has consumed a prefix of the prompt.
        prompt: the whole prompt.
        step: tokens of one chunk.
        cancelled: asked before every chunk; True ends early with the state valid.

    Yields:
        Prompt tokens consumed so far, after every chunk.
    """
    end = len(prompt) - 1
    for start in range(len(timeline.tokens), end, step):
        if cancelled():
            return
        timeline.consume(prompt[start : min(start + step, end)])
        yield len(timeline.tokens)

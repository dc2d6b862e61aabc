"""How a draft was trained, as the directory of an exported draft says. Entry point: `read_training`.

The document stands beside the draft (`flashnext-training.json`) and comes with it from whoever made it.

The format is described in docs/FORMATS.md.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from drafter.documents import DocumentRefused, check_version, parse_object

FORMAT: Final = "flashnext-draft-training"
VERSION: Final = 1
FILE: Final = "flashnext-training.json"
_BASE: Final = "base"


class Training(msgspec.Struct, frozen=True):
    """The document, as far as the promotion ladder asks.

    Attributes:
        target_digest: of the build that it was trained for.
        steps_done: of the run.
        log: the first and the last means that the run noted, by their names; empty for a run that noted none.
    """

    format: str
    version: int
    target_digest: Annotated[str, msgspec.Meta(max_length=256)]
    steps_done: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    log: Annotated[list[dict[str, float]], msgspec.Meta(max_length=2)]

    @property
    def base_losses(self) -> tuple[float, float]:
        """Return the first and the last base loss; without a log it has not fallen."""
        return (self.log[0][_BASE], self.log[-1][_BASE]) if self.log else (0.0, 0.0)


def read_training(data: bytes) -> Training:
    """Return what a file says.

    Raises:
        DocumentRefused: it is no such document, or of another version.
    """
    document = parse_object(data, FILE)
    check_version(FILE, (document.get("format"), document.get("version")), (FORMAT, VERSION))
    try:
        found = msgspec.convert(document, Training)
    except (msgspec.ValidationError, OverflowError) as error:
        raise DocumentRefused(f"{FILE} is no record of a training: {error}") from None
    if any(_BASE not in row for row in found.log):
        raise DocumentRefused(f"{FILE} has a line of its log without a {_BASE} loss")
    return found

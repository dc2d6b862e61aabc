"""Opens what a conversion has written, compares pieces of it with the source, and says how far it is off.

Entry point: `check_written`. A piece is read from the source and converted anew; the bytes in the output must
be these. The same pieces give the error of each part: the root of the sum of squared differences over that of
squares, of the values as a reader decodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from expert_store.errors import RecordCorrupt
from expert_store.safetensors_index import TensorInfo
from expert_store.source import ByteSource, FileSource
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.conversion.works import CopyWork, Deviation, ExpertsWork, Work, convert_piece, read_run

EXPERTS_CHECKED: Final = 4
"""Of each layer, the first and the last among them."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Error of one part of one layer.

    Attributes:
        part: `experts`, `trunk`, `table`, `embedding`, `head`, `mtp experts` or `mtp`.
        layer: Layer index, None for what belongs to no layer.
        relative: Root mean square of the difference, as a share of that of the values.
    """

    part: str
    layer: int | None
    relative: float

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {"part": self.part, "layer": self.layer, "relative": self.relative}


def check_written(
    directory: Path, works: Sequence[Work], source: ByteSource, progress: Progress
) -> tuple[tuple[LayerError, ...], str]:
    """Open the new checkpoint and compare pieces of every part.

    Args:
        directory: Where it is.
        works: What was written.
        source: The old one's files.
        progress: Called with (stage, parts done, parts in all).

    Returns:
        The errors, by part and layer, and the identity of the new checkpoint.

    Raises:
        RecordCorrupt: The output does not hold what was written.
        ModelError, StoreError: It does not open.
    """
    written = open_checkpoint(directory)
    found: dict[tuple[str, int | None], Deviation] = {}
    with FileSource(written.table.files) as files:
        for number, work in enumerate(works):
            infos = [written.table.tensors[output.name] for output in work.outputs]
            deviation = None
            if not isinstance(work, CopyWork):
                deviation = found.setdefault((work.group, work.layer), Deviation())
            for piece in _sample(work):
                _compare(work, piece, source, files, infos, deviation)
            progress("checking", number + 1, len(works))
    errors = (LayerError(part, layer, one.relative) for (part, layer), one in found.items())
    return tuple(errors), written.digest


def _sample(work: Work) -> list[int]:
    """Return pieces to compare: the first, the last, and of experts some in between."""
    last = work.num_pieces - 1
    count = EXPERTS_CHECKED if isinstance(work, ExpertsWork) else 2
    return sorted({last * step // (count - 1) for step in range(count)})


def _compare(
    work: Work,
    piece: int,
    source: ByteSource,
    files: ByteSource,
    infos: Sequence[TensorInfo],
    deviation: Deviation | None,
) -> None:
    parts = convert_piece(work, piece, work.read(source, piece), deviation)
    for info, data in zip(infos, parts, strict=True):
        # All pieces are of one size, but for the last, which ends where its tensor does.
        is_last = piece == work.num_pieces - 1
        first = info.length - data.nbytes if is_last else piece * data.nbytes
        if read_run(files, info, first, data.nbytes) != data:
            raise RecordCorrupt(
                f"What is on the disk is not what was written: {info.name}, bytes from {first}",
                hint="check the drive, then remove what was begun and convert again",
                tensor=info.name,
                offset=info.offset + first,
            )

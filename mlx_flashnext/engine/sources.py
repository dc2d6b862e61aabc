"""The files of a checkpoint behind one source: compared with digests if a pack has them, mirrored if asked.

Entry point: `open_source`. Imported by the composition root alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from expert_store.mirrored import Mirror, MirroredSource, find_mirror
from expert_store.source import ByteSource, FileSource
from expert_store.verified import RecordDigests, VerifiedSource, VerifyReads
from mlx_flashnext.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Where a run's bytes come from.

    Attributes:
        source: of everything.
        mirror: the same, if there is a mirror.
        notices: what a person should know of the mirror.
    """

    source: ByteSource
    mirror: MirroredSource | None = None
    notices: tuple[str, ...] = ()


def open_source(
    checkpoint: Checkpoint,
    wrap_source: Callable[[ByteSource], ByteSource],
    verify: VerifyReads,
    mirror_directory: Path | None,
) -> OpenSource:
    """Return the source of a run; nothing is read but the headers of a mirror.

    Args:
        checkpoint: whose files.
        wrap_source: wraps the first copy.
        verify: when records of a pack are compared with their digests.
        mirror_directory: of a second copy of the experts, on another drive.

    Raises:
        CheckpointNotFound: there is no mirror where one was named.
    """
    files, records = checkpoint.table.files, checkpoint.records
    first = _verified(wrap_source(FileSource(files)), records, verify)
    if mirror_directory is None:
        return OpenSource(first)
    mirror = mirror_of(checkpoint, mirror_directory)
    second: ByteSource = FileSource(mirror.files)
    if records is not None:
        second = VerifiedSource(second, records.renumbered(mirror.numbers), verify=verify)
    both = MirroredSource(first, second, mirror.numbers, is_proved=records is not None)
    return OpenSource(both, both, mirror.notes)


def mirror_of(checkpoint: Checkpoint, directory: Path) -> Mirror:
    """Return the copies that a directory holds of the files with experts.

    Raises:
        CheckpointNotFound: there are none.
    """
    layouts = [layout.record for layout in checkpoint.expert_layouts(mtp=True).values()]
    wanted = sorted({file for record in layouts for file in record.files})
    return find_mirror(checkpoint.table.files, wanted, directory)


def _verified(source: ByteSource, records: RecordDigests | None, verify: VerifyReads) -> ByteSource:
    return source if records is None else VerifiedSource(source, records, verify=verify)

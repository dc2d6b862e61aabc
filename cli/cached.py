"""What lies in the local Hugging Face cache, looked at without network and without huggingface_hub.

Entry points: `scan`, `lacking`, `trouble_of`. The layout is huggingface_hub's: `models--ORG--NAME` with
`blobs`, `snapshots` of commits that link to them, and `refs` that name commits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from cli.settings import hub_cache

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One commit of one repository.

    Attributes:
        repo: `org/name`.
        commit: its whole name.
        refs: names that mean it, such as `main`.
        directory: of the snapshot.
        num_bytes: of its files; what several commits share counts for each.
        modified_s: when its newest file came, seconds since 1970.
        trouble: why it does not run, "" if it may.
    """

    repo: str
    commit: str
    refs: tuple[str, ...]
    directory: Path
    num_bytes: int
    modified_s: float
    trouble: str


class Index(msgspec.Struct):
    """The index of a checkpoint: which file holds a tensor."""

    weight_map: dict[str, str]


def repositories() -> Iterator[tuple[str, Path]]:
    """Yield the models in the cache, sorted: (`org/name`, folder)."""
    cache = hub_cache()
    folders = sorted(cache.glob("models--*")) if cache.is_dir() else []
    for folder in folders:
        name = folder.name.removeprefix("models--")
        if folder.is_dir() and "--" in name:
            yield name.replace("--", "/", 1), folder


def scan() -> list[CachedModel]:
    """Return every commit of every model in the cache."""
    return [_look_at(repo, folder, path) for repo, folder in repositories() for path in _snapshots(folder)]


def lacking(snapshot: Path) -> tuple[list[str], int]:
    """Return the data files that a snapshot's index names and that are not there, and how many it names.

    A snapshot without an index, or with one that cannot be read, is left to whoever opens it.
    """
    from mlx_flashnext.regular_file import read_regular

    try:
        index = msgspec.json.decode(read_regular(snapshot / INDEX), type=Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [], 0
    names = sorted(set(index.weight_map.values()))
    return [name for name in names if not _is_there(snapshot / name)], len(names)


def partial_bytes(folder: Path) -> int:
    """Return the bytes of downloads that were begun and not ended."""
    return sum(path.stat().st_size for path in folder.glob("blobs/*.incomplete"))


def names_of(folder: Path) -> dict[str, str]:
    """Return the commit that each reference of a repository names."""
    root = folder / "refs"
    paths = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
    return {path.relative_to(root).as_posix(): named_by(path) for path in sorted(paths)}


def named_by(reference: Path) -> str:
    """Return the commit that a reference names, "" if it names none."""
    from mlx_flashnext.regular_file import read_regular

    try:
        name = read_regular(reference, 1 << 10).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return name if PurePath(name).name == name and "\0" not in name else ""


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _snapshots(folder: Path) -> list[Path]:
    root = folder / "snapshots"
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _look_at(repo: str, folder: Path, snapshot: Path) -> CachedModel:
    files = [path.stat() for path in snapshot.rglob("*") if path.is_file()]
    return CachedModel(
        repo,
        snapshot.name,
        tuple(name for name, commit in names_of(folder).items() if commit == snapshot.name),
        snapshot,
        sum(status.st_size for status in files),
        max((status.st_mtime for status in files), default=0.0),
        trouble_of(snapshot),
    )


def trouble_of(snapshot: Path) -> str:
    """Return why a directory does not run, as far as small files tell; "" if it may."""
    from mlx_flashnext.config import read_config
    from mlx_flashnext.errors import ModelError

    if not (snapshot / "config.json").is_file():
        return "incomplete: no config.json"
    try:
        read_config(snapshot)
    except ModelError as error:
        return error.message
    missing, num_files = lacking(snapshot)
    if missing:
        return f"incomplete: {len(missing)} of {num_files} data files are not here"
    if not any(snapshot.glob("*.safetensors")):
        return "no safetensors files"
    return ""

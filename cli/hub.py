"""Repositories of the Hub: what one holds, and fetching it into huggingface_hub's own cache.

Entry point: `Listing.of`; `hub_fetch.fetch` brings the files. Requests, tokens and endpoint are
huggingface_hub's; the cache has its layout (`blobs`, `snapshots`, `refs`), so that other programs find what
was fetched, and nothing is there twice.

Invariants:
    H1  a blob has its name only once its size and its digest are those that the Hub listed;
    H2  a revision's name (`refs/main`) moves to a commit only once all of it is here: an update that was cut
        short never hides what worked before;
    H3  one commit is resolved at the start; every file is of that commit;
    H4  no name or digest of a listing leads out of the repository's folder.
"""

import contextlib
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, cast

import msgspec

from cli.cached import INDEX, Index
from cli.errors import DAMAGED, INCOMPATIBLE, NOT_ENOUGH, USAGE, CommandError
from cli.hub_errors import explained
from cli.settings import hub_cache

DOCUMENTS: Final = ("*.json", "*.jinja", "*.txt", "*.md", "LICENSE*", "NOTICE*")
DATA: Final = "*.safetensors"
SPARE_BYTES: Final = 256 << 20
"""Left free on the disk beside what is fetched."""
MAX_DOCUMENT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        name: its path there.
        size: bytes.
        digest: SHA-256 of large files, Git's SHA-1 of small ones; its blob's name in the cache.
        kind: which of the two.
    """

    name: str
    size: int
    digest: str
    kind: Literal["sha256", "git"]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit, and where it goes.

    Attributes:
        repo: `org/name`.
        revision: as asked for: a branch, a tag or a commit.
        commit: what it was when it was asked.
        folder: of this repository in the cache.
        files: those that flashnext can use: documents, and data that the index names.
    """

    repo: str
    revision: str
    commit: str
    folder: Path
    files: tuple[RemoteFile, ...]

    @classmethod
    def of(cls, repo: str, revision: str) -> "Listing":
        """Ask the Hub.

        Raises:
            CommandError: no answer, or one that says no.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        with explained(repo, revision):
            api = HfApi(library_name="flashnext")
            commit = api.repo_info(repo, revision=revision).sha
            if not commit or not _is_hexadecimal(commit, 40):
                raise _nonsense(f"commit {commit!r} of {repo}@{revision}")
            entries = api.list_repo_tree(repo, recursive=True, revision=commit)
            files = [_remote_file(entry) for entry in entries if isinstance(entry, RepoFile)]
        kept = tuple(file for file in files if _is_document(file.name) or fnmatch(file.name, DATA))
        return cls(repo, revision, commit, repo_folder(repo), kept)

    @property
    def snapshot(self) -> Path:
        """Return the directory of this commit."""
        return self.folder / "snapshots" / self.commit

    @property
    def documents(self) -> tuple[RemoteFile, ...]:
        """Return the small files: they say which data is needed."""
        return tuple(file for file in self.files if _is_document(file.name))

    def read(self, name: str) -> bytes | None:
        """Return a document, from the cache or the Hub, None if there is none. Nothing is written.

        Raises:
            CommandError: no answer, or one that says no; or it is too large for a document.
        """
        file = next((file for file in self.documents if file.name == name), None)
        if file is None:
            return None
        if file.size > MAX_DOCUMENT_BYTES:
            raise CommandError(
                f"A document of more than {MAX_DOCUMENT_BYTES} bytes: {name} has {file.size}",
                hint="the repository is damaged",
                code=DAMAGED,
            )
        path = self.snapshot / name
        if path.is_file():
            return path.read_bytes()
        from huggingface_hub import constants, hf_hub_url, utils

        with explained(self.repo, self.revision, name):
            response = cast("Any", utils).http_backoff(
                "GET",
                hf_hub_url(self.repo, name, revision=self.commit),
                headers=request_headers(),
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
            utils.hf_raise_for_status(response)
            return response.content

    def with_needed_data(self) -> "Listing":
        """Return the listing with the data that the index names, or all of it without an index.

        Raises:
            CommandError: the index names a file that the repository lacks (FIELD P84), or there is no data.
        """
        index = self.read(INDEX)
        names = None if index is None else _indexed(index)
        data = [file for file in self.files if not _is_document(file.name)]
        if names is None:
            needed = [file for file in data if "/" not in file.name]
        else:
            needed = [file for file in data if file.name in names]
            absent = sorted(names - {file.name for file in needed})
            if absent:
                more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
                raise CommandError(
                    f"The repository lacks what its index names: {absent[0]}{more} of {self.repo}",
                    hint="nothing was fetched; its owner has to complete it, or name another revision",
                    code=INCOMPATIBLE,
                )
        if not needed:
            raise CommandError(
                f"The repository holds no safetensors files: {self.repo}",
                hint="flashnext reads safetensors; look for another build of the model",
                code=INCOMPATIBLE,
            )
        return Listing(self.repo, self.revision, self.commit, self.folder, (*self.documents, *needed))

    def missing(self) -> list[RemoteFile]:
        """Return the files that are not in the cache."""
        return [file for file in self.files if not (self.snapshot / file.name).is_file()]

    def missing_bytes(self) -> int:
        """Return the bytes to fetch; what was begun and blobs of other revisions count as here."""
        return sum(file.size - self._here(file) for file in self.missing())

    def check_space(self) -> None:
        """Refuse to begin what cannot end.

        Raises:
            CommandError: the disk has not enough room.
        """
        from cli.console import size

        wanted = self.missing_bytes()
        place = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        free = shutil.disk_usage(place).free
        if wanted and wanted + SPARE_BYTES > free:
            raise CommandError(
                f"{self.repo} needs {size(wanted)} more and {size(SPARE_BYTES)} spare, "
                f"the disk of {place} has {size(free)} free",
                hint="make room, or put the cache on another disk with HF_HUB_CACHE",
                code=NOT_ENOUGH,
            )

    def point(self) -> None:
        """Let the revision's name mean this commit (H2). A commit's own name needs none."""
        if self.revision == self.commit:
            return
        path = self.folder / "refs" / self.revision
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(self.commit, encoding="ascii")
        fresh.replace(path)

    def blob(self, file: RemoteFile) -> Path:
        """Return where a file's bytes lie."""
        return self.folder / "blobs" / file.digest

    def part(self, file: RemoteFile) -> Path:
        """Return where they lie while they are not all here."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def _here(self, file: RemoteFile) -> int:
        if self.blob(file).is_file():
            return file.size
        with contextlib.suppress(OSError):
            return min(self.part(file).stat().st_size, file.size)
        return 0


def parse_name(name: str) -> tuple[str, str]:
    """Return repository and revision of `org/name` or `org/name@revision`.

    Raises:
        CommandError: it is no such name.
    """
    repo, at, revision = name.partition("@")
    if at and not revision:
        raise CommandError(
            f"No revision after the @: {name}", hint=f"{repo} alone is its main branch", code=USAGE
        )
    words = repo.split("/")
    is_plain = len(words) == 2 and all(word and word.strip(".") and _is_plain(word) for word in words)
    if not is_plain or "--" in repo or (revision and not _is_revision(revision)):
        raise CommandError(
            f"Not the name of a repository: {name}", hint="ORG/NAME, or ORG/NAME@REVISION", code=USAGE
        )
    return repo, revision or "main"


def request_headers() -> dict[str, str]:
    """Return what every request carries: who asks, with the user's token if there is one."""
    from huggingface_hub import utils

    return cast("Any", utils).build_hf_headers(library_name="flashnext")


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache, whether it is there or not."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def _remote_file(entry: Any) -> RemoteFile:
    """Return a file of a listing; names and digests become paths here, so they are looked at (H4)."""
    if entry.lfs is not None:
        file = RemoteFile(entry.path, entry.lfs.size, entry.lfs.sha256, "sha256")
    else:
        file = RemoteFile(entry.path, entry.size, entry.blob_id, "git")
    pure = PurePosixPath(file.name)
    is_inside = not pure.is_absolute() and ".." not in pure.parts and str(pure) == file.name
    if not is_inside or not file.name.isprintable():
        raise _nonsense(f"file name {file.name!r}")
    if not _is_hexadecimal(file.digest, 64 if file.kind == "sha256" else 40) or file.size < 0:
        raise _nonsense(f"digest {file.digest!r} and size {file.size} of {file.name}")
    return file


def _is_hexadecimal(text: str, length: int) -> bool:
    return len(text) == length and all(letter in "0123456789abcdef" for letter in text)


def _nonsense(what: str) -> CommandError:
    return CommandError(
        f"The Hub's listing makes no sense: {what}",
        hint="nothing was fetched; is HF_ENDPOINT what it should be?",
        code=DAMAGED,
    )


def _is_document(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in DOCUMENTS)


def _is_plain(word: str) -> bool:
    return all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in word)


def _is_revision(revision: str) -> bool:
    pure = PurePosixPath(revision)
    return (
        str(pure) == revision
        and not pure.is_absolute()
        and all(map(_is_plain, pure.parts))
        and (".." not in pure.parts)
    )


def _indexed(index: bytes) -> set[str]:
    """Return the files that an index names."""
    try:
        return set(msgspec.json.decode(index, type=Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(
            f"{INDEX} cannot be read: {error}", hint="the repository is damaged", code=DAMAGED
        ) from error

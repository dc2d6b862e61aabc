"""Brings files of a `Listing` into huggingface_hub's cache. Entry point: `fetch`.

Our own loop, because the library's keeps nothing of a file that was cut short: a laptop that sleeps would
begin tens of GiB again. Tokens, endpoint, waiting and locks are the library's.

Invariant H1 of hub.py: a blob has its name only once its size and its digest are those that the Hub listed.
"""

import contextlib
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from cli.errors import DAMAGED, CommandError
from cli.hub import Listing, RemoteFile, request_headers
from cli.hub_errors import explained
from cli.settings import hub_cache

NUM_WORKERS: Final = 4
NUM_TRIES: Final = 5
"""Times in a row that a connection may break without a byte having come."""
RETRY_S: Final = 1.0
"""Before the second try; then twice as long each time."""
STOP_S: Final = 2.0
_POLL_S: Final = 0.2

Progress = Callable[[str, int, int], None]


def fetch(listing: Listing, files: Sequence[RemoteFile], label: str, progress: Progress) -> None:
    """Bring files into the cache and link them into the snapshot.

    On Ctrl-C the exception passes at once; the threads are daemons, and what they wrote is a beginning that
    the next run goes on from.

    Args:
        listing: whose files.
        files: which of them; those that are here are left alone.
        label: for progress.
        progress: called with (label, bytes here, bytes in all).

    Raises:
        CommandError: the first file that could not be had; the others are not begun then.
    """
    waiting = [file for file in files if not (listing.snapshot / file.name).is_file()]
    if not waiting:
        return
    _Fetching(listing, waiting).run(label, progress)


class _Fetching:
    """Files on their way, a few at a time."""

    def __init__(self, listing: Listing, files: Sequence[RemoteFile]) -> None:
        self._listing = listing
        self._total = sum(file.size for file in files)
        self._todo: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in sorted(files, key=lambda file: file.size):
            self._todo.put(file)
        self._num_threads = min(NUM_WORKERS, len(files))
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # protects `_num_here`
        self._num_here = 0
        self._is_stopped = threading.Event()

    def run(self, label: str, progress: Progress) -> None:
        threads = [
            threading.Thread(target=self._work, name="pull", daemon=True) for _ in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                with contextlib.suppress(queue.Empty):
                    error = self._ended.get(timeout=_POLL_S)
                    left -= 1
                    if error is not None:
                        raise error
                progress(label, min(self._num_here, self._total), self._total)
        except Exception:
            # What the others have begun they leave whole; one that waits for the Hub is not waited for.
            self._is_stopped.set()
            for thread in threads:
                thread.join(STOP_S)
            raise
        finally:
            self._is_stopped.set()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            while not self._is_stopped.is_set():
                self._bring(self._todo.get_nowait())
        except queue.Empty:
            pass
        except BaseException as raised:  # noqa: BLE001  handed to the thread that waits
            error = raised
        self._ended.put(error)

    def _bring(self, file: RemoteFile) -> None:
        listing = self._listing
        blob, lock = listing.blob(file), hub_cache() / ".locks" / listing.folder.name / f"{file.digest}.lock"
        with explained(listing.repo, listing.revision, file.name):
            from huggingface_hub.utils import WeakFileLock

            for path in (blob, lock):
                path.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if blob.is_file():
                    self._advance(file.size)
                else:
                    self._download(file, listing.part(file))
                    if self._is_stopped.is_set():
                        return
                    _compare(file, listing.part(file))
                    listing.part(file).replace(blob)
            _link(blob, listing.snapshot / file.name)

    def _download(self, file: RemoteFile, part: Path) -> None:
        """Append to the part until it is as long as the file."""
        import httpx2

        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        with part.open("ab") as stream:
            self._advance(stream.tell())
            num_failures = 0
            while stream.tell() < file.size and not self._is_stopped.is_set():
                before = stream.tell()
                try:
                    self._append(file, stream)
                except httpx2.TransportError as error:
                    # What broke is opened again where it broke; what gives nothing, not for ever.
                    num_failures = 1 if stream.tell() > before else num_failures + 1
                    if num_failures >= NUM_TRIES:
                        raise
                    _wait_before_try(num_failures, file, error, self._is_stopped)

    def _append(self, file: RemoteFile, stream: BinaryIO) -> None:
        from huggingface_hub import constants, hf_hub_url, utils

        at = stream.tell()
        headers = request_headers()
        # Compressed on the wire, lengths and offsets would be those of something else.
        headers["Accept-Encoding"] = "identity"
        if at:
            headers["Range"] = f"bytes={at}-"
        url = hf_hub_url(self._listing.repo, file.name, revision=self._listing.commit)
        asking = cast("Any", utils).http_stream_backoff(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, retry_on_exceptions=()
        )
        with asking as response:
            utils.hf_raise_for_status(response)
            if at and response.status_code != 206:
                self._advance(-at)
                stream.truncate(0)
                stream.seek(0)
            for chunk in response.iter_bytes():  # as they come: what broke off has been written
                stream.write(chunk)
                self._advance(len(chunk))
                if stream.tell() > file.size or self._is_stopped.is_set():
                    break
        stream.flush()
        if not self._is_stopped.is_set() and stream.tell() != file.size:
            got = stream.tell()
            stream.truncate(0)
            raise CommandError(
                f"The Hub sent another size than it lists: {file.name} has {file.size} bytes, {got} came",
                hint="run the same line again; if it stays, the repository is damaged",
                code=DAMAGED,
            )

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._num_here += num_bytes


@contextlib.contextmanager
def library_notes(note: Callable[[str], None]) -> Generator[None]:
    """Within: what huggingface_hub would log about waiting and trying again is told as notes."""
    logger = logging.getLogger("huggingface_hub")
    handlers, propagates = list(logger.handlers), logger.propagate
    logger.handlers, logger.propagate = [_Notes(note)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagates


class _Notes(logging.Handler):
    """Tells each line once: eight threads that wait for one server say the same."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage().splitlines()[0] if record.getMessage() else ""
        if line and line != self._last:
            self._last = line
            self._note(line)


def _compare(file: RemoteFile, part: Path) -> None:
    """Refuse bytes that are not those the Hub listed (H1)."""
    digest = hashlib.sha256() if file.kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if file.kind == "git":
        digest.update(b"blob %d\0" % file.size)
    with part.open("rb") as stream:
        while data := stream.read(4 << 20):
            digest.update(data)
    if digest.hexdigest() != file.digest:
        part.unlink()
        raise CommandError(
            f"What came is not what the Hub lists: {file.name} has the digest {digest.hexdigest()[:12]}..., "
            f"it should be {file.digest[:12]}...",
            hint="it was thrown away; run the same line again",
            code=DAMAGED,
        )


def _link(blob: Path, pointer: Path) -> None:
    """Let the snapshot show a blob, by a relative link as the library makes them."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    fresh = pointer.with_name(f".{pointer.name}.{threading.get_ident()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(blob, pointer.parent))
    fresh.replace(pointer)


def _wait_before_try(number: int, file: RemoteFile, error: Exception, is_stopped: threading.Event) -> None:
    logging.getLogger("huggingface_hub").warning(
        "%s broke off (%s); going on where it stopped", file.name, str(error) or type(error).__name__
    )
    is_stopped.wait(min(8.0, RETRY_S * 2.0 ** (number - 1)))

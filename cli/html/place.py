"""Where a page goes, and reports that were saved. Entry points: `PagePlace`, `read_report`.

A page replaces an older page, as whoever runs a report again expects, and nothing else: a slip of the hand
must not cost a file of another kind. Whether a page can be written is known before anything is measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from cli.errors import DAMAGED, INCOMPATIBLE, CommandError, UsageProblem, code_of, code_of_reading
from cli.html.page import GENERATOR, TITLES, VERSIONS, render_page
from cli.html.reading import Node
from cli.settings import expanded
from expert_store.published import check_place, publish
from mlx_flashnext.regular_file import read_regular

_HEAD_BYTES: Final = 4096
_MARK: Final = f'<meta name="generator" content="{GENERATOR}">'.encode()


class PagePlace:
    """A name for a page.

    Attributes:
        path: as it was typed.
    """

    def __init__(self, path: Path) -> None:
        """Look whether a page can be written there.

        Raises:
            UsageProblem: the name is a directory's, or its directory is not there.
            CommandError: there is a file of another kind, or nothing can be written.
        """
        self.path = path
        self._target = self._found(expanded(str(path)))

    def publish(self, report: Mapping[str, Any]) -> None:
        """Write the page of a report, whole or not at all.

        Raises:
            CommandError: it cannot be written.
        """
        data = render_page(report).encode("utf-8")
        try:
            self._refuse_others(self._target)
            publish(self._target, data)
        except OSError as error:
            raise self._failed(error) from error

    def _found(self, path: Path) -> Path:
        try:
            target = Path(os.path.realpath(path))
            if target.is_dir():
                raise UsageProblem(
                    f"A page is a file, this is a directory: {self.path}", hint=f"--html {path}/report.html"
                )
            if not target.parent.is_dir():
                raise UsageProblem(
                    f"There is no such directory: {path.parent}", hint=f"mkdir -p {path.parent}"
                )
            self._refuse_others(target)
            check_place(target)
            return target
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise self._failed(error) from error

    def _refuse_others(self, target: Path) -> None:
        """Refuse to write over anything but a page."""
        if not os.path.lexists(target):
            return
        is_page = False
        if target.is_file():
            with target.open("rb") as stream:
                is_page = _MARK in stream.read(_HEAD_BYTES)
        if not is_page:
            raise CommandError(
                f"The file exists and is not a page of flashnext: {self.path}", hint="choose another name"
            )

    def _failed(self, error: Exception) -> CommandError:
        reason = getattr(error, "strerror", None) or error
        return CommandError(
            f"Cannot write {self.path}: {reason}", hint="choose another place for --html", code=code_of(error)
        )


def read_report(path: Path) -> Mapping[str, Any]:
    """Read a report that `--json` printed.

    Raises:
        CommandError: it cannot be read, is no JSON document, or none that there is a page of.
    """
    try:
        data = read_regular(expanded(str(path)))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(
            f"Cannot read {path}: {reason}",
            hint="save one: flashnext bench --report ssd-wait --json > FILE",
            code=code_of_reading(error),
        ) from error
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CommandError(
            f"Not a JSON document: {path}: {error}", hint="save it again", code=DAMAGED
        ) from error
    node = Node(document)
    name = node["format"].text
    if name not in TITLES:
        told = repr(name[:80]) if name else "none"
        raise CommandError(
            f"There is no page of this document: {path}: format {told}",
            hint=f"there are pages of {', '.join(TITLES)}",
            code=INCOMPATIBLE,
        )
    version = node["version"].number
    if version is not None and version > VERSIONS[name]:
        raise CommandError(
            f"{path} has version {version:g} of {name}, this program reads up to {VERSIONS[name]}",
            hint="upgrade flashnext, or measure again",
            code=INCOMPATIBLE,
        )
    return cast("Mapping[str, Any]", document)

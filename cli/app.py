"""The console script `flashnext`: prepares the process, then hands over to the command tree.

Entry point: `main`. Light on purpose: from its first line to the end of a command, Ctrl-C ends the
process without a traceback. Commands take it over while they run (`cli/interrupts.py`).
"""

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.engine_factory import Services


def main(arguments: Sequence[str] | None = None, *, services: "Services | None" = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; the process's own when None.
        services: what commands call below the command line.
    """
    # Python's own handler would print a traceback of whatever is being imported.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.console import prepare_streams
    from cli.engine_factory import Services
    from cli.tree import app

    prepare_streams()
    app(
        args=None if arguments is None else list(arguments),
        prog_name="flashnext",
        obj=services or Services(),
    )

"""What the Hub, the line to it or the disk refused, as messages with a next step. Entry: `explained`."""

import contextlib
import errno
from collections.abc import Generator
from typing import Any

from cli.errors import FAILED, NOT_ENOUGH, USAGE, CommandError
from drafter.files import naming

_AGAIN = "what came is kept; run the same line again to go on"


@contextlib.contextmanager
def explained(repo: str, revision: str, file: str = "") -> Generator[None]:
    """Within: errors of huggingface_hub, of the connection and of the disk become `CommandError`."""
    import httpx2
    from huggingface_hub import errors

    what = f"{repo}@{revision}" + (f", {file}" if file else "")
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise CommandError(
            f"HF_HUB_OFFLINE is set, so nothing can be fetched: {what}", hint="unset HF_HUB_OFFLINE"
        ) from error
    except errors.HFValidationError as error:
        raise CommandError(
            f"Not the name of a repository: {repo}", hint="ORG/NAME, or ORG/NAME@REVISION", code=USAGE
        ) from error
    except errors.GatedRepoError as error:
        raise CommandError(
            f"The repository is only for those who accepted its terms: {what}",
            hint="accept them on its page, then log in with hf auth login, or set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CommandError(
            f"The repository has no such revision: {what}", hint="leave out @REVISION for its main branch"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CommandError(
            f"The Hub has no such repository, or none that you may see: {what}",
            hint="check the name; for a private one, hf auth login, or set HF_TOKEN",
        ) from error
    except errors.HfHubHTTPError as error:
        raise _refused(error, what) from error
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(
            f"Cannot reach the Hub: {reason}: {what}", hint=f"check the connection; {_AGAIN}"
        ) from error
    except ValueError as error:
        raise CommandError(
            f"The Hub's answer cannot be read: {what}",
            hint="a page to log in to the network may answer in its place; is HF_ENDPOINT right?",
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CommandError(
                f"The disk is full: {what}", hint=f"make room; {_AGAIN}", code=NOT_ENOUGH
            ) from error
        with naming(what):
            raise


def _refused(error: Any, what: str) -> CommandError:
    """Return the error for a status without a class of its own."""
    status = error.response.status_code
    if status in (401, 403):
        return CommandError(
            f"The Hub refuses ({status}): {what}",
            hint="log in with hf auth login, or set HF_TOKEN to a token that may read it",
        )
    if status == 404:
        return CommandError(f"The Hub has no such thing (404): {what}", hint="check name and revision")
    if status == 429:
        return CommandError(
            f"The Hub asks for fewer requests (429): {what}",
            hint=f"wait some minutes, or log in with hf auth login; {_AGAIN}",
        )
    if status >= 500:
        return CommandError(f"The Hub has a fault ({status}): {what}", hint=f"later, {_AGAIN}")
    return CommandError(f"The Hub answers {status}: {what}", hint="check name and revision", code=FAILED)

"""Options of the measuring commands, and what people type in them: lists, rates, durations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.console import Console
from cli.errors import UsageProblem
from cli.parse import parse_count, parse_number, parse_size

_DISK, _REPORT = "Disk", "Report"
_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(us|ms|s)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(.*?)\s*(?:/s)?\s*")
MOST_VALUES = 64
# `oracle` and `oracle-draft` replay a recorded run, so they need a report.
BENCH_HINTS = (
    "off", "frequency", "previous", "random", "near-gate", "near-linear", "sidecar", "both",
    "oracle", "oracle-draft",
)  # fmt: skip
BENCH_DRAFTS = ("none", "lookup", "mtp", "dflash2", "oracle")
ALL_DRAFTS = "none,mtp:2,dflash2,lookup:4,oracle"


def parse_rate(text: str) -> int:
    """Return bytes a second: `3GB/s`, `500MiB/s`."""
    found = _RATE.fullmatch(text)
    return parse_size(found[1] if found is not None else text)


def parse_duration(text: str) -> float:
    """Return seconds: `0.2ms`, `150us`, `1s`."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"not a duration: {text!r} (write 0.2ms, 150us or 1s)")
    return float(found[1]) * _SECONDS[found[2]]


def counts(flag: str, text: str, *, example: str = "128,512") -> list[int]:
    """Return the numbers of a list such as `128,512,4k`; 0 means none.

    Args:
        flag: whose they are.
        text: as typed.
        example: what the hint of a refusal shows.

    Raises:
        UsageProblem: not such a list.
    """
    words = [word.strip() for word in text.split(",")]
    try:
        values = [0 if word == "0" else parse_count(word) for word in words]
    except typer.BadParameter as error:
        raise UsageProblem(f"{flag}: {error.message}", hint=f"such as {example}") from error
    _check_number(flag, len(values))
    return values


def words_of(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Return the words of a list such as `off,near-gate`.

    Raises:
        UsageProblem: a word that is not known.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise UsageProblem(f"{flag} does not know: {word}", hint=f"there are {', '.join(known)}")
    _check_number(flag, len(words))
    return words


@dataclass(frozen=True, slots=True)
class Share:
    """A budget: a percentage of the experts, or a number of slots of each layer.

    Attributes:
        text: as typed.
        percent: of the experts, or None.
        slots: of each layer, or None.
    """

    text: str
    percent: float | None = None
    slots: int | None = None

    def slots_of(self, num_experts: int, fewest: int) -> int:
        """Return the expert slots of each layer; at least what one token needs, at most all."""
        return max(fewest, min(num_experts, self._wanted(num_experts)))

    def note_of(self, num_experts: int, fewest: int) -> str:
        """Return what to tell of a budget that cannot be had as it was asked for; "" of one that can."""
        wanted, taken = self._wanted(num_experts), self.slots_of(num_experts, fewest)
        if taken == wanted:
            return ""
        asked = self.text if self.percent is None else f"{self.text} of {num_experts} ({wanted})"
        if taken > wanted:
            return f"budget {asked} is less than a token needs of a layer: taken as {taken} slots"
        return f"budget {asked} is more than a layer has: taken as all {taken} experts"

    def _wanted(self, num_experts: int) -> int:
        """Return the slots that were asked for; there may be none such."""
        if self.percent is not None:
            return round(num_experts * self.percent / 100)
        assert self.slots is not None
        return self.slots


def shares(flag: str, text: str) -> list[Share]:
    """Return budgets such as `25%,50%,100%` or `24,32`, slots of each layer.

    Raises:
        UsageProblem: not such a list.
    """
    found: list[Share] = []
    hint = "write 25%,50%,100%, or slots of a layer such as 24,32"
    for word in (word.strip() for word in text.split(",")):
        try:
            if word.endswith("%"):
                share = Share(word, percent=parse_number(word[:-1]))
            else:
                share = Share(word, slots=parse_count(word))
        except typer.BadParameter:
            message = f"{flag}: neither a share of the experts nor slots of a layer: {word!r}"
            raise UsageProblem(message, hint=hint) from None
        if share.percent is not None and not 0 < share.percent <= 100:
            raise UsageProblem(f"{flag}: not a share of the experts: {word!r}", hint=hint)
        found.append(share)
    _check_number(flag, len(found))
    return found


def slots_of_shares(console: Console, budgets: Sequence[Share], num_experts: int, fewest: int) -> list[int]:
    """Return the slots of each layer under each budget, without repeats; say which are not as asked for.

    Args:
        console: hears what was changed.
        budgets: as asked for.
        num_experts: of a layer.
        fewest: slots that one token needs.
    """
    for note in dict.fromkeys(share.note_of(num_experts, fewest) for share in budgets):
        if note:
            console.note(f"note: {note}")
    return list(dict.fromkeys(share.slots_of(num_experts, fewest) for share in budgets))


def _check_number(flag: str, number: int) -> None:
    if number > MOST_VALUES:
        raise UsageProblem(f"{flag} takes at most {MOST_VALUES} values: {number}", hint="give fewer")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What stands between the files and the readers."""

    page_cache: Annotated[
        Literal["as-is", "cold", "warm"] | None,
        typer.Option(
            "--page-cache",
            help="Drop (cold) or read (warm) the model's files before every repetition. Left out: as-is, "
            "in a report cold.",
            rich_help_panel=_DISK,
        ),
    ] = None
    throttle: Annotated[
        int | None,
        typer.Option(
            "--throttle",
            metavar="RATE",
            help="Read as from a drive of this bandwidth, such as 3GB/s. Rows say: simulated disk.",
            parser=parse_rate,
            rich_help_panel=_DISK,
        ),
    ] = None
    latency: Annotated[
        float | None,
        typer.Option(
            "--latency",
            metavar="TIME",
            help="Add this to every read, such as 0.2ms. Rows say: simulated disk.",
            parser=parse_duration,
            rich_help_panel=_DISK,
        ),
    ] = None

    @property
    def label(self) -> str:
        """Return what rows say of the disk."""
        if self.throttle is None and self.latency is None:
            return "real"
        parts = [] if self.throttle is None else [f"{self.throttle / 1e9:g} GB/s"]
        parts += [] if self.latency is None else [f"{self.latency * 1e3:g} ms more a read"]
        return f"simulated disk: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured; names as in llama-bench."""

    n_prompt: Annotated[
        str,
        typer.Option("--n-prompt", "-p", metavar="LIST", help="Prompt tokens to read; 0 for none."),
    ] = "512"
    n_gen: Annotated[
        str | None,
        typer.Option(
            "--n-gen",
            "-n",
            "-g",
            metavar="LIST",
            help="Tokens to say; 0 for none. Left out: 128, in a report 16, in the draft report 64.",
        ),
    ] = None
    n_depth: Annotated[
        str,
        typer.Option(
            "--n-depth", "-d", metavar="LIST", help="Tokens in the context before the clock starts."
        ),
    ] = "0"
    repetitions: Annotated[
        int,
        typer.Option(
            "--repetitions",
            "-r",
            metavar="N",
            help="Of each case, after one that is not counted.",
            min=1,
            max=1000,
        ),
    ] = 5
    output: Annotated[
        Literal["md", "json", "jsonl", "csv"],
        typer.Option("--output", "-o", help="Form of the result on stdout."),
    ] = "md"
    hints: Annotated[
        str,
        typer.Option(
            "--hints", metavar="LIST", help=f"Who says what to read ahead: {', '.join(BENCH_HINTS)}."
        ),
    ] = ""
    drafts: Annotated[
        str | None,
        typer.Option(
            "--drafts",
            metavar="LIST",
            help="Who proposes, with the most tokens of a cycle: none,mtp:2,dflash2; oracle:4 in a report. "
            "Left out: none; in the draft report all that there are.",
        ),
    ] = None
    draft_model: Annotated[
        Path | None,
        typer.Option(
            "--draft-model",
            metavar="DIR",
            help="Directory of a draft for dflash2. Left out: the one beside the model.",
        ),
    ] = None
    captures: Annotated[
        Path | None,
        typer.Option(
            "--captures",
            metavar="SET",
            help="Count the predictor report's frequencies of this capture set. Left out: of its own tokens.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    report: Annotated[
        Literal["ssd-wait", "warm-start", "verify", "draft", "predictors"] | None,
        typer.Option(
            "--report",
            metavar="REPORT",
            help="ssd-wait: how long compute stood still for the drive, why, and the bounds. "
            "warm-start: what the first answer gains by it. "
            "verify: whether blocks are verified and rolled back as they should be. "
            "draft: what each drafter costs and brings. "
            "predictors: what each source of hints knows, and when.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Also write the report ssd-wait, predictors or draft as one page with pictures, which needs "
            "no network. A page that is there is replaced, no other file.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    from_json: Annotated[
        Path | None,
        typer.Option(
            "--from-json",
            metavar="FILE",
            help="Measure nothing: make the page of --html of a report that --json printed before.",
            rich_help_panel=_REPORT,
        ),
    ] = None
    budgets: Annotated[
        str,
        typer.Option(
            "--budgets",
            metavar="LIST",
            help="Experts in memory to compare: shares of all, or slots of each layer.",
            rich_help_panel=_REPORT,
        ),
    ] = "25%,50%"
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts",
            metavar="N",
            help="Prompts of each repetition.",
            min=1,
            max=1000,
            rich_help_panel=_REPORT,
        ),
    ] = 2


def drafts_of(text: str) -> list[tuple[str, int]]:
    """Return drafters with the most proposals of a cycle: `none,mtp:2,oracle:4`.

    Without a number it is 4, but for `dflash2` 0, which stands for its whole block.

    Raises:
        UsageProblem: not such a list.
    """
    from drafter.api import MAX_PROPOSALS

    found: list[tuple[str, int]] = []
    for word in (word.strip() for word in text.split(",")):
        kind, _, number = word.partition(":")
        if kind not in BENCH_DRAFTS:
            raise UsageProblem(f"--drafts does not know: {kind}", hint=f"there are {', '.join(BENCH_DRAFTS)}")
        if kind == "none":
            found.append(("none", 0))
            continue
        try:
            found.append((kind, parse_count(number) if number else 0 if kind == "dflash2" else 4))
        except typer.BadParameter as error:
            raise UsageProblem(f"--drafts: {error.message}", hint="write oracle:4") from error
        if found[-1][1] > MAX_PROPOSALS:
            raise UsageProblem(
                f"At most {MAX_PROPOSALS} tokens are drafted at a time: {word}",
                hint="2 to 4 are the usual best",
            )
    _check_number("--drafts", len(found))
    return found

"""A machine that is not here, as a file: its drive, and what it takes to compute. Entry: `read_machine`.

TOML; `FORMAT` and `VERSION` below. Every field has bounds, none is unknown, and nothing in it is executed.

    format = "flashnext-machine"
    version = 1
    name = "MacBook Pro, M5 Pro, 48 GB"
    about = "where the figures come from"

    [drive]
    bytes_per_s = 17.3e9     # of all readers together; left out: no limit
    latency_us = 130         # of every read
    overhead_us = 20         # of a record, beside the drive
    wake_us = 20             # until a thread that slept goes on
    readers = 4

    [compute]
    layer_us = 170           # trunk and router of a layer for one row; or a list, one of each layer
    row_us = 0               # more for every further row of a block
    expert_us = 4            # of every distinct expert of a layer
    sync_us = 80             # of the one wait for the device in a layer
    hint_us = 0              # of a hand-over of hints, before the layer's wait; readers stand still
    pass_us = 1000           # of a pass, before its first layer: head of the last one, embedding, draft
    record_us = 0            # of every record that is read while computing: what reading takes from it
    tell_us = 0              # until hints are handed over where a layer waited for nothing
    woken_us = 0             # of a layer after one that waited: more than after one that did not

All of `[compute]` is zero where it is left out: then waits are those of a machine that computes in no time.
"""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec

from drafter.reasons import shown
from expert_store.simulate import Drive
from mlx_flashnext.engine.errors import EngineError
from mlx_flashnext.regular_file import NO_PLAIN_FILE, read_regular

FORMAT = "flashnext-machine"
VERSION = 1
FILE_BYTES_MAX: Final = 1 << 14
_MOST_DOTS: Final = 600
"""In one line: a number of each layer has one. Python's reader takes quadratic time over a dotted key."""
_EXAMPLE: Final = "docs/FORMATS.md, flashnext-machine, has an example"
_US: Final = 1000
_MOST_LAYERS: Final = 512

_Time = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class MachineMissing(EngineError):
    """No machine file can be read there."""


class MachineUnusable(EngineError):
    """A machine file that is none, or says what no machine is."""


class MachineForeign(MachineUnusable):
    """A machine file of another kind or version, or of a model with other layers."""


class _Drive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes_per_s: Annotated[float, msgspec.Meta(ge=1, le=1e15)] | None = None
    latency_us: _Time = 0.0
    overhead_us: _Time = 0.0
    wake_us: _Time = 0.0
    readers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4


class _Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer_us: _Time | Annotated[tuple[_Time, ...], msgspec.Meta(min_length=1, max_length=_MOST_LAYERS)] = 0.0
    row_us: _Time = 0.0
    expert_us: _Time = 0.0
    sync_us: _Time = 0.0
    hint_us: _Time = 0.0
    pass_us: _Time = 0.0
    record_us: _Time = 0.0
    tell_us: _Time = 0.0
    woken_us: _Time = 0.0


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: _Name
    version: int
    name: _Name
    drive: _Drive
    compute: _Compute = msgspec.field(default_factory=_Compute)
    about: Annotated[str, msgspec.Meta(max_length=4000)] = ""


@dataclass(frozen=True, slots=True)
class Compute:
    """What computing takes, in nanoseconds; the words are those of the file.

    Attributes:
        layer_ns: trunk and router of a layer for one row: of all layers alike, or one of each.
        row_ns: more for every further row.
        expert_ns: of every distinct expert.
        sync_ns: of the wait for the device.
        hint_ns: of a hand-over of hints; readers stand still, as they need the interpreter too.
        pass_ns: of a pass, before its first layer.
        record_ns: of every record that is read while computing.
        tell_ns: from the moment that a layer's experts are there until hints are handed over, where nothing
            was waited for: the host describes the next layer first, so that the device has work.
        woken_ns: more of a layer after one that waited: a processor that slept is slow to begin.
    """

    layer_ns: int | tuple[int, ...] = 0
    row_ns: int = 0
    expert_ns: int = 0
    sync_ns: int = 0
    hint_ns: int = 0
    pass_ns: int = 0
    record_ns: int = 0
    tell_ns: int = 0
    woken_ns: int = 0

    def of_layer(self, place: int, num_rows: int) -> int:
        """Return what passes before a layer's experts are known.

        Args:
            place: of the layer among those that are streamed, from 0.
            num_rows: of the block.
        """
        own = self.layer_ns if isinstance(self.layer_ns, int) else self.layer_ns[place]
        return own + self.sync_ns + self.row_ns * (num_rows - 1)

    def check(self, num_layers: int, name: str) -> None:
        """Refuse a list that is not of so many layers.

        Args:
            num_layers: that are streamed.
            name: of the machine or its file, for the error.

        Raises:
            MachineForeign: names both numbers.
        """
        if not isinstance(self.layer_ns, int) and len(self.layer_ns) != num_layers:
            raise MachineForeign(
                f"{name}: layer_us has {len(self.layer_ns)} values, the trace has {num_layers} "
                "streamed layers",
                hint="give one value for all layers, or one for each",
            )


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """One machine.

    Attributes:
        name: what tables call it.
        about: where its figures come from.
    """

    name: str
    drive: Drive
    compute: Compute = field(default_factory=Compute)
    about: str = ""


FREE: Final = SimulatedMachine("no machine", Drive())
"""Reads and computes in no time: what remains is what is asked for, found and read."""


def read_machine(path: Path) -> SimulatedMachine:
    """Read a machine file.

    Raises:
        MachineMissing: nothing is there, or the system refuses.
        MachineUnusable: it is none; one line says where and why.
    """
    try:
        data = read_regular(path, FILE_BYTES_MAX)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_PLAIN_FILE:
            raise _unusable(path, reason) from None
        raise MachineMissing(f"Cannot read the machine {path}: {reason}", hint=_EXAMPLE) from None
    except ValueError as error:  # a name that no file can have
        raise _unusable(path, str(error)) from None
    return parse_machine(data, path)


def parse_machine(data: bytes, path: Path = Path("machine")) -> SimulatedMachine:
    """Return what the bytes of a machine file say; as `read_machine`."""
    if any(line.count(b".") > _MOST_DOTS for line in data.splitlines()):
        raise _unusable(path, f"a line has more than {_MOST_DOTS} dots")
    try:
        document = tomllib.loads(data.decode())
        file = msgspec.convert(document, _File)
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unusable(path, str(error)) from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise _unusable(
            path,
            f"it is {shown(file.format)!r} version {shown(file.version)}, not {FORMAT} {VERSION}",
            MachineForeign,
        )
    if not file.name.isprintable():
        raise _unusable(path, "its name has characters that cannot be shown")
    drive, compute = file.drive, file.compute
    layers = compute.layer_us
    times = [*(layers if isinstance(layers, tuple) else (layers,)), drive.bytes_per_s or 0.0]
    if not all(map(math.isfinite, [*times, *_times(drive), *_times(compute)])):
        raise _unusable(path, "a number in it is none")
    return SimulatedMachine(
        file.name,
        Drive(
            drive.bytes_per_s,
            _ns(drive.latency_us),
            _ns(drive.overhead_us),
            _ns(drive.wake_us),
            drive.readers,
        ),
        Compute(
            tuple(map(_ns, layers)) if isinstance(layers, tuple) else _ns(layers),
            _ns(compute.row_us),
            _ns(compute.expert_us),
            _ns(compute.sync_us),
            _ns(compute.hint_us),
            _ns(compute.pass_us),
            _ns(compute.record_us),
            _ns(compute.tell_us),
            _ns(compute.woken_us),
        ),
        file.about,
    )


def write_machine(machine: SimulatedMachine) -> str:
    """Return the file of a machine; reading it gives the machine back, to a nanosecond."""
    drive, compute = machine.drive, machine.compute
    layers = compute.layer_ns
    shown = _us(layers) if isinstance(layers, int) else f"[{', '.join(map(_us, layers))}]"
    rate = [] if drive.bytes_per_s is None else [f"bytes_per_s = {drive.bytes_per_s!r}"]
    lines = [
        f'format = "{FORMAT}"',
        f"version = {VERSION}",
        f"name = {_text(machine.name)}",
        f"about = {_text(machine.about)}",
        "",
        "[drive]",
        *rate,
        f"latency_us = {_us(drive.latency_ns)}",
        f"overhead_us = {_us(drive.overhead_ns)}",
        f"wake_us = {_us(drive.wake_ns)}",
        f"readers = {drive.num_readers}",
        "",
        "[compute]",
        f"layer_us = {shown}",
        f"row_us = {_us(compute.row_ns)}",
        f"expert_us = {_us(compute.expert_ns)}",
        f"sync_us = {_us(compute.sync_ns)}",
        f"hint_us = {_us(compute.hint_ns)}",
        f"pass_us = {_us(compute.pass_ns)}",
        f"record_us = {_us(compute.record_ns)}",
        f"tell_us = {_us(compute.tell_ns)}",
        f"woken_us = {_us(compute.woken_ns)}",
    ]
    return "\n".join(lines) + "\n"


def _times(part: _Drive | _Compute) -> list[float]:
    values = [getattr(part, name) for name in part.__struct_fields__ if name.endswith("_us")]
    return [value for value in values if isinstance(value, float | int)]


def _ns(microseconds: float) -> int:
    return round(microseconds * _US)


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds / _US:.3f}"


def _text(text: str) -> str:
    """Return a TOML string: JSON's escapes are among TOML's."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _unusable(path: Path, why: str, kind: type[MachineUnusable] = MachineUnusable) -> MachineUnusable:
    line = " ".join(why.split())[:300]
    return kind(f"Not a machine: {path}: {line}", hint=_EXAMPLE)

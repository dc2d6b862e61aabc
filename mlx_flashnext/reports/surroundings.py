"""What around a run can slow it down: swap, power, the file system and drive of the model, the wired limit.

Entry point: `look_around`. Facts of Linux are read here; those of a Mac come from its own tools, asked in the
form that their manuals give. They were never run on one here: tests feed what those tools print. What this
machine cannot say is listed as not measured, never guessed.
"""

import os
import plistlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from mlx_flashnext.engine.machine import GIB, MIB, filesystem_of, is_on_battery, swap_bytes

Ask = Callable[[Sequence[str]], bytes]

MUCH_SWAP: Final = GIB
NETWORK: Final = ("nfs", "nfs4", "smbfs", "cifs", "afpfs", "webdav", "sshfs", "fuse.sshfs", "9p")
SLOW: Final = ("exfat", "msdos", "vfat", "ntfs", "ntfs3", "fuseblk", "hfs")
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing about the machine.

    Attributes:
        name: what.
        value: how it is, in words.
        advice: what to do about it, "" if it is fine.
    """

    name: str
    value: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All of them.

    Attributes:
        facts: what is known.
        unmeasured: what is not, and why.
    """

    facts: tuple[Fact, ...]
    unmeasured: tuple[str, ...]


def look_around(directory: Path, *, platform: str = sys.platform, ask: Ask | None = None) -> Surroundings:
    """Look at what is around a model.

    Args:
        directory: of the model.
        platform: as `sys.platform`.
        ask: runs a command and returns what it printed.

    Raises:
        OSError: the directory cannot be looked at.
    """
    is_mac = platform == "darwin"
    run = ask or _run
    facts = [_swap(), *_battery(), _filesystem(directory)]
    unmeasured: list[str] = []
    probes: tuple[tuple[str, Callable[[], Fact | None]], ...] = (
        ("low power mode", lambda: _low_power(run) if is_mac else None),
        ("whether the drive is external", lambda: _drive_of(directory, run, is_mac=is_mac)),
        ("the wired limit", lambda: _wired_limit(run) if is_mac else None),
    )
    for name, probe in probes:
        try:
            fact, why = probe(), "" if is_mac or "drive" in name else "only a Mac says"
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            fact, why = None, str(error) or type(error).__name__
        if fact is not None:
            facts.append(fact)
        else:
            unmeasured.append(f"{name}: {why or 'this machine does not say'}")
    return Surroundings(tuple(facts), tuple(unmeasured))


def _swap() -> Fact:
    used, total = swap_bytes()
    advice = (
        "" if used < MUCH_SWAP else "memory is short: close other programs, or plan for less with --memory"
    )
    return Fact("swap", f"{used / GIB:.1f} of {total / GIB:.1f} GiB in use" if total else "none", advice)


def _battery() -> list[Fact]:
    on_battery = is_on_battery()
    if on_battery is None:
        return []
    advice = "plug it in: many machines compute at half speed on battery" if on_battery else ""
    return [Fact("power", "battery" if on_battery else "mains", advice)]


def _filesystem(directory: Path) -> Fact:
    kind, place = filesystem_of(directory)
    advice = ""
    if kind.lower() in NETWORK:
        advice = "a network is no drive: copy the model to this machine"
    elif kind.lower() in SLOW:
        advice = "read-ahead and large reads are slow on it: keep the model on the system's own file system"
    return Fact("file system", f"{kind or 'unknown'} at {place}", advice)


def _low_power(run: Ask) -> Fact:
    words = [line.split() for line in run(("pmset", "-g")).decode(errors="replace").splitlines()]
    values = {line[0]: line[1] for line in words if len(line) > 1}
    is_low = values["lowpowermode"] == "1"
    return Fact(
        "low power mode", "on" if is_low else "off", "switch it off to measure or to wait" if is_low else ""
    )


def _drive_of(directory: Path, run: Ask, *, is_mac: bool) -> Fact | None:
    return _mac_drive(directory, run) if is_mac else _linux_drive(directory)


def _mac_drive(directory: Path, run: Ask) -> Fact:
    answer = cast("Mapping[str, Any]", plistlib.loads(run(("diskutil", "info", "-plist", str(directory)))))
    is_internal, bus = bool(answer["Internal"]), str(answer.get("BusProtocol", "unknown bus"))
    return _drive(is_external=not is_internal, bus=bus, spins=answer.get("SolidState") is False)


def _linux_drive(directory: Path) -> Fact | None:
    device = directory.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not block.exists():
        return None
    real = block.resolve()
    whole = real if (real / "queue").is_dir() else real.parent
    # A virtual disk says that it turns, whatever lies under it.
    is_virtual = whole.name.startswith(("vd", "xvd", "dm-", "loop"))
    spins = not is_virtual and (whole / "queue" / "rotational").read_text().strip() == "1"
    is_usb = "/usb" in str(real)
    return _drive(is_external=is_usb, bus="USB" if is_usb else whole.name, spins=spins)


def _drive(*, is_external: bool, bus: str, spins: bool) -> Fact:
    where = f"{'external' if is_external else 'internal'}, {bus}{', turning disks' if spins else ''}"
    advice = ""
    if spins:
        advice = "a disk that turns takes 10 ms a record: put the model on an SSD"
    elif is_external:
        advice = "if it is slow below, try the internal one; copies on both are read together with --mirror"
    return Fact("drive", where, advice)


def _wired_limit(run: Ask) -> Fact:
    limit = int(run(("sysctl", "-n", "iogpu.wired_limit_mb")).decode().strip())
    if limit == 0:
        return Fact("wired limit", "the system's own")
    return Fact("wired limit", f"{limit * MIB / GIB:.1f} GiB, set by hand", "0 gives the system its own back")


def _run(words: Sequence[str]) -> bytes:
    done = subprocess.run(words, capture_output=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout

"""Machine files: what is written reads back, and what a stranger writes is refused in one line."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.simulate import Drive
from mlx_flashnext.simulation.simulated_machine import (
    FILE_BYTES_MAX,
    Compute,
    MachineForeign,
    MachineMissing,
    MachineUnusable,
    SimulatedMachine,
    parse_machine,
    read_machine,
    write_machine,
)

GOOD = """\
format = "flashnext-machine"
version = 1
name = "one"
[drive]
bytes_per_s = 3e9
latency_us = 100
readers = 8
[compute]
layer_us = [1.5, 2]
sync_us = 80
"""
TIMES = st.integers(0, 10**12)
MACHINES = st.builds(
    SimulatedMachine,
    st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20),
    st.builds(Drive, st.none() | st.floats(1.0, 1e15), TIMES, TIMES, TIMES, st.integers(1, 256)),
    st.builds(Compute, TIMES | st.lists(TIMES, min_size=1, max_size=4).map(tuple), *[TIMES] * 8),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=50),
)


@given(MACHINES)
def test_what_is_written_reads_back(machine):
    assert parse_machine(write_machine(machine).encode()) == machine


def test_the_file_of_the_docs_is_one():
    machine = parse_machine(GOOD.encode())
    assert machine.drive == Drive(3e9, 100_000, num_readers=8)
    assert machine.compute.of_layer(1, 1) == 82_000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "version 2, not flashnext-machine 1"),
        ("flashnext-machine", "flashnext-trace", "'flashnext-trace' version 1"),
        ("bytes_per_s = 3e9", "bytes_per_s = 0", "bytes_per_s"),
        ("bytes_per_s = 3e9", "bytes_per_s = -1", "bytes_per_s"),
        ("bytes_per_s = 3e9", "bytes_per_s = 1e-300", "bytes_per_s"),
        ("bytes_per_s = 3e9", "bytes_per_s = nan", "bytes_per_s"),
        ("bytes_per_s = 3e9", "bytes_per_s = inf", "bytes_per_s"),
        ("bytes_per_s = 3e9", "bytes_per_s = 1e400", "bytes_per_s"),
        ("bytes_per_s = 3e9", 'bytes_per_s = "fast"', "bytes_per_s"),
        ("latency_us = 100", "latency_us = -1", "latency_us"),
        ("latency_us = 100", "latency_us = nan", "latency_us"),
        ("latency_us = 100", "latency_us = 1e300", "latency_us"),
        ("readers = 8", "readers = 0", "readers"),
        ("readers = 8", "readers = 1000000", "readers"),
        ("readers = 8", "writers = 8", "writers"),
        ("layer_us = [1.5, 2]", "layer_us = []", "layer_us"),
        ("layer_us = [1.5, 2]", "layer_us = [1.5, nan]", "layer_us|a number in it is none"),
        ("layer_us = [1.5, 2]", "layer_us = [[1]]", "layer_us"),
        ("layer_us = [1.5, 2]", f"layer_us = {[1] * 513}", "layer_us"),
        ("sync_us = 80", "sync_us = true", "sync_us"),
        ("sync_us = 80", "sync_us = 80\nsync_us = 81", "overwrite"),
        ('name = "one"', 'name = ""', "name"),
        ('name = "one"', f'name = "{"x" * 201}"', "name"),
        ('name = "one"', 'name = "\\u001b[2J"', "cannot be shown"),
        ('name = "one"', "", "name"),
        ("[drive]", "[disk]", "disk"),
        ("[drive]", "[drive", "Expected|invalid|line"),
    ],
)
def test_a_field_that_no_machine_has_is_named(old, new, said):
    text = GOOD.replace(old, new)
    assert text != GOOD
    with pytest.raises(MachineUnusable, match=said) as refused:
        parse_machine(text.encode())
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 500
    assert refused.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"\x00" * 100,
        b"a = " + b"[" * 16_000,
        b"a." * 8_000 + b"b = 1",
        b"\n".join(b"x = {" + b"a." * 600 + b"b = 1}" for _ in range(13)),
        b"a = '''" + b"x" * 16_000,
        b"[[a]]\n" * 2_700,
        b"[drive]\nreaders = " + b"9" * 5_000,
    ],
)
def test_a_hostile_file_is_refused(data):
    with pytest.raises(MachineUnusable):
        parse_machine(data)


@given(st.binary(max_size=200), st.integers(0, len(GOOD)))
def test_no_bytes_do_anything_but_be_read_or_refused(data, at):
    text = GOOD.encode()
    try:
        machine = parse_machine(text[:at] + data + text[at:])
    except MachineUnusable:
        return
    assert machine.drive.num_readers >= 1


def test_what_is_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    for name, said in (("pipe", "Not a regular file"), ("large", "Larger than"), (".", "directory")):
        with pytest.raises(MachineUnusable, match=said):
            read_machine(tmp_path / name)
    with pytest.raises(MachineMissing, match="No such file"):
        read_machine(tmp_path / "none")
    with pytest.raises(MachineUnusable):
        read_machine(Path("a\0b"))


def test_a_list_must_be_of_the_layers():
    with pytest.raises(MachineForeign, match=r"^this: layer_us has 2 values, the trace has 3"):
        parse_machine(GOOD.encode()).compute.check(3, "this")
    parse_machine(GOOD.encode()).compute.check(2, "this")

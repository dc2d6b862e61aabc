"""Files are read whole, exactly, and only as long as they are the files that were indexed."""

import errno
import os
import pathlib
import threading

import pytest

from expert_store import source as source_module
from expert_store.errors import SourceChanged, SourceFailed, StoreClosed
from expert_store.safetensors_index import FileInfo
from expert_store.source import FileSource
from expert_store.testing import (
    CountingSource,
    FaultySource,
    ManualClock,
    MemorySource,
    ReaderKilled,
    ThrottledSource,
)

CONTENT = bytes(range(256)) * 40


def info_of(path: pathlib.Path) -> FileInfo:
    status = path.stat()
    return FileInfo(path, status.st_size, status.st_mtime_ns, status.st_ino)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    return path


def read(source, offset, *lengths):
    buffers = [bytearray(length) for length in lengths]
    got = source.read_into(0, offset, [memoryview(buffer) for buffer in buffers])
    return got, b"".join(buffers)


@pytest.mark.parametrize("cache", ["keep", "bypass"])
def test_a_run_fills_the_views_in_order(path, cache):
    with FileSource([info_of(path)], cache=cache) as source:
        assert read(source, 100, 7, 0, 300, 1) == (308, CONTENT[100:408])
        assert source.name(0) == "shard.safetensors"


def test_the_end_of_the_file_makes_a_short_count_and_writes_nothing_more(path):
    with FileSource([info_of(path)]) as source:
        got, data = read(source, len(CONTENT) - 10, 8, 8)
        assert (got, data) == (10, CONTENT[-10:] + bytes(6))
        assert read(source, len(CONTENT) + 5, 4) == (0, bytes(4))


def test_a_read_cut_short_by_the_system_goes_on_where_it_stopped(path, monkeypatch):
    preadv = os.preadv

    def stingy(descriptor, views, offset):
        return preadv(descriptor, [views[0][:3]], offset)

    monkeypatch.setattr(source_module.os, "preadv", stingy)
    with FileSource([info_of(path)]) as source:
        assert read(source, 50, 2, 10, 1, 4) == (17, CONTENT[50:67])


def test_a_run_larger_than_one_call_may_take_is_read_in_several(path, monkeypatch):
    monkeypatch.setattr(source_module, "_MAX_BYTES", 100)
    with FileSource([info_of(path)]) as source:
        assert read(source, 3, 60, 150, 90) == (300, CONTENT[3:303])
        assert read(source, 0, *([1] * 3000)) == (3000, CONTENT[:3000])


def rewrite(path):
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))


def truncate(path):
    os.truncate(path, 200)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    other.replace(path)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("change", [rewrite, truncate, replace, remove])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_changed_since_it_was_indexed_is_noticed_open_or_not(path, change, is_open):
    source = FileSource([info_of(path)])
    if is_open:
        read(source, 0, 10)
    change(path)
    with pytest.raises(SourceChanged, match=r"shard\.safetensors") as caught:
        read(source, 0, 10)
    assert caught.value.hint
    source.close()


def test_a_refused_read_names_file_offset_and_reason(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    source = FileSource([info_of(path)])
    monkeypatch.setattr(source_module.os, "preadv", refuse)
    with pytest.raises(SourceFailed, match=r"shard\.safetensors at 77: Input/output error") as caught:
        read(source, 77, 4)
    assert caught.value.context == {"errno": errno.EIO, "file": "shard.safetensors", "offset": 77}
    source.close()


def test_too_many_open_files_comes_with_the_remedy(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(source_module.os, "open", refuse)
    with pytest.raises(SourceFailed) as caught:
        read(FileSource([info_of(path)]), 0, 4)
    assert "ulimit -n" in caught.value.hint


def test_a_closed_source_refuses_and_closes_once(path):
    source = FileSource([info_of(path)])
    read(source, 0, 1)
    source.close()
    source.close()
    with pytest.raises(StoreClosed):
        read(source, 0, 1)


def test_many_threads_open_a_file_once(path):
    source = FileSource([info_of(path)])
    opened = []
    open_file = os.open
    barrier = threading.Barrier(8)

    def reading():
        barrier.wait()
        assert read(source, 5, 5)[1] == CONTENT[5:10]

    def counting(*args):
        opened.append(args)
        return open_file(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module.os, "open", counting)
        threads = [threading.Thread(target=reading) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(opened) == 1
    source.close()


def test_faults_come_as_ordered_and_wrong_bytes_are_all_wrong():
    faults = iter([None, "short", "wrong", "die", OSError(5, "no")])
    source = FaultySource(MemorySource([CONTENT]), lambda *_: next(faults))
    assert read(source, 0, 4, 4) == (8, CONTENT[:8])
    assert read(source, 0, 6, 4) == (5, CONTENT[:5] + bytes(5))
    got, data = read(source, 0, 4, 4)
    assert got == 8
    assert all(one != other for one, other in zip(data, CONTENT, strict=False))
    with pytest.raises(ReaderKilled):
        read(source, 0, 4)
    with pytest.raises(OSError, match="no"):
        read(source, 0, 4)


def test_a_throttled_source_shares_its_bandwidth_and_overlaps_its_latency():
    clock = ManualClock()
    slept = []

    def sleep(seconds):
        slept.append(round(seconds, 6))

    source = ThrottledSource(
        MemorySource([CONTENT]), latency_s=0.5, bytes_per_s=10, sleep=sleep, clock=lambda: clock.now_ns / 1e9
    )
    read(source, 0, 20)
    read(source, 0, 20)
    read(source, 0, 1)
    clock.advance(100_000_000_000)
    read(source, 0, 1)
    assert slept == [2.5, 4.5, 4.6, 0.6]


def test_a_counting_source_counts_what_was_delivered():
    source = CountingSource(
        FaultySource(MemorySource([CONTENT]), lambda number, *_: "short" if number else None)
    )
    read(source, 8, 4)
    read(source, 16, 4)
    assert source.num_bytes == 6
    assert [(one.file, one.offset, one.length) for one in source.reads] == [(0, 8, 4), (0, 16, 4)]
    assert {one.thread for one in source.reads} == {threading.get_ident()}
    assert source.num_reads_max == 1

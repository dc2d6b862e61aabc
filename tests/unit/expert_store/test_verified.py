"""Records are compared with their digests where they are read, once or each time, and nothing else is."""

import threading

import pytest
from xxhash import xxh3_128

from expert_store.errors import RecordCorrupt, SourceFailed
from expert_store.layout import ReadOp
from expert_store.source import ByteSource
from expert_store.testing import MemorySource
from expert_store.verified import RecordDigests, VerifiedSource

RECORD, STRIDE, BASE, COUNT = 30, 64, 128, 4
LENGTHS = (17, 13)


def shelf_bytes() -> bytes:
    records = (bytes([expert + 1] * RECORD) + bytes(STRIDE - RECORD) for expert in range(COUNT))
    return bytes(BASE) + b"".join(records)


class Rig:
    def __init__(self, data: bytes, verify="first") -> None:
        digests = RecordDigests()
        whole = shelf_bytes()
        spans = [whole[BASE + e * STRIDE :][:RECORD] for e in range(COUNT)]
        digests.add(0, 7, BASE, STRIDE, RECORD, [xxh3_128(span).hexdigest() for span in spans])
        self.hashed: list[str] = []

        def hasher():
            self.hashed.append(threading.current_thread().name)
            return xxh3_128()

        self.source = VerifiedSource(MemorySource([data, bytes(100)]), digests, verify=verify, hasher=hasher)

    def read(self, expert: int) -> bytes:
        memory = [memoryview(bytearray(length)) for length in LENGTHS]
        run = ReadOp(0, BASE + expert * STRIDE, RECORD, 0, 2)
        assert self.source.read_runs([run], memory) == RECORD
        return b"".join(memory)


@pytest.mark.parametrize(("verify", "times"), [("first", 1), ("every", 3)])
def test_a_record_is_hashed_at_its_first_read_or_at_every(verify, times):
    rig = Rig(shelf_bytes(), verify)
    for _ in range(3):
        assert rig.read(2) == bytes([3] * RECORD)
    assert len(rig.hashed) == times
    rig.read(1)
    assert len(rig.hashed) == times + 1


@pytest.mark.parametrize("verify", ["first", "every"])
@pytest.mark.parametrize("at", [0, 16, 17, RECORD - 1])
def test_any_changed_byte_of_a_record_is_refused_with_its_place_each_time(verify, at):
    data = bytearray(shelf_bytes())
    data[BASE + 2 * STRIDE + at] ^= 1
    rig = Rig(bytes(data), verify)
    for _ in range(2):  # a record that failed has not been checked
        with pytest.raises(RecordCorrupt, match="expert 2 of layer 7") as caught:
            rig.read(2)
        assert (caught.value.context["layer"], caught.value.context["expert"]) == (7, 2)
        assert caught.value.context["offset"] == BASE + 2 * STRIDE
        assert caught.value.hint
    assert rig.read(1) == bytes([2] * RECORD)


def test_padding_is_not_part_of_a_record():
    data = bytearray(shelf_bytes())
    data[BASE + RECORD] ^= 1
    Rig(bytes(data)).read(0)


@pytest.mark.parametrize(("verify", "is_seen"), [("first", False), ("every", True)])
def test_bytes_that_were_good_once_are_looked_at_again_only_if_every_read_is(verify, is_seen):
    data = bytearray(shelf_bytes())
    rig = Rig(data, verify)
    rig.read(1)
    data[BASE + STRIDE] ^= 1
    if is_seen:
        with pytest.raises(RecordCorrupt):
            rig.read(1)
    else:
        rig.read(1)


def test_other_files_headers_and_short_reads_pass_through():
    rig = Rig(shelf_bytes()[: BASE + STRIDE + 10])
    memory = memoryview(bytearray(50))
    assert rig.source.read_into(1, 0, [memory]) == 50
    assert rig.source.read_into(0, 0, [memory]) == 50
    assert rig.source.read_into(0, BASE + STRIDE, [memory[:RECORD]]) == 10  # whoever asked judges the length
    assert rig.hashed == []
    assert rig.source.name(0) == "memory-0"


def test_an_error_of_the_source_is_passed_on():
    class Broken(ByteSource):
        def read_into(self, file, offset, views):
            raise SourceFailed("no", hint="yes")

        def name(self, file):
            return "x"

        def close(self):
            return None

    digests = RecordDigests()
    digests.add(0, 7, 0, STRIDE, RECORD, ["0" * 32])
    with pytest.raises(SourceFailed, match="no"):
        VerifiedSource(Broken(), digests).read_into(0, 0, [memoryview(bytearray(RECORD))])

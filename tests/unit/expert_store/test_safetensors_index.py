"""Headers and indexes: what is right is read whole, what is wrong is refused by name."""

import json
import os
import pathlib
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.errors import CheckpointCorrupt, CheckpointNotFound, SourceFailed
from expert_store.safetensors_file import MAX_HEADER_BYTES
from expert_store.safetensors_header import _decode_fast, _decode_strict, decode_header
from expert_store.safetensors_index import INDEX_NAME, read_tensor_table

ROWS = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
BIAS = {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]}
GOOD = {"rows": ROWS, "bias": BIAS}


def write(path: pathlib.Path, header: object, num_bytes: int = 29) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(num_bytes % 256)))
    with path.open("r+b") as stream:
        stream.truncate(8 + len(text) + num_bytes)
    return text


def write_index(folder: pathlib.Path, weight_map: object, **other: object) -> None:
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": 29}, "weight_map": weight_map, **other})
    )


def refused(folder: pathlib.Path) -> CheckpointCorrupt:
    with pytest.raises(CheckpointCorrupt) as caught:
        read_tensor_table(folder)
    error = caught.value
    assert "\n" not in error.message
    assert error.hint
    assert error.context
    return error


def test_what_mlx_writes_without_metadata_opens(tmp_path):
    """It writes null for them, and safetensors' own reader takes that."""
    import mlx.core as mx

    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"rows": mx.ones((2, 3))})
    assert b'"__metadata__":null' in (tmp_path / "model.safetensors").read_bytes()
    assert read_tensor_table(tmp_path).tensors["rows"].shape == (2, 3)


def test_a_table_says_where_every_tensor_lies(tmp_path):
    header = write(tmp_path / "model.safetensors", {"__metadata__": {"format": "mlx"}, **GOOD})
    table = read_tensor_table(tmp_path)
    start = 8 + len(header)
    rows = table.tensors["rows"]
    assert (rows.name, rows.dtype, rows.shape, rows.file, rows.offset, rows.length) == (
        "rows",
        "F32",
        (2, 3),
        0,
        start,
        24,
    )
    assert (table.tensors["bias"].offset, table.tensors["bias"].length) == (start + 24, 5)
    status = (tmp_path / "model.safetensors").stat()
    info = table.files[0]
    assert (info.path, info.size, info.mtime_ns, info.inode) == (
        tmp_path / "model.safetensors",
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    )
    assert table.file_sizes == (status.st_size,)


def test_shards_come_in_name_order_with_or_without_an_index(tmp_path):
    write(tmp_path / "b.safetensors", {"x": ROWS}, 24)
    write(tmp_path / "a.safetensors", {"y": ROWS}, 24)
    write(tmp_path / "unlisted.safetensors", {"z": ROWS}, 24)
    names = [info.path.name for info in read_tensor_table(tmp_path).files]
    assert names == ["a.safetensors", "b.safetensors", "unlisted.safetensors"]
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors"})
    table = read_tensor_table(tmp_path)
    assert [info.path.name for info in table.files] == ["a.safetensors", "b.safetensors"]
    assert {name: info.file for name, info in table.tensors.items()} == {"y": 0, "x": 1}


def test_the_digest_tells_checkpoints_apart_by_header_size_and_name_but_not_by_place(tmp_path):
    digests = []
    for number, (name, header, size) in enumerate(
        [
            ("a.safetensors", GOOD, 29),
            ("a.safetensors", GOOD, 29),
            ("b.safetensors", GOOD, 29),
            ("a.safetensors", {"rows": ROWS, "bias2": BIAS}, 29),
            ("a.safetensors", {"rows": ROWS}, 24),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / name, header, size)
        digests.append(read_tensor_table(folder).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert len(digests[0]) == 64


def test_order_of_the_header_does_not_matter_but_cover_does(tmp_path):
    write(
        tmp_path / "m.safetensors",
        {"bias": BIAS, "rows": ROWS, "empty": {**BIAS, "shape": [0], "data_offsets": [24, 24]}},
    )
    assert set(read_tensor_table(tmp_path).tensors) == {"bias", "rows", "empty"}


@pytest.mark.parametrize(
    ("header", "num_bytes", "says"),
    [
        ({"rows": {**ROWS, "data_offsets": [-4, 20]}}, 24, r"negative or reversed: \[-4, 20\] of rows"),
        ({"rows": {**ROWS, "data_offsets": [24, 0]}}, 24, "negative or reversed"),
        ({"rows": {**ROWS, "shape": [-2, -3]}}, 24, "Shape is negative"),
        ({"rows": ROWS, "bias": {**BIAS, "data_offsets": [20, 25]}}, 25, "overlaps the one before it: bias"),
        ({"rows": ROWS, "bias": {**BIAS, "data_offsets": [26, 31]}}, 31, "hole of 2 bytes before it: bias"),
        ({"rows": {**ROWS, "data_offsets": [4, 28]}}, 28, "hole of 4 bytes before it: rows"),
        ({"rows": ROWS}, 30, "lists 24 data bytes, the file holds 30"),
        ({"rows": ROWS}, 23, "ends beyond its file: rows"),
        ({"rows": {**ROWS, "shape": [2, 4]}}, 24, r"rows in m.safetensors has 24 bytes for F32 \(2, 4\)"),
        ({"rows": {**ROWS, "shape": [10**30, 10**30]}}, 24, "Length does not fit"),
        ({"rows": {**ROWS, "dtype": "F31"}}, 24, "Unknown dtype: 'F31' of rows"),
        ({"rows": {**ROWS, "dtype": "F4", "shape": [3]}}, 24, "not whole bytes"),
        ({"rows": {**ROWS, "dtype": 4}}, 24, "entry is malformed: 'rows'"),
        ({"rows": {**ROWS, "shape": [2.0, 3]}}, 24, "entry is malformed"),
        ({"rows": {**ROWS, "shape": [True, 6]}}, 24, "entry is malformed"),
        ({"rows": {**ROWS, "shape": "23"}}, 24, "entry is malformed"),
        ({"rows": {**ROWS, "data_offsets": [0]}}, 24, "entry is malformed"),
        ({"rows": 7}, 24, "entry is malformed"),
        ({"rows": {"dtype": "F32", "shape": [2, 3]}}, 24, "no data_offsets: rows"),
        ({"rows": {"dtype": "F32", "data_offsets": [0, 24]}}, 24, "no shape: rows"),
        ({"rows": {"shape": [2, 3], "data_offsets": [0, 24]}}, 24, "no dtype: rows"),
        ({"__metadata__": {"a": 1}, "rows": ROWS}, 24, "not a map of strings"),
        ({"__metadata__": [], "rows": ROWS}, 24, "not a map of strings"),
        ([ROWS], 24, "JSON is not an object: m.safetensors holds list"),
        (b"", 0, "Not valid JSON"),
        (b"{", 0, "Not valid JSON"),
        (b'{"rows": NaN}', 0, "entry is malformed"),
        (b'{"a": 1' + b"0" * 5000 + b"}", 0, "Not valid JSON"),
        (b'{"a":' * 20000 + b"1" + b"}" * 20000, 0, "Not valid JSON"),
        (b'{"\xff": 1}', 0, "Not UTF-8: m.safetensors at byte 2"),
        (b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "entry is malformed"),
        (b"\xef\xbb\xbf{}", 0, "Not valid JSON"),
    ],
)
def test_a_bad_header_is_refused_by_name(tmp_path, header, num_bytes, says):
    write(tmp_path / "m.safetensors", header, num_bytes)
    error = refused(tmp_path)
    assert error.context["file"] == "m.safetensors"
    assert re.search(says, error.message), error.message


ENTRY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'{"a":%s,"a":%s}' % (ENTRY, ENTRY), "a"),
        (b'{"a":%s,"\\u0061":%s}' % (ENTRY, ENTRY), "a"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}', "dtype"),
        (b'{"a":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}}', "shape"),
        (b'{"a":{"dtype":"U8","dtype":"U8","data_offsets":[0,0],"x":0}}', "dtype"),
        (b'{"__metadata__":{"k":"1","k":"2"},"a":%s}' % ENTRY, "k"),
        (b'{"__metadata__":{},"__metadata__":{},"a":%s}' % ENTRY, "__metadata__"),
    ],
)
def test_a_key_listed_twice_is_refused_wherever_it_is(tmp_path, header, key):
    write(tmp_path / "m.safetensors", header, 0)
    assert f"listed twice: {key} in m.safetensors" in refused(tmp_path).message


def test_names_with_escapes_quotes_and_other_letters_are_read(tmp_path):
    names = ['a"dtype"b', "back\\slash", "\u00fcber", "tab\t", "dtype", "shape"]
    header = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}
    write(tmp_path / "m.safetensors", header, 0)
    assert set(read_tensor_table(tmp_path).tensors) == set(names)


NAMES = st.text(st.sampled_from('ab"\\:{}dtype \u00e9'), max_size=6)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "dtype", 'q"']),
        "shape": st.lists(st.integers(-1, 9), max_size=3),
        "data_offsets": st.lists(st.integers(0, 9), min_size=2, max_size=2),
    },
    optional={"extra": st.one_of(st.integers(), NAMES, st.lists(NAMES, max_size=2))},
)


@given(
    pairs=st.lists(st.tuples(NAMES, ENTRIES), max_size=4),
    metadata=st.none() | st.dictionaries(NAMES, NAMES, max_size=3),
    is_ascii=st.booleans(),
    junk=st.sampled_from(["", " ", '"', "{}"]),
)
def test_the_fast_decoder_never_disagrees_with_the_strict_one(pairs, metadata, is_ascii, junk):
    members = [json.dumps(name, ensure_ascii=is_ascii) + ":" + json.dumps(entry) for name, entry in pairs]
    if metadata is not None:
        members.insert(0, '"__metadata__":' + json.dumps(metadata))
    header = ("{" + ",".join(members) + "}" + junk).encode()
    fast = _decode_fast(header)
    if fast is None:
        return
    strict = _decode_strict(header, "m")
    plain = {name: (e.dtype, e.shape, e.data_offsets) for name, e in fast.items()}
    assert plain == {name: (e.dtype, e.shape, e.data_offsets) for name, e in strict.items()}


def test_a_regular_header_takes_the_fast_way():
    header = json.dumps({"__metadata__": {"format": "pt"}, **GOOD}).encode() + b"   "
    assert set(_decode_fast(header) or ()) == {"rows", "bias"}
    assert set(decode_header(header, "m")) == {"rows", "bias"}


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_header_length_is_refused(tmp_path, size):
    (tmp_path / "m.safetensors").write_bytes(bytes(size))
    assert f"m.safetensors has {size} bytes" in refused(tmp_path).message


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert f"longer than the file: {2**63} bytes, the file has 10" in refused(tmp_path).message


def test_a_hundred_megabyte_header_is_refused_without_being_read(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 100 * 2**20))
    os.truncate(path, 8 + 100 * 2**20)
    assert f"larger than {MAX_HEADER_BYTES} bytes: {100 * 2**20}" in refused(tmp_path).message


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    write(path, GOOD)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(tmp_path)


def test_an_empty_or_missing_directory_is_not_found(tmp_path):
    for path, says in [
        (tmp_path, "No .safetensors file"),
        (tmp_path / "none", "does not exist"),
        (tmp_path / "file", "is not a directory"),
    ]:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointNotFound, match=says) as caught:
            read_tensor_table(path)
        assert str(path) in caught.value.message


# The index.


@pytest.mark.parametrize(
    "name",
    [
        "../m.safetensors",
        "a\ud800.safetensors",
        "a\x1b.safetensors",
        "/etc/passwd",
        "a/../m.safetensors",
        "",
        ".",
        "./m.safetensors",
        "a//b",
        "m\0",
        "a\\b",
    ],
)
def test_a_file_name_that_is_not_plain_is_refused(tmp_path, name):
    write(tmp_path / "m.safetensors", GOOD)
    write_index(tmp_path, {"rows": name, "bias": "m.safetensors"})
    assert repr(name) in refused(tmp_path).message


def test_a_missing_shard_is_named(tmp_path):
    write(tmp_path / "a.safetensors", {"rows": ROWS}, 24)
    write_index(tmp_path, {"rows": "a.safetensors", "bias": "b.safetensors"})
    assert refused(tmp_path).message == "Shard is missing: b.safetensors"


def test_a_link_that_leaves_the_folder_is_refused(tmp_path):
    inside, outside = tmp_path / "model", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    write(outside / "m.safetensors", GOOD)
    (inside / "m.safetensors").symlink_to(outside / "m.safetensors")
    assert "leaves the model folder" in refused(inside).message
    (inside / "m.safetensors").unlink()
    (inside / "sub").symlink_to(outside)
    write_index(inside, {"rows": "sub/m.safetensors", "bias": "sub/m.safetensors"})
    assert "leaves the model folder" in refused(inside).message


def test_an_index_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    write_index(tmp_path, {"rows": "m.safetensors"})
    (inside / INDEX_NAME).symlink_to(tmp_path / INDEX_NAME)
    assert "leaves the model folder" in refused(inside).message


def test_dangling_and_circular_links_are_refused(tmp_path):
    (tmp_path / "m.safetensors").symlink_to("nowhere")
    assert "dangling link" in refused(tmp_path).message
    (tmp_path / "m.safetensors").unlink()
    (tmp_path / "m.safetensors").symlink_to("m.safetensors")
    refused(tmp_path)


def test_a_hub_cache_snapshot_may_link_to_its_own_blobs_and_no_others(tmp_path):
    for repository in ("models--org--one", "models--org--two"):
        (tmp_path / repository / "blobs").mkdir(parents=True)
        (tmp_path / repository / "snapshots" / "abc").mkdir(parents=True)
    write(tmp_path / "models--org--one" / "blobs" / "f00d", GOOD)
    for repository, blob in (("one", "../../blobs/f00d"), ("two", "../../../models--org--one/blobs/f00d")):
        (tmp_path / f"models--org--{repository}" / "snapshots" / "abc" / "m.safetensors").symlink_to(blob)
    table = read_tensor_table(tmp_path / "models--org--one" / "snapshots" / "abc")
    assert table.files[0].path.name == "m.safetensors"
    assert "leaves the model folder" in refused(tmp_path / "models--org--two" / "snapshots" / "abc").message


def test_a_directory_reached_through_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "m.safetensors", GOOD)
    (tmp_path / "link").symlink_to("real")
    assert len(read_tensor_table(tmp_path / "link").tensors) == 2


def test_a_shard_that_is_not_a_regular_file_is_refused_without_being_opened(tmp_path):
    os.mkfifo(tmp_path / "m.safetensors")
    assert "Not a regular file" in refused(tmp_path).message
    (tmp_path / "m.safetensors").unlink()
    (tmp_path / "m.safetensors").mkdir()
    assert "Not a regular file" in refused(tmp_path).message


def test_index_and_shards_must_agree(tmp_path):
    write(tmp_path / "a.safetensors", GOOD)
    write(tmp_path / "b.safetensors", {"other": ROWS}, 24)
    files = {"rows": "a.safetensors", "bias": "a.safetensors", "other": "b.safetensors"}
    for changed, says in [
        ({"more": "b.safetensors"}, "that its shard lacks: more in b.safetensors"),
        ({"other": "a.safetensors"}, "that its shard lacks: other"),
        (
            {"bias": "b.safetensors"},
            "a.safetensors holds a tensor that the index places in b.safetensors: bias",
        ),
    ]:
        write_index(tmp_path, files | changed)
        assert says in refused(tmp_path).message
    del files["bias"]
    write_index(tmp_path, files)
    assert "holds a tensor that the index does not list: bias" in refused(tmp_path).message


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write(tmp_path / "a.safetensors", GOOD)
    write(tmp_path / "b.safetensors", {"rows": ROWS}, 24)
    assert "in two files: rows in a.safetensors and b.safetensors" in refused(tmp_path).message
    write_index(tmp_path, {"rows": "b.safetensors", "bias": "a.safetensors"})
    assert "places in b.safetensors: rows" in refused(tmp_path).message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[]", "holds list"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {"rows": 3}}', "no file name for rows: 3"),
        (b'{"weight_map": {"rows": "a", "rows": "b"}}', "listed twice: rows"),
        (b'{"weight_map": {}, "weight_map": {"rows": "m.safetensors"}}', "listed twice: weight_map"),
        (b'{"weight_map": {"\xff": "a"}}', "Not UTF-8"),
        (b'{"weight_map"', "Not valid JSON"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, text, says):
    write(tmp_path / "m.safetensors", GOOD)
    (tmp_path / INDEX_NAME).write_bytes(text)
    error = refused(tmp_path)
    assert says in error.message
    assert error.context["file"] == INDEX_NAME


def test_an_index_with_unusual_but_valid_content_is_read(tmp_path):
    write(tmp_path / "m.safetensors", {'q"': ROWS, "bias": BIAS})
    write_index(tmp_path, {'q"': "m.safetensors", "bias": "m.safetensors"}, note='"quoted"')
    assert len(read_tensor_table(tmp_path).tensors) == 2


def test_what_the_system_refuses_is_reported_with_its_reason(tmp_path, monkeypatch):
    write(tmp_path / "m.safetensors", GOOD)

    def refuse(self, *args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(SourceFailed, match="Permission denied") as caught:
        read_tensor_table(tmp_path)
    assert caught.value.context["errno"] == 13

"""The popularity file: what is kept, what is refused, and what a warm start makes of it."""

import errno
import json
import os

import pytest

from expert_store.keys import ReadClass
from expert_store.popularity import (
    DECAY,
    FILE_BYTES_MAX,
    FORMAT,
    VERSION,
    WARM_OWNER,
    Popularity,
    PopularityUnusable,
    load_popularity,
    save_popularity,
)
from tests.unit.expert_store.rig import make_rig

NUM_EXPERTS = {0: 4, 3: 6}
POPULARITY = Popularity({0: (0.0, 7.5, 2.0, 0.0), 3: (1.0, 0.0, 0.0, 4.0, 0.0, 4.0)})


def load(path, digest="d"):
    return load_popularity(path, model_digest=digest, num_experts=NUM_EXPERTS)


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "popularity.json"
    save_popularity(path, POPULARITY, model_digest="d")
    assert load(path) == POPULARITY
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == (FORMAT, VERSION)
    assert document["layers"][1] == {
        "layer": 3,
        "num_experts": 6,
        "experts": [3, 5, 0],
        "counts": [4.0, 4.0, 1.0],
    }
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_run_adds_to_what_is_left_of_the_runs_before():
    later = POPULARITY.followed_by({0: [1, 0, 0, 3], 3: [0] * 6})
    assert later.counts[0] == (1.0, DECAY * 7.5, DECAY * 2.0, 3.0)
    assert later.counts[3] == tuple(DECAY * count for count in POPULARITY.counts[3])
    assert Popularity({}).followed_by({0: [0, 2]}).counts == {0: (0.0, 2.0)}


def good_document():
    return {
        "format": FORMAT,
        "version": VERSION,
        "model_digest": "d",
        "layers": [{"layer": 0, "num_experts": 4, "experts": [1], "counts": [7.5]}],
    }


def with_layer(**changes):
    return lambda document: document["layers"][0].update(changes)


HOSTILE = {
    "another format": lambda d: d.update(format="gguf"),
    "a later version": lambda d: d.update(version=VERSION + 1),
    "another model": lambda d: d.update(model_digest="e"),
    "no layers": lambda d: d.pop("layers"),
    "a layer that does not exist": with_layer(layer=1),
    "more experts than there are": with_layer(num_experts=10**15),
    "an expert beyond the last": with_layer(experts=[4]),
    "a negative expert": with_layer(experts=[-1]),
    "an expert twice": with_layer(experts=[1, 1], counts=[1, 1]),
    "more experts than counts": with_layer(experts=[1, 2]),
    "a negative count": with_layer(counts=[-1.0]),
    "a count of zero": with_layer(counts=[0.0]),
    "a count that is no number": with_layer(counts=[None]),
    "an expert that is a fraction": with_layer(experts=[1.5]),
    "a layer twice": lambda d: d["layers"].append(d["layers"][0]),
    "a string for a list": lambda d: d.update(layers="all"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_document_that_is_not_ours_is_refused_by_name(tmp_path, what):
    path = tmp_path / "popularity.json"
    document = good_document()
    path.write_text(json.dumps(document))
    assert load(path).ranked(0) == [1]
    HOSTILE[what](document)
    path.write_text(json.dumps(document))
    with pytest.raises(PopularityUnusable, match=r"No warm start from popularity\.json: "):
        load(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": 1e999}',
        b"null",
        json.dumps(good_document()).replace("7.5", "1e999").encode(),
        json.dumps(good_document()).replace("7.5", "NaN").encode(),
        b" " * (FILE_BYTES_MAX + 1),
    ],
)
def test_bytes_that_are_no_document_are_refused_by_name(tmp_path, data):
    path = tmp_path / "popularity.json"
    path.write_bytes(data)
    with pytest.raises(PopularityUnusable, match="No warm start"):
        load(path)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "popularity.json"
    save_popularity(path, POPULARITY, model_digest="d")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(PopularityUnusable):
            load(path)


def test_a_missing_file_and_a_directory_are_reasons_like_any_other(tmp_path):
    with pytest.raises(PopularityUnusable, match="cannot be read: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(PopularityUnusable, match="cannot be read"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")  # nobody will ever write
    with pytest.raises(PopularityUnusable, match="cannot be read: not a regular file"):
        load(tmp_path / "pipe.json")


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "here" / "popularity.json"
    save_popularity(path, POPULARITY, model_digest="d")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("expert_store.published.os.fsync", full)
    with pytest.raises(PopularityUnusable, match="cannot be written: No space left"):
        save_popularity(path, Popularity({0: (1.0, 1.0, 1.0, 1.0)}), model_digest="d")
    assert load(path) == POPULARITY
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_hints_take_the_most_popular_of_every_layer_in_turns():
    hints = POPULARITY.hints({0: 2, 3: 2})
    assert [(hint.layer, hint.expert) for hint in hints] == [(0, 1), (3, 3), (0, 2), (3, 5)]
    assert {hint.read_class for hint in hints} == {ReadClass.SPECULATIVE}
    assert all(0 < hint.confidence <= 1 for hint in hints)
    assert POPULARITY.hints({}) == []


def test_a_warm_start_fills_empty_slots_and_makes_way_as_soon_as_it_is_over():
    rig = make_rig(num_experts=8, slots=4, lengths={0: (24,)})
    for experts in ([1, 2], [1, 5], [1, 2], [6, 7]):
        rig.load(0, experts)
    popularity = Popularity({}).followed_by(rig.store.demand_counts())
    assert popularity.ranked(0)[:2] == [1, 2]

    warm = make_rig(num_experts=8, slots=4, lengths={0: (24,)})
    hints = popularity.hints({0: 4})
    assert warm.store.prefetch(hints, owner=WARM_OWNER, generation=0) == 4
    warm.reader.run()
    assert [warm.store.is_resident(0, expert) for expert in (1, 2, 5, 6)] == [True] * 4
    warm.load(0, [1])
    warm.store.advance(WARM_OWNER, 1)
    warm.load(0, [0])  # evicts the least popular one that was not used
    assert [warm.store.is_resident(0, expert) for expert in (0, 1, 2)] == [True] * 3
    got = warm.store.statistics()
    assert (got.num_prefetched, got.num_hits, got.num_misses) == (1, 1, 1)

"""The file of measured choices: found, read, refused with a sentence, replaced as a whole."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from pyruntime.tuning import cache
from pyruntime.tuning.cache import CacheError, Choice, Key, Place

PLACE = Place("a processor, 1 thread(s) a rank", 2, "symmetric memory", "pyruntime 0.1.0, torch 2.13.0")
KEY, ANOTHER, THIRD = (Key("all_gather_matmul", 64, 32, k, "float32", "cpu") for k in (16, 17, 18))
CHOICE = Choice("chunked", {"chunked": 0.001, "unfused": 0.002}, rounds=7, date="2026-11-21")
TILED = Choice.of("fused:large", {"unfused": 0.002, "fused": 0.002, "fused:large": 0.001}, 3, "2026-11-21")
CHUNKED = Choice.of("chunked:4", {"unfused": 0.002, "chunked": 0.002, "chunked:4": 0.001}, 3, "2026-11-21")
CACHE = {
    PLACE: {KEY: CHOICE, ANOTHER: TILED, THIRD: CHUNKED},
    dataclasses.replace(PLACE, world_size=4): {KEY: TILED},
}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "folder" / "tuning.json"
    assert cache.read(path) == {}
    cache.write(path, CACHE)
    assert cache.read(path) == CACHE
    assert os.listdir(path.parent) == ["tuning.json"]


@pytest.mark.parametrize(
    ("name", "tier", "chunks", "tiles"),
    [
        ("unfused", "unfused", 0, ""),
        ("chunked:12", "chunked", 12, ""),
        ("fused", "fused", 0, ""),
        ("fused:sm90-large", "fused", 0, "sm90-large"),
    ],
)
def test_a_choice_is_kept_in_its_parts(name, tier, chunks, tiles):
    choice = Choice.of(name, {name: 1.0}, 3, "2026-11-21")
    assert (choice.name, choice.tier, choice.chunks, choice.tiles) == (name, tier, chunks, tiles)


def test_the_file_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("PYRUNTIME_TUNING", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for folder, wanted in (("", "/home/someone/.cache"), ("relative", "/home/someone/.cache"), ("/x", "/x")):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert cache.default_path() == Path(wanted, "pyruntime", "tuning.json")
    monkeypatch.setenv("PYRUNTIME_TUNING", str(tmp_path / "mine.json"))
    assert cache.default_path() == tmp_path / "mine.json"


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "tuning.json"
    cache.write(path, CACHE)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(CacheError, match=r"tuning\.json is damaged: "):
            cache.read(path)


def changed(path: Path, change) -> Path:
    cache.write(path, CACHE)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


def first(document: dict) -> dict:
    return document["places"][0]["choices"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("places"),
        lambda document: document.update(places=7),
        lambda document: document["places"][0].pop("device"),
        lambda document: document["places"][0].update(world_size="two"),
        lambda document: document["places"][0].update(choices=[1]),
        lambda document: first(document).pop("tier"),
        lambda document: first(document).pop("op"),
        lambda document: first(document).update(rows="many"),
        lambda document: first(document).update(dtype=None),
        lambda document: first(document).update(tier="fused"),
        lambda document: first(document).update(tier=3),
        lambda document: first(document).update(rounds="many"),
        lambda document: first(document).update(colour="blue"),
        lambda document: first(document).update(seconds={"chunked": -1.0}),
        lambda document: first(document).update(seconds={"chunked": float("inf")}),
        lambda document: first(document).update(seconds={"chunked": "fast"}),
        lambda document: first(document).update(tiles=None),
        lambda document: first(document).update(tiles="large"),  # was not measured
        lambda document: first(document).update(chunks=4),
        lambda document: first(document).update(chunks="four"),
        lambda document: first(document).update(chunks=-4, seconds={"chunked:-4": 1.0}),
        lambda document: first(document).update(chunks=4, tiles="x", seconds={"chunked:4:x": 1.0}),
    ],
)
def test_a_file_with_something_else_inside_is_refused(tmp_path, change):
    with pytest.raises(CacheError, match=r"the tuning file .*tuning\.json is damaged: ") as found:
        cache.read(changed(tmp_path / "tuning.json", change))
    assert not found.value.old


def test_foreign_and_old_files_are_told_apart(tmp_path):
    path = tmp_path / "tuning.json"
    for text in ("[]", '"text"', "{}", '{"format": "something"}'):
        path.write_text(text)
        with pytest.raises(CacheError, match="is no tuning file of pyruntime") as found:
            cache.read(path)
        assert not found.value.old
    with pytest.raises(CacheError, match=r"has version 1, and this pyruntime reads version 2: run") as found:
        cache.read(changed(path, lambda document: document.update(version=1)))
    assert found.value.old
    with pytest.raises(CacheError, match="cannot be read: Is a directory"):
        cache.read(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    cache.write(path, CACHE)

    def half(document, file, **_):
        file.write('{"format": ')
        raise OSError("the disk is full")

    monkeypatch.setattr(cache.json, "dump", half)
    with pytest.raises(OSError, match="the disk is full"):
        cache.write(path, {})
    assert cache.read(path) == CACHE and os.listdir(tmp_path) == ["tuning.json"]


def test_new_choices_replace_old_ones_of_their_place_and_no_others():
    other = dataclasses.replace(PLACE, transport="ring over gloo")
    newer, new = dataclasses.replace(CHOICE, tier="unfused"), dataclasses.replace(KEY, rows=65)
    found = cache.merged(CACHE, PLACE, {KEY: newer, new: CHOICE})
    assert found[PLACE] == {KEY: newer, ANOTHER: TILED, THIRD: CHUNKED, new: CHOICE}
    assert {place: choices for place, choices in found.items() if place != PLACE} == {
        place: choices for place, choices in CACHE.items() if place != PLACE
    }
    assert cache.merged(CACHE, other, {KEY: newer})[other] == {KEY: newer}

"""Files become tokens: all of them, once, split without overlap, the same every time."""

import os
import random
import socket
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from pyruntime.train.data import documents
from pyruntime.train.data.corpus_tokens import Tokens, bytes_before
from pyruntime.train.errors import ConfigError
from tests.train.data.texts import array, build, everything, halves, write_shard


def make_files(folder: Path, count: int = 40) -> dict[str, bytes]:
    rng = np.random.default_rng(random.getrandbits(64))
    contents = {}
    for number in range(count):
        content = b"%d:" % number + bytes(rng.integers(32, 127, size=int(rng.integers(1, 400))).tolist())
        path = folder / f"{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        contents[str(path)] = content
    return contents


def test_every_document_is_there_once_and_the_split_is_disjoint(tmp_path):
    contents = make_files(tmp_path / "text")
    text = build([tmp_path / "text"], tmp_path, val_fraction=0.2)
    stored = everything(text)
    assert sorted(stored.split(b"\0")[:-1]) == sorted(contents.values())
    (held_out,) = text.sets
    assert len(held_out.tokens) == round(0.2 * len(stored)) == held_out.tokens.bytes
    assert text.sources[0].text.facts.files == len(contents)
    assert held_out.bytes_per_token == 1.0


def test_the_split_does_not_depend_on_names_or_places(tmp_path):
    make_files(tmp_path / "a")
    for number, path in enumerate(sorted((tmp_path / "a").rglob("*.txt"))):
        moved = tmp_path / "b" / f"{number}.md"
        moved.parent.mkdir(exist_ok=True)
        moved.write_bytes(path.read_bytes())
    first = halves(build([tmp_path / "a"], tmp_path / "run_a"))
    second = halves(build([tmp_path / "b"], tmp_path / "run_b"))
    assert np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])


def test_a_single_file_is_split_too(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 201)))
    train, val = halves(build([path], tmp_path, val_fraction=0.25))
    assert train.tobytes() == bytes(range(1, 152))
    assert val.tobytes() == bytes([*range(152, 201), 0])


def test_bytes_that_are_no_utf8_are_kept_and_binaries_left_out(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "latin.txt").write_bytes(b"gr\xf6\xdfe" * 50)
    (tmp_path / "text" / "image.bin").write_bytes(b"\x89PNG\0\0" * 50)
    (tmp_path / "text" / "empty.txt").write_bytes(b"")
    text = build([tmp_path / "text"], tmp_path)
    facts = text.sources[0].text.facts
    assert (facts.files, facts.skipped) == (1, 1)
    assert everything(text) == b"gr\xf6\xdfe" * 50 + b"\0"


def test_the_pattern_chooses_files_of_folders(tmp_path):
    contents = make_files(tmp_path / "text", 9)
    names = {path.name for path, _ in documents.list_files([str(tmp_path / "text")], "[0-4].txt")}
    assert names == {f"{n}.txt" for n in range(5)} and len(contents) == 9


def test_what_is_no_file_is_left_out(tmp_path):
    folder = tmp_path / "text"
    make_files(folder, 3)
    os.mkfifo(folder / "pipe.txt")
    (folder / "nowhere.txt").symlink_to(tmp_path / "missing")
    (folder / "link.txt").symlink_to(folder / "0" / "0.txt")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket.txt"))
        names = {path.name for path, _ in documents.list_files([str(folder)], "*")}
    assert names == {"0.txt", "1.txt", "2.txt", "link.txt"}


def test_the_default_text_is_the_standard_library_without_its_tests():
    files = [path for path, _ in documents.list_files([], "*")]
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "dataclasses.py" in files and root / "json" / "decoder.py" in files
    inside = [path.relative_to(root).parts for path in files]
    assert not [parts for parts in inside if {"test", "tests", "site-packages"} & set(parts)]
    assert all(path.suffix == ".py" for path in files)
    assert sum(path.stat().st_size for path in files) > 4e6


def test_too_little_text_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a few words, no more")
    with pytest.raises(ConfigError, match=r"train\.seq_len=64 needs at least 65 tokens on both sides"):
        build([path], tmp_path, seq_len=64)


def test_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.paths: there is no text in .* with names like \*\.md"):
        build([tmp_path], tmp_path / "run", pattern="*.md")


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no source files to train on; name files or folders"):
        documents.list_files([], "*")


def test_tokens_of_several_shards_are_one_stream_with_their_documents_and_bytes(tmp_path):
    rng = np.random.default_rng(random.getrandbits(64))
    lengths = rng.integers(1, 30, size=25)
    texts = [rng.integers(1000, size=int(length)) for length in lengths]
    shards = [
        write_shard(tmp_path / f"{first}", texts[first:last]) for first, last in ((0, 9), (9, 9), (9, 25))
    ]
    whole = np.concatenate(texts)
    numbers = np.repeat(np.arange(25), lengths)
    tokens = Tokens(shards, 7, len(whole) - 5)
    assert np.array_equal(array(tokens), whole[7:-5])
    for _ in range(50):
        low, high = sorted(rng.integers(0, len(tokens) + 1, size=2))
        if low < high:
            assert np.array_equal(tokens.read(low, high), whole[7 + low : 7 + high])
            assert np.array_equal(tokens.documents(low, high), numbers[7 + low : 7 + high])
    assert tokens.bytes == 3 * len(tokens)


def test_bytes_of_the_held_out_tokens_are_counted():
    lengths = [(10, 40), (5, 10), (4, 20)]  # (tokens, bytes) of three documents
    ends = np.cumsum(np.array(lengths), axis=0).T
    assert [bytes_before(ends, 19 - last) for last in (0, 4, 9, 14, 19)] == [70, 50, 40, 20, 0]


def test_several_sources_are_split_each_by_itself_and_sets_go_by_their_names(tmp_path):
    for name, letter in (("web", "w"), ("code", "c"), ("exam", "e")):
        (tmp_path / f"{name}.txt").write_text(letter * 999)
    val = (str(tmp_path / "exam.txt"),)
    text = build([tmp_path / "web.txt", tmp_path / "code.txt"], tmp_path, weights=(3.0, 1.0), val_paths=val)
    assert [source.name for source in text.sources] == ["web", "code"]
    assert {name: len(each) for name, each in ((x.name, x.tokens) for x in text.sets)} == {
        "web": 50, "code": 50, "exam": 1000,
    }  # fmt: skip
    assert set(array(text.sources[1].train).tobytes()) == {ord("c")}
    together = build([tmp_path / "web.txt", tmp_path / "code.txt"], tmp_path, val_paths=val, val_fraction=0.0)
    assert [len(source.train) for source in together.sources] == [2000]
    assert [each.name for each in together.sets] == ["exam"]


def test_two_sets_of_one_name_and_one_that_is_too_short_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text("letters " * 100)
    paths = [tmp_path / "a" / "text.txt", tmp_path / "b" / "text.txt"]
    with pytest.raises(ConfigError, match="two of them are called text"):
        build(paths, tmp_path, weights=(1.0, 1.0))
    (tmp_path / "few.txt").write_text("few")
    with pytest.raises(ConfigError, match=r"needs at least 65 tokens, but the 4 tokens of .*few\.txt"):
        build(paths[:1], tmp_path, seq_len=64, val_fraction=0.5, val_paths=(str(tmp_path / "few.txt"),))

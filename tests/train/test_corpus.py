"""Files become tokens: all of them, once, split without overlap, the same every time; and tokens batches,
which depend on seed and step alone."""

import dataclasses
import os
import socket
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from pyruntime.train import corpus, documents
from pyruntime.train.config import Data
from pyruntime.train.corpus import training_batch, validation_batches
from pyruntime.train.errors import ConfigError
from pyruntime.train.tokenizer import ByteTokenizer


def make_files(folder: Path, count: int = 40) -> dict[str, bytes]:
    rng = np.random.default_rng()
    contents = {}
    for number in range(count):
        content = b"%d:" % number + bytes(rng.integers(32, 127, size=int(rng.integers(1, 400))).tolist())
        path = folder / f"{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        contents[str(path)] = content
    return contents


def build(data: Data, folder: Path, seq_len: int = 8) -> corpus.Corpus:
    tokens = corpus.build(dataclasses.replace(data, cache=str(folder)), ByteTokenizer())
    return corpus.open_corpus(tokens, data.val_fraction, seq_len)


def test_every_document_is_there_once_and_the_split_is_disjoint(tmp_path):
    contents = make_files(tmp_path / "text")
    text = build(Data(paths=(str(tmp_path / "text"),), val_fraction=0.2), tmp_path / "run")
    stored = text.train.tobytes() + text.val.tobytes()
    assert sorted(stored.split(b"\0")[:-1]) == sorted(contents.values())
    assert len(text.val) == round(0.2 * len(stored)) == len(text.val) == text.val_bytes
    assert text.text.files == len(contents)
    assert text.val_bytes_per_token == 1.0


def test_the_split_does_not_depend_on_names_or_places(tmp_path):
    make_files(tmp_path / "a")
    for number, path in enumerate(sorted((tmp_path / "a").rglob("*.txt"))):
        moved = tmp_path / "b" / f"{number}.md"
        moved.parent.mkdir(exist_ok=True)
        moved.write_bytes(path.read_bytes())
    first = build(Data(paths=(str(tmp_path / "a"),)), tmp_path / "run_a")
    second = build(Data(paths=(str(tmp_path / "b"),)), tmp_path / "run_b")
    assert np.array_equal(first.train, second.train) and np.array_equal(first.val, second.val)


def test_a_single_file_is_split_too(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 201)))
    text = build(Data(paths=(str(path),), val_fraction=0.25), tmp_path / "run")
    assert text.train.tobytes() == bytes(range(1, 152))
    assert text.val.tobytes() == bytes([*range(152, 201), 0])


def test_bytes_that_are_no_utf8_are_kept_and_binaries_left_out(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "latin.txt").write_bytes(b"gr\xf6\xdfe" * 50)
    (tmp_path / "text" / "image.bin").write_bytes(b"\x89PNG\0\0" * 50)
    (tmp_path / "text" / "empty.txt").write_bytes(b"")
    text = build(Data(paths=(str(tmp_path / "text"),)), tmp_path / "run")
    assert (text.text.files, text.text.skipped) == (1, 1)
    assert (text.train.tobytes() + text.val.tobytes()) == b"gr\xf6\xdfe" * 50 + b"\0"


def test_the_pattern_chooses_files_of_folders(tmp_path):
    contents = make_files(tmp_path / "text", 9)
    data = Data(paths=(str(tmp_path / "text"),), pattern="[0-4].txt")
    names = {path.name for path, _ in documents.list_files(data)}
    assert names == {f"{n}.txt" for n in range(5)} and len(contents) == 9


def test_what_is_no_file_is_left_out(tmp_path):
    folder = tmp_path / "text"
    make_files(folder, 3)
    os.mkfifo(folder / "pipe.txt")
    (folder / "nowhere.txt").symlink_to(tmp_path / "missing")
    (folder / "link.txt").symlink_to(folder / "0" / "0.txt")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket.txt"))
        names = {path.name for path, _ in documents.list_files(Data(paths=(str(folder),)))}
    assert names == {"0.txt", "1.txt", "2.txt", "link.txt"}


def test_the_default_text_is_the_standard_library_without_its_tests():
    files = [path for path, _ in documents.list_files(Data())]
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "dataclasses.py" in files and root / "json" / "decoder.py" in files
    inside = [path.relative_to(root).parts for path in files]
    assert not [parts for parts in inside if {"test", "tests", "site-packages"} & set(parts)]
    assert all(path.suffix == ".py" for path in files)
    assert sum(path.stat().st_size for path in files) > 4e6


def test_bytes_of_the_held_out_tokens_are_counted():
    lengths = [(10, 40), (5, 10), (4, 20)]  # (tokens, bytes) of three documents
    ends = np.cumsum(np.array(lengths, dtype=np.uint64), axis=0)
    assert [corpus._bytes_behind(ends, 19 - last) for last in (0, 4, 9, 14, 19)] == [0, 20, 30, 30 + 20, 70]


def test_too_little_text_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a few words, no more")
    with pytest.raises(ConfigError, match=r"train\.seq_len=64 needs at least 65 tokens on both sides"):
        build(Data(paths=(str(path),)), tmp_path / "run", 64)


def test_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.paths: there is no text in .* with names like \*\.md"):
        build(Data(paths=(str(tmp_path),), pattern="*.md"), tmp_path / "run")


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no source files to train on; name files or folders"):
        documents.list_files(Data())


TOKENS = np.arange(5000, dtype=np.uint16)


def test_labels_are_the_next_tokens():
    ids, labels = training_batch(TOKENS, step=3, seed=1, batch_size=16, seq_len=32)
    assert ids.shape == labels.shape == (16, 32) and ids.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, ids + 1)
    assert torch.equal(ids[:, 1:], labels[:, :-1])


def test_the_same_seed_and_step_give_the_same_batch_and_others_do_not():
    first = training_batch(TOKENS, 7, 1, 8, 32)[0]
    assert torch.equal(first, training_batch(TOKENS, 7, 1, 8, 32)[0])
    assert not torch.equal(first, training_batch(TOKENS, 8, 1, 8, 32)[0])
    assert not torch.equal(first, training_batch(TOKENS, 7, 2, 8, 32)[0])


def test_every_window_is_reachable_and_stays_inside():
    starts = {int(s) for step in range(200) for s in training_batch(TOKENS[:20], step, 0, 8, 16)[0][:, 0]}
    assert starts == {0, 1, 2, 3}  # the last label is token start + 16 <= 19


def test_validation_windows_are_disjoint_and_spread():
    batches = validation_batches(TOKENS, sequences=10, batch_size=4, seq_len=100)
    assert [len(ids) for ids, _ in batches] == [4, 4, 2]
    labels = torch.cat([labels for _, labels in batches]).flatten().tolist()
    assert len(set(labels)) == len(labels) == 1000
    assert max(labels) > 4500


def test_short_text_gives_fewer_validation_windows():
    batches = validation_batches(TOKENS[:251], sequences=64, batch_size=8, seq_len=100)
    assert sum(len(ids) for ids, _ in batches) == 2

"""Batches are windows of the text with their documents, the same however ranks share them, read ahead."""

import itertools
import threading

import numpy as np
import pytest
import torch

from pyruntime.train.config import Data
from pyruntime.train.data import batches
from pyruntime.train.data.batches import Batches, validation_batches
from pyruntime.train.data.corpus import Corpus, Tokenized, Tokens, ValidationSet, Wanted
from pyruntime.train.data.corpus import TextSource as Text
from pyruntime.train.data.tokenizing import CorpusFacts
from pyruntime.train.errors import ConfigError
from tests.train.data.texts import build, lines_file, open_text, write_shard


def numbers(folder, lengths) -> Corpus:
    """Tokens 0, 1, 2, .. in documents of these lengths, all to learn from."""
    ends = np.cumsum([0, *lengths])
    documents = [np.arange(begin, end) for begin, end in itertools.pairwise(ends)]
    shard = write_shard(folder / "shard", documents)
    tokens = Tokens([shard], 0, len(shard.tokens))
    text = Tokenized(Wanted("numbers", (), True, False), folder, CorpusFacts("", "", 1, 1, 1, 1, 1, 0, (1,)))
    return Corpus((Text("numbers", tokens, text),), (), (ValidationSet("numbers", tokens),))


def test_labels_are_the_next_tokens_and_an_epoch_is_all_windows(tmp_path):
    made = Batches(numbers(tmp_path, [5000]), 1, batch_size=12, seq_len=32, vocab_size=5000)
    seen = []
    for step in range(13):  # of 156 windows
        batch = made.take(12 * step)
        assert batch.ids.shape == batch.labels.shape == (12, 32) and batch.ids.dtype == torch.int64
        assert torch.equal(batch.labels, batch.ids + 1)
        assert torch.equal(batch.ids[:, 1:], batch.labels[:, :-1]) and batch.documents is None
        seen += batch.ids.flatten().tolist()
    assert len(set(seen)) == len(seen) == 156 * 32
    assert max(seen) - min(seen) == len(seen) - 1


def test_epochs_begin_their_windows_in_other_places(tmp_path):
    text = numbers(tmp_path, [20])
    made = Batches(text, 0, batch_size=1, seq_len=16, vocab_size=20)
    starts = {int(made.read(step).ids[0, 0]) for step in range(200)}
    assert starts == {0, 1, 2, 3}  # the last label is token start + 16 <= 19


def test_documents_are_runs_of_one_number_and_left_out_where_there_is_one(tmp_path):
    lengths = [3, 1, 40, 9, 200, 11]
    text = numbers(tmp_path, lengths)
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    batch = Batches(text, 0, batch_size=8, seq_len=31, vocab_size=300).read(0)
    for ids, documents in zip(batch.ids, batch.documents, strict=True):
        expected = of_token[ids.numpy()]
        assert np.array_equal(documents.numpy(), expected - expected[0])
    parts = batch.split(1)
    assert [part.documents is None for part in parts] == [
        len(set(of_token[ids.tolist()])) == 1 for ids in batch.ids
    ]
    assert any(part.documents is None for part in parts)
    assert Batches(text, 0, 8, 31, 300, masks=False).read(0).documents is None


@pytest.mark.parametrize("weights", [(), (0.3, 0.7)])
def test_ranks_share_the_same_samples_on_every_mesh(tmp_path, weights):
    paths = [lines_file(tmp_path, [f"{n} {name}" * 9 for n in range(40)], f"{name}.jsonl") for name in "ab"]
    text = build(paths, tmp_path, weights=weights)
    settings = {"seed": 3, "batch_size": 12, "seq_len": 16, "vocab_size": 256}
    for first in (0, 12 * 7, 12 * 1000):
        whole = Batches(text, **settings).read(first)
        for shares in (2, 3, 4):
            parts = [
                Batches(
                    text, **settings, own=range(12)[rank * 12 // shares : (rank + 1) * 12 // shares]
                ).read(first)
                for rank in range(shares)
            ]
            assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
            assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_a_later_batch_is_the_same_whether_those_before_were_taken(tmp_path):
    text = numbers(tmp_path, [700, 800])
    one, other = (Batches(text, 5, 4, 16, 5000) for _ in range(2))
    taken = [one.take(4 * step) for step in range(30)]
    assert torch.equal(other.take(4 * 29).ids, taken[29].ids)
    assert not torch.equal(taken[0].ids, taken[1].ids)


def test_the_next_batch_is_read_while_a_step_computes(tmp_path, monkeypatch):
    made = Batches(numbers(tmp_path, [5000]), 1, batch_size=2, seq_len=32, vocab_size=5000)
    read, readers, ready = made.read, [], threading.Event()

    def noted(first):
        readers.append((first, threading.current_thread() is threading.main_thread()))
        found = read(first)
        if first == 2:
            ready.set()
        return found

    monkeypatch.setattr(made, "read", noted)
    made.take(0)
    assert ready.wait(30)  # in the step, before anybody takes it
    made.take(2)
    assert readers[:2] == [(0, True), (2, False)]


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path):
    made = Batches(numbers(tmp_path, [5000]), 1, batch_size=8, seq_len=32, vocab_size=1000)
    with pytest.raises(ConfigError, match=r"go up to \d+, but the model's vocabulary has 1000; "):
        [made.read(8 * step) for step in range(10)]


def test_validation_windows_are_disjoint_and_spread(tmp_path):
    (each,) = numbers(tmp_path, [5000]).sets
    found = validation_batches(each, sequences=10, batch_size=4, seq_len=100)
    assert [len(batch.ids) for batch in found] == [4, 4, 2]
    labels = torch.cat([batch.labels for batch in found]).flatten().tolist()
    assert len(set(labels)) == len(labels) == 1000
    assert max(labels) > 4500


def test_short_text_gives_fewer_validation_windows(tmp_path):
    (each,) = numbers(tmp_path, [251]).sets
    assert sum(len(batch.ids) for batch in validation_batches(each, 64, 8, 100)) == 2


def test_a_document_ends_at_its_separator(tmp_path):
    path = lines_file(tmp_path, ["aaa", "bbbbb", "cc"] * 30)
    text = open_text(Data(paths=(str(path),), cache=str(tmp_path / "cache"), val_fraction=0.1), seq_len=8)
    batch = batches.Batches(text, 0, 6, 16, 256).read(0)
    for ids, documents in zip(batch.ids.tolist(), batch.documents.tolist(), strict=True):
        for place in range(15):
            assert (documents[place + 1] > documents[place]) == (ids[place] == 0)

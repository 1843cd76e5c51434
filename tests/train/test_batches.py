"""Batches depend on seed and step alone, and validation windows never overlap."""

import numpy as np
import torch

from pyruntime.train.corpus import training_batch, validation_batches

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

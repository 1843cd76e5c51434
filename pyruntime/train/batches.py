"""Which windows of the tokens each step sees: a pure function of the seed and the step."""

from __future__ import annotations

import numpy as np
import torch


def training_batch(
    tokens: np.ndarray, step: int, seed: int, batch_size: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of step `step`: ids and labels, each int64 [batch_size, seq_len], labels one token
    further on.

    A counter-based generator keyed by (seed, step) draws the starts: all ranks draw the same without a
    message, and a resumed run goes on with the batches that the uninterrupted one would have seen.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(tokens) - seq_len, size=batch_size)
    return _windows(tokens, starts, seq_len)


def validation_batches(
    tokens: np.ndarray, sequences: int, batch_size: int, seq_len: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """At most `sequences` windows that do not overlap, evenly spread over the tokens, `batch_size` at a time.

    Returns the same ids and labels every time; the last batch may be smaller.
    """
    count = min(sequences, (len(tokens) - 1) // seq_len)
    starts = np.arange(count) * ((len(tokens) - 1) // count)
    return [_windows(tokens, starts[i : i + batch_size], seq_len) for i in range(0, count, batch_size)]


def _windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

"""Sentences that many lines of a table would repeat are said once, below it."""

from __future__ import annotations

import collections
from collections.abc import Sequence


def footnotes(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """What each line says, and the lines below: a sentence of several lines becomes [1], [2], .. there."""
    counts = collections.Counter(sentences)
    repeated = [sentence for sentence, count in counts.items() if sentence and count > 1]
    marks = {sentence: f"[{number}]" for number, sentence in enumerate(repeated, start=1)}
    cells = [marks.get(sentence, sentence) for sentence in sentences]
    return cells, [f"{mark} {sentence}" for sentence, mark in marks.items()]

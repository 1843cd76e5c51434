"""What the benchmark of replicas that are killed counts, from a record that is known."""

from __future__ import annotations

import pytest

from bench.data_parallel.goodput import figures


def record(blocks_of_last: dict[str, int]) -> list[dict]:
    """Two replicas from second 10 on; one is away from 14 to 17."""
    return [
        {"time": 8.0, "event": "come", "replica": "a"},
        {"time": 9.0, "event": "come", "replica": "b"},
        {"time": 10.0, "event": "start", "round": 0, "members": 2},
        {"time": 13.0, "event": "round", "round": 0, "blocks": {"a": 0, "b": 1}, "attempt": 1},
        {"time": 14.0, "event": "lost", "replica": "b", "reason": "its process ended"},
        {"time": 16.0, "event": "round", "round": 1, "blocks": {"a": 2}, "attempt": 2},
        {"time": 17.0, "event": "come", "replica": "c"},
        {"time": 20.0, "event": "round", "round": 2, "blocks": blocks_of_last, "attempt": 3},
        {"time": 25.0, "event": "left", "replica": "a", "reason": "its process ended"},
    ]


def test_seconds_in_which_a_replica_is_away_are_not_its_own():
    found = figures(record({"a": 4, "c": 3}))
    assert found == {"seconds": 10.0, "replica_seconds": 2 * 10.0 - 3.0, "rounds": 3, "blocks": 5}


def test_a_block_that_counts_twice_ends_the_benchmark():
    with pytest.raises(SystemExit, match="a block counted twice"):
        figures(record({"a": 2, "c": 3}))

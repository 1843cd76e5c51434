"""Grids of tensor parallelism and ZeRO 3 in virtual time read the bytes that AxoNN has published."""

from __future__ import annotations

import pytest

from bench.overlap import grid
from pyruntime.clock import mirrors
from pyruntime.clock.mirrors import ProgramPlace, mirrored

HIDDEN, SEQ, ELEMENT = 512, 96, 4


def read(group, sizes: tuple[int, int, int]) -> list[float]:
    """Returns the bytes that the first rank of the grid x, y, z reads over each axis for a layer and step. A
    host has one rank: on one of several, linears gather their input again for dW instead of keeping it."""
    x, y, z = sizes
    mirrors.begin(lambda kind, sizes: 0.0, 2**32)
    with mirrored({"dp": z, "tp": x, "tp_y": y}, ProgramPlace({}, 1)) as runtime:
        return grid.measured(runtime, HIDDEN, SEQ)


def published(sizes: tuple[int, int, int]) -> list[float]:
    """Returns the bytes of a layer over each axis by the communication model of arXiv 2305.13525. Of a linear
    O [m, n] = I [m, k] W [k, n], whose m rows here are a z's: all-reduces of O over y and of dI over x, with
    both exchanged in every second linear; all-gathers of W over z forward and backward, and one
    reduce-scatter of dW."""
    x, y, z = sizes
    config = grid.config_of(1, HIDDEN)
    q, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    columns = [(HIDDEN, q + 2 * keys), (HIDDEN, 2 * config.intermediate_size)]
    rows = [(q, HIDDEN), (config.intermediate_size, HIDDEN)]
    of_x = sum(2 * (x - 1) / x * SEQ * k / y for k, _ in columns)
    of_x += sum(2 * (x - 1) / x * SEQ * n / y for _, n in rows)
    of_y = sum(2 * (y - 1) / y * SEQ * n / x for _, n in columns)
    of_y += sum(2 * (y - 1) / y * SEQ * k / x for k, _ in rows)
    of_z = sum(3 * (z - 1) / z * k * n / (x * y) for k, n in (*columns, *rows))
    return [ELEMENT * each for each in (of_x, of_y, of_z)]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 2, 2)], ids=str)
def test_a_grid_reads_the_bytes_of_axonns_formulas(ranks, sizes):
    (outcome,) = ranks.launch(read, 1, sizes, init=False)
    assert outcome.error is None, outcome.error
    x, y, _ = sizes
    # Ours have two norms beside: a sum of a row's squares, forward and backward, over y, and the gradients of
    # their weights over x.
    of_norms = 2 * 2 * (x - 1) / x * 4 * HIDDEN / y, 2 * 2 * (y - 1) * 4 * SEQ / x
    of_x, of_y, of_z = published(sizes)
    assert outcome.value[:2] == [of_x + of_norms[0], of_y + of_norms[1]]
    # A rank of z does not hold exactly its share of every bucket.
    assert outcome.value[2] == pytest.approx(of_z, rel=0.02)

"""Which GEMM multiplies bf16: the table of a processor, how core and Python read it, what tuning changes."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from pyruntime import _C
from pyruntime.ops import gemm_tables
from pyruntime.ops.gemm_tables import PRODUCTS, GemmTable
from pyruntime.tuning.cache import Choice, Key
from pyruntime.tuning.gemms import op_of, tuned


@pytest.fixture(autouse=True)
def table_of_this_processor():
    yield
    gemm_tables.use(gemm_tables.read())


def drawn(seed: int) -> GemmTable:
    draw = random.Random(seed)
    empty = gemm_tables.read(processor="none")
    every = [(product, *point) for product in PRODUCTS for point in empty.points()]
    return GemmTable(empty.rows, empty.features, frozenset(draw.sample(every, len(every) // 2)), "2026-01-01")


@pytest.mark.parametrize("library_has_bf16", [True, False])
def test_a_processor_that_the_file_does_not_have_takes_the_library_if_that_has_bf16(
    monkeypatch, library_has_bf16
):
    monkeypatch.setattr(_C, "library_has_bf16", lambda: library_has_bf16)
    unknown = gemm_tables.read(processor="none")
    assert unknown.date == ""
    gemm_tables.use(unknown)
    taken = {_C.takes_own_gemm(product, *point) for product in PRODUCTS for point in unknown.points()}
    assert taken == {not library_has_bf16}
    if _C.has_own_gemm():
        assert ("for which the library has no bf16" in unknown.describe()) == (not library_has_bf16)


def test_every_table_in_the_file_has_all_points():
    for processor in json.loads(gemm_tables.FILE.read_text())["processors"]:
        assert gemm_tables.read(processor).date


def test_the_core_goes_by_the_nearest_point():
    table, draw = drawn(1), random.Random(2)
    gemm_tables.use(table)
    taken = set()
    for _ in range(2000):
        rows, k, n = (int(2 ** draw.uniform(0, 16)) for _ in range(3))
        product = draw.choice(PRODUCTS)
        expected = (product, *table.nearest(rows, k, n)) in table.ours
        assert _C.takes_own_gemm(product, rows, k, n) == expected, (product, rows, k, n)
        taken.add(expected)
    assert taken == {True, False}


@pytest.mark.parametrize(("value", "point"), [(1, 256), (424, 256), (425, 704), (5000, 4096), (10**6, 14336)])
def test_nearest_is_meant_in_logarithms(value, point):
    assert gemm_tables.read().nearest(1, value, 256)[1] == point


def test_a_table_that_was_written_is_read_again(tmp_path):
    file = tmp_path / "tables.json"
    file.write_text(gemm_tables.FILE.read_text())
    one, other = drawn(3), drawn(4)
    gemm_tables.write(one, "one", file)
    gemm_tables.write(other, "other", file)
    assert gemm_tables.read("one", file) == one and gemm_tables.read("other", file) == other


def test_what_tune_measured_overrules_the_table_and_the_slower_of_a_class_decides():
    def choice(tier: str) -> Choice:
        return Choice(tier, {"ours": 1.0, "library": 1.0}, 3, "2026-01-01")

    def key(product: str, rows: int) -> Key:
        return Key(op_of(product), rows, 1024, 2048, "bfloat16", "cpu")

    unknown = dataclasses.replace(gemm_tables.read(processor="none"), ours=frozenset())
    found = tuned(
        unknown,
        {
            key("dW", 2000): choice("ours"),
            key("dX", 2000): choice("ours"),
            key("dX", 2100): choice("library"),
            Key("all_gather_matmul", 2000, 1024, 2048, "bfloat16", "cpu"): choice("ours"),
        },
    )
    assert found.ours == {("dW", 2048, 2048, 1024)} and found.tuned == 2
    again = tuned(found, {key("dW", 2000): choice("library")})
    assert not again.ours


def test_a_table_of_another_form_is_refused():
    with pytest.raises(ValueError, match="9 rows and 7 features has 441 classes"):
        table = gemm_tables.read()
        _C.use_gemm_table(list(table.rows), list(table.features), [[True]] * 3)
    with pytest.raises(ValueError, match="use forward, dX or dW"):
        _C.takes_own_gemm("backward", 1, 1, 1)

"""What rows are rounded to on their way: bit for bit as torch rounds them, in as many bytes as is said."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyruntime import comm
from pyruntime.comm.channel import Channels
from pyruntime.comm.core import _C
from pyruntime.comm.wire import Wire
from tests.transports import take

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 128


def as_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and exponents of the scales of rows [n, width], and what they are, by torch's own e4m3."""
    wide = torch.nn.functional.pad(rows.double(), (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    exponent = (wide.abs().amax(-1, keepdim=True) / 448).log2().ceil().clamp(-126, 127)
    codes = (wide * torch.exp2(-exponent)).float().to(torch.float8_e4m3fn)
    values = (codes.double() * torch.exp2(exponent)).flatten(1)[:, : rows.shape[1]]
    packed = codes.view(torch.uint8).flatten(1)[:, : rows.shape[1]]
    return torch.cat((packed, (exponent.flatten(1) + 127).byte()), 1), values.to(rows.dtype)


def rows_of(dtype: torch.dtype, width: int, is_heavy: bool = True) -> Tensor:
    """Heavy: most blocks hold values so small beside their largest that their codes are subnormal."""
    generator = torch.Generator().manual_seed(width)
    values = torch.randn(9, width, generator=generator)
    return (values * torch.logspace(-3, 2, 9).unsqueeze(1) * values.abs().pow(3 * is_heavy)).to(dtype)


@pytest.mark.parametrize("width", [1, 7, 128, 130, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_heavy", [True, False])
def test_fp8_is_torchs_in_blocks_with_the_least_power_of_two(is_heavy, dtype, width):
    rows, wire = rows_of(dtype, width, is_heavy), Wire("fp8", width, dtype)
    packed, values = as_fp8(rows)
    assert wire.travelling_width == packed.shape[1] == width + -(-width // BLOCK)
    assert torch.equal(wire.packed(rows), packed)
    assert torch.equal(wire.unpacked(packed), values)
    assert torch.equal(wire.packed(values), wire.packed(wire.unpacked(wire.packed(values))))
    assert torch.equal(wire.unpacked(wire.packed(values)), values)  # once rounded it stays


def test_rows_are_read_from_between_others():
    rows, wire = rows_of(torch.float32, 7).view(3, 3, 7), Wire("fp8", 7, torch.float32)
    packed = wire.packed(rows)
    assert torch.equal(wire.unpacked(packed[:, :1]), wire.unpacked(packed)[:, :1])


def test_no_value_is_further_off_than_half_a_step():
    rows = torch.rand(64, 512, generator=torch.Generator().manual_seed(2)) + 1e-3
    wire = Wire("fp8", 512, torch.float32)
    assert ((wire.unpacked(wire.packed(rows)) - rows).abs() <= rows * 2**-4 + 2**-18).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_nan_and_no_other(value):
    rows = torch.ones(3, 300)
    rows[1, 200] = value
    wire = Wire("fp8", 300, torch.float32)
    read = wire.unpacked(wire.packed(rows))
    expected = torch.zeros(3, 300, dtype=torch.bool)
    expected[1, 128:256] = True
    assert torch.equal(read.isnan(), expected)


def test_what_is_nearly_nothing_is_zero():
    rows = torch.full((2, 130), 1e-37)
    rows[1] = 0
    wire = Wire("fp8", 130, torch.float32)
    assert not wire.unpacked(wire.packed(rows)).any()


def test_bf16_is_torchs_and_same_is_no_copy():
    rows = torch.randn(4, 6)
    assert torch.equal(Wire("bf16", 6, torch.float32).unpacked(rows.bfloat16()), rows.bfloat16().float())
    same = Wire("same", 6, torch.float64)
    assert same.packed(rows) is rows and same.unpacked(rows) is rows


@pytest.mark.parametrize(
    ("ask", "error", "sentence"),
    [
        (lambda: Wire("fp4", 3, torch.float32), ValueError, "format='fp4' is none of same, bf16, fp8"),
        (lambda: Wire("fp8", 3, torch.float64), ValueError, r'rows are torch\.float64; use "same"'),
        (
            lambda: Wire("fp8", 3, torch.float32, "meta"),
            ValueError,
            'cannot round rows on meta: there are no device kernels for meta tensors; or use "bf16".',
        ),
        (lambda: _C.fp8_bytes(-1), ValueError, "width=-1"),
        (
            lambda: _C.pack_fp8(torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.uint8)),
            ValueError,
            r"packed has shape \[2, 5\]; of values \[2, 5\] it must be \[2, 6\]",
        ),
        (
            lambda: _C.pack_fp8(torch.zeros(5, 2).t(), torch.zeros(2, 6, dtype=torch.uint8)),
            ValueError,
            "it must be contiguous rows on cpu",
        ),
        (
            lambda: _C.unpack_fp8(torch.zeros(2, 6), torch.zeros(2, 5)),
            TypeError,
            "packed has dtype Float; it must be uint8",
        ),
    ],
)
def test_what_does_not_fit_is_said(ask, error, sentence):
    with pytest.raises(error, match=sentence):
        ask()


def sent(group, transport, wire, x):
    """What comes of two messages from rank 0, and bytes that were read."""
    take(group, transport)
    channels = Channels(group, "pp", [(0, 1)], 5, x.shape[1], x.dtype, wire=wire)
    before = comm.bytes_read("pp")
    if group.rank() == 0:
        for part in (x[:5], x[5:]):
            channels.send(1, part)
        return None, 0
    channels.expect(0, [5, len(x) - 5])
    return torch.cat([channels.receive(0) for _ in range(2)]), comm.bytes_read("pp") - before


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.parametrize("format", ["same", "bf16", "fp8"])
def test_messages_take_the_bytes_that_travel(ranks, transport, format):
    x = rows_of(torch.float32, 200)
    wire = Wire(format, 200, torch.float32)
    _, (came, taken) = ranks.run(sent, 2, transport, format, x)
    assert torch.equal(came, wire.unpacked(wire.packed(x)))
    assert taken == len(x) * {"same": 800, "bf16": 400, "fp8": 202}[format]

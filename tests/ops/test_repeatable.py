"""With the default tier every op gives the same bits, call to call and run to run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.ops.primitives import linear

pytestmark = pytest.mark.second_tier

RANKS = 4
ROWS, N, K = 41, 24, 17  # cut unevenly by 2, 3 and 4
TIMES = 3


def cases(group, draw: Callable[..., Tensor]) -> dict[str, tuple[list[Tensor], Callable[..., object]]]:
    """By name: the operands that get gradients, and the op on them."""
    size, rank = group.size(), group.rank()
    shard, whole = draw(ROWS, K).tensor_split(size)[rank], draw(ROWS, K)
    weights, bias = [draw(N, K), draw(N + rank, K)], draw(N)

    def gather(x, w, v, b, **options):
        return ops.all_gather_matmul(x, [w, v], group, rows=ROWS, bias=[b, None], **options)

    return {
        "all_gather_matmul": ([shard, *weights, bias], gather),
        "all_gather_matmul, x gathered once": (
            [shard, *weights, bias],
            lambda *of: gather(*of, return_gathered=True, keep_gathered=True),
        ),
        "matmul_reduce_scatter": (
            [whole, weights[0], bias],
            lambda x, w, b: ops.matmul_reduce_scatter(x, w, group, bias=b),
        ),
        "matmul_all_reduce": (
            [whole, weights[0], bias],
            lambda x, w, b: ops.matmul_all_reduce(x, w, group, bias=b),
        ),
        "replicated_matmul": (
            [whole, *weights, bias],
            lambda x, w, v, b: ops.replicated_matmul(x, [w, v], group, bias=[b, None]),
        ),
        "all_gather": ([shard], lambda x: ops.all_gather(x, group, rows=ROWS)),
        "reduce_scatter": ([whole], lambda x: ops.reduce_scatter(x, group)),
        "all_reduce": ([whole], lambda x: ops.all_reduce(x, group)),
        "replicate_grad": ([whole], lambda x: ops.replicate_grad(x, group)),
        "all_gather_stats": ([], lambda: ops.all_gather_stats(whole, group)),
        "linear": ([whole, weights[0], bias], linear),
    }


def call(operands: list[Tensor], op: Callable[..., object], draw: Callable[..., Tensor]) -> str:
    """Digest of what the op and its backward give."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    found = op(*leaves)
    outputs = list(found) if isinstance(found, list) else [found]
    gradients = torch.autograd.grad(outputs, leaves, [draw(*one.shape) for one in outputs]) if leaves else ()
    digest = hashlib.sha256()
    for tensor in (*outputs, *gradients):
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def drawn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def digests(_, transport: str) -> dict[str, str]:
    """By op, dtype and number of ranks; raises where two calls differ."""
    found = {}
    for size in range(1, RANKS + 1):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        if size > 1:
            comm.configure(group, transport=transport)
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(size)
            draw = functools.partial(drawn, generator, dtype)
            for name, (operands, op) in cases(group, draw).items():
                said = set()
                for _ in range(TIMES):
                    generator.manual_seed(size + 100)
                    said.add(call(operands, op, draw))
                assert len(said) == 1, f"{name}, {dtype}, {size} ranks: {len(said)} results"
                found[f"{name}, {dtype}, {size} ranks"] = said.pop()
    return found


@pytest.mark.parametrize("transport", ["auto", "process_group", "collectives"])
def test_every_op_has_the_same_bits_in_every_call_and_every_run(ranks, transport):
    first, second = (ranks.launch(digests, RANKS, transport, timeout=300) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.error is None and other.error is None, one.error or other.error
        assert one.value == other.value
    assert len(first[0].value) == 11 * 2 * RANKS

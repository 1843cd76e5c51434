"""Weight gradients that come later in the backward pass, under its waits: the bits of the plain order,
whoever is late, and autograd's own rules for everything that looks at a gradient."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

import pyruntime
from pyruntime import ops
from pyruntime.comm import group_rank, group_size
from pyruntime.overlap import EntryKind
from tests.transports import TRANSPORTS, on_transport, take

ROWS, FEATURES, INNER = 157, 330, 520
"""A weight gradient has 54 to 108 million floating-point operations: two pieces or three."""
GRADIENTS = {"all_gather_matmul weight gradient", "matmul_reduce_scatter weight gradient"}


class Net:
    """Two blocks, x + row(gelu(column(x))): shards of x and of the weights, the same of all transports."""

    def __init__(self, group, dtype: torch.dtype = torch.float32, tier: str = "chunked"):
        rank, size = group_rank(group), group_size(group)
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        self.group, self.tier = group, tier
        self.whole = [
            drawn(INNER, FEATURES),
            drawn(FEATURES, INNER),
            drawn(INNER, FEATURES),
            drawn(FEATURES, INNER),
        ]
        self.weights = [w.tensor_split(size, i % 2)[rank].contiguous() for i, w in enumerate(self.whole)]
        for weight in self.weights:
            weight.requires_grad_()
        self.x = drawn(ROWS, FEATURES)
        self.dy = drawn(ROWS, FEATURES).tensor_split(size)[rank]
        self.shard = self.x.tensor_split(size)[rank].clone().requires_grad_()

    def block(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = ops.all_gather_matmul(x, up, self.group, rows=ROWS, tier=self.tier)
        return x + ops.matmul_reduce_scatter(gelu(h), down, self.group, tier=self.tier)

    def forward(self, block: Callable[..., Tensor] | None = None) -> Tensor:
        block = block or self.block
        return block(block(self.shard, *self.weights[:2]), *self.weights[2:])

    def plain(self) -> list[Tensor]:
        """Gradients as they are asked for by name, which none may come after."""
        return list(torch.autograd.grad(self.forward(), [self.shard, *self.weights], self.dy))

    def exact(self) -> list[Tensor]:
        """dW of this rank's shards, of one rank with all rows in fp64."""
        leaves = [weight.double().requires_grad_() for weight in self.whole]
        x, size = self.x.double(), group_size(self.group)
        for up, down in (leaves[:2], leaves[2:]):
            x = x + gelu(x @ up.T) @ down.T
        dy = torch.cat(gathered(self.group, self.dy)).double()
        grads = torch.autograd.grad(x, leaves, dy)
        return [g.tensor_split(size, i % 2)[group_rank(self.group)] for i, g in enumerate(grads)]

    def grads(self) -> list[Tensor]:
        return [tensor.grad for tensor in (self.shard, *self.weights)]

    def clear(self) -> None:
        for tensor in (self.shard, *self.weights):
            tensor.grad = None


def gathered(group, shard: Tensor) -> list[Tensor]:
    return list(ops.all_gather(shard, group, rows=ROWS).tensor_split(group_size(group)))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def late_by(tensor: Tensor, seconds: float) -> Tensor:
    """Its gradient takes its time."""

    def wait(gradient: Tensor) -> None:
        time.sleep(seconds)

    tensor.register_hook(wait)
    return tensor


def bits(group, dtype: torch.dtype, tier: str) -> bool:
    """Whether some gradients came later."""
    net = Net(group, dtype, tier)
    plain = net.plain()
    for found, exact in zip(plain[1:], net.exact(), strict=True):
        error = (found.double() - exact).abs().max() / exact.abs().max()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype], error
    entries = []
    for late in [None, *range(group_size(group))]:
        net.clear()

        def block(x, up, down, late=late):
            y = net.block(x, up, down)
            return late_by(y, 0.02) if late == group_rank(group) else y

        with pyruntime.ledger() as ledger:
            net.forward(block).backward(net.dy)
        assert same(net.grads(), plain), f"rank {late} was late"
        entries += ledger.stretch.entries
    return any(entry.kind is EntryKind.OP and entry.name in GRADIENTS for entry in entries)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["symmetric_memory-2"])
def test_gradients_that_come_later_have_the_bits_of_the_plain_order(ranks, transport, size):
    later = ranks.run(on_transport, size, transport, bits, torch.float32, "chunked")
    assert later == [transport != "symmetric_memory"] * size


@pytest.mark.parametrize(
    ("dtype", "tier"), [(torch.bfloat16, "chunked"), (torch.float32, "unfused")], ids=str
)
@pytest.mark.second_tier("torch.float32-unfused")
def test_so_do_those_of_other_dtypes_and_tiers(ranks, dtype, tier):
    assert all(ranks.run(on_transport, 2, "process_group", bits, dtype, tier))


def looked_at(group) -> None:
    """Everything that looks at a gradient sees what it sees in the plain order."""
    net = Net(group)
    plain = net.plain()
    up, down = net.weights[2:]
    seen: list[Tensor] = []

    handle = up.register_hook(lambda g: seen.append(g.clone()))
    net.forward().backward(net.dy)
    handle.remove()
    assert same(net.grads(), plain) and same(seen, [plain[3]])

    net.clear()
    handle = down.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    net.forward().backward(net.dy)
    handle.remove()
    assert same(net.grads(), plain) and same(seen, [plain[3], plain[4]])

    net.clear()
    y = net.forward()
    edges = y.grad_fn.next_functions[1][0]  # of the last op
    handle = edges.register_hook(lambda inputs, outputs: seen.append(inputs[1].clone()))
    y.backward(net.dy)
    handle.remove()
    assert same(net.grads(), plain) and same(seen[2:], [plain[4]])

    net.clear()
    net.forward().backward(net.dy, inputs=[down])
    assert torch.equal(down.grad, plain[4]) and up.grad is None

    net.clear()
    for _ in range(2):  # gradients add up
        net.forward().backward(net.dy)
    assert same(net.grads(), [g + g for g in plain])

    net.clear()
    y = net.forward()
    y.backward(net.dy, retain_graph=True)
    y.backward(net.dy)
    assert same(net.grads(), [g + g for g in plain])


def test_what_looks_at_a_gradient_sees_all_of_it(ranks):
    ranks.run(on_transport, 2, "process_group", looked_at)


def used_twice(group) -> None:
    net = Net(group)
    net.weights[2:] = net.weights[:2]
    plain = torch.autograd.grad(net.forward(), net.weights[:2], net.dy)
    before = [torch.randn_like(g) for g in plain]
    for weight, gradient in zip(net.weights, before, strict=False):
        weight.grad = gradient.clone()
    net.forward().backward(net.dy)
    assert same([w.grad for w in net.weights[:2]], [b + g for b, g in zip(before, plain, strict=True)])


def test_the_uses_of_one_weight_are_summed_before_they_are_added(ranks):
    ranks.run(on_transport, 2, "process_group", used_twice)


def computed(group) -> None:
    """Weights that are themselves results."""
    net = Net(group)
    scaled = [weight.detach().clone().requires_grad_() for weight in net.weights]
    net.weights = [weight * 2 for weight in scaled]
    plain = torch.autograd.grad(net.forward(), scaled, net.dy)
    net.weights = [weight * 2 for weight in scaled]
    net.forward().backward(net.dy)
    assert same([weight.grad for weight in scaled], list(plain))


def test_gradients_of_weights_that_are_computed_do_not_come_later(ranks):
    ranks.run(on_transport, 2, "process_group", computed)


def recomputed(group, use_reentrant: bool) -> None:
    net = Net(group)
    plain = net.plain()
    block = lambda *operands: checkpoint(net.block, *operands, use_reentrant=use_reentrant)  # noqa: E731
    net.forward(block).backward(net.dy)
    assert same(net.grads(), plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.second_tier("True")
def test_blocks_that_are_computed_again_have_the_same_gradients(ranks, use_reentrant):
    ranks.run(on_transport, 2, "process_group", recomputed, use_reentrant)


def recomputed_with_a_hook(group) -> None:
    """What a checkpoint takes back is another tensor than the weight, which has the hook."""
    net = Net(group)
    plain = net.plain()
    found: list[Tensor | None] = []
    net.weights[0].register_post_accumulate_grad_hook(lambda weight: found.append(weight.grad))
    block = lambda *operands: checkpoint(net.block, *operands, use_reentrant=False)  # noqa: E731
    net.forward(block).backward(net.dy)
    assert same(net.grads(), plain)
    assert len(found) == 1
    assert found[0] is not None


def test_a_hook_of_a_block_that_is_computed_again_is_called_with_the_gradient(ranks):
    ranks.run(on_transport, 2, "process_group", recomputed_with_a_hook)


def frozen_since(group) -> None:
    net = Net(group)
    plain = net.plain()
    net.clear()
    y = net.forward()
    net.weights[0].requires_grad_(False)
    y.backward(net.dy)
    assert net.weights[0].grad is None
    assert same(net.grads()[2:], plain[2:])


def test_a_weight_that_was_frozen_since_its_forward_has_no_gradient(ranks):
    ranks.run(on_transport, 2, "process_group", frozen_since)


def failing(group) -> None:
    net = Net(group)
    plain = net.plain()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("of this test")

    def block(x, up, down):
        x = x * 1
        x.register_hook(fail)
        return net.block(x, up, down)

    with pytest.raises(RuntimeError, match="of this test"):
        net.forward(lambda *each: (block if each[1] is net.weights[2] else net.block)(*each)).backward(net.dy)
    assert net.weights[2].grad is None or torch.equal(net.weights[2].grad, plain[3])
    net.clear()
    net.forward().backward(net.dy)
    assert same(net.grads(), plain)


def test_a_pass_that_fails_leaves_nothing_behind(ranks):
    ranks.run(on_transport, 2, "process_group", failing)


def waits(group) -> tuple[float, float]:
    """Seconds of weight gradients that this rank multiplied before its last wait ended, rank 1 being late,
    and of its waits as the transport counts them."""
    net = Net(group)
    net.plain()
    before = pyruntime.comm.stats(group).waiting_s
    with pyruntime.ledger() as ledger:
        y = net.forward(lambda x, up, down: net.block(late_by(x * 1, 0.3 * group_rank(group)), up, down))
        y.backward(net.dy)
    entries = ledger.stretch.entries
    last_wait = max((e.end for e in entries if e.kind is EntryKind.WAIT), default=0.0)
    filled = sum(e.seconds for e in entries if e.name in GRADIENTS and e.end < last_wait)
    account = ledger.account()
    parts = account.computing_s + account.copying_s + account.summing_s + account.rest_s + account.exposed_s
    assert parts == pytest.approx(account.seconds)
    waiting = pyruntime.comm.stats(group).waiting_s - before
    assert account.exposed_s == pytest.approx(waiting)
    overlapping = [
        (wait, op)
        for wait in entries
        for op in entries
        if wait.kind is EntryKind.WAIT and op.name in GRADIENTS and wait.begin < op.begin < wait.end
    ]
    assert not overlapping
    return filled, waiting


def test_a_rank_that_waits_multiplies_and_the_ledger_says_so(ranks):
    (filled, waiting), _ = ranks.run(on_transport, 2, "process_group", waits)
    assert filled > 0 and waiting > 0


def killed(group) -> str:
    take(group, "process_group")
    net = Net(group)
    net.plain()

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = net.block(x, up, down)
        return late_by(y, 30.0) if group_rank(group) == 1 and up is net.weights[0] else y

    y = net.forward(block)
    if group_rank(group) == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        y.backward(net.dy)
    except pyruntime.PeerLost as error:
        return str(error)
    return "no error"


def test_a_rank_killed_in_the_middle_of_a_filled_wait_ends_all(ranks):
    outcomes = ranks.launch(killed, 3)
    for rank in (0, 2):
        assert "waiting for rank" in outcomes[rank].value or "rank 1" in outcomes[rank].value, outcomes[rank]


def beyond_the_deadline(group) -> tuple[str, float]:
    take(group, "process_group")
    net = Net(group)
    net.plain()
    pyruntime.comm.set_deadline(group, 0.5)
    y = net.forward(lambda x, up, down: late_by(net.block(x, up, down), 2.0 * (group_rank(group) == 1)))
    start = time.monotonic()
    try:
        y.backward(net.dy)
    except pyruntime.CommError as error:
        return type(error).__name__, time.monotonic() - start
    return "no error", 0.0


def test_deadlines_hold_in_filled_waits(ranks):
    outcomes = ranks.launch(beyond_the_deadline, 2)
    name, seconds = outcomes[0].value
    assert name == "CommTimeout" and seconds < 2.0

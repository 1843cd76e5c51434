"""Operators of torch on the simulated device give what the CPU gives, later, where the host cannot look."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().to("sim").requires_grad_(tensor.requires_grad) for tensor in tensors]


def chain(x, w):
    y = F.rms_norm(F.gelu(x @ w), (w.size(1),))
    return torch.cat([y[1:, ::2], y[:-1, 1::2]], 1).softmax(-1).log().t().contiguous()


def losses(x, w):
    return F.cross_entropy(x @ w, torch.arange(x.size(0), device=x.device) % w.size(1))


def attention(x, w):
    heads = (x @ w).unflatten(1, (2, -1)).transpose(0, 1)[None]
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def selected(x, w):
    y = x @ w
    return y[y > 0].sum() + y[torch.tensor([0, 2, 0])].sum() + torch.nonzero(y > 1).sum()


def in_place(x, w):
    y = (x @ w).clone()
    y[:, 1].mul_(3)
    y.add_(1).clamp_(min=0)
    y.index_put_((torch.tensor([0, 1], device=y.device),), y.new_ones(2, y.size(1)))
    return torch.where(y > 1, y, torch.zeros((), device=y.device)), y.max(1).values, y.topk(2).values


OPERATIONS = [chain, losses, attention, selected, in_place]


def outcome(function, x, w):
    made = function(x, w)
    outputs = made if isinstance(made, tuple) else (made,)
    sum(output.float().square().sum() for output in outputs).backward()
    return [tensor.detach().cpu() for tensor in (*outputs, x.grad, w.grad)]


def compare_operations(group):
    sim.begin(delays=3)
    for function in OPERATIONS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x, w = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((7, 6), (6, 8)))
            found, expected = outcome(function, *on_device(x, w)), outcome(function, x, w)
            # Attention has kernels of its own on the CPU, which round elsewhere; other kernels are the same.
            steps = 128 if function is attention else 0
            for one, other in zip(found, expected, strict=True):
                limit = steps * torch.finfo(dtype).eps * other.abs().max()
                assert (one - other).abs().max() <= limit, (function.__name__, dtype)


def test_operators_give_what_they_give_on_the_cpu(ranks):
    ranks.run(compare_operations, 1)


def normalise(group):
    """CUDA's kernels compute LayerNorm in fp32, whatever they are given."""
    sim.begin(delays=4)
    given = [torch.randn(shape) for shape in ((7, 6), (6,), (6,), (7, 6))]
    low = [each.bfloat16() for each in given]
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "sim")):
        x, w, b, grad = (each.detach().to(device, dtype).requires_grad_() for each in low)
        y = F.layer_norm(x, (6,), w, b)
        y.backward(grad)
        statistics = torch.native_layer_norm(x, (6,), w, b, 1e-5)[1:]
        found.append([each.detach().cpu().float() for each in (*statistics, y, x.grad, w.grad, b.grad)])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        # fp32 statistics; what is rounded to bf16 may be its neighbour there.
        torch.testing.assert_close(one, other, rtol=1e-5 if number < 2 else 2**-7, atol=1e-6)


def test_a_layer_norm_in_bf16_keeps_fp32_statistics_for_its_backward_pass(ranks):
    ranks.run(normalise, 1)


def train_a_model(group):
    sim.begin(delays=5)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 11))
    other = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 11))
    other.load_state_dict(model.state_dict())
    ids = torch.arange(22).view(2, 11) % 11
    for each, device in ((model, "cpu"), (other.to("sim"), "sim")):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            loss = F.cross_entropy(each(ids.to(device)).flatten(0, 1), ids.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two.cpu())
    torch.testing.assert_close(model.state_dict()["0.weight"], other.state_dict()["0.weight"].to("cpu"))


def test_a_model_learns_the_same_weights(ranks):
    ranks.run(train_a_model, 1)


def look_early(group):
    sim.begin()
    x = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    sim.block_streams(0.3)
    begun = time.monotonic()
    pinned = torch.zeros(4).pin_memory()
    pinned.copy_(x + 1, non_blocking=True)
    early, took = pinned.tolist(), time.monotonic() - begun
    torch.accelerator.synchronize()
    assert early == [0.0] * 4 and took < 0.3 and pinned.tolist() == [2.0] * 4


def test_the_host_goes_on_before_an_operation_has_run(ranks):
    ranks.run(look_early, 1)


def use_streams(group):
    """Without the wait the other stream reads what is not written yet."""
    sim.begin()
    found = {}
    for waits in (True, False):
        x, other = torch.zeros(8, device="sim"), torch.Stream(device="sim")
        torch.accelerator.synchronize()
        sim.block_streams(0.2)  # of the current stream alone
        x.add_(5)
        if waits:
            other.wait_stream(torch.accelerator.current_stream())
        with other:
            y = x * 2
        other.synchronize()
        with other:
            found[waits] = y.cpu().tolist()
        torch.accelerator.synchronize()
    assert found == {True: [10.0] * 8, False: [0.0] * 8}


def test_streams_are_ordered_by_events_alone(ranks):
    ranks.run(use_streams, 1)


def free_early(group):
    """A block of one stream that another uses: the note (record_stream) keeps it from being reused."""
    sim.begin()
    found = {}
    for is_noted in (True, False):
        other = torch.Stream(device="sim")
        x = torch.full((64,), 3.0, device="sim")
        other.wait_stream(torch.accelerator.current_stream())
        torch.accelerator.synchronize()
        with other:
            sim.block_streams(0.2)
            y = x + 1
        if is_noted:
            x.record_stream(other)
        del x
        z = torch.full((64,), 7.0, device="sim")
        torch.accelerator.synchronize()
        with other:
            found[is_noted] = y.cpu()[0].item()
        del y, z
    assert found[True] == 4.0 and found[False] != 4.0


def test_memory_that_another_stream_uses_is_reused_only_where_that_is_noted(ranks):
    ranks.run(free_early, 1)


def touch(group):
    sim.begin()
    x = torch.ones(4, device="sim")
    sim.touch(x)


def test_the_host_cannot_touch_device_memory(ranks):
    if reason := sim.why_not_protected():
        pytest.skip(reason)
    (died,) = ranks.launch(touch, 1)
    assert died.exit_code == -signal.SIGSEGV
    assert "sim: the host touched memory of a device" in died.output


def read_unwritten(group):
    sim.begin()
    assert torch.empty(5, device="sim").isnan().all().item()
    x = torch.ones(300, device="sim")
    address = x.data_ptr()
    del x
    again = torch.empty(300, device="sim")
    assert again.data_ptr() == address and again.isnan().all().item()


def test_memory_that_was_not_written_is_nan(ranks):
    ranks.run(read_unwritten, 1)


def fill_memory(group):
    sim.begin(gigabytes=1 / 64)
    kept = [torch.empty(2**20, device="sim") for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory: 4194304 bytes were asked for"):
        kept += [torch.empty(2**20, device="sim") for _ in range(3)]
    kept.clear()
    assert torch.ones(3 * 2**20, device="sim").sum().item() == 3 * 2**20  # cached blocks are given up for it
    assert torch.accelerator.max_memory_allocated() >= 3 * 2**22


def test_memory_ends_and_is_there_again_when_it_is_free(ranks):
    (outcome,) = ranks.launch(fill_memory, 1)
    assert outcome.error is None


def draw(group):
    sim.begin(delays=7)
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        state = torch.sim.get_rng_state()
        first = [torch.randn(5, device="sim"), F.dropout(torch.ones(50, device="sim"), 0.5)]
        torch.sim.set_rng_state(state)
        again = [torch.randn(5, device="sim"), F.dropout(torch.ones(50, device="sim"), 0.5)]
        assert all(map(torch.equal, first, again)) and not torch.equal(first[0], torch.randn(5, device="sim"))
        drawn.append(first)
    assert all(map(torch.equal, *drawn))


def test_random_numbers_are_those_of_the_seed_in_whatever_order_streams_run(ranks):
    ranks.run(draw, 1)


def break_it(group):
    sim.begin()
    x = torch.zeros(3, device="sim")
    with pytest.raises(RuntimeError, match=r"simulated device has failed: aten::index_select.*out of range"):
        x.index_select(0, torch.tensor([5], device="sim"))
        torch.accelerator.synchronize()
    event = torch.Event("sim")
    for call in (lambda: x + 1, event.query, event.record, torch.accelerator.current_stream().query):
        with pytest.raises(RuntimeError, match="simulated device has failed"):
            call()  # as on CUDA: for good


def test_an_operation_that_fails_is_told_when_the_host_waits(ranks):
    (outcome,) = ranks.launch(break_it, 1)
    assert outcome.error is None, outcome.error


def mix(group):
    sim.begin()
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.ones(3) + torch.ones(3, device="sim")
    assert (torch.ones(3, device="sim") + torch.tensor(2.0)).tolist() == [3.0] * 3


def test_tensors_of_two_devices_do_not_mix(ranks):
    ranks.run(mix, 1)

"""Training on several ranks equals training in one process: losses, every weight, gradient norms."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel import reducer
from tests.data_parallel import cases
from tests.ranks import check_others_lost_rank_1
from tests.transports import TRANSPORTS, take

BUCKET = 400  # bytes: most matrices travel alone, vectors together
STEPS = 5


def trained(group, *arguments, cut=True):
    """cut: products are multiplied chunk by chunk however small they are."""
    least, reducer.LEAST_GEMM = reducer.LEAST_GEMM, 0.0 if cut else math.inf
    try:
        return trained_as_it_is(group, *arguments)
    finally:
        reducer.LEAST_GEMM = least


def trained_whole(group, *arguments):
    return trained(group, *arguments, cut=False)


def trained_as_it_is(
    group, transport, mesh_kind, stage, tied, dtype, sequences, max_norm, keep=0, bucket=BUCKET
):
    if mesh_kind != "hsdp":
        take(group, transport)
    mesh, rank, size = cases.mesh_of(group, mesh_kind)
    whole = cases.model(tied, stage == 3, dtype)
    handle = pyruntime.shard(
        whole, None if mesh_kind == "alone" else mesh, stage=stage, bucket_bytes=bucket, keep_gathered=keep
    )
    optimizer = handle.adamw(lr=1e-2, max_norm=max_norm)
    losses, norms = cases.train(whole, handle, optimizer, cases.batches(STEPS, sequences), rank, size)
    assert all(p.grad is None for p in whole.parameters())
    weights = {name: p.clone() for name, p in whole.state_dict().items()}
    handle.close()
    return losses, weights, norms


def expected(stage, tied, dtype, sequences, max_norm):
    return cases.reference(tied, stage == 3, dtype, STEPS, sequences, max_norm)


def check(results, expected, tolerance):
    losses, weights, norms = expected
    for step, loss in enumerate(losses):
        assert sum(result[0][step] for result in results) == pytest.approx(loss, rel=tolerance)
    for result in results:
        assert result[2] == pytest.approx(norms, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(
                result[1][name],
                weight,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, n=name: f"{n}: {text}",
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "sequences"), [(2, 2), (2, 8), (3, 3)])
@pytest.mark.second_tier("2-2-1", "2-8-3")
def test_equals_one_process(ranks, stage, world, sequences):
    arguments = (torch.float64, sequences, 0.5)
    results = ranks.run(trained, world, "symmetric_memory", "dp", stage, False, *arguments)
    check(results, expected(stage, False, *arguments), 1e-9)


@pytest.mark.parametrize("mesh_kind", ["dp", "alone"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_is_one_process(ranks, stage, mesh_kind):
    arguments = (torch.float64, 3, 0.5)
    results = ranks.run(trained, 1, "symmetric_memory", mesh_kind, stage, True, *arguments)
    check(results, expected(stage, True, *arguments), 1e-12)


def given_the_norm(_group, norm):
    """Of a rank alone: gradients where they are, before and after; weights, masters and moments after a step
    with that norm."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).bfloat16()
    before = model.weight.detach().clone()
    optimizer = pyruntime.shard(model, None).adamw(lr=0.1, max_norm=1.0)
    model(torch.randn(4, 5).bfloat16()).float().square().sum().backward()
    had = model.weight.grad is not None
    square = optimizer.squared_norm()
    expected = torch.nn.utils.get_total_norm([rows.double() for _, rows in optimizer.arrived_rows()]).square()
    torch.testing.assert_close(square, expected, rtol=1e-6, atol=0)
    optimizer.step(norm)
    state = optimizer.state_dict()
    return had, model.weight.grad, before, model.weight.detach(), state["master.weight"]


@pytest.mark.parametrize("norm", [3.0, torch.tensor(3.0, dtype=torch.float64)])
def test_a_rank_alone_steps_by_a_norm_that_is_given_to_it(ranks, norm):
    ((had, left, before, weight, master),) = ranks.run(given_the_norm, 1, norm)
    assert had and left is None
    assert not torch.equal(weight, before) and torch.equal(weight, master.bfloat16())


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_on_the_device_that_is_not_finite_updates_nothing(ranks, norm):
    ((_, left, before, weight, _),) = ranks.run(given_the_norm, 1, torch.tensor(norm))
    assert left is None and torch.equal(weight, before)


@pytest.mark.parametrize("bucket", [1, 1600, 1 << 20])  # 1600: some buckets hold one matrix
@pytest.mark.parametrize("run", [trained, trained_whole])
@pytest.mark.second_tier("trained-1600", "trained_whole-1", "trained_whole-1600")
def test_equals_one_process_whatever_travels_together(ranks, run, bucket):
    arguments = (torch.float64, 2, 0.5)
    results = ranks.run(run, 2, "symmetric_memory", "dp", 2, False, *arguments, 0, bucket)
    check(results, expected(2, False, *arguments), 1e-9)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", [*TRANSPORTS, "device between hosts"])
@pytest.mark.second_tier(but=["hierarchical-0"])
def test_equals_one_process_over_any_transport(ranks, stage, transport):
    results = ranks.run(trained, 4, transport, "dp", stage, True, torch.float64, 4, 0.0)
    check(results, expected(stage, True, torch.float64, 4, 0.0), 1e-9)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.second_tier("1", "3")
def test_hybrid_sharding_equals_one_process(ranks, stage):
    results = ranks.run(trained, 4, "", "hsdp", stage, False, torch.float64, 8, 1.0)
    check(results, expected(stage, False, torch.float64, 8, 1.0), 1e-9)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.second_tier("0", "2")
def test_equals_one_process_in_fp32(ranks, stage):
    results = ranks.run(trained, 2, "symmetric_memory", "dp", stage, False, torch.float32, 4, 1.0)
    check(results, expected(stage, False, torch.float32, 4, 1.0), 2e-6)


def bitwise(group, stage, at_once, keep):
    """Weights after a few steps in bf16, of a model with matrices large enough to leave chunk by chunk."""
    torch.manual_seed(1)
    whole = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).to(torch.bfloat16)
    mesh = DeviceMesh.from_group(group, "cpu")
    handle = pyruntime.shard(whole, mesh, stage=stage, keep_gathered=keep)
    settings = {"nonfinite": "ignore"} if at_once else {"max_norm": 1e9}
    optimizer = handle.adamw(lr=1e-3, **settings)
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(3):
        for more in (True, False):
            x = torch.randn(800, 256, generator=generator).to(torch.bfloat16)
            loss = whole(x).float().square().mean() / 2
            with handle.accumulate() if more else contextlib.nullcontext():
                loss.backward()
        optimizer.step()
    weights = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    handle.close()
    return weights


def test_stages_agree_bitwise_and_with_updates_during_the_backward_pass(ranks):
    cases_ = [(1, False, 0), (2, True, 0), (3, False, 0), (3, True, 2)]
    found = [ranks.run(bitwise, 2, *case)[0] for case in cases_]
    for other in found[1:]:
        for name, weight in found[0].items():
            assert torch.equal(other[name], weight), name


def checkpointed(group, stage):
    """Weights after a few steps of a model whose layers are computed again in the backward pass, and of one
    whose are not."""
    found = []
    for again in (False, True):
        whole = cases.model(False, True, torch.float64)
        if again:
            for layer in whole.layers:
                forward = layer.forward
                layer.forward = functools.partial(checkpoint, forward, use_reentrant=False)
        mesh = DeviceMesh.from_group(group, "cpu")
        handle = pyruntime.shard(whole, mesh, stage=stage, bucket_bytes=BUCKET)
        optimizer = handle.adamw(lr=1e-2)
        cases.train(whole, handle, optimizer, cases.batches(STEPS, 4), group.rank(), 2)
        found.append({name: p.clone() for name, p in whole.state_dict().items()})
        handle.close()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.second_tier("2", "3")
def test_layers_that_are_computed_again_train_alike(ranks, stage):
    for kept, again in ranks.run(checkpointed, 2, stage):
        for name, weight in kept.items():
            assert torch.equal(again[name], weight), name


def again_and_again(group):
    whole = cases.model(False, True, torch.float64)
    mesh = DeviceMesh.from_group(group, "cpu")
    (ids, labels), *_ = cases.batches(1, 2)
    found = []
    for model, axis, found in ((whole, "dp", "[A-Za-z]+ and str"), ("whole", mesh, "str and DeviceMesh")):
        with pytest.raises(TypeError, match=rf"an nn\.Module and a DeviceMesh, .* found: {found}\.$"):
            pyruntime.shard(model, axis)
    with pytest.raises(ValueError, match="stage=4 is none of 0, 1, 2 and 3"):
        pyruntime.shard(whole, mesh, stage=4)
    with pytest.raises(ValueError, match="has no parameter that requires a gradient"):
        pyruntime.shard(nn.Linear(2, 2).requires_grad_(False), mesh)
    handle = pyruntime.shard(whole, mesh, stage=2, bucket_bytes=BUCKET)
    with pytest.raises(ValueError, match="is sharded already"):
        pyruntime.shard(whole, mesh)
    with pytest.raises(ValueError, match="nonfinite='never'"):
        handle.adamw(nonfinite="never")
    optimizer = handle.adamw(max_norm=1.0)
    for _ in range(2):
        whole(ids, labels).backward()
        optimizer.step()
    whole(ids, labels).backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) ran twice without optimizer.step"):
        whole(ids, labels).backward()
    return found


def test_misuse_is_told_of(ranks):
    ranks.run(again_and_again, 2)


def nonfinite(group, kind):
    whole = cases.model(False, True, torch.float64)
    mesh = DeviceMesh.from_group(group, "cpu")
    handle = pyruntime.shard(whole, mesh, stage=2, bucket_bytes=BUCKET)
    optimizer = handle.adamw(nonfinite=kind)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    (ids, labels), *_ = cases.batches(1, 2)
    loss = whole(ids, labels)
    if group.rank() == 1:
        loss = loss * whole.layers[1].up.weight[0, 0] * float("nan")
    loss.backward()
    if kind == "raise":
        with pytest.raises(pyruntime.data_parallel.NonFiniteGradient) as caught:
            optimizer.step()
        assert "layers.1.up.weight" in caught.value.parameters
    else:
        assert optimizer.step().skipped
    after = whole.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    handle.close()


@pytest.mark.parametrize("kind", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_changes_nothing(ranks, kind):
    ranks.run(nonfinite, 2, kind)


def killed_in_backward(group, stage):
    """Rank 1 dies in the middle of the third backward pass; what the others were told, and after how long."""
    comm.configure(group, deadline_s=4.0)
    whole = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    handle = pyruntime.shard(whole, DeviceMesh.from_group(group, "cpu"), stage=stage)
    optimizer = handle.adamw()
    started = 0.0
    try:
        for step in range(5):
            y = whole(torch.randn(8, 256))
            if step == 2 and group.rank() == 1:
                whole[1].weight.register_hook(lambda _: None)
                whole[1].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                y = whole(torch.randn(8, 256))
            started = time.monotonic()
            y.sum().backward()
            optimizer.step()
    except comm.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.second_tier("0")
def test_a_rank_that_dies_in_backward_ends_the_others(ranks, stage):
    outcomes = ranks.launch(killed_in_backward, 3, stage)
    check_others_lost_rank_1(outcomes)


def dropped(group):
    whole = nn.Linear(300, 300)
    handle = pyruntime.shard(whole, DeviceMesh.from_group(group, "cpu"), stage=2)
    optimizer = handle.adamw()
    whole(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    handle.complete()
    gone = weakref.ref(whole.weight)
    del whole, handle, optimizer
    gc.collect()
    return gone() is None


def test_a_sharded_model_is_freed_when_nobody_holds_it(ranks):
    assert ranks.run(dropped, 2) == [True, True]


def made_anew(_group, folder):
    """The process group and a sharded model, twice in one process."""
    rank = int(os.environ["RANK"])
    for turn in range(2):
        store = dist.FileStore(f"{folder}/{turn}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        whole = nn.Linear(300, 300)
        handle = pyruntime.shard(whole, DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        optimizer = handle.adamw()
        for _ in range(2):
            whole(torch.randn(4, 300)).sum().backward()
            optimizer.step()
        handle.close()
        dist.barrier()
        dist.destroy_process_group()
    return turn


def test_a_process_group_is_made_anew_under_its_name(ranks, tmp_path):
    for outcome in ranks.launch(made_anew, 2, str(tmp_path), init=False):
        assert outcome.value == 1, outcome.output


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: nn.Embedding(7, 3, sparse=True), "has sparse gradients"),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), "weight is torch.complex64"),
        (
            lambda: nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last),
            r"weight \[3, 4, 3, 3\] has strides",
        ),
    ],
)
def test_parameters_that_do_not_travel_as_rows_are_refused_at_once(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        pyruntime.shard(nn.Sequential(build()), None)


def test_one_rank_at_stage_3_loads_what_it_saved():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    handle = pyruntime.shard(model, None, stage=3, bucket_bytes=16)
    optimizer = handle.adamw(lr=0.1)
    saved = {name: value.clone() for name, value in handle.state_dict().items()}
    before = model(x)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), before)
    handle.load_state_dict(saved)
    assert torch.equal(model(x), before)

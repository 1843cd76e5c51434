"""A step that is taken ahead of its norm is the step after it, bit by bit, whether it counts or not."""

from __future__ import annotations

import contextlib
import math
from unittest.mock import patch

import pytest
import torch

import pyruntime
from pyruntime.data_parallel import NonFiniteGradient, ShardedAdamW, reducer
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.weight_gathers import AHEAD_ONE_OF
from pyruntime.plan.step import SENT_AHEAD
from tests.data_parallel import cases
from tests.transports import TRANSPORTS, on_transport, take

BUCKET = 400  # bytes: most matrices travel alone, vectors together
STEPS = 7
NO_CLIPPING = 1e9


def barrier():
    """Around steps that wait for their norm."""
    return patch.object(ShardedAdamW, "_goes_ahead", lambda *_: False)


class Watch:
    """Counts weights that left ahead, and steps that were taken back."""

    def __init__(self):
        self.ahead = self.taken_back = 0

    @contextlib.contextmanager
    def around(self):
        begin_ahead, forget = BucketWeights.begin_ahead, ShardedAdamW._forget_ahead

        def begun(each, rows):
            self.ahead += 1
            begin_ahead(each, rows)

        def forgotten(optimizer):
            self.taken_back += 1
            forget(optimizer)

        with (
            patch.object(BucketWeights, "begin_ahead", begun),
            patch.object(ShardedAdamW, "_forget_ahead", forgotten),
        ):
            yield


def made(group, mesh_kind, stage, dtype, rounding="nearest", **options):
    mesh, rank, size = cases.mesh_of(group, mesh_kind)
    whole = cases.model(False, stage == 3, dtype)
    handle = pyruntime.shard(whole, mesh, stage=stage, bucket_bytes=BUCKET)
    return whole, handle, handle.adamw(lr=1e-2, rounding=rounding, **options), rank, size


def states_of(whole, handle, optimizer):
    """All weights, and this rank's rows of all states."""
    found = {name: p.clone() for name, p in whole.state_dict().items()}
    for name, tensor in optimizer.state_dict().items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found[name] = local.clone()
    return found


def stepped(group, mesh_kind, stage, dtype, max_norm, rounding="nearest", poisoned=(), between=None, **more):
    """Reports, and after every step all weights and states. poisoned: steps with a NaN on the last rank."""
    options = {"max_norm": max_norm, "nonfinite": "skip"} | more
    whole, handle, optimizer, rank, size = made(group, mesh_kind, stage, dtype, rounding, **options)
    reports, states = [], []
    for number, (ids, labels) in enumerate(cases.batches(STEPS, 2 * size)):
        mine = range(rank, len(ids), size)
        for one in mine:
            loss = whole(ids[one : one + 1], labels[one : one + 1]) / len(mine)
            if number in poisoned and rank == size - 1:
                loss = loss * math.nan
            with handle.accumulate() if one != mine[-1] else contextlib.nullcontext():
                loss.backward()
        if between is not None:
            between(number, whole, handle, optimizer, states)
        report = optimizer.step()
        reports.append((report.grad_norm, report.skipped))
        states.append(states_of(whole, handle, optimizer))
    handle.close()
    return reports, states


def both(group, transport, mesh_kind, stage, dtype, rounding, clipping, poisoned):
    """How often weights left ahead and steps were taken back. Raises AssertionError where a step is not what
    it is after its norm."""
    take(group, transport)
    least, reducer.LEAST_GEMM = reducer.LEAST_GEMM, 0.0
    try:
        with barrier():
            norms = [norm for norm, _ in stepped(group, mesh_kind, stage, dtype, NO_CLIPPING, rounding)[0]]
            max_norm = {"never": NO_CLIPPING, "always": 1e-3, "sometimes": sorted(norms)[STEPS // 2]}
            max_norm = max_norm[clipping]
            arguments = group, mesh_kind, stage, dtype, max_norm, rounding, poisoned
            reports, states = stepped(*arguments)
        watch = Watch()
        with watch.around():
            found = stepped(*arguments)
    finally:
        reducer.LEAST_GEMM = least
    assert str(found[0]) == str(reports)  # NaN is NaN
    for step, (one, other) in enumerate(zip(found[1], states, strict=True)):
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), f"{name} after step {step}"
    return watch.ahead, watch.taken_back


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clipping", ["never", "sometimes", "always"])
@pytest.mark.second_tier(but=["always-2"])
def test_is_bitwise_the_step_after_its_norm(ranks, stage, clipping):
    found = ranks.run(both, 2, "hierarchical", "dp", stage, torch.bfloat16, "nearest", clipping, ())
    for ahead, taken_back in found:
        # Nothing is taken ahead in the first step, nor after a step that was clipped.
        assert (ahead > 0) == (stage < 3 and clipping != "always")
        assert (taken_back > 0) == (clipping == "sometimes")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.second_tier("2", "3")
def test_a_step_that_is_not_finite_is_taken_back(ranks, stage):
    arguments = (torch.bfloat16, "nearest", "never", (2, 5))
    for _, taken_back in ranks.run(both, 3, "hierarchical", "dp", stage, *arguments):
        assert taken_back == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, "nearest"), (torch.bfloat16, "stochastic")])
@pytest.mark.second_tier(but=["dtype0-nearest-symmetric_memory"])
def test_rows_without_masters_are_taken_back_too(ranks, transport, dtype, rounding):
    for _, taken_back in ranks.run(both, 3, transport, "dp", 2, dtype, rounding, "sometimes", (4,)):
        assert taken_back > 0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.second_tier("1")
def test_replicas_agree(ranks, stage):
    for _, taken_back in ranks.run(both, 4, "", "hsdp", stage, torch.bfloat16, "nearest", "sometimes", (4,)):
        assert taken_back > 0


def read_between(group, stage, what):
    """Steps with something between backward pass and update, and the same steps after their norm."""

    def between(number, whole, handle, optimizer, states):
        if number == 0:
            return
        if what == "lr":
            optimizer.lr = 1e-2 / number
            return
        if what == "forward":
            ids, labels = cases.batches(1, 1)[0]
            with torch.no_grad():
                whole(ids, labels)
        handle.complete()
        for name, parameter in whole.named_parameters():
            assert torch.equal(parameter, states[-1][name]), f"{name} before step {number}"

    arguments = group, "dp", stage, torch.bfloat16, NO_CLIPPING, "nearest", (), between
    watch = Watch()
    with watch.around():
        _, found = stepped(*arguments)
    with barrier():
        _, expected = stepped(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    return watch.ahead


@pytest.mark.parametrize("what", ["complete", "forward", "lr"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.second_tier(but=["2-forward"])
def test_until_the_step_weights_are_those_before_it(ranks, stage, what):
    take_each = ranks.run(read_between, 3, stage, what)
    assert all((ahead > 0) == (stage < 3) for ahead in take_each)


def raising(group, stage):
    """Whether weights are as before a step that raised, and train on."""
    whole, handle, optimizer, _, size = made(group, "dp", stage, torch.bfloat16, max_norm=NO_CLIPPING)
    for number, (ids, labels) in enumerate(cases.batches(4, size)):
        before = {name: p.clone() for name, p in whole.state_dict().items()}
        loss = whole(ids, labels)
        (loss * math.nan if number == 2 else loss).backward()
        if number == 2:
            with pytest.raises(NonFiniteGradient, match=r"head\.weight"):
                optimizer.step()
            after = whole.state_dict()
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        else:
            assert not optimizer.step().skipped
    handle.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_raises_leaves_the_weights_of_before(ranks, stage):
    ranks.run(raising, 2, stage)


def taking_turns(group, apart):
    """The weights of two models that share the ranks, their steps interleaved, or one after the other."""
    made_of = [made(group, "dp", 2, torch.bfloat16, max_norm=NO_CLIPPING) for _ in range(2)]
    data = cases.batches(4, made_of[0][4])

    def pass_of(model, number):
        ids, labels = data[number]
        model(ids, labels).backward()

    (one, handle, optimizer, *_), (two, another, other, *_) = made_of
    for number in range(4):
        pass_of(one, number)
        if apart:
            optimizer.step()
        pass_of(two, number)
        other.step()
        if not apart:
            optimizer.step()
        one(*data[0])  # weights come back between the other's
    for each in (handle, another):
        each.close()
    return [{name: p.clone() for name, p in model.state_dict().items()} for model in (one, two)]


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
@pytest.mark.second_tier("process_group")
def test_two_models_of_one_group_train_as_one_after_the_other(ranks, transport):
    for rank in range(2):
        found = [ranks.run(on_transport, 2, transport, taking_turns, apart)[rank] for apart in (True, False)]
        for apart, mixed in zip(*found, strict=True):
            assert all(torch.equal(mixed[name], tensor) for name, tensor in apart.items())


def test_the_planner_knows_how_many_weights_leave_ahead_on_devices():
    assert SENT_AHEAD == 1 / AHEAD_ONE_OF

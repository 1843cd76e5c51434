"""Ranks whose ops would pair with others than the user means: an error on all, and no wrong result."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from torch import nn

import pyruntime
from pyruntime import nn as parallel
from pyruntime import ops
from pyruntime.comm import group_rank, group_size
from tests.transports import TRANSPORTS, take

DEADLINE_S = 5.0
ERRORS = (pyruntime.CommError, ValueError)


def two_threads_case(group, transport):
    """A second thread calls an op while the first is inside one: what each of them was told."""
    take(group, transport)
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    ops.all_reduce(torch.ones(4), group)
    rank, told = group_rank(group), {}

    def second():
        time.sleep(0.3)
        try:
            told["second"] = ops.all_reduce(torch.full((4,), 100.0), group).tolist()
        except ERRORS as error:
            told["second"] = f"{type(error).__name__}: {error}"

    other = threading.Thread(target=second, name="the second")
    if rank == 0:
        other.start()
    else:
        time.sleep(1.0)  # so that the first is inside on rank 0 for so long
    try:
        told["first"] = ops.all_reduce(torch.ones(4), group).tolist()
    except ERRORS as error:
        told["first"] = f"{type(error).__name__}: {error}"
    if rank == 0:
        other.join()
    try:
        ops.all_reduce(torch.ones(4), group)
    except ERRORS as error:
        told["later"] = str(error)
    return told


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["hierarchical"])
def test_two_threads_in_one_group_are_refused_before_a_result(ranks, transport):
    outcomes = ranks.launch(two_threads_case, 2, transport)
    for outcome in outcomes:
        assert outcome.error is None, outcome
        first, later = outcome.value["first"], outcome.value["later"]
        assert "used by two threads at once on rank 0" in first or "two threads" in first, first
        assert "two threads" in later or "cannot go on" in later, later
    second = outcomes[0].value["second"]
    assert re.search(r"thread \d+ \(the second\) called all_reduce while thread \d+ \(MainThread\)", second)
    assert "make a group for each thread" in second


def racing_case(group, rounds):
    """Two threads on each rank call the same op with values of their own. Wrong results, and errors."""
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    ops.all_reduce(torch.ones(4), group)
    size, start, wrong, told = group_size(group), threading.Barrier(2), [], []

    def run(value):
        start.wait()
        try:
            for _ in range(rounds):
                found = ops.all_reduce(torch.full((4,), value), group)
                if found.tolist() != [value * size] * 4:
                    wrong.append(found.tolist())
        except ERRORS as error:
            told.append(str(error))

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 100.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong, told


def test_threads_that_race_end_in_an_error_that_names_them(ranks):
    for outcome in ranks.launch(racing_case, 2, 2000):
        wrong, told = outcome.value
        # The thread that comes after the error is told that there was one.
        assert any("two threads" in message for message in told), (wrong, told)
        assert all("two threads" in message or "cannot go on" in message for message in told), (wrong, told)


def one_after_another_case(group):
    """Threads that take turns, and backward in a thread of its own."""
    found, size = [], group_size(group)
    for value in range(8):
        thread = threading.Thread(
            target=lambda value=value: found.append(ops.all_reduce(torch.full((2,), float(value)), group))
        )
        thread.start()
        thread.join()
        found.append(ops.all_reduce(torch.full((2,), float(value)), group))
    assert [int(each[0]) for each in found] == [size * value for value in range(8) for _ in range(2)]
    x = torch.ones(4, 3, requires_grad=True)
    y = ops.matmul_reduce_scatter(x, torch.ones(5, 3, requires_grad=True), group).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert x.grad is not None


def test_threads_may_take_turns(ranks):
    ranks.run(one_after_another_case, 2)


class Raised(Exception):
    """Of the user's code."""


def linears_case(group, transport, where):
    """A step of two column and row linears, of equal shapes; in the backward pass of step 1 the user's hook
    raises on rank 1, which catches that and goes on. The steps that this rank has done, and its error."""
    take(group, transport)
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            kind(8, 8, group=group, bias=False)
            for _ in range(2)
            for kind in (parallel.ColumnParallelLinear, parallel.RowParallelLinear)
        )
    )
    step = 0

    def hook(_):
        if step == 1 and group_rank(group) == 1:
            raise Raised("not a number")

    done, error = [], ""
    x = torch.randn(8, 8).tensor_split(group_size(group))[group_rank(group)].clone().requires_grad_()
    try:
        for step in range(4):
            found = x
            losses = []
            for _ in range(2):  # two micro-batches, whose passes backward follow each other
                found = x
                for index, layer in enumerate(model):
                    found = layer(found)
                    if index == where:
                        found.register_hook(hook)
                losses.append(found.sum())
            for loss in losses:
                try:
                    loss.backward()
                except Raised:
                    continue
            done.append(step)
    except ERRORS as caught:
        error = f"{type(caught).__name__}: {caught}"
    return done, error


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["symmetric_memory-1"])
def test_linears_after_a_backward_that_raised_on_one_rank(ranks, transport, where):
    for outcome in ranks.launch(linears_case, 2, transport, where):
        done, error = outcome.value
        assert done == [0], outcome
        assert "Ranks disagree" in error and "in backward pass" in error, error
        assert "may have left a forward or backward pass by an exception" in error, error


def sharded_case(group, stage, where, goes_on):
    """The same with data parallelism. goes_on: with the optimizer's step, or with the next batch."""
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    handle = pyruntime.shard(model, mesh, stage=stage)
    optimizer = handle.adamw(lr=1e-3)
    step = 0

    def hook(_):
        if step == 2 and group_rank(group) == 1:
            raise Raised("not a number")

    done, error = [], ""
    try:
        for step in range(5):
            found = torch.randn(4, 8)
            for index, layer in enumerate(model):
                found = layer(found)
                if index == where:
                    found.register_hook(hook)
            try:
                found.square().sum().backward()
            except Raised:
                if not goes_on:
                    continue
            optimizer.step()
            done.append(step)
    except ERRORS as caught:
        error = f"{type(caught).__name__}: {caught}"
    return done, error


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.second_tier(but=["3-2-False"])
def test_sharded_data_parallelism_after_a_backward_that_raised_on_one_rank(ranks, stage, where, goes_on):
    for rank, outcome in enumerate(ranks.launch(sharded_case, 2, stage, where, goes_on)):
        assert outcome.error is None, (rank, outcome)
        done, error = outcome.value
        assert done == [0, 1], (rank, outcome)
        assert "Ranks disagree" in error and "after 1 pass that an exception ended" in error, error


def forward_case(group, kind, where):
    """Training in which the forward pass of step 2 raises in one layer of rank 1, which catches that and goes
    on with the next batch."""
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    if kind == "by hand":
        kinds = (parallel.ColumnParallelLinear, parallel.RowParallelLinear) * 2
        model = nn.Sequential(*(layer(8, 8, group=group, bias=False) for layer in kinds))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    elif kind == "tp":
        model = pyruntime.parallelize(model, group, {"*": "column_gather"})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        optimizer = pyruntime.shard(model, mesh, stage=kind).adamw(lr=1e-3)
    step = 0

    def hook(*_):
        if step == 2 and group_rank(group) == 1:
            raise Raised("not a number")

    model[where].register_forward_pre_hook(hook)
    done, error = [], ""
    x = torch.randn(8, 8)
    if kind == "by hand":
        x = x.tensor_split(2)[group_rank(group)]
    try:
        for step in range(5):
            try:
                found = model(x)
            except Raised:
                continue
            optimizer.zero_grad()
            found.square().sum().backward()
            optimizer.step()
            done.append(step)
    except ERRORS as caught:
        error = f"{type(caught).__name__}: {caught}"
    return done, error


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("kind", [1, 2, 3, "tp"])
@pytest.mark.second_tier(but=["2-0"])
def test_a_forward_that_raised_on_one_rank_is_told_to_all(ranks, kind, where):
    for rank, outcome in enumerate(ranks.launch(forward_case, 2, kind, where)):
        assert outcome.error is None, (rank, outcome)
        done, error = outcome.value
        assert done == [0, 1], (rank, outcome)
        assert "Ranks disagree" in error and "after 1 pass that an exception ended" in error, error
        assert "rank 1" in error and "left a forward or backward pass by an exception" in error, error


def test_layers_without_a_root_disagree_before_the_step_ends(ranks):
    """No hook sees the user's own model: ops are missing when the other rank goes backward."""
    for rank, outcome in enumerate(ranks.launch(forward_case, 2, "by hand", 2)):
        assert outcome.error is None, (rank, outcome)
        done, error = outcome.value
        assert done == [0, 1] and "Ranks disagree" in error and "in forward pass" in error, error


def alike_case(group):
    """All ranks' forward passes raise in the same step, one of them while it handles another error."""
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    torch.manual_seed(0)
    model = pyruntime.parallelize(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), group, {"*": "column_gather"}
    )
    for width in (8, 7, 8):
        try:
            model(torch.ones(4, width)).sum().backward()
        except ValueError:
            model(torch.ones(4, 8)).sum().backward()
    if group_rank(group) == 1:
        try:
            raise Raised
        except Raised:
            model(torch.ones(4, 8))
    else:
        model(torch.ones(4, 8))
    return float(ops.all_reduce(torch.ones(1), group))


def test_forwards_that_raise_on_all_ranks_alike_may_be_caught(ranks):
    assert ranks.run(alike_case, 2) == [2.0, 2.0]


class RefusesRows(nn.Module):
    """Code of a model that raises on rank 1 where only its rows come, as the first call tries."""

    def __init__(self, group):
        super().__init__()
        self.raises = group_rank(group) == 1
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.raises and self.calls == 2:
            raise Raised("in a trial")
        return x


def trial_case(group):
    """The first call's own trials of a model may raise on one rank: whether ranks disagree after that."""
    pyruntime.comm.set_deadline(group, DEADLINE_S)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), RefusesRows(group), nn.Linear(8, 8))
    model = pyruntime.parallelize(model, group, {"0": "column", "2": "row"})
    try:
        model(torch.ones(4, 8))
    except ValueError as error:
        return "Ranks disagree" in str(error), float(ops.all_reduce(torch.ones(1), group))
    return False, float(ops.all_reduce(torch.ones(1), group))


def test_a_trial_of_the_first_call_is_no_pass(ranks):
    assert ranks.run(trial_case, 2) == [(False, 2.0)] * 2

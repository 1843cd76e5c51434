"""Muon: its arithmetic, and that a matrix is updated alike wherever its pieces lie."""

from __future__ import annotations

import contextlib
import time
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pyruntime
from pyruntime import comm
from pyruntime.comm.core import _C
from pyruntime.data_parallel import Muon, ShardedAdamW
from pyruntime.data_parallel.muon import Matrix, owners
from pyruntime.data_parallel.pieces import MatrixCut
from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelExperts,
    RowParallelLinear,
)
from tests.data_parallel import cases
from tests.transports import TRANSPORTS, take

LR, DECAY, STEPS, BUCKET = 0.01, 0.1, 4, 400


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """What Newton-Schulz makes of a matrix, by its singular values, in fp64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(7, 7), (3, 41), (53, 17), (1, 9), (9, 1), (130, 70)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    found = _C.NewtonSchulz(matrix).finish()
    torch.testing.assert_close(found, orthogonal(matrix), rtol=1e-9, atol=1e-9)
    found = _C.NewtonSchulz(matrix.bfloat16()).finish()
    assert found.dtype == torch.bfloat16
    torchs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    for one in (found, torchs):
        assert (one.double() - orthogonal(matrix)).norm() <= 0.05 * min(shape) ** 0.5


def test_newton_schulz_of_nothing_is_nothing_and_of_what_is_no_matrix_refused():
    assert not _C.NewtonSchulz(torch.zeros(5, 3)).finish().any()
    assert _C.NewtonSchulz(torch.zeros(0, 3)).finish().shape == (0, 3)
    for wrong in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="give it a matrix of floating-point numbers"):
            _C.NewtonSchulz(wrong)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and parameter.requires_grad and not name.startswith(("embed", "head"))
    ]


def reference(steady: bool, sequences: int, max_norm: float):
    """One process with torch's optimizers, but for Newton-Schulz, which torch has in bf16."""
    whole = cases.model(False, steady, torch.float64)
    matrices, trained = matrices_of(whole), [p for p in whole.parameters() if p.requires_grad]
    rest = [p for p in trained if all(p is not matrix for matrix in matrices)]
    decayed = [{"params": [p], "weight_decay": DECAY if p.dim() >= 2 else 0.0} for p in rest]
    optimizers = [
        torch.optim.AdamW(decayed, lr=LR, betas=(0.9, 0.95)),
        torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
    ]
    with patch("torch.optim._muon._zeropower_via_newtonschulz", lambda update, *_: orthogonal(update)):
        for ids, labels in cases.batches(STEPS, sequences):
            for one in range(sequences):
                (whole(ids[one : one + 1], labels[one : one + 1]) / sequences).backward()
            nn.utils.clip_grad_norm_(trained, max_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: weight.detach() for name, weight in whole.state_dict().items()}


def made(group, mesh_kind, stage, dtype, **options):
    mesh, rank, size = cases.mesh_of(group, mesh_kind)
    whole = cases.model(False, stage == 3, dtype)
    handle = pyruntime.shard(whole, mesh, stage=stage, bucket_bytes=BUCKET)
    muon = Muon(matrices_of(whole))
    return whole, handle, handle.adamw(lr=LR, muon=muon, **options), rank, size


def trained(group, transport, mesh_kind, stage, sequences, max_norm):
    if transport:
        take(group, transport)
    whole, handle, optimizer, rank, size = made(group, mesh_kind, stage, torch.float64, max_norm=max_norm)
    cases.train(whole, handle, optimizer, cases.batches(STEPS, sequences), rank, size)
    weights = {name: weight.clone() for name, weight in whole.state_dict().items()}
    handle.close()
    return weights


def check(results, expected):
    for weights in results:
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 0), (3, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("max_norm", [1e9, 0.5])
@pytest.mark.second_tier(but=["1000000000.0-2-0"])
def test_equals_one_process(ranks, world, stage, max_norm):
    found = ranks.run(trained, world, "symmetric_memory", "dp", stage, 6, max_norm)
    check(found, reference(stage == 3, 6, max_norm))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["symmetric_memory"])
def test_equals_one_process_over_any_transport(ranks, transport):
    check(ranks.run(trained, 4, transport, "dp", 2, 4, 1e9), reference(False, 4, 1e9))


def test_replicas_equal_one_process(ranks):
    check(ranks.run(trained, 4, "", "hsdp", 1, 8, 1e9), reference(False, 8, 1e9))


def stepped(group, stage, max_norm, ahead):
    """Weights and states after every step, of which one is not finite; and how many buckets' matrices left
    before its norm was known, and after."""
    whole, handle, optimizer, rank, size = made(
        group, "dp", stage, torch.bfloat16, max_norm=max_norm, nonfinite="skip"
    )
    left, states = [], []
    begin = type(optimizer._muon).begin

    def begun(muon, bucket, gradients, scale):
        if any(state.matrices for state, _ in gradients):
            left.append(len(states))
        begin(muon, bucket, gradients, scale)

    never = patch.object(ShardedAdamW, "_was_plain", property(lambda _: False, lambda *_: None), create=True)
    with contextlib.nullcontext() if ahead else never, patch.object(type(optimizer._muon), "begin", begun):
        for number, (ids, labels) in enumerate(cases.batches(6, size)):
            loss = whole(ids[rank : rank + 1], labels[rank : rank + 1])
            (loss * float("nan") if number == 3 else loss).backward()
            square = optimizer.squared_norm().view(1)
            early = left.count(number)
            optimizer.step(float(pyruntime.ops.all_gather_stats(square, group).sum().sqrt()))
            handle.complete()
            found = {name: weight.clone() for name, weight in whole.state_dict().items()}
            for name, tensor in optimizer.state_dict().items():
                found[name] = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()
            states.append(found | {"left": (early, left.count(number) - early)})
    handle.close()
    return states


@pytest.mark.parametrize(("stage", "max_norm"), [(1, 1e9), (2, 0.45), (3, 1e-3)])
@pytest.mark.second_tier("2-0.45", "3-0.001")
def test_what_left_before_the_norm_was_known_is_bitwise_the_step_after_it(ranks, stage, max_norm):
    early = ranks.run(stepped, 3, stage, max_norm, True)
    after = ranks.run(stepped, 3, stage, max_norm, False)
    for one, other in zip(early, after, strict=True):
        left = [step.pop("left") for step in one]
        assert not any(step.pop("left")[0] for step in other)
        assert any(before for before, _ in left) == (max_norm > 0.1) and left[0][0] == 0
        assert any(before and again for before, again in left) == (max_norm == 0.45)
        for step, wanted in zip(one, other, strict=True):
            assert all(torch.equal(step[name], tensor) for name, tensor in wanted.items())


class Layer(nn.Module):
    """Parallel linears of ragged sizes, whose gradients are given."""

    def __init__(self, group, dtype, device="cpu"):
        super().__init__()
        options = {"group": group, "dtype": dtype, "device": device, "bias": False}
        self.merged = MergedColumnParallelLinear(22, {"q": 19, "k": 7}, **options)
        self.column = ColumnParallelLinear(22, 31, **options)
        self.row = RowParallelLinear(31, 22, **options)
        generator = torch.Generator().manual_seed(7)
        for module in (self.merged, self.column, self.row):
            layout = module.weight.tp_layout
            full = {part.key: torch.randn(part.shape, generator=generator) for part in layout.parts}
            module.load_full({key: weight.to(dtype) for key, weight in full.items()})
            grads = [
                {part.key: torch.randn(part.shape, generator=generator) for part in layout.parts}
                for _ in range(3)
            ]
            module.given = [layout.gather_parts(each).to(dtype).to(device) for each in grads]

    def forward(self, step):
        modules = (self.merged, self.column, self.row)
        return sum((module.weight * module.given[step]).sum() for module in modules)


_meshes: dict = {}


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """Of the pool's ranks, made once."""
    if (dp, tp) not in _meshes:
        _meshes[dp, tp] = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return _meshes[dp, tp]


def given(group, mesh_kind, stage, dtype):
    """Whole weights after three steps along the same gradients on every rank."""
    tp_group, dp = group, None
    if mesh_kind == "both":
        tp_group, dp = (mesh_of(2, 2)[name] for name in ("tp", "dp"))
    elif mesh_kind == "dp":
        tp_group, dp = None, DeviceMesh.from_group(group, "cpu")
    model = Layer(tp_group, dtype)
    handle = pyruntime.shard(model, dp, stage=stage, bucket_bytes=1)
    optimizer = handle.adamw(lr=LR, max_norm=1e9, muon=Muon(list(model.parameters())))
    for step in range(3):
        model(step).backward()
        optimizer.step()
    state = {**handle.state_dict(), **optimizer.state_dict()}
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }
    handle.close()
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.second_tier("dtype0")
def test_is_bitwise_the_same_on_one_rank_and_many_given_the_same_gradients(ranks, dtype):
    (alone,) = ranks.run(given, 1, "dp", 1, dtype)
    assert any(name.startswith("momentum.") for name in alone)
    # Powers of two, whose sums of equal gradients are exact.
    layouts = [(4, "both", 1), (4, "both", 3), (4, "dp", 2), (2, "dp", 0), (2, "tp", 1), (3, "tp", 1)]
    for world, mesh_kind, stage in layouts:
        for whole in ranks.run(given, world, mesh_kind, stage, dtype):
            assert whole.keys() == alone.keys()
            for name, value in alone.items():
                assert torch.equal(whole[name], value), (name, world, mesh_kind, stage)


def of_experts(group):
    """Whether gate, up and down of each expert step as torch's Muon steps them one by one."""
    experts = ParallelExperts(3, 7, 5, group=group, dtype=torch.float64)
    halves = [each.detach().clone() for each in experts.gate_up_proj.detach().reshape(6, 5, 7)]
    downs = [each.detach().clone() for each in experts.down_proj.detach()]
    singles = [nn.Parameter(each) for each in (*halves, *downs)]
    torchs = torch.optim.Muon(singles, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    handle = pyruntime.shard(experts, None)
    muon = Muon(stacks={experts.gate_up_proj: 2, experts.down_proj: 1})
    optimizer = handle.adamw(lr=LR, weight_decay=DECAY, muon=muon)
    for step in range(STEPS):
        x, ids = torch.randn(9, 7, dtype=torch.float64), torch.rand(9, 3).topk(2).indices
        (experts(x, ids, torch.rand(9, 2).double()) ** 2).sum().backward()
        gradients = [*experts.gate_up_proj.grad.reshape(6, 5, 7), *experts.down_proj.grad]
        for single, gradient in zip(singles, gradients, strict=True):
            single.grad = gradient.clone()
        optimizer.step()
        with patch("torch.optim._muon._zeropower_via_newtonschulz", lambda update, *_: orthogonal(update)):
            torchs.step()
        found = [*experts.gate_up_proj.detach().reshape(6, 5, 7), *experts.down_proj.detach()]
        for one, other in zip(found, singles, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-9, msg=f"step {step}")


def test_experts_step_each_by_itself(ranks):
    ranks.run(of_experts, 1)


def test_every_rank_owns_about_as_much():
    def matrix(rows, columns, tp=2, shards=3):
        local = (rows // tp, columns)
        return Matrix(
            (rows, columns), MatrixCut(local, 0, shards), MatrixCut((rows, columns), 0, tp), "tp", 0
        )

    shapes = [(64, 64), (128, 64), (64, 128), (32, 64)] * 9
    found = owners([matrix(*shape) for shape in shapes])
    load = dict.fromkeys(((shard, tp) for shard in range(3) for tp in range(2)), 0)
    for owner, shape in zip(found, shapes, strict=True):
        load[owner] += matrix(*shape).work
    assert max(load.values()) <= 1.1 * min(load.values())


def waiting(group):
    """Of a rank whose peer is late by a second: seconds that it multiplied meanwhile, and those left."""
    take(group, "symmetric_memory")
    name, late = comm.group_name(group), comm.group_rank(group) == 1
    pyruntime.ops.all_gather_stats(torch.zeros(1), name)
    matrix = torch.randn(600, 700)
    alone = _C.NewtonSchulz(matrix).finish()
    with pyruntime.ledger() as ledger:
        product = None if late else _C.NewtonSchulz(matrix)
        if late:
            time.sleep(1.0)
        pyruntime.ops.all_gather_stats(torch.zeros(1), name)
        waited = time.monotonic()
        assert product is None or torch.equal(product.finish(), alone)
    entries = [each for each in ledger.stretch.entries if each.name == "newton_schulz"]
    return sum(each.end <= waited for each in entries), sum(each.end > waited for each in entries)


def test_a_rank_that_waits_for_another_multiplies(ranks):
    (during, afterwards), _ = ranks.run(waiting, 2)
    assert during > 15 and afterwards == 0


def test_what_muon_cannot_update_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).bfloat16()
    for muon, options, words in [
        (Muon([model[1].weight]), {}, "Muon updates only matrices;"),
        (Muon([nn.Parameter(torch.zeros(2, 2))]), {}, "no trainable parameters of the model"),
        (Muon([model[0].weight]), {"rounding": "stochastic"}, 'use "nearest"'),
    ]:
        handle = pyruntime.shard(model, None)
        with pytest.raises(ValueError, match=words):
            handle.adamw(muon=muon, **options)
        handle.close()

"""Linears and norms over the axes x and y, and z as ZeRO 3: against numpy and torch in double precision."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pyruntime
from pyruntime.nn import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    clip_grad_norm_,
    grad_norm,
    shard_bounds,
)
from pyruntime.ops.layers import rms_norm
from tests.any_model.test_auto import BATCH, build
from tests.nn.cases import assert_near

K, HIDDEN, N = 10, 22, 14
WIDE, NARROW = 22, 10  # where a GEMM hides what travels over x
ROWS = 13


@functools.cache
def mesh_of(**sizes):
    """A mesh of all ranks of the pool."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def piece(full, *cuts):
    """The block of `full` that this rank holds, by (dimension, axis) of each cut."""
    for dim, axis in cuts:
        start, stop = shard_bounds(full.shape[dim], axis.size(), axis.get_local_rank())
        full = full.narrow(dim, start, stop - start)
    return full.contiguous()


def rows_of(full, axis):
    return full.tensor_split(axis.size())[axis.get_local_rank()]


def chained_on_2x2x2(group, operands):
    """Two chained layers: this rank's result, dX and pieces of gradients, what numpy has in their places, and
    the elements of the first weight that the rank keeps."""
    mesh = mesh_of(z=2, tp=2, tp_y=2)
    z, x, y = (mesh[name] for name in mesh.mesh_dim_names)
    full = {name: torch.from_numpy(value) for name, value in operands.items()}
    options = {"group": mesh["tp", "tp_y"], "dtype": torch.float64}
    net = nn.Sequential(
        ColumnParallelLinear(WIDE, NARROW, True, **options), RowParallelLinear(NARROW, N, True, **options)
    )
    for layer, number in ((net[0], 1), (net[1], 2)):
        layer.load_full({"weight": full[f"w{number}"], "bias": full[f"b{number}"]})
    handle = pyruntime.shard(net, z, stage=3, bucket_bytes=64)
    optimizer = handle.adamw()

    def mine(value):
        return piece(rows_of(rows_of(value, z), x), (1, y))

    own = mine(full["x"]).requires_grad_()
    result = net(own)
    result.backward(mine(full["dy"]))
    optimizer.squared_norm()  # gradients have come when it returns
    pieces = {state.part.key: rows.clone() for state, rows in optimizer.arrived_rows()}
    kept = handle.state_dict()["0.weight"].to_local().numel()
    handle.close()
    expected = {
        "result": mine(full["out"]),
        "dx": mine(full["dx"]),
        "0.weight": piece(full["dw1"], (0, x), (1, y), (0, z)),
        "0.bias": piece(full["db1"], (0, x), (0, z)),
        "1.weight": piece(full["dw2"], (0, y), (1, x), (0, z)),
        "1.bias": piece(full["db2"], (0, y), (0, z)),
    }
    return {"result": result.detach(), "dx": own.grad, **pieces}, expected, kept


@pytest.mark.second_tier
def test_two_chained_layers_on_2x2x2_are_those_of_numpy(ranks):
    draw = np.random.default_rng(random.getrandbits(64)).standard_normal
    given = {
        "x": draw((2 * ROWS, WIDE)), "dy": draw((2 * ROWS, N)),
        "w1": draw((NARROW, WIDE)), "b1": draw(NARROW), "w2": draw((N, NARROW)), "b2": draw(N),
    }  # fmt: skip
    middle, back = given["x"] @ given["w1"].T + given["b1"], given["dy"] @ given["w2"]
    computed = {
        "out": middle @ given["w2"].T + given["b2"], "dx": back @ given["w1"],
        "dw1": back.T @ given["x"], "db1": back.sum(0),
        "dw2": given["dy"].T @ middle, "db2": given["dy"].sum(0),
    }  # fmt: skip
    for rank, (found, expected, kept) in enumerate(ranks.run(chained_on_2x2x2, 8, given | computed)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(found[name], value, f"{name} of rank {rank}", 1e-12)
        assert kept in (3 * 11, 2 * 11)  # of 10 x 22, halved by x and y, and by z as far as rows go


def block(group, sizes, given, fp64):
    """A norm, merged columns and a row linear, over two axes or one: what may be compared, whole."""
    mesh = mesh_of(**sizes)
    x = mesh["tp"]
    y = mesh["tp_y"] if "tp_y" in sizes else None
    cut = mesh["tp", "tp_y"] if y is not None else x
    options = {"group": cut, "dtype": torch.float64 if fp64 else torch.float32}
    net = nn.ModuleDict(
        {
            "norm": RMSNorm(K, **options),
            "up": MergedColumnParallelLinear(K, {"a": HIDDEN, "b": HIDDEN}, True, **options),
            "down": RowParallelLinear(HIDDEN, N, True, **options),
        }
    )
    net.load_state_dict({name: value.to(options["dtype"]) for name, value in given["state"].items()})

    def mine(name):
        value = rows_of(given[name].to(options["dtype"]), x)
        return value.contiguous() if y is None else piece(value, (1, y))

    own = mine("x").requires_grad_()
    a, b = net["up"](net["norm"](own)).chunk(2, -1)
    result = net["down"](a * b)
    result.backward(mine("dy"))
    norms = grad_norm(net.parameters(), cut), nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    gradients = {
        f"{name}.{key}": value.full_tensor()
        for name, module in net.items()
        for parameter in module.parameters()
        for key, value in parameter.tp_layout.to_dtensors(parameter.grad.as_subclass(torch.Tensor)).items()
    }
    state = {name: value.full_tensor() for name, value in net.state_dict().items()}
    place = (x.get_local_rank(), 0 if y is None else y.get_local_rank())
    return place, {"result": result.detach(), "dx": own.grad}, gradients, norms, state


@pytest.fixture
def given():
    shapes = {
        "norm.weight": (K,), "up.a.weight": (HIDDEN, K), "up.b.weight": (HIDDEN, K), "up.a.bias": (HIDDEN,),
        "up.b.bias": (HIDDEN,), "down.weight": (N, HIDDEN), "down.bias": (N,),
    }  # fmt: skip
    state = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    like = {"dtype": torch.float64}
    return {"state": state, "x": torch.randn(ROWS, K, **like), "dy": torch.randn(ROWS, N, **like)}


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
@pytest.mark.second_tier("(1, 4)")
def test_a_block_at_ragged_sizes_is_torchs(ranks, given, sizes):
    state = {name: value.clone().requires_grad_() for name, value in given["state"].items()}
    x = given["x"].clone().requires_grad_()
    normed = rms_norm(x, state["norm.weight"], 1e-6)
    a, b = (normed @ state[f"up.{part}.weight"].T + state[f"up.{part}.bias"] for part in "ab")
    result = (a * b) @ state["down.weight"].T + state["down.bias"]
    result.backward(given["dy"])
    norm = torch.stack([value.grad.square().sum() for value in state.values()]).sum().sqrt()
    found = ranks.run(block, 4, {"tp": sizes[0], "tp_y": sizes[1]}, given, True)
    for place, local, gradients, norms, kept in found:
        for name, whole in (("result", result.detach()), ("dx", x.grad)):
            own = whole.tensor_split(sizes[0])[place[0]].chunk(sizes[1], 1)[place[1]]
            assert_near(local[name], own, f"{name} of {place}", 1e-12)
        for name, value in state.items():
            assert_near(gradients[name], value.grad, f"gradient of {name} on {place}", 1e-12)
            assert torch.equal(kept[name], value)
        for each in norms:
            assert_near(each.double(), norm, "norm", 1e-10)
    assert len({tuple(map(float, norms)) for _, _, _, norms, _ in found}) == 1


def test_x_alone_is_tensor_parallelism_bitwise(ranks, given):
    found = ranks.run(block, 4, {"tp": 4, "tp_y": 1}, given, False)
    twins = ranks.run(block, 4, {"tp": 4}, given, False)
    for (_, local, gradients, norms, _), (_, wanted, of_twin, norms_of_twin, _) in zip(
        found, twins, strict=True
    ):
        assert all(torch.equal(local[name], wanted[name]) for name in wanted)
        assert all(torch.equal(gradients[name], of_twin[name]) for name in of_twin)
        assert norms == norms_of_twin


def refusals(group):
    """What linears over two axes refuse: parts, a norm over x alone, adapters."""
    mesh = mesh_of(tp=2, tp_y=2)
    found = []
    with pytest.raises(ValueError) as caught:
        ColumnParallelLinear(6, 12, group=mesh, packed=(4, 4, 4))
    found.append(str(caught.value))
    layer = ColumnParallelLinear(6, 12, True, group=mesh)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    grad_norm([layer.bias], mesh["tp"])  # which y does not cut
    for norm in (grad_norm, functools.partial(clip_grad_norm_, max_norm=1.0)):
        with pytest.raises(ValueError) as caught:
            norm(layer.parameters(), group=mesh["tp"])
        found.append(str(caught.value))
    adapters = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for whole in (get_peft_model(build("Llama"), adapters), build("Phi3")):
        with pytest.raises(ValueError) as caught:
            pyruntime.parallelize(whole, mesh, "auto")
        found.append(str(caught.value))
    return found


def test_what_does_not_go_with_two_axes_is_refused(ranks):
    for parts, norm, clip, adapters, fused in ranks.run(refusals, 4):
        assert parts == (
            "A linear of the parts [4, 4, 4] is cut part by part, which works over one axis only; use a mesh "
            "of one dimension."
        )
        assert norm == clip and "A parameter of shape [6, 3] is cut over group" in norm
        assert ".q_proj has adapters of peft" in adapters
        assert "qkv_proj" in fused and "over one axis only" in fused


def fused_linears_over_y(group):
    whole = build("Phi3")
    model = pyruntime.parallelize(copy.deepcopy(whole), mesh_of(tp=1, tp_y=4), "auto")
    pyruntime.verify(model, whole, BATCH, tolerance=1e-5)


def test_fused_linears_that_x_does_not_cut(ranks):
    ranks.run(fused_linears_over_y, 4)

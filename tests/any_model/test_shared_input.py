"""Column linears that read one input run as one op, and stop where they turn out not to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from pyruntime import explain, parallelize, shard
from pyruntime.any_model.activations.shared_input import SeenInputs
from pyruntime.any_model.layer_hooks import ColumnHook, CutModel
from pyruntime.nn import ColumnParallelLinear, TensorGroup
from tests.any_model.test_auto import BATCH, build
from tests.nn.cases import assert_near

SUM = "pyruntime::replicated_matmul_backward"
PLAN = {"[abc]": "column", "down": "row"}


class Net(nn.Module):
    """a and b read x; c reads what the call says."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x, how: str = "one input"):
        x = x.tanh()
        h = self.a(x)
        if how != "without b":
            h = h * self.b(x)
        return self.down(h + self.c(x * 2 if how == "another for c" else x).sin())


def seeded_net() -> Net:
    torch.manual_seed(0)
    return Net()


def sums_of(y: torch.Tensor) -> int:
    """How many sums of dX its backward pass makes."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        y.square().sum().backward()
    return sum(event.count for event in found.key_averages() if event.key == SUM)


def compared(model: nn.Module, whole: nn.Module, how: str) -> int:
    """Outputs and gradients of both; how many sums of dX."""
    draws = torch.Generator().manual_seed(1)
    x, x_whole = (torch.randn(5, 8, generator=draws.manual_seed(1)).requires_grad_() for _ in range(2))
    for each in (model, whole):
        each.zero_grad()
    y, expected = model(x, how), whole(x_whole, how)
    assert_near(y, expected, how)
    sums = sums_of(y)
    expected.square().sum().backward()
    assert_near(x.grad, x_whole.grad, f"dX {how}")
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            layout = p.tp_layout
            assert_near(p.grad, layout.local_part(layout.parts[0], q.grad), f"{name} {how}")
    return sums


def one_sum_for_what_reads_one_input(group) -> list[tuple[str, int, int]]:
    """(call, sums, linears that share)."""
    said = []
    for second in ("one input", "another for c", "without b"):
        whole = seeded_net()
        model = parallelize(copy.deepcopy(whole), group, PLAN)
        for how in ("one input", second, "one input"):
            sums = compared(model, whole, how)
            said.append((how, sums, sum(map(len, explain(model).shared))))
    return said


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.second_tier("3")
def test_it_ends_where_they_read_another(ranks, world_size):
    together, alone = ("one input", 1, 3), ("one input", 3, 0)
    for said in ranks.run(one_sum_for_what_reads_one_input, world_size):
        assert said[:3] == [together] * 3
        # c is called before all have taken what was made for the first input
        assert said[3:6] == [together, ("another for c", 2, 0), alone]
        assert said[6:] == [together, ("without b", 1, 3), alone]


def llama(group) -> tuple[int, str]:
    model = parallelize(build("Llama"), group, "llama")
    loss = model(**BATCH).loss
    return sums_of(loss), str(explain(model))


def test_a_block_sums_twice(ranks):
    sums, said = ranks.run(llama, 2)[0]
    assert sums == 2 * 2 + 1  # and the head's
    attention = ", ".join(f"model.layers.*.self_attn.{leaf}_proj" for leaf in "qkv")
    assert f"one op for what reads one input: {attention}\n" in said
    assert "one op for what reads one input: model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj" in said


def alone(group) -> list[int]:
    """Sums where a hook brings a weight; of a copy; and nothing travels where no gradient goes back."""
    whole = seeded_net()
    model = parallelize(copy.deepcopy(whole), group, PLAN)
    assert compared(model, whole, "one input") == 1
    twin = copy.deepcopy(model)
    model.b.register_forward_pre_hook(lambda module, args: None)
    assert all(
        layer is getattr(twin, name) for name, layer in zip("abc", twin.a.hook.shared.layers, strict=True)
    )
    sums = [compared(model, whole, "one input"), compared(twin, whole, "one input")]
    with torch.no_grad():
        assert_near(twin(torch.ones(2, 8)), whole(torch.ones(2, 8)), "without gradients")
    return sums


def test_copies_share_among_themselves_and_hooks_end_it(ranks):
    assert ranks.run(alone, 2) == [[3, 1]] * 2


def column(label: str) -> ColumnParallelLinear:
    hook = ColumnHook(CutModel(TensorGroup.of(None), TensorGroup.of(None), gives_way=False), label)
    layer = ColumnParallelLinear(4, 4, group=None, hook=hook)
    layer.label = label
    return layer


def test_what_was_written_into_is_another_input():
    layers = [column(f"block.{name}") for name in "abcd"]
    x, seen = torch.zeros(2, 4), SeenInputs()
    for layer in layers[:2]:
        seen.note(layer, x)
    x.add_(1)
    for layer in layers[2:]:
        seen.note(layer, x)
    seen.connect()
    assert layers[0].hook.shared.layers == tuple(layers[:2])
    assert layers[2].hook.shared.layers == tuple(layers[2:])


def test_linears_of_several_modules_do_not_share():
    """Layers of a decoder all read what the encoder gives, and are recomputed one by one."""
    layers = [column(f"layers.{i}.{name}") for i in range(2) for name in "kv"]
    x, seen = torch.zeros(2, 4), SeenInputs()
    for layer in layers:
        seen.note(layer, x)
    seen.connect()
    assert [layer.hook.shared.layers for layer in layers] == [tuple(layers[:2])] * 2 + [tuple(layers[2:])] * 2


def test_one_that_reads_now_here_and_now_there_reads_alone():
    a, b, c = (column(f"block.{name}") for name in "abc")
    x, y, seen = torch.zeros(2, 4), torch.zeros(2, 4), SeenInputs()
    for layer, given in ((a, x), (b, x), (column("other.d"), y), (a, y), (c, y)):
        seen.note(layer, given)
    seen.connect()
    assert [layer.hook.shared for layer in (a, b, c)] == [None] * 3


def sharded_at_stage_0(group) -> list[int]:
    """Sums of dX in two steps of a model that is cut over two ranks and replicated over two."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(seeded_net(), mesh["tp"], PLAN)
    optimizer = shard(model, mesh["dp"], stage=0).adamw()
    sums = []
    for _ in range(2):
        sums.append(sums_of(model(torch.randn(5, 8, requires_grad=True))))
        optimizer.step()
    return sums


def test_a_sharded_model_whose_weights_are_all_here_shares_too(ranks):
    assert [outcome.value for outcome in ranks.launch(sharded_at_stage_0, 4)] == [[1, 1]] * 4

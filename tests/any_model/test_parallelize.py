"""parallelize() on models that know nothing of it: same function and gradients, and clear refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from pyruntime import parallelize, verify
from pyruntime.nn import (
    ColumnParallelLinear,
    Plan,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
)
from tests.nn.cases import assert_near, in_double
from tests.ranks import without_processes

PLAN = {
    "embed": "embedding",
    "blocks.*.[qkv]": "column",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "blocks.*.out": "row",
    "head": "column_gather",
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.head_dim = dim // heads
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A small model in plain torch."""

    def __init__(self, tied: bool = False, heads: int = 12):
        super().__init__()
        self.embed = nn.Embedding(23, 24)
        self.blocks = nn.ModuleList(Block(24, heads, 30) for _ in range(2))
        self.head = nn.Linear(24, 23, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(build=Transformer, *args) -> nn.Module:
    torch.manual_seed(0)
    return build(*args)


def matches(group, tied: bool) -> None:
    """Logits, loss and every gradient, then a step of clipped SGD."""
    model = seeded(Transformer, tied)
    reference = in_double(model)
    names = list(dict(model.named_modules()))
    assert parallelize(model, group, PLAN) is model
    assert list(dict(model.named_modules())) == names, "the tree keeps its names"
    assert isinstance(model.embed, VocabParallelEmbedding)
    assert (
        isinstance(model.blocks[1].mlp[2], RowParallelLinear)
        and model.blocks[1].mlp[2].label == "blocks.1.mlp.2"
    )
    assert isinstance(model.head, ColumnParallelLinear)
    assert (model.head.weight is model.embed.weight) == tied

    ids = torch.randint(23, (3, 7), generator=torch.Generator().manual_seed(1))
    logits, logits_reference = model(ids), reference(ids)
    assert_near(logits, logits_reference, "logits")
    for output in (logits, logits_reference):
        F.cross_entropy(output.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    compare(model, reference, group, lambda p: p.grad, "gradient")

    total = clip_grad_norm_(model.parameters(), 0.5, group)
    assert_near(total, nn.utils.clip_grad_norm_(reference.parameters(), 0.5), "norm")
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    compare(model, reference, group, lambda p: p, "value after a step")
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        found = state[name]
        assert_near(
            found.full_tensor() if hasattr(found, "full_tensor") else found, value, f"state of {name}"
        )


def compare(model, reference, group, of, what: str) -> None:
    whole = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        expected = of(whole[name])
        layout = getattr(p, "tp_layout", None)
        mine = expected if layout is None else layout.local_part(layout.parts[0], expected.detach())
        assert_near(of(p), mine, f"{what} of {name}")


def only_an_mlp(group) -> None:
    """A plan need not name everything, and widths need not divide."""
    model = seeded(Transformer)
    reference = in_double(model)
    parallelize(model, group, {"*.mlp.0": "column", "*.mlp.2": "row"}, tier="unfused")
    assert type(model.head) is nn.Linear and model.blocks[0].mlp[0].tier == "unfused"
    ids = torch.arange(10).view(2, 5)
    assert_near(model(ids), reference(ids), "logits")


def frozen_weights_stay_frozen(group) -> None:
    model = seeded(nn.Sequential, nn.Linear(4, 8), nn.Linear(8, 4)).eval()
    model[0].weight.requires_grad_(False)
    parallelize(model, group, {"0": "column", "1": "row"})
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None
    assert not model[0].training and model[0].weight.untyped_storage().nbytes() == model[0].weight.nbytes


class NotLinear(nn.Linear):
    """Looks like one and computes something else."""


def refusals(group) -> dict[str, str]:
    messages = {}

    def refused(name: str, model: nn.Module, plan, **options) -> None:
        before = list(model.modules())
        with pytest.raises(ValueError) as caught:
            parallelize(model, group, plan, **options)
        assert list(model.modules()) == before, "a refused model must stay as it was"
        messages[name] = str(caught.value)

    refused("no match", seeded(), {"blocks.*.up_proj": "column"})
    refused("kind", seeded(), {"blocks.*.norm": "column"})
    refused("subclass", nn.Sequential(NotLinear(4, 4)), {"0": "column"})
    refused("embedding", seeded(), {"head": "embedding"})
    refused("style", seeded(), {"head": "columns"})
    refused("two styles", seeded(), {"head": "column", "h*d": "row"})
    refused("plan", seeded(), "gpt2")
    refused("empty", seeded(), {})
    refused("tier", seeded(), PLAN, tier="fast")
    refused("llama", seeded(), "llama")
    refused("too many ranks", nn.Sequential(nn.Linear(4, 1)), {"0": "column"})
    refused("tied", seeded(Transformer, True), {"embed": "embedding"})
    refused("tied dims", seeded(Transformer, True), {"embed": "embedding", "head": "row"})
    parallel = parallelize(seeded(), group, PLAN)
    refused("twice", parallel, PLAN)
    refused("wrapped", nn.ModuleDict({"of": DistributedDataParallel(seeded(), process_group=group)}), PLAN)
    cut = seeded()
    mesh = DeviceMesh.from_group(group, "cpu")
    cut.head.weight = nn.Parameter(DTensor.from_local(torch.zeros(12, 24), mesh, [Shard(0)]))
    refused("cut", cut, PLAN)

    torch.manual_seed(dist.get_rank(group))
    refused("weights", nn.Sequential(nn.Linear(4, 4)), {"0": "column"})
    torch.manual_seed(0)
    permuted = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        permuted[0].weight.copy_(permuted[0].weight.roll(dist.get_rank(group), 0))
    refused("permuted", permuted, {"0": "column"})
    refused("shapes", nn.Sequential(nn.Linear(4, 4 + dist.get_rank(group))), {"0": "column"})
    deeper = nn.Sequential(nn.Linear(4, 4), *[nn.LayerNorm(4)] * dist.get_rank(group))
    nn.init.zeros_(deeper[0].weight), nn.init.zeros_(deeper[0].bias)
    refused("depth", deeper, {"0": "column"})
    for plan in ({"0": "column"}, "auto"):
        refused(f"devices, {plan}", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), plan)

    net = parallelize(nn.Sequential(nn.Identity(), zeros(nn.Linear(4, 4))), group, {"1": "row"})
    with pytest.raises(ValueError) as caught:
        net(torch.ones(2, 4))
    messages["row alone"] = str(caught.value)
    return messages


def what_is_no_model_no_group_or_no_plan(group) -> dict[str, str]:
    messages = {}
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"), _init_backend=False)
    for name, kind, *arguments in (
        ("path", TypeError, "meta-llama/Llama-3.1-8B", group, PLAN),
        ("class", TypeError, Transformer, group, PLAN),
        ("group", TypeError, seeded(), 2, PLAN),
        ("name", ValueError, seeded(), "tp", PLAN),
        ("axes", ValueError, seeded(), mesh, PLAN),
        ("plan", TypeError, seeded(), group, ["*.mlp.0"]),
    ):
        with pytest.raises(kind) as caught:
            parallelize(*arguments)
        messages[name] = str(caught.value)
    return messages


def whole_between(group) -> None:
    """A norm over all features stands between linears that are cut; widths need not divide."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(7, 10), nn.LayerNorm(10), nn.Linear(10, 5), nn.GELU(), nn.Linear(5, 3))
    plan = {"0": "column_gather", "2": "row_split", "4": "row_split"}
    model = parallelize(copy.deepcopy(whole), group, plan)
    assert model[2].weight.shape[1] < 10 and model[2].hook.whole
    verify(model, whole, torch.randn(4, 7), tolerance=1e-5)


def zeros(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)
    return linear


def a_plan_checks_first(group) -> str:
    def check(model: nn.Module, tp: int) -> None:
        raise ValueError(f"{type(model).__name__} is not for tp={tp}")

    with pytest.raises(ValueError) as caught:
        parallelize(seeded(), group, Plan("mine", PLAN, check))
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.second_tier("False-3", "False-4", "True-3")
def test_a_transformer_stays_the_same_function(ranks, world_size, tied):
    ranks.run(matches, world_size, tied)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_plan_may_name_a_part(ranks, world_size):
    ranks.run(only_an_mlp, world_size)


def test_frozen_weights_stay_frozen(ranks):
    ranks.run(frozen_weights_stay_frozen, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_linears_may_give_and_take_whole_activations(ranks, world_size):
    ranks.run(whole_between, world_size)


def test_refusals_are_sentences(ranks):
    expected = {
        "no match": "'blocks.*.up_proj' matches no module; the model's linears are: embed, blocks.0.q, ",
        "kind": "asks for 'column' on blocks.0.norm, which is a LayerNorm and not an nn.Linear",
        "subclass": "which is a NotLinear and not an nn.Linear",
        "embedding": "asks for 'embedding' on head, which is a Linear and not an nn.Embedding",
        "style": "Pattern 'head' asks for style 'columns'; use one of 'column', 'column_gather'",
        "two styles": "head is 'column' by pattern 'head' and 'row' by pattern 'h*d'",
        "plan": "There is no plan named 'gpt2'; use one of 'auto', 'llama'",
        "empty": "The plan is empty",
        "tier": "tier='fast' is none of auto, unfused",
        "llama": "from model.config, which this Transformer does not have",
        "too many ranks": "0 cannot be cut as 'column': tp=2 cuts dimension 0 of weight, which is 1",
        "tied": "embed.weight and head.weight are one tied tensor, but only a part of them is in the plan",
        "tied dims": "embed.weight and head.weight are one tied tensor, but the plan cuts them along "
        "different",
        "twice": "embed (pattern 'embed') is parallel already",
        "wrapped": "wrapped in DistributedDataParallel (of), which would keep the uncut parameters",
        "cut": "head.weight is a DTensor: another tool has cut this model already (from_pretrained",
        "weights": "0.weight of rank 1 is not that of rank 0",
        "permuted": "0.weight of rank 1 is not that of rank 0",
        "shapes": "where rank 0 has 0.weight [4, 4] torch.float32, rank 1 has 0.weight [5, 4] torch.float32",
        "depth": "rank 0 has 2 parameters, rank 1 has 4",
        **dict.fromkeys(
            ("devices, {'0': 'column'}", "devices, auto"),
            "this one has 0.weight on cpu and 1.weight on meta; move it to one device",
        ),
        "row alone": "1 is a 'row' linear and is given an input of shape [2, 4] instead of [2, 2]: no "
        "'column' "
        "linear's output",
    }
    for messages in ranks.run(refusals, 2):
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in without_processes(messages[name]), name


def test_other_things_than_a_model_a_group_and_a_plan_are_refused(ranks):
    for messages in ranks.run(what_is_no_model_no_group_or_no_plan, 2):
        assert messages == {
            "path": "parallelize() cuts a model that is built, an nn.Module; found: str.",
            "class": "parallelize() cuts a model that is built, an nn.Module; found: the class Transformer.",
            "group": "A group is a process group, its name, or one axis of a DeviceMesh, such as runtime.tp; "
            "found: int.",
            "name": "No process group has the name 'tp'; pass the group itself, or one axis of a mesh, such "
            "as runtime.tp.",
            "axes": "The mesh has axes ('dp', 'tp'), and tensor parallelism cuts nothing over dp; pass the "
            'axis to cut over, as in mesh["tp"].',
            "plan": "A plan is 'auto', a plan's name, or a mapping such as {'*.up_proj': 'column', "
            "'*.down_proj': 'row'}; found: list.",
        }


def test_a_plan_checks_first(ranks):
    assert ranks.run(a_plan_checks_first, 2) == ["Transformer is not for tp=2"] * 2

"""Gradients of what is whole on every rank and is read between a column and a row linear."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyruntime import parallelize
from tests.any_model.test_parallelize import compare
from tests.nn.cases import in_double

D, H, HEADS = 12, 24, 6


class Mlp(nn.Module):
    """up and down, and a subclass's own idea of what is between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x):
        return self.down(self.between(self.up(x), x))


class Gain(Mlp):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def between(self, h, x):
        return torch.tanh(self.gain * h) * self.gain


class Prelu(Mlp):
    def __init__(self):
        super().__init__()
        self.act = nn.PReLU()

    def between(self, h, x):
        return self.act(h)


class Gated(Mlp):
    """The gate is whole, and so are the activations that it is made of."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return x + super().forward(x)

    def between(self, h, x):
        return torch.tanh(h) * torch.sigmoid(self.gate(x))


class InsideAndOutside(Mlp):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return super().forward(x * self.gain) + self.gain

    def between(self, h, x):
        return h.sin() * self.gain


class TwoRows(Mlp):
    """One region that two row linears end."""

    def __init__(self):
        super().__init__()
        self.gain, self.down2 = nn.Parameter(torch.tensor(0.7)), nn.Linear(H, D)

    def forward(self, x):
        h = torch.tanh(self.up(x) * self.gain)
        return self.down(h) + self.down2(h.sin())


class HeadNorms(nn.Module):
    """A norm's weight over each head, as Qwen3 has; keys that all heads share, as DeepSeek's rotated ones."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.q, self.k, self.v = (nn.Linear(D, HEADS * 4) for _ in range(3))
        self.shared_key = nn.Linear(D, 2)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(HEADS * 4, D)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = self.norm(q), self.norm(k)
        shared = self.shared_key(x).unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        k, q = torch.cat([k, shared], -1), torch.cat([q, q[..., :2]], -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Recomputed(Gain):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedReentrantly(Gain):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


PLAN = {"*up": "column", "*down": "row"}
CASES = {
    Gain: PLAN,
    Prelu: PLAN,
    Gated: PLAN,
    InsideAndOutside: PLAN,
    TwoRows: {"*up": "column", "*down*": "row"},
    HeadNorms: {"*[qkv]": "column", "*out": "row"},
    Recomputed: PLAN,
    RecomputedReentrantly: PLAN,
}


def two_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.Tanh(), kind())


def gradients_match(group, kind: type[nn.Module], frozen: bool) -> None:
    model = two_of(kind)
    if frozen:
        for name, p in model.named_parameters():
            p.requires_grad_("up" not in name and "first" not in name)
    reference = in_double(model)
    model = copy.deepcopy(parallelize(model, group, CASES[kind]))
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # gradients accumulate
        for each, batch in ((model, x), (reference, x.double())):
            batch = batch.clone().requires_grad_(kind is not Gated)
            each(batch).square().sum().backward()
    trained = lambda p: p.grad if p.grad is not None else torch.zeros_like(p)  # noqa: E731
    compare(model, reference, group, trained, f"gradient of {kind.__name__}")


class Reentrant(Mlp):
    """A recomputed part that begins between the two."""

    def forward(self, x):
        return checkpoint(lambda h: self.down(torch.tanh(h)), self.up(x), use_reentrant=True)


class ReadsShards(Mlp):
    def between(self, h, x):
        return h + self.up.weight.sum()


def refused(group, kind: type[nn.Module]) -> str:
    torch.manual_seed(0)
    model = parallelize(kind(), group, PLAN)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model(torch.ones(2, D)).sum().backward()
    return str(caught.value)


def compiled(group, kind: type[nn.Module]) -> None:
    """Nothing is compiled before an eager pass has looked; what needs no sum is then one graph, and the rest
    breaks the graph at the parallel layers or is refused."""
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))
    model = two_of(kind)
    reference = in_double(model)
    parallelize(model, group, CASES.get(kind, PLAN))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run one forward pass"):
        torch.compile(model, fullgraph=True, backend="eager")(x)
    model(x)
    torch.compiler.reset()
    one_graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    if kind is Plain:
        one_graph(x).square().sum().backward()
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="run one forward pass"):
            one_graph(x)
        torch.compiler.reset()
        try:
            torch.compile(model, backend="aot_eager")(x).square().sum().backward()
        except RuntimeError as error:
            assert "leave the module that holds" in str(error), error
            return
    reference(x.double()).square().sum().backward()
    compare(model, reference, group, lambda p: p.grad, "gradient, compiled")


class Plain(Mlp):
    def between(self, h, x):
        return torch.tanh(h)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_gradients_of_what_is_whole_are_those_of_one_rank(ranks, kind, world_size):
    ranks.run(gradients_match, world_size, kind, False)


@pytest.mark.parametrize("kind", [Gain, TwoRows, Gated], ids=lambda kind: kind.__name__)
def test_a_region_behind_frozen_layers_is_known(ranks, kind):
    ranks.run(gradients_match, 2, kind, True)


def test_what_cannot_be_told_is_refused(ranks):
    for message in ranks.run(refused, 2, Reentrant):
        assert "is no parameter, so it is unknown whether it is cut" in message
    for message in ranks.run(refused, 2, ReadsShards):
        assert "down" in message


@pytest.mark.parametrize("kind", [Plain, Gain], ids=lambda kind: kind.__name__)
@pytest.mark.second_tier("Plain")
def test_compiled_is_right_or_refused(ranks, kind):
    ranks.run(compiled, 2, kind)

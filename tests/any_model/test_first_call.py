"""The first call of a parallel model: what counts heads or splits features itself is mended or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyruntime import parallelize
from tests.any_model.test_parallelize import compare
from tests.nn.cases import assert_near, in_double
from tests.ranks import without_processes

D, HEADS = 12, 6
PLAN = {"*[qkv]": "column", "*out": "row"}


class Attention(nn.Module):
    """`view` as OPT writes it: the whole number of heads, so that cut features run over into the sequence."""

    def __init__(self, heads: int = HEADS):
        super().__init__()
        self.num_heads, self.head_dim = heads, 4
        self.q, self.k, self.v = (nn.Linear(D, heads * 4) for _ in range(3))
        self.out = nn.Linear(heads * 4, D)

    def heads_of(self, x):
        return x.view(x.shape[0], -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.heads_of(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class Fixed(Attention):
    """The number of heads is where nobody finds it."""

    def heads_of(self, x):
        return x.view(x.shape[0], -1, HEADS, self.head_dim).transpose(1, 2)


class Fused(nn.Module):
    """gate and up in one linear, as Phi-3 has them."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 24), nn.Linear(12, D)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Normed(nn.Module):
    """A norm over all features, as OLMo-2 has it over all heads; `over` of them."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 24), nn.LayerNorm(24), nn.Linear(24, D)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


class Fickle(Normed):
    """Takes another path when its features are cut."""

    def forward(self, x):
        h = self.up(x)
        return self.down(h) if h.shape[-1] == 24 else x


class Softmaxed(Normed):
    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


def seeded(kind: type[nn.Module], *args) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(*args), nn.Dropout(0.3), nn.BatchNorm1d(6), kind(*args))


X = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1))


def refused(group, kind: type[nn.Module], plan: dict, *args) -> list[str]:
    """Every call is refused, not the first alone, and in evaluation too."""
    model, messages = parallelize(seeded(kind, *args), group, plan), []
    for call in (model, model, model.eval()):
        with pytest.raises(ValueError) as caught:
            call(X)
        messages.append(str(caught.value))
    assert not hasattr(model[0], "num_heads") or model[0].num_heads == (args[0] if args else HEADS)
    return messages


def mended(group) -> None:
    model = seeded(Attention)
    reference = in_double(model)
    parallelize(model, group, PLAN)
    state, random = copy.deepcopy(model[2].state_dict()), torch.get_rng_state()
    with torch.no_grad():  # dropout on: only what the check leaves behind is looked at
        model.train()(X)
    assert model[0].num_heads == HEADS // group.size()
    assert model[2].num_batches_tracked == state["num_batches_tracked"] + 1, "the check is no batch"
    assert not torch.equal(random, torch.get_rng_state())
    model[2].load_state_dict(state)
    for each, x in ((model, X), (reference, X.double())):
        each.eval()
        each(x).square().sum().backward()
    compare(model, reference, group, lambda p: p.grad, "gradient")


def random_numbers_are_those_of_one_call(group) -> torch.Tensor:
    torch.manual_seed(0)
    model = parallelize(
        nn.Sequential(nn.Linear(D, 24), nn.Linear(24, D), nn.Dropout()), group, {"0": "column", "1": "row"}
    )
    torch.manual_seed(3)
    return model(X).detach()


def encoder_in_evaluation(group) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    reference = in_double(model).eval()
    parallelize(model, group, {"*.linear1": "column", "*.linear2": "row"}).eval()
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 3:] = True
    for mask in (None, padding):
        with torch.no_grad():
            found = model(X, src_key_padding_mask=mask)
            expected = reference(X.double(), src_key_padding_mask=mask)
        if mask is not None:
            found, expected = (y.masked_fill(mask.unsqueeze(-1), 0) for y in (found, expected))
        assert_near(found, expected, "output in evaluation")


class Cached(Attention):
    """Adds its keys to a list that the caller holds."""

    def forward(self, x, cache):
        cache.append(self.k(x))
        return super().forward(x)


def arguments_are_left_alone(group) -> None:
    torch.manual_seed(0)
    model = parallelize(Cached(), group, PLAN)
    cache: list = []
    model(X, cache)
    assert len(cache) == 1 and cache[0].shape == (2, 6, HEADS * 4 // group.size())


class Routed(nn.Module):
    """Two experts, and the second is wrong when it is cut."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Softmaxed(), Softmaxed()])
        self.experts[0].forward = lambda x: self.experts[0].down(self.experts[0].up(x))

    def forward(self, x, expert: int):
        return self.experts[expert](x)


def an_expert_called_later(group) -> str:
    torch.manual_seed(0)
    model = parallelize(Routed(), group, {"*up": "column", "*down": "row"})
    for _ in range(2):
        model(X, 0)
    with pytest.raises(ValueError) as caught:
        model(X, 1)
    return str(caught.value)


def different_batches(group) -> list[str]:
    """Refused until all ranks are given the same; then nothing is left of it."""
    model, messages = parallelize(seeded(Attention), group, PLAN), []
    rank = group.rank()
    for args, kwargs in (
        ((X + rank,), {}),
        ((), {"input": X[: 2 - rank]}),
        ((X.double() if rank else X,), {}),
    ):
        with pytest.raises(ValueError) as caught:
            model(*args, **kwargs)
        messages.append(str(caught.value))
    model(X * (1 + 1e-6 * rank))
    words = parallelize(nn.Sequential(nn.Embedding(50, D), seeded(Attention)), group, PLAN)
    with pytest.raises(ValueError) as caught:
        words(torch.arange(12).view(2, 6).roll(rank, 1))
    return [*messages, str(caught.value)]


def half_precision(group) -> None:
    """Rounding is no mismatch."""
    model = seeded(Attention).bfloat16()
    parallelize(model, group, PLAN)(X.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = parallelize(seeded(Attention), group, PLAN)
        again(X).float().square().sum().backward()
    assert again[0].q.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_given_different_batches_are_told(ranks, world_size):
    for messages in ranks.run(different_batches, world_size):
        assert [without_processes(message).split(" is not that of rank 0. ")[0] for message in messages] == [
            f"The ranks are given different batches: {name} of rank 1"
            for name in ("argument 0", "input", "argument 0", "argument 0")
        ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_counts_of_heads_become_a_ranks_own(ranks, world_size):
    ranks.run(mended, world_size)


@pytest.mark.parametrize(
    ("kind", "plan", "expected"),
    [
        (Fixed, PLAN, "0.out is given other numbers than the whole model's ("),
        (
            Fused,
            {"*gate_up": "column", "*down": "row"},
            "between 0.gate_up and it does not work feature by feature",
        ),
        (
            Normed,
            {"*up": "column", "*down": "row"},
            "0.norm cannot work on a rank's features of 0.up (RuntimeError",
        ),
        (
            Softmaxed,
            {"*up": "column", "*down": "row"},
            "0.down is given other numbers than the whole model's (",
        ),
        (
            Fickle,
            {"*up": "column", "*down": "row"},
            "0.down is called in another place with the plan than without it",
        ),
        (Normed, {"3.down": "row"}, "3.down is a 'row' linear and is given an input of shape [2, 6, 24]"),
        (Normed, {"3.up": "column"}, "3.norm cannot work on a rank's features of 3.up"),
    ],
    ids=["view", "fused", "norm", "softmax", "path", "row alone", "column alone"],
)
def test_what_does_not_work_on_a_ranks_features_is_refused(ranks, kind, plan, expected):
    for messages in ranks.run(refused, 2, kind, plan):
        for message in messages:
            assert expected in message


def outputs_refused(group) -> str:
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(D, 24)), group, {"0": "column"})
    with pytest.raises(ValueError) as caught:
        model(X)
    return str(caught.value)


def test_an_output_that_is_cut_is_refused(ranks):
    for message in ranks.run(outputs_refused, 2):
        assert "has shape [2, 6, 12], without it the shape is [2, 6, 24]" in message
        assert "code that reads 0 gets only a rank's features" in message and "'column_gather'" in message


def test_heads_that_the_ranks_do_not_divide_are_refused(ranks):
    for messages in ranks.run(refused, 2, Attention, PLAN, 3):
        assert "0." in messages[0]


def test_the_check_draws_no_random_numbers(ranks):
    drawn = ranks.run(random_numbers_are_those_of_one_call, 2)[0]
    alone = ranks.run(random_numbers_are_those_of_one_call, 1)[0]
    assert_near(drawn, alone, "output with dropout")


def test_an_encoder_layer_of_torch_is_right_in_evaluation(ranks):
    ranks.run(encoder_in_evaluation, 2)


def test_arguments_are_left_alone(ranks):
    ranks.run(arguments_are_left_alone, 2)


def test_rounding_is_no_mismatch(ranks):
    ranks.run(half_precision, 2)


def test_what_the_first_call_left_out_is_compared_when_it_is_called(ranks):
    for message in ranks.run(an_expert_called_later, 2):
        assert "experts.1.down is given other numbers than the whole model's (" in message

"""Routers and their losses: published vectors, Hugging Face's own routers, and ranks that share tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyruntime.comm import group_rank, group_size
from pyruntime.nn import Router, RouterLosses
from pyruntime.nn.router import (
    balance_loss,
    counts_of,
    moved_bias,
    sigmoid_routes,
    softmax_routes,
    top_k,
    z_loss,
)

A = torch.tensor([(1, 2, -1, 0.5), (0, 0, 3, 1), (2, 2, 2, -3), (-0.5, 1.5, 0.25, 1)], dtype=torch.float64)
"""Logits of four tokens and experts."""


def close(found: Tensor, *expected) -> None:
    exact = torch.tensor(expected, dtype=torch.float64).view(found.shape)
    torch.testing.assert_close(found.detach().double(), exact, rtol=0, atol=1e-8)


def test_of_equal_scores_the_lowest_expert_is_taken():
    scores = torch.tensor([[2.0, 5.0, 5.0, 5.0, 2.0]]).repeat(1000, 30)
    assert torch.equal(top_k(scores, 4), torch.tensor([1, 2, 3, 6]).expand(1000, 4))


def test_softmax_routes():
    routed = softmax_routes(A, 2)
    assert routed.ids.tolist() == [[1, 0], [2, 3], [0, 1], [1, 3]]
    close(
        routed.weights,
        (0.731058579, 0.268941421),
        (0.880797078, 0.119202922),
        (0.5, 0.5),
        (0.622459331, 0.377540669),
    )
    close(softmax_routes(A, 2, renormalize=False).weights[0], 0.609460038, 0.224207818)


def test_losses_of_all_tokens():
    logits = A.clone().requires_grad_()
    ids = top_k(A, 2)
    counts = counts_of(ids, 4)
    assert counts.tolist() == [2, 3, 1, 2]
    loss = balance_loss(logits.softmax(-1), counts, 2)
    close(loss, 1.020176872)
    (gradient,) = torch.autograd.grad(loss, logits)
    close(gradient[0], -0.016230315, 0.032063936, -0.005989438, -0.009844183)
    close(z_loss(A, 4), 7.755905455)
    # Two ranks of two tokens: each takes the counts of both, and their shares add up.
    halves = [balance_loss(half.softmax(-1), counts, 2) for half in A.chunk(2)]
    close(torch.stack(halves), 0.476207149, 0.543969723)
    close(balance_loss(A[:3].softmax(-1), counts_of(ids[:3], 4), 2), 1.017660734)


def test_sigmoid_routes_in_groups_and_the_bias_after_a_step():
    logits = torch.tensor([[0.2, -0.4, 1.1, 0.3, -1, -2, 0.9, 0.8]], dtype=torch.float64)
    bias = torch.tensor([-0.9, -0.9, -0.85, -0.9, -0.2, 0, -0.9, -0.9], dtype=torch.float64)
    routed = sigmoid_routes(logits, 3, bias, groups=4, best_groups=2, factor=2.5)
    assert routed.ids.tolist() == [[5, 4, 6]]
    close(routed.weights[0], 0.271139090, 0.611734435, 1.617126475)
    with pytest.raises(ValueError, match="groups must be equal"):
        sigmoid_routes(logits, 3, bias, groups=3)
    counts = torch.tensor([9.0, 2, 3, 2])
    close(moved_bias(torch.zeros(4), counts, 1.0), -1, 1, 1, 1)
    close(moved_bias(torch.zeros(4), counts, 1.0, centred=True), -1.5, 0.5, 0.5, 0.5)


def draw(tokens: int, experts: int, features: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, features), (experts, features), (tokens, 2))
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def gradients(group, tokens: int, experts: int, features: int, seed: int):
    """Gradients of this rank's rows and of the router's weight, with both losses and a loss of weights."""
    x, weight, use = draw(tokens, experts, features, seed)
    x, use = (each.tensor_split(group_size(group))[group_rank(group)] for each in (x, use))
    losses = RouterLosses(balance=0.7, z=0.3, groups=[group], scale=0.5)
    router = Router(features, experts, 2, group=group, losses=losses, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(weight)
    x = x.clone().requires_grad_()
    (router(x).weights * use).sum().backward()
    return x.grad, router.weight.grad


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_on_ranks_are_those_of_all_tokens(ranks, world_size):
    tokens, experts, features = 11, 7, 5
    x, weight, use = draw(tokens, experts, features, 3)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.T
    ids = logits.topk(2, -1).indices
    probabilities = logits.softmax(-1)
    shares = torch.nn.functional.one_hot(ids, experts).sum((0, 1)).double() / (2 * tokens)
    loss = (probabilities.gather(-1, ids).div(probabilities.gather(-1, ids).sum(-1, True)) * use).sum()
    loss = loss + 0.5 * 0.7 * experts * (shares * probabilities.mean(0)).sum()
    loss = loss + 0.5 * 0.3 * logits.logsumexp(-1).square().mean()
    loss.backward()
    found = ranks.run(gradients, world_size, tokens, experts, features, 3)
    torch.testing.assert_close(torch.cat([dx for dx, _ in found]), x.grad, rtol=1e-12, atol=1e-14)
    for _, dweight in found:
        torch.testing.assert_close(dweight, weight.grad, rtol=1e-12, atol=1e-14)


def test_nothing_is_added_in_evaluation():
    x, weight, _ = draw(6, 4, 5, 1)
    router = Router(5, 4, 2, losses=RouterLosses(balance=1.0), dtype=torch.float64).eval()
    with torch.no_grad():
        router.weight.copy_(weight)
    x.requires_grad_()
    router(x).weights.sum().backward()  # weights sum to 1, whatever x is
    assert x.grad.abs().max() < 1e-15

"""The vocabulary-parallel loss against F.cross_entropy in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pyruntime import ops
from pyruntime.nn import shard_bounds, vocab_parallel_cross_entropy
from tests.nn.cases import assert_near, my_features, same_on_all_ranks


def logits_and_labels(vocabulary: int, extreme: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(17, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (17,), generator=generator)
    labels[0], labels[1] = 0, vocabulary - 1
    if extreme == "huge":
        logits *= 300
        logits[2] += 900
    elif extreme == "masked":  # only the first two tokens stay possible, so that whole shards are -inf
        logits[:, 2:] = -torch.inf
        labels = labels % 2
    elif extreme == "equal":
        logits[:] = -1000.0
    return logits, labels


def matches(group, vocabulary: int, extreme: str, dtype: torch.dtype, overwrite_logits: bool) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    logits, labels = logits_and_labels(vocabulary, extreme)
    logits = logits.to(dtype)
    labels[3:6] = -100
    reference = logits.double().requires_grad_()
    loss_reference = F.cross_entropy(reference, labels, reduction="none")
    grad = torch.rand(17, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    loss_reference.backward(grad)
    leaf = my_features(logits, group).requires_grad_()
    start, _ = shard_bounds(vocabulary, size, rank)
    # An op between leaf and loss, as a head is, so that the logits may be overwritten.
    loss = vocab_parallel_cross_entropy(
        leaf * 1, labels, group, vocab_start=start, vocab_size=vocabulary, overwrite_logits=overwrite_logits
    )
    loss.backward(grad.float())
    assert loss.dtype == torch.float32
    assert_near(loss, loss_reference, "loss")
    assert_near(
        leaf.grad, my_features(reference.grad, group), "dlogits", 1e-5 if dtype == torch.float32 else 1e-2
    )
    assert (loss[3:6] == 0).all() and (leaf.grad[3:6] == 0).all()
    assert same_on_all_ranks(loss.detach(), group)


def matches_with_z_loss(group, vocabulary: int, dtype: torch.dtype, overwrite_logits: bool) -> None:
    rank, size, z = dist.get_rank(group), dist.get_world_size(group), 0.3
    logits, labels = logits_and_labels(vocabulary, "")
    logits = logits.to(dtype)
    labels[3:6] = -100
    reference = logits.double().requires_grad_()
    wanted = F.cross_entropy(reference, labels, reduction="none")
    wanted = wanted + z * (reference.logsumexp(1) ** 2).masked_fill(labels == -100, 0.0)
    grad = torch.rand(17, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted.backward(grad)
    leaf = my_features(logits, group).requires_grad_()
    start, _ = shard_bounds(vocabulary, size, rank)
    options = {"overwrite_logits": overwrite_logits, "z_loss": z}
    loss = vocab_parallel_cross_entropy(leaf * 1, labels, group, vocab_start=start, **options)
    loss.backward(grad.float())
    assert_near(loss, wanted, "loss")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # 1 + 2 z lse times what bf16 loses of a probability
    assert_near(leaf.grad, my_features(reference.grad, group), "dlogits", tolerance)
    assert (loss[3:6] == 0).all() and (leaf.grad[3:6] == 0).all()
    assert same_on_all_ranks(loss.detach(), group)


def leading_dimensions_and_other_ignore_index(group) -> None:
    logits = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 0] = 7
    expected = F.cross_entropy(logits.double().transpose(1, 2), labels, reduction="none", ignore_index=7)
    start, _ = shard_bounds(12, dist.get_world_size(group), dist.get_rank(group))
    loss = vocab_parallel_cross_entropy(
        my_features(logits, group), labels, group, vocab_start=start, ignore_index=7
    )
    assert_near(loss, expected, "loss")


def sizes_of_what_is_gathered(group) -> list[int]:
    """Bytes that every gather of a forward and a backward moves, seen where the module calls for it."""
    sizes, real = [], ops.all_gather_stats

    def watched(tensor, name):
        sizes.append(tensor.numel())
        return real(tensor, name)

    ops.all_gather_stats = watched
    try:
        logits = torch.randn(10, 1000, requires_grad=True)
        labels = torch.zeros(10, dtype=torch.int64)
        start = 1000 * dist.get_rank(group)
        vocab_parallel_cross_entropy(logits, labels, group, vocab_start=start).sum().backward()
    finally:
        ops.all_gather_stats = real
    return sizes


def wrong_inputs(group) -> list[str]:
    logits = torch.randn(4, 6)
    start = 6 * dist.get_rank(group)
    with pytest.raises(ValueError) as shapes:
        vocab_parallel_cross_entropy(logits, torch.zeros(5, dtype=torch.int64), group, vocab_start=start)
    with pytest.raises(IndexError) as label:
        vocab_parallel_cross_entropy(
            logits, torch.tensor([1, 2, 12, 3]), group, vocab_start=start, vocab_size=12
        )
    return [str(shapes.value), str(label.value)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
class TestAgainstOneRank:
    @pytest.mark.parametrize("extreme", ["", "huge", "masked", "equal"])
    @pytest.mark.parametrize("vocabulary", [32, 31])
    def test_loss_and_gradient(self, ranks, world_size, vocabulary, extreme):
        ranks.run(matches, world_size, vocabulary, extreme, torch.float32, False)

    def test_bf16_logits_and_overwriting_them(self, ranks, world_size):
        ranks.run(matches, world_size, 31, "", torch.bfloat16, True)

    def test_leading_dimensions_and_other_ignore_index(self, ranks, world_size):
        ranks.run(leading_dimensions_and_other_ignore_index, world_size)


def test_three_numbers_a_token_are_gathered(ranks):
    assert ranks.run(sizes_of_what_is_gathered, 2) == [[30], [30]]


def test_wrong_inputs_are_sentences(ranks):
    shapes, label = ranks.run(wrong_inputs, 2)[0]
    assert "the logits are [4, 6] and the labels [5]" in shapes
    assert "12" in label


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("ranks_of", "vocabulary"), [(1, 12), (3, 7), (4, 37)])
def test_z_loss_adds_the_squared_log_sum_exp(ranks, ranks_of, vocabulary, dtype, overwrite):
    ranks.run(matches_with_z_loss, ranks_of, vocabulary, dtype, overwrite)

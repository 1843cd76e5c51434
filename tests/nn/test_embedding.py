"""The vocabulary-parallel embedding against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyruntime.nn import VocabParallelEmbedding
from tests.nn.cases import assert_near, in_double, my_features, my_rows


def matches(group, vocabulary: int, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(vocabulary, 6, padding_idx=padding_idx)
    for shape, dim in (((13,), 0), ((3,), 0), ((2, 7), 1), ((5, 2), 0)):
        ids = torch.randint(vocabulary, shape)
        ids.view(-1)[-1] = vocabulary - 1
        if padding_idx is not None:
            ids.view(-1)[0] = padding_idx
        grad = torch.randn(*shape, 6)
        reference = in_double(embedding)
        y_reference = reference(ids)
        y_reference.backward(grad.double())
        for sequence_parallel in (True, False):
            layer = VocabParallelEmbedding.from_embedding(
                embedding, group, sequence_parallel=sequence_parallel, dim=dim
            )
            y = layer(ids)
            cut = (lambda t, dim=dim: my_rows(t, group, dim)) if sequence_parallel else (lambda t: t)
            y.backward(cut(grad))
            assert_near(y, cut(y_reference), f"y, ids {shape}, {sequence_parallel=}")
            assert_near(layer.weight.grad, my_features(reference.weight.grad, group, 0), f"dW, ids {shape}")


def init_is_a_slice_of_one_table(group) -> torch.Tensor:
    torch.manual_seed(0)
    return VocabParallelEmbedding(11, 4, group=group, padding_idx=3).state_dict()["weight"].full_tensor()


def wrong_inputs(group) -> list[str]:
    layer = VocabParallelEmbedding(11, 4, group=group)
    layer.label = "embed"
    messages = []
    for ids in (torch.tensor([3, 11]), torch.tensor([-1])):
        with pytest.raises(IndexError) as caught:
            layer(ids)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as refused:
        VocabParallelEmbedding.from_embedding(nn.Embedding(11, 4, max_norm=1.0), group)
    return [*messages, str(refused.value)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
class TestAgainstOneRank:
    @pytest.mark.parametrize(("vocabulary", "padding_idx"), [(16, None), (11, None), (11, 3)])
    def test_rows_and_gradient(self, ranks, world_size, vocabulary, padding_idx):
        ranks.run(matches, world_size, vocabulary, padding_idx)

    def test_init_is_a_slice_of_one_table(self, ranks, world_size):
        whole = ranks.run(init_is_a_slice_of_one_table, 1)[0]
        assert whole[3].eq(0).all()
        for table in ranks.run(init_is_a_slice_of_one_table, world_size):
            assert torch.equal(table, whole)


def test_wrong_inputs_are_sentences(ranks):
    too_high, too_low, refused = ranks.run(wrong_inputs, 2)[0]
    assert "embed has num_embeddings=11, but the ids given reach from 3 to 11" in too_high
    assert "from -1 to -1" in too_low
    assert "max_norm=1.0" in refused

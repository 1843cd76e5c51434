"""Tokens of packed sequences see their own document alone: against transformers with such a mask, in every
way that sequences are cut."""

import pytest
import torch
import transformers

from pyruntime.context import Context, positions
from pyruntime.llama import Llama, load_hf
from tests.llama.cases import CASES

SEQ = 48
LENGTHS = ([5, 1, 30, 12], [48], [17, 31])


def document_ids() -> torch.Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])


def packed(group, folder, ids, labels, options, layout):
    """Loss and logits of this rank's tokens, and a gradient, with tensor or context parallelism."""
    context = Context(group, layout=layout) if layout else None
    model = load_hf(folder, None if layout else group, context=context, **options)
    documents = document_ids()
    if context is not None:
        ids, labels = context.shard(ids), context.shard(labels)
    with torch.no_grad():
        logits = model(ids, documents=documents)
    loss = model(ids, labels, documents)
    loss.backward()
    return loss.detach(), logits, model.norm.weight.grad, model.layers[0].attention_norm.weight.grad


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A checkpoint, a batch, and what transformers makes of it in fp64."""
    folder = tmp_path_factory.mktemp("model")
    config = CASES["gqa-llama3-tied"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    model = model.double()
    ids, labels = torch.randint(config.vocab_size, (2, len(LENGTHS), SEQ)).unbind()
    documents = document_ids()
    sees = (documents[:, :, None] == documents[:, None, :]) & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, float("-inf"))[:, None]
    logits = model(ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    unmasked = model(ids).logits
    assert (unmasked - logits).abs().max() > 0.1
    return (
        folder,
        ids,
        labels,
        loss.detach(),
        logits.detach(),
        model.model.layers[0].input_layernorm.weight.grad,
    )


@pytest.mark.parametrize(
    ("world", "layout", "options"),
    [
        (1, "", {}),
        (1, "", {"recompute": "selective"}),
        (2, "", {}),
        (2, "", {"slices": 3}),
        (2, "zigzag", {}),
        (3, "striped", {}),
        (2, "contiguous", {"recompute": "full"}),
    ],
)
@pytest.mark.second_tier("1--options0")
def test_a_packed_batch_is_as_with_a_mask_of_transformers(ranks, reference, world, layout, options):
    folder, ids, labels, loss, logits, gradient = reference
    parts = ranks.run(packed, world, folder, ids, labels, options, layout)
    assert sum(float(part[0]) for part in parts) / world == pytest.approx(float(loss), rel=1e-5)
    if layout:
        order = positions(layout, SEQ, world).flatten().argsort()
        found = torch.cat([part[1] for part in parts], 1)[:, order]
        of_layer = sum(part[3] for part in parts) / world
    else:
        found, of_layer = parts[0][1], parts[0][3]
    torch.testing.assert_close(found.double(), logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(of_layer.double(), gradient, rtol=1e-3, atol=1e-5)


def test_documents_of_another_shape_are_refused():
    model = Llama(CASES["plain"])
    with pytest.raises(ValueError, match=r"documents have shape \[1, 7\]; they must be \[1, 8\]"):
        model(torch.zeros(1, 8, dtype=torch.long), documents=torch.zeros(1, 7, dtype=torch.long))

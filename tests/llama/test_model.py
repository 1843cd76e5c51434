"""The model against transformers' LlamaForCausalLM: logits, loss and every gradient, at every tp."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from pyruntime.llama import Llama, preset
from tests.llama.cases import (
    CASES,
    build_error,
    eager_and_compiled,
    gradients_through_logits,
    logits_loss_gradients,
)

BATCH, SEQ = 3, 47  # 141 tokens, which neither 2 nor 4 divides


@pytest.fixture(params=CASES)
def reference(request, tmp_path):
    """transformers' model with random weights, large enough for every part to matter, and its folder."""
    config = CASES[request.param]
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config.to_hf(), attn_implementation="eager")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def batch_of(config):
    ids = torch.randint(config.vocab_size, (BATCH, SEQ))
    labels = torch.randint(config.vocab_size, (BATCH, SEQ))
    return ids, labels.masked_fill(torch.rand(BATCH, SEQ) < 0.2, -100)


def assert_same(found, exact, name):
    """Equal to 1e-5 of the largest value, which is stricter than 1e-5 for the small gradients. Where all are
    zero but for rounding (one key, one weight), to 1e-7."""
    largest = exact.abs().max()
    error = (found - exact).abs().max() / (largest if largest > 1e-7 else 1e-2)
    assert found.shape == exact.shape and error < 1e-5, f"{name} differs by {error:.2e} of its largest value"


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.second_tier("plain-1", "plain-4")
def test_logits_loss_and_gradients_are_those_of_transformers(ranks, reference, tp):
    model, directory = reference
    ids, labels = batch_of(model.config)
    exact = model(ids).logits
    exact_loss = torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten())
    exact_loss.backward()

    results = ranks.run(logits_loss_gradients, tp, directory, ids, labels)

    for rank, (logits, loss, _) in enumerate(results):
        assert_same(logits, exact, f"logits of rank {rank}")
        assert abs(loss - exact_loss) < 1e-5
        assert torch.equal(loss, results[0][1]), "the loss must be bitwise the same on every rank"
    gradients = results[0][2]
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert_same(gradients[name], parameter.grad, f"gradient of {name}")


@pytest.mark.parametrize("tp", [2, 4])
def test_gradients_of_a_loss_on_gathered_logits(ranks, reference, tp):
    model, directory = reference
    ids, _ = batch_of(model.config)
    weights = torch.randn(BATCH, SEQ, model.config.vocab_size)
    (model(ids).logits * weights).sum().backward()
    for gradients in ranks.run(gradients_through_logits, tp, directory, ids, weights):
        for name, parameter in model.named_parameters():
            assert_same(gradients[name], parameter.grad, f"gradient of {name}")


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (1, 150)])
def test_fewer_tokens_than_ranks_and_longer_sequences_than_a_block(ranks, tmp_path, shape):
    config = CASES["gqa-llama3-tied"]
    ids, labels = torch.randint(config.vocab_size, (2, *shape)).unbind()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf()))
    model.save_pretrained(tmp_path)
    exact = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    exact.backward()
    for _, loss, gradients in ranks.run(logits_loss_gradients, 4, tmp_path, ids, labels):
        assert abs(loss - exact) < 1e-5
        for name, parameter in model.named_parameters() if gradients else ():
            assert_same(gradients[name], parameter.grad, f"gradient of {name}")


@pytest.mark.second_tier
def test_the_whole_model_compiles_without_a_graph_break(ranks):
    config = CASES["gqa-llama3-tied"]
    ids, labels = torch.randint(config.vocab_size, (2, 2, 25)).unbind()
    for eager, compiled in ranks.run(eager_and_compiled, 2, config, ids, labels, timeout=120):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_bf16_stays_close_to_fp32():
    ids, labels = torch.randint(256, (2, 2, 64)).unbind()
    exact, rounded = (Llama(preset("debug"), dtype=dtype)(ids, labels) for dtype in (None, torch.bfloat16))
    assert rounded.dtype == torch.float32
    assert abs(rounded - exact) < 2e-3


def test_loss_of_nothing_but_ignored_labels_is_zero():
    model = Llama(preset("debug"))
    loss = model(torch.randint(256, (1, 5)), torch.full((1, 5), -100))
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_every_parallel_module_carries_its_name():
    model = Llama(preset("debug"), device="meta")
    assert model.layers[1].qkv.label == "layers.1.qkv"
    assert model.embed.label == "embed"


@pytest.mark.parametrize("tp", [2, 3])
def test_tp_that_cuts_heads_is_refused_on_every_rank(ranks, tp):
    config = dataclasses.replace(CASES["plain"], num_attention_heads=5, num_key_value_heads=5, head_dim=4)
    errors = ranks.run(build_error, tp, config)
    assert errors == [f"tp={tp} does not divide num_key_value_heads=5; use 1."] * tp


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        (torch.zeros(4, dtype=torch.long), None, r"ids have shape \[4\]"),
        (torch.zeros(0, 4, dtype=torch.long), None, r"ids have shape \[0, 4\]"),
        (
            torch.zeros(1, 4, dtype=torch.long),
            torch.zeros(1, 3, dtype=torch.long),
            r"labels have shape \[1, 3\]",
        ),
        (torch.zeros(1, 257, dtype=torch.long), None, "max_position_embeddings=256"),
    ],
)
def test_wrong_inputs_are_refused(ids, labels, message):
    with pytest.raises(ValueError, match=message):
        Llama(preset("debug"))(ids, labels)


def test_tokens_outside_the_vocabulary_are_refused():
    model = Llama(preset("debug"))
    good, bad = torch.zeros(1, 4, dtype=torch.long), torch.full((1, 4), 256)
    with pytest.raises(IndexError, match="256"):
        model(bad)
    with pytest.raises(IndexError, match="256"):
        model(good, bad)

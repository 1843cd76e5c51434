"""Sampling: the cache changes nothing, ranks agree, seeds repeat, and cuts cut."""

from __future__ import annotations

import pytest
import torch
import transformers

from pyruntime.llama import KVCache, Llama, generate, generate_steps, preset, save_hf
from pyruntime.llama.generation import next_logits, sample
from tests.llama.cases import CASES, continue_text

CONFIG = CASES["gqa-llama3-tied"]


@pytest.fixture
def prompt():
    return torch.randint(CONFIG.vocab_size, (3, 7))


@pytest.mark.parametrize("case", CASES)
def test_cached_logits_are_those_of_the_whole_text(case):
    model = Llama(CASES[case])
    ids = torch.randint(CASES[case].vocab_size, (2, 80))
    with torch.no_grad():
        exact = model(ids)
    cache = KVCache(model, 2, 80)
    # A prompt, single tokens, then several at once behind what is there.
    for start, end in ((0, 70), (70, 71), (71, 72), (72, 80)):
        logits = next_logits(model, ids[:, start:end], cache)
        torch.testing.assert_close(logits, exact[:, end - 1], rtol=1e-5, atol=1e-5)
    assert cache.length == 80


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.second_tier("True-4")
def test_every_tp_generates_the_same_with_and_without_cache(ranks, prompt, tp, use_cache):
    expected = generate(Llama(CONFIG, seed=5), prompt, 12, temperature=0.8, top_k=20, seed=1)
    options = {"temperature": 0.8, "top_k": 20, "seed": 1, "use_cache": use_cache}
    for text in ranks.run(continue_text, tp, CONFIG, prompt, 12, options):
        assert torch.equal(text, expected)


def test_most_likely_tokens_are_those_of_transformers(tmp_path, prompt):
    model = Llama(CONFIG, seed=5)
    save_hf(model, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    expected = theirs.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, prompt, 10, temperature=0.0), expected)


def test_seed_alone_decides(prompt):
    model = Llama(CONFIG)
    torch.manual_seed(1)
    first = generate(model, prompt, 20, seed=3)
    torch.manual_seed(2)
    assert torch.equal(generate(model, prompt, 20, seed=3), first)
    assert not torch.equal(generate(model, prompt, 20, seed=4), first)
    assert torch.equal(first[:, :7], prompt) and first.shape == (3, 27)


def test_steps_are_the_columns_of_the_text(prompt):
    model = Llama(CONFIG)
    steps = list(generate_steps(model, prompt, 5, seed=2))
    assert torch.equal(torch.stack(steps, dim=1), generate(model, prompt, 5, seed=2)[:, 7:])


def test_a_sequence_that_has_ended_stays_ended(prompt):
    model = Llama(CONFIG)
    free = generate(model, prompt, 60, seed=8)[:, 7:]
    eos = free[0, 5].item()  # drawn by the first sequence at step 5 at the latest
    text = generate(model, prompt, 60, seed=8, eos_token_id=eos)[:, 7:]
    for row, undisturbed in zip(text, free, strict=True):
        ends = (row == eos).nonzero().flatten()
        length = ends[0].item() if len(ends) else len(row)
        assert torch.equal(row[:length], undisturbed[:length])
        assert torch.all(row[length:] == eos)
    alone = generate(model, prompt[:1], 60, temperature=0.0)[0, 7:]
    first = alone[3].item()
    stopped = generate(model, prompt[:1], 60, temperature=0.0, eos_token_id=first)[0, 7:]
    assert len(stopped) <= 4 and stopped[-1] == first


def draw(logits, temperature=1.0, top_k=None, top_p=None, times=4000):
    generator = torch.Generator().manual_seed(0)
    tokens = sample(logits.expand(times, -1), temperature, top_k, top_p, generator)
    return torch.bincount(tokens, minlength=logits.numel()) / times


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(0)
        # 4000 draws: a standard error is at most 0.008.
        torch.testing.assert_close(draw(logits, temperature), expected, rtol=0, atol=0.04)


def test_cuts_keep_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert draw(logits, top_k=2).nonzero().flatten().tolist() == [1, 3]
    assert draw(logits, top_k=9).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert draw(logits, top_p=0.39).nonzero().flatten().tolist() == [1]
    assert draw(logits, top_p=0.65).nonzero().flatten().tolist() == [1, 3]
    assert draw(logits, top_p=0.75).nonzero().flatten().tolist() == [1, 2, 3]
    assert draw(logits, top_p=1.0).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert draw(logits, temperature=0.0).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 250}, "make 257, but the model has max_position_embeddings=256"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan must be 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"ids": torch.zeros(0, 3, dtype=torch.long)}, r"ids have shape \[0, 3\]"),
    ],
)
def test_arguments_out_of_range_are_refused(prompt, arguments, message):
    arguments = {"ids": prompt, "max_new_tokens": 5} | arguments
    with pytest.raises(ValueError, match=message):
        generate(Llama(CONFIG, device="meta"), **arguments)


def test_a_cache_that_is_full_is_an_error():
    model = Llama(preset("debug"))
    with pytest.raises(ValueError, match="The cache holds 4 tokens, but 5 were given"):
        next_logits(model, torch.zeros(1, 5, dtype=torch.long), KVCache(model, 1, 4))

"""Models of other families than Llama, as transformers saves them: on ranks of every kind they compute what
transformers computes, and leave as they came."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pyruntime.context import Context, positions
from pyruntime.llama import Llama, LlamaConfig, generate, load_hf, load_weights, save_hf
from pyruntime.llama.families import family_of
from pyruntime.llama.hf import read_config
from pyruntime.llama.model import ModelPart
from pyruntime.llama.stored import stored as stored_as
from pyruntime.plan.models import keys_seen
from pyruntime.train.planned import of_llama
from tests.llama.cases import full_gradients

SEQ, WINDOW = 40, 7
ROUNDING = 2e-5
_SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
}
_LATE_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_OF_ALL = {
    **_YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8, "beta_slow": 2, "truncate": False
}  # fmt: skip
_SMOLLM2 = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "tie_word_embeddings": True,
}
_NO_PAD = {"pad_token_id": None}  # whose embedding transformers would not learn
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen2, window in the later layers": ("qwen2", _LATE_WINDOW),
    "qwen2, yarn": ("qwen2", {"rope_scaling": _YARN}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW, "head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3, window": ("qwen3", {**_LATE_WINDOW, "head_dim": 16}),
    "llama, yarn with mscale": ("llama", {"rope_scaling": _YARN_OF_ALL}),
    "llama, dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "phi3": ("phi3", _NO_PAD),
    "phi3, window": ("phi3", {**_NO_PAD, "sliding_window": WINDOW}),
    "olmo2": ("olmo2", _NO_PAD),
    "smollm2": ("llama", {**_SMOLLM2, "rope_theta": 100000.0}),
}


class Reference:
    """A folder of transformers, a batch, and what transformers makes of it in fp64.

    rounding: what transformers loses in fp32, relative to the largest entry of a tensor. One batch in
    a hundred loses five times what others lose, here as there.
    """

    def __init__(self, folder, family, changes):
        self.folder = folder
        config = transformers.AutoConfig.for_model(family, **_SMALL | changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)  # biases too
        model.save_pretrained(folder)
        self.ids, self.labels = torch.randint(101, (2, 2, SEQ)).unbind()
        self.labels[:, ::3] = -100
        _, rounded = self._computed(model)
        model.zero_grad()
        self.logits, self.gradients = self._computed(model.double())
        self.rounding = max(distance(rounded[name], exact) for name, exact in self.gradients.items())

    def _computed(self, model):
        logits = model(self.ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten()).backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters()}

    def config(self):
        return LlamaConfig.from_hf(read_config(self.folder))

    def batch(self):
        return self.folder, self.ids, self.labels

    def check(self, logits, gradients):
        bound = max(ROUNDING, 4 * self.rounding)
        assert distance(logits, self.logits) < bound
        gradients = as_in_files(self.config(), gradients)
        assert gradients.keys() == self.gradients.keys()
        lost = {name: distance(gradients[name], exact) for name, exact in self.gradients.items()}
        assert all(value < bound for value in lost.values()), (lost, self.rounding)


def as_in_files(config, tensors):
    """Tensors of the model by the names of files, of which one may have several, row after row."""
    found = {}
    for name, value in tensors.items():
        found.setdefault(stored_as(config, name, value.shape)[0].name, []).append(value)
    return {name: torch.cat(values) if len(values) > 1 else values[0] for name, values in found.items()}


def distance(found, exact):
    """The largest difference, relative to the largest entry. Between fp32 and the fp64 of transformers,
    where norms and angles are fp32 too, it is mostly below ROUNDING."""
    return float((found.double() - exact.double()).abs().max() / exact.abs().max())


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("model"), *CASES[request.param])


def computed(group, folder, ids, labels, layout="", options=None):
    """Logits and gradients with tensor parallelism or, with a layout, context parallelism."""
    context = Context(group, layout=layout) if layout else None
    model = load_hf(folder, None if layout else group, context=context, **options or {})
    if context is not None:
        ids, labels = context.shard(ids), context.shard(labels)
    with torch.no_grad():
        logits = model(ids)
    model(ids, labels).backward()
    return logits, full_gradients(model)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_rank_computes_what_transformers_computes(ranks, reference, recompute):
    reference.check(*ranks.run(computed, 1, *reference.batch(), "", {"recompute": recompute})[0])


def test_so_do_two_tensor_parallel_ranks(ranks, reference):
    cut = (1,) if reference.config().qk_norm else (1, 2)  # slices know no normalised heads
    for slices in cut:
        for found in ranks.run(computed, 2, *reference.batch(), "", {"slices": slices}):
            reference.check(*found)


@pytest.mark.parametrize(("world", "layout"), [(2, "zigzag"), (4, "striped"), (2, "contiguous")])
@pytest.mark.second_tier(but=[f"{name}-2-zigzag" for name in CASES])
def test_so_do_ranks_that_share_the_sequence(ranks, reference, world, layout):
    parts = ranks.run(computed, world, *reference.batch(), layout)
    order = positions(layout, SEQ, world).flatten().argsort()
    logits = torch.cat([logits for logits, _ in parts], 1)[:, order]
    reference.check(logits, {name: sum(g[name] for _, g in parts) / world for name in parts[0][1]})


def packed(group, folder, ids, documents, layout, slices):
    """Logits of packed documents, with tensor or context parallelism."""
    context = Context(group, layout=layout) if layout else None
    model = load_hf(folder, None if layout else group, context=context, slices=slices)
    with torch.no_grad():
        return model(ids if context is None else context.shard(ids), documents=documents)


@pytest.mark.parametrize(("world", "layout", "slices"), [(1, "", 1), (2, "", 2), (2, "zigzag", 1)])
@pytest.mark.parametrize("reference", ["mistral, window"], indirect=True)
def test_a_window_ends_where_a_document_begins(ranks, reference, world, layout, slices):
    documents = torch.stack([torch.arange(SEQ) // 17, torch.arange(SEQ) // 5])
    sees = (documents[:, :, None] == documents[:, None, :]) & torch.ones(SEQ, SEQ).tril().triu(
        1 - WINDOW
    ).bool()
    mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[:, None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder)
    with torch.no_grad():
        expected = theirs(reference.ids, attention_mask=mask).logits
    assert (expected - reference.logits).abs().max() > 0.1
    parts = ranks.run(packed, world, reference.folder, reference.ids, documents, layout, slices)
    found = parts[0]
    if layout:
        found = torch.cat(parts, 1)[:, positions(layout, SEQ, world).flatten().argsort()]
    assert distance(found, expected) < ROUNDING


def test_so_do_two_stages_of_a_pipeline(reference):
    config = reference.config()
    first = Llama(config, seed=None, part=ModelPart((0, 1), embed=True, head=False))
    last = Llama(config, seed=None, part=ModelPart((2,), embed=False, head=True))
    for part in (first, last):
        load_weights(part, reference.folder)
    x = first.hidden(reference.ids)
    x = last.run(x, (2,), *reference.ids.shape)
    found = last.head(x, reference.ids.numel()).view(*reference.ids.shape, -1).detach()
    last.loss(x, reference.labels).backward()
    gradients = full_gradients(first)
    for name, value in full_gradients(last).items():
        gradients[name] = gradients[name] + value if name in gradients else value  # a tied weight is in both
    reference.check(found, gradients)


def test_in_bf16_it_rounds_no_worse(reference):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16)
    ours = load_hf(reference.folder, dtype=torch.bfloat16)
    with torch.no_grad():
        found = [model(reference.ids) for model in (theirs, ours)]
    errors = [float((each - reference.logits).abs().mean()) for each in (found[0].logits, found[1])]
    assert errors[1] < 1.25 * errors[0]


def continued(group, folder, prompt, new_tokens, use_cache):
    return generate(load_hf(folder, group), prompt, new_tokens, temperature=0.0, use_cache=use_cache)


def test_it_goes_on_with_the_likeliest_tokens_as_transformers_does(ranks, reference):
    theirs, prompt = transformers.AutoModelForCausalLM.from_pretrained(reference.folder), reference.ids[:, :9]
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    for count, use_cache in ((1, True), (2, True), (1, False)):
        for found in ranks.run(continued, count, reference.folder, prompt, 20, use_cache):
            assert torch.equal(found, expected)


def loaded_and_saved(group, source, target):
    save_hf(load_hf(source, group), target)


def stored(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("count", [1, 2])
def test_what_leaves_is_what_came(ranks, reference, tmp_path, count):
    ranks.run(loaded_and_saved, count, reference.folder, tmp_path)
    came, left = stored(reference.folder), stored(tmp_path)
    assert came.keys() == left.keys() and all(torch.equal(left[name], came[name]) for name in came)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert distance(theirs(reference.ids).logits, reference.logits) < ROUNDING


def test_parameters_and_operations_are_counted(reference):
    config = reference.config()
    planned = of_llama("a model", config)
    distinct = {name: t.numel() for name, t in stored(reference.folder).items()}
    assert config.parameter_count() == planned.parameters == sum(distinct.values())
    # Whole numbers for a token.
    assert planned.step_flops(1000, SEQ) == pytest.approx(1000 * config.flops_per_token(SEQ), rel=1e-5)


def test_keys_in_a_window_are_counted():
    """The mean over rows of the keys that a row sees, as for a mask of all: half a key less."""
    seq, window = 400, 70
    mask = torch.ones(seq, seq).tril().triu(1 - window)
    assert float(mask.sum(1).mean()) - 0.5 == pytest.approx(keys_seen(seq, window), rel=0.01)
    assert keys_seen(seq, None) == keys_seen(seq, seq) == seq / 2


@pytest.mark.parametrize("reference", [name for name in CASES if "window" in name], indirect=True)
def test_a_window_matters_to_the_tokens_behind_it(reference):
    model = load_hf(reference.folder)
    short, whole = model(reference.ids[:, :WINDOW]), model(reference.ids)
    assert distance(short, whole[:, :WINDOW]) < ROUNDING
    without = json.loads((reference.folder / "config.json").read_text())
    without |= {"sliding_window": None, "use_sliding_window": False}
    other = Llama(LlamaConfig.from_hf(without), seed=None)
    load_weights(other, reference.folder)
    assert (other(reference.ids)[:, WINDOW:] - whole[:, WINDOW:]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_what_transformers_takes_for_keys_that_lack_is_taken(family):
    lacking = {"num_hidden_layers": 40, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 101}
    lacking |= {"num_attention_heads": 8}
    ours = LlamaConfig.from_hf({"model_type": family, **lacking, "num_key_value_heads": 8})
    theirs = transformers.AutoConfig.for_model(family, **lacking)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == theirs.sliding_window
    assert family_of(ours) == family

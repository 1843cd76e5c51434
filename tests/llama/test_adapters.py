"""Low-rank adapters of a Llama, against peft on transformers' model: losses, gradients, files, merges."""

from __future__ import annotations

import dataclasses
import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pyruntime.choices import LORA_TARGETS
from pyruntime.llama import Llama, load_hf, save_hf
from pyruntime.llama.adapter_files import CONFIG, WEIGHTS, load_adapters, save_adapters
from pyruntime.llama.adapters import merge
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.origin import fingerprint
from pyruntime.llama.tensor_shards import gather_full
from pyruntime.nn.low_rank import LoRA
from tests.llama.cases import CASES

LORA = LoRA(5, 12.0, LORA_TARGETS, seed=3)
SOME = LoRA(5, 12.0, ("q_proj", "v_proj", "down_proj"), rslora=True)
PREFIX = "base_model.model."


def with_effect(model: Llama) -> Llama:
    """The model with B matrices that are not 0, the same for any number of ranks."""
    with torch.no_grad():
        for place, shard in enumerate(model.adapter_shards()):
            if shard.name.endswith("lora_B.weight"):
                generator = torch.Generator().manual_seed(place)
                whole = 0.1 * torch.randn(shard.shape, generator=generator)
                dim = shard.dim or 0
                shard.local.copy_(whole.narrow(dim, shard.start, shard.local.shape[dim]))
    return model


def full(model: Llama) -> dict[str, torch.Tensor]:
    return {shard.name: gather_full(shard).clone() for shard in model.adapter_shards()}


def batch(config) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (2, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:].contiguous()


def losses_and_gradients(group, base, lora, target=None, adapters=None, **options):
    """Loss and gradients of adapters with an effect, or of those in `adapters`; saves them to `target`."""
    model = load_hf(base, group, lora=lora, **options)
    if adapters is None:
        with_effect(model)
    else:
        load_adapters(model, adapters)
    if target is not None:
        save_adapters(model, target, str(base))
    loss = model(*batch(model.config))
    loss.backward()
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    return loss.detach(), full(model)


def check_near(found, expected, tolerance=2e-5):
    assert found[0].item() == pytest.approx(expected[0].item(), abs=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        limit = tolerance * max(1.0, gradient.abs().max().item())
        assert (found[1][name] - gradient).abs().max() <= limit, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some, rslora"])
@pytest.mark.second_tier(but=["all-plain", "some, rslora-gqa-llama3-tied"])
def test_losses_gradients_and_files_are_those_of_peft(ranks, tmp_path, case, lora):
    save_hf(Llama(CASES[case], seed=6), tmp_path / "base")
    found = losses_and_gradients(None, tmp_path / "base", lora, tmp_path / "adapters")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True)
    ids, labels = batch(CASES[case])
    logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {
        name.removeprefix(PREFIX).replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    check_near(found, (loss.detach(), gradients))
    theirs.save_pretrained(tmp_path / "again")  # the files go there and back without a change
    ours, again = (load_file(tmp_path / name / WEIGHTS) for name in ("adapters", "again"))
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    back = losses_and_gradients(None, tmp_path / "base", lora, tmp_path / "back", tmp_path / "again")
    assert back[0] == found[0]
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (tmp_path / "adapters" / WEIGHTS).read_bytes()
    merged = theirs.merge_and_unload().state_dict()
    model = load_hf(tmp_path / "base", lora=lora)
    load_adapters(model, tmp_path / "again")
    merge(model)
    save_hf(model, tmp_path / "merged")
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)


OPTIONS = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


@pytest.mark.parametrize("recompute", OPTIONS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.second_tier(but=["2-selective", "4-full"])
def test_ranks_compute_what_one_computes(ranks, tmp_path, world_size, recompute):
    case = "gqa-linear-bias-wide"
    save_hf(Llama(CASES[case], seed=6), tmp_path / "base")
    expected = losses_and_gradients(None, tmp_path / "base", LORA, tmp_path / "one")
    options = OPTIONS[recompute]
    found = ranks.run(saving, world_size, tmp_path / "base", LORA, tmp_path / "many", options)
    for each in found:
        check_near(each, expected)
    assert found[0][0] == found[-1][0]
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def saving(group, base, lora, target, options):
    return losses_and_gradients(group, base, lora, target, **options)


def initial(group, config, lora):
    return full(Llama(config, group, lora=lora))


def test_new_adapters_are_the_same_for_any_number_of_ranks_and_have_no_effect(ranks):
    config = CASES["plain"]
    model = Llama(config, lora=LORA)
    ids, labels = batch(config)
    assert torch.equal(model(ids, labels), Llama(config)(ids, labels))
    expected = full(model)
    assert len(expected) == 2 * 7 * config.num_hidden_layers
    for tensors in ranks.run(initial, 2, config, LORA):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    a = expected["model.layers.1.mlp.down_proj.lora_A.weight"]
    assert (
        a.abs().max() <= 1 / config.intermediate_size**0.5 and a.std() > 0.5 / config.intermediate_size**0.5
    )


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("r", 8, "r=8, but the adapters here have 5"),
        ("target_modules", ["q_proj"], "target_modules"),
        ("use_dora", True, "only plain LoRA"),
        ("modules_to_save", ["lm_head"], "only plain LoRA"),
        ("bias", "all", "only plain LoRA"),
        ("init_lora_weights", "pissa", r"init_lora_weights='pissa', and only plain LoRA"),
        ("alora_invocation_tokens", [5], "only plain LoRA"),
    ],
)
def test_other_adapters_are_refused(tmp_path, name, value, words):
    model = Llama(CASES["plain"], lora=LORA)
    save_adapters(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {name: value}))
    with pytest.raises(ValueError, match=words):
        load_adapters(model, tmp_path)


def test_weights_that_differ_in_one_tensor_have_another_fingerprint(tmp_path):
    """As after adapters of one kind of linear were merged: the end of the file is as before."""
    save_hf(Llama(LlamaConfig(64, 256, 64, 1, 4), seed=6), tmp_path)
    seen, path = {fingerprint(tmp_path)}, tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor + 1}, path, metadata={"format": "pt"})
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + len(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    assert fingerprint(tmp_path) in seen
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        fingerprint(tmp_path)


def test_files_that_do_not_fit_are_refused(tmp_path):
    model = Llama(CASES["plain"], lora=LORA)
    save_adapters(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    first = next(iter(tensors))
    for changed, words in (
        ({name: tensor for name, tensor in tensors.items() if name != first}, "lacks"),
        (tensors | {f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(1)}, "holds"),
        (tensors | {first: tensors[first][:2].clone()}, "has shape"),
    ):
        save_file(changed, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=words):
            load_adapters(model, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="holds no"):
        load_adapters(model, tmp_path)


def test_models_that_cannot_have_adapters_are_refused():
    with pytest.raises(ValueError, match="lm_head"):
        Llama(CASES["plain"], lora=dataclasses.replace(LORA, targets=("lm_head",)))
    with pytest.raises(ValueError, match="rank of at least 1"):
        Llama(CASES["plain"], lora=dataclasses.replace(LORA, rank=0))


def kept_bytes(lora: LoRA | None) -> int:
    """Memory that a forward pass of a Llama keeps for the backward pass, without parameters."""
    model = Llama(CASES["plain"], lora=lora)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch(model.config))
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    assert loss.requires_grad
    return sum(saved.values())


def test_linears_without_an_adapter_keep_no_input():
    """Of a layer with adapters of q only, an MLP's linears would keep D + F numbers for each token."""
    config, tokens = CASES["plain"], 32
    spared = 4 * tokens * config.num_hidden_layers * (config.hidden_size + config.intermediate_size)
    spared += 4 * tokens * config.hidden_size  # the head's
    low = 4 * tokens * config.num_hidden_layers * 5
    assert kept_bytes(LoRA(5, 12.0, ("q_proj",))) < kept_bytes(None) - spared + 2 * low

"""Models of transformers spread over devices by parallelize(model, mesh, "auto") are the whole ones, and give
what they give on CPU ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from pyruntime import explain, parallelize, verify
from pyruntime.comm import Runtime
from pyruntime.comm.devices import generators_of
from pyruntime.nn import ParallelExperts
from pyruntime.nn.cut import memory_of
from tests.any_model.test_auto import COMMON, IDS, build
from tests.any_model.test_experts import MIXTRAL
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")

SHAPES = {"Llama": COMMON, "Mixtral": MIXTRAL}


def whole_model(name: str) -> nn.Module:
    """name: a model, or "LoRA": matrices of low rank beside those of a Llama."""
    model = build("Llama" if name == "LoRA" else name, SHAPES)
    if name == "LoRA":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"]))
        for key, p in model.named_parameters():
            if "lora_B" in key:  # zeros as peft makes it
                nn.init.normal_(p, std=0.1)
    return model


def results(device, name, folder):
    """Loss, logits, this rank's gradients, and tokens that the model writes."""
    with Runtime.start(tp=2, device=device) as runtime:
        whole, ids = whole_model(name).to(runtime.device), IDS.to(runtime.device)
        model = parallelize(copy.deepcopy(whole), runtime.tp, "auto")
        torch.manual_seed(7)
        before = [generator.get_state() for generator in generators_of(runtime.device)]
        verify(model, whole, {"input_ids": ids, "labels": ids}, tolerance=1e-5)
        assert any(isinstance(each, ParallelExperts) for each in model.modules()) == (name == "Mixtral")
        assert not explain(model).gave_way, str(explain(model))
        after = [generator.get_state() for generator in generators_of(runtime.device)]
        assert all(map(torch.equal, before, after))  # as the layers' first calls are tried, too
        given = model(input_ids=ids, labels=ids)
        given.loss.backward()
        gradients = {key: memory_of(p.grad).cpu() for key, p in model.named_parameters() if p.requires_grad}
        written = ids[:, :0]
        if name == "LoRA":
            written = model.eval().generate(input_ids=ids[:, :5], max_new_tokens=4, do_sample=False)
            model.save_pretrained(folder)
        return given.loss.detach().cpu(), given.logits.detach().cpu(), gradients, written.cpu()


def compare(group, name, folder):
    sim.begin_rank(delays=4)
    sim.use_kernels(kernels.LIBRARY)
    expected = results("cpu", name, folder / "cpu")
    torch.testing.assert_close(results("sim", name, folder / "sim"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "LoRA"])
@pytest.mark.second_tier("Llama", "LoRA")
def test_models_are_the_whole_ones_and_those_of_cpu_ranks(ranks, tmp_path, name):
    for rank in ranks.launch(compare, 2, name, tmp_path, init=False, timeout=180.0):
        assert rank.error is None and rank.exit_code == 0, (rank.error, rank.output)
    if name == "LoRA":
        saved = [load_file(tmp_path / device / "adapter_model.safetensors") for device in ("cpu", "sim")]
        assert len(saved[0]) == 12
        torch.testing.assert_close(saved[1], saved[0], rtol=0, atol=0)

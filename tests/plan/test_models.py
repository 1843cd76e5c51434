"""Parameters and operations of known models are the published ones."""

import pytest

from bench.planning.megatron import flops_per_step, parameters, training_seconds
from pyruntime.cli.plan_facts import MODELS, find_model
from pyruntime.llama.presets import PRESETS

# Billions of parameters as Megatron-LM's table 1 gives them, by name.
PUBLISHED = {
    "gpt-1.7b": 1.7,
    "gpt-18.4b": 18.4,
    "gpt-145.6b": 145.6,
    "gpt-529.6b": 529.6,
    "gpt-1008b": 1008.0,
}


def test_parameters_of_llamas():
    assert find_model("llama-3.1-8b").parameters == 8_030_261_248
    assert find_model("llama-2-7b").parameters == 6_738_415_616


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_that_the_model_counts_itself(name):
    assert MODELS[name].parameters == PRESETS[name].parameter_count()


@pytest.mark.parametrize("name", PRESETS)
def test_operations_of_a_step_are_those_that_the_model_counts_itself(name):
    assert MODELS[name].step_flops(3 * 512, 512) == 3 * 512 * PRESETS[name].flops_per_token(512)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_of_megatrons_gpts(name, billions):
    model = find_model(name)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    assert model.parameters == pytest.approx(parameters(model.layers, model.hidden, 51200, 2048), rel=1e-9)


def test_megatrons_closed_forms_at_a_trillion_parameters():
    assert parameters(128, 25600, 51200, 2048) == pytest.approx(1.008039e12, rel=1e-6)
    flops = flops_per_step(3072, 2048, 128, 25600, 51200)
    assert flops == pytest.approx(5.1391e19, rel=1e-4)
    assert flops / (3072 * 163e12) == pytest.approx(102.6, abs=0.05)
    # 450 billion tokens take about three months (section 5.1).
    assert training_seconds(450e9, 1.008e12, 3072, 163e12) / 86400 == pytest.approx(84, abs=1)


@pytest.mark.parametrize("spelled", ["llama-3-70b", "Llama3_70B", "meta-llama-3.1-70b", "LLAMA3-70B"])
def test_a_model_is_found_however_it_is_spelled(spelled):
    assert find_model(spelled).name == "llama3-70b"


def test_an_unknown_model_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"There is no model 'llama-3-70'; the nearest is llama3-70b\."):
        find_model("llama-3-70")

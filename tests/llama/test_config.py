"""Model shapes: known sizes, the translation to Hugging Face's, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import transformers
from torch import nn

from pyruntime.llama import PRESETS, Llama, LlamaConfig, RopeScaling, preset
from tests.llama.cases import CASES

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
}
SLIDING_FIRST = ["sliding_attention", "full_attention"]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_that_of_the_model(name):
    assert PRESETS[name].parameter_count() == parameters(Llama(PRESETS[name], device="meta"))


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_parameter_count_of_published_models(name, total):
    assert PRESETS[name].parameter_count() == total


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_parameter_count_with_biases_and_tied_head(config):
    assert config.parameter_count() == parameters(Llama(config, device="meta"))


@pytest.mark.parametrize("name", ["debug", "3m", "10m", "30m", "125m"])
def test_small_presets_are_as_large_as_their_names_say(name):
    wanted = {"debug": 0.3e6, "3m": 3e6, "10m": 10e6, "30m": 30e6, "125m": 125e6}[name]
    assert PRESETS[name].parameter_count() == pytest.approx(wanted, rel=0.1)
    PRESETS[name].check_tp(4)


def test_flops_are_twice_the_products_of_every_matrix_and_of_the_visible_scores():
    config = CASES["gqa-llama3-tied"]
    model = Llama(config, device="meta")
    # A tied head is one parameter, but the embedding is looked up and the head is multiplied.
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    seq = 33
    # Token t of a sequence meets about half of seq keys, in Q K^T and in P V, of 8 heads of 8 channels.
    scores = config.num_hidden_layers * 2 * (seq / 2) * 64
    assert config.flops_per_token(seq, training=False) == 2 * (matrices + scores)
    assert config.flops_per_token(seq) == 3 * config.flops_per_token(seq, training=False)


@pytest.mark.parametrize("config", [*CASES.values(), *PRESETS.values()], ids=[*CASES, *PRESETS])
def test_config_survives_the_way_to_hugging_face_and_back(config, tmp_path):
    assert LlamaConfig.from_hf(config.to_hf()) == config
    assert LlamaConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    # transformers writes its own spelling of the same.
    hf = config.to_hf()
    transformers.AutoConfig.for_model(**hf).save_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert LlamaConfig.from_hf(theirs) == config


def test_old_spelling_of_rope_scaling_is_read():
    hf = PRESETS["llama2-7b"].to_hf() | {"rope_scaling": {"type": "linear", "factor": 8.0}}
    assert LlamaConfig.from_hf(hf).rope_scaling == RopeScaling("linear", factor=8.0)


def test_preset_with_another_width_has_another_head_dim():
    assert preset("10m", hidden_size=768).head_dim == 64
    assert preset("10m", vocab_size=5000).head_dim == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0 must be a positive whole number."),
        ({"vocab_size": 2.5}, "vocab_size=2.5 must be a positive whole number."),
        ({"hidden_size": 100, "num_attention_heads": 8}, "hidden_size=100 is not a multiple of"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads=3 does not divide num_attention_heads=8; use one of",
        ),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be between 1e-30 and 1"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a finite number"),
        ({"initializer_range": float("nan")}, "initializer_range=nan must be a finite number"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4} | changes
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rope_type": "longrope"}, "There is no rope_type='longrope'; use one of"),
        ({"rope_type": "yarn", "beta_fast": 1.0}, "beta_slow=1.0 and beta_fast=1.0 must be positive"),
        ({"rope_type": "yarn", "attention_factor": 0.0}, "attention_factor=0.0 must be between"),
        ({"rope_type": "yarn", "truncate": 1}, "truncate=1 must be true or false"),
        ({"factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 and high_freq_factor=4.0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0 must be"),
    ],
)
def test_impossible_rope_scaling_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2'; only 'deepseek_v3', 'dots1', 'llama', 'mistral'"),
        ({"partial_rotary_factor": 0.75}, "has partial_rotary_factor=0.75, which this model does not have"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": SLIDING_FIRST},
            "layer_types=.*; only layers with full_attention, and after them",
        ),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True},
            "which is not supported for qwen3_moe; it is for qwen2 and qwen3",
        ),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window='no' of config.json must"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0 must be a positive whole number"),
        (
            {"model_type": "mistral", "attention_bias": True},
            "has attention_bias=True, which no mistral model has",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "is quantized"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' in config.json lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_foreign_config_json_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(PRESETS["debug"].to_hf() | changes)


def test_tp_that_cuts_heads_is_refused_with_what_would_do():
    with pytest.raises(ValueError, match=r"tp=3 does not divide num_key_value_heads=8; use 1, 2, 4 or 8\."):
        PRESETS["llama3-8b"].check_tp(3)
    with pytest.raises(ValueError, match=r"tp=4 does not divide intermediate_size=90; use 1 or 2\."):
        preset("debug", intermediate_size=90).check_tp(4)


def test_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="no model preset 'llama4'; use one of debug, 3m"):
        preset("llama4")

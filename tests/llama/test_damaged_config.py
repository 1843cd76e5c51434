"""A config.json in which anything was changed is a model or one sentence."""

import dataclasses
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config, saved_dtype
from pyruntime.llama.presets import PRESETS
from pyruntime.llama.rope_scaling import RopeScaling
from tests.mutations import BOUNDED, contents, documents, is_one_sentence

PLAIN = PRESETS["debug"].to_hf()
LLAMA_31 = PRESETS["llama3-8b"].to_hf("bfloat16")
NEW_SPELLING = {
    **PLAIN,
    "dtype": "float16",
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}
RELATIVES = [
    dataclasses.replace(PRESETS["debug"], **changes).to_hf()
    for changes in (
        {"qkv_bias": True, "sliding_window": 9, "first_window_layer": 1},
        {"sliding_window": 9},
        {"merged_files": True},
        {"qk_norm": True, "qk_norm_of_all": True, "norms_after": True},
        {"rope_scaling": RopeScaling("yarn", attention_factor=1.2)},
    )
] + [PRESETS["experts-8x1m"].to_hf()]


def is_read_or_refused(hf) -> None:
    try:
        config = LlamaConfig.from_hf(hf)
        saved_dtype(hf)
        config.check_tp(2)
    except ValueError as error:
        assert is_one_sentence(error)
        return
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert config.parameter_count() > 0 and config.flops_per_token(64) > 0


@given(st.sampled_from([PLAIN, LLAMA_31, NEW_SPELLING, *RELATIVES]).flatmap(documents))
@example(PLAIN | {"hidden_size": "96"})
@example(PLAIN | {"rms_norm_eps": "1e-5"})
@example(PLAIN | {"num_key_value_heads": 1.5})
@example(PLAIN | {"num_key_value_heads": 3, "num_attention_heads": 2**61})
@example(PLAIN | {"rope_scaling": [1]})
@example(PLAIN | {"torch_dtype": ["float32"]})
@example(PLAIN | {"rope_scaling": {"rope_type": "linear", "factor": "2"}})
@example(PLAIN | {"rope_theta": float("inf")})
@example(PLAIN | {"rope_theta": -(10**400)})
@example(RELATIVES[0] | {"layer_types": [1]})
@example(RELATIVES[0] | {"layer_types": "sliding_attention"})
@example(RELATIVES[0] | {"max_window_layers": None})
@example(RELATIVES[0] | {"sliding_window": "9"})
@example(RELATIVES[0] | {"num_hidden_layers": None})
@example(RELATIVES[4] | {"rope_theta": 1.0})
@example(
    RELATIVES[4] | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}}
)
@example(
    RELATIVES[4]
    | {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1e300, "mscale_all_dim": 1e-300}}
)
@example(RELATIVES[4] | {"rope_scaling": {"rope_type": ["yarn"]}})
@example(PLAIN | {"partial_rotary_factor": [1]})
@example(PLAIN | {"model_type": ["qwen2"]})
@BOUNDED
def test_changed_values(hf):
    if isinstance(hf, dict):
        is_read_or_refused(hf)


@given(contents(json.dumps(LLAMA_31).encode()))
@example(b"[" * 200_000)
@example(b"1" * 5000)
@BOUNDED
def test_changed_bytes(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_bytes(content)
    try:
        hf = read_config(folder)
    except ValueError as error:
        assert is_one_sentence(error) and "config.json" in str(error)
    else:
        is_read_or_refused(hf)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("hidden_size", "96", "hidden_size='96' must be a positive whole number"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps='1e-5' must be a finite number"),
        ("tie_word_embeddings", "false", "tie_word_embeddings='false' must be true or false"),
        ("rope_scaling", [1], "rope_scaling of config.json must be an object, found [1]"),
        ("torch_dtype", ["float32"], "config.json says dtype ['float32']"),
    ],
)
def test_the_sentence_names_the_key_and_what_it_holds(name, value, sentence):
    hf = PLAIN | {name: value}
    with pytest.raises(ValueError) as refused:
        LlamaConfig.from_hf(hf)
        saved_dtype(hf)
    assert sentence in str(refused.value)

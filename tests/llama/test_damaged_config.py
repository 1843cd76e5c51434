"""A config.json in which anything was changed is a model or one sentence."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import read_config, saved_dtype
from pyruntime.llama.presets import PRESETS
from tests.mutations import BOUNDED, contents, documents, is_one_sentence

PLAIN = PRESETS["debug"].to_hf()
LLAMA_31 = PRESETS["llama3-8b"].to_hf("bfloat16")
NEW_SPELLING = {
    **PLAIN,
    "dtype": "float16",
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


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


@given(st.sampled_from([PLAIN, LLAMA_31, NEW_SPELLING]).flatmap(documents))
@example(PLAIN | {"hidden_size": "96"})
@example(PLAIN | {"rms_norm_eps": "1e-5"})
@example(PLAIN | {"num_key_value_heads": 1.5})
@example(PLAIN | {"num_key_value_heads": 3, "num_attention_heads": 2**61})
@example(PLAIN | {"rope_scaling": [1]})
@example(PLAIN | {"torch_dtype": ["float32"]})
@example(PLAIN | {"rope_scaling": {"rope_type": "linear", "factor": "2"}})
@example(PLAIN | {"rope_theta": float("inf")})
@example(PLAIN | {"rope_theta": -(10**400)})
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

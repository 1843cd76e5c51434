"""The model that a configuration asks for, or one sentence why there is none."""

import dataclasses
import json

import pytest
import torch

from pyruntime.llama import Llama
from pyruntime.llama.presets import PRESETS
from pyruntime.train.config import Model, RunConfig, Train
from pyruntime.train.errors import ConfigError
from pyruntime.train.model_of_run import words_of_positions
from pyruntime.train.shape import llama_config


def test_a_preset_takes_the_tokenizers_vocabulary_and_the_given_sizes():
    model = Model(preset="10m", num_hidden_layers=2, hidden_size=64, num_attention_heads=8)
    shape = llama_config(model, 1000, 4096, tp=2)
    assert shape.vocab_size == 1024
    assert (shape.num_hidden_layers, shape.hidden_size, shape.head_dim) == (2, 64, 8)
    assert shape.intermediate_size == PRESETS["10m"].intermediate_size
    assert shape.max_position_embeddings == 4096


def test_a_checkpoint_fixes_the_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["debug"].to_hf()))
    assert llama_config(Model(init_from=str(tmp_path)), 256, 64, tp=1) == PRESETS["debug"]


@pytest.mark.parametrize("seq_len", [256, 300])
def test_sequences_beyond_the_positions_of_a_checkpoint_are_told(tmp_path, seq_len):
    shape = dataclasses.replace(PRESETS["debug"], max_position_embeddings=256)
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf()))
    config = RunConfig(model=Model(init_from=str(tmp_path)), train=Train(seq_len=seq_len))
    assert llama_config(config.model, 256, seq_len, tp=1).max_position_embeddings == seq_len
    assert ("max_position_embeddings=256" in words_of_positions(config)) == (seq_len > 256)
    assert not words_of_positions(RunConfig(train=Train(seq_len=4096)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers=1"),
        ({"preset": "3m"}, "preset=3m"),
        ({"vocab_size": 512}, "vocab_size=512"),
    ],
)
def test_a_shape_beside_a_checkpoint_is_refused(tmp_path, other, named):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["debug"].to_hf()))
    with pytest.raises(ConfigError) as refused:
        llama_config(Model(init_from=str(tmp_path), **other), 256, 64, tp=1)
    assert f"model.{named}" in str(refused.value) and "leave out model." in str(refused.value)
    same = Model(init_from=str(tmp_path), num_hidden_layers=2)  # what the checkpoint has is no contradiction
    assert llama_config(same, 256, 64, tp=1) == PRESETS["debug"]


@pytest.mark.parametrize(
    ("model", "vocab", "tp", "sentence"),
    [
        (Model(preset="3m"), 256, 3, "tp=3 does not divide num_key_value_heads=4; use 1, 2 or 4."),
        (Model(preset="3m", intermediate_size=641), 256, 2, "tp=2 does not divide intermediate_size=641;"),
        (
            Model(preset="3m", vocab_size=100),
            256,
            1,
            "model.vocab_size=100 is smaller than the tokenizer's 256",
        ),
        (
            Model(preset="3m", hidden_size=100),
            256,
            1,
            "hidden_size=100 is not a multiple of num_attention_heads=8",
        ),
        (
            Model(preset="3m", hidden_size=-8),
            256,
            1,
            "hidden_size=-8 must be a positive whole number below 2**31.",
        ),
        (
            Model(preset="3m", num_hidden_layers=0),
            256,
            1,
            "num_hidden_layers=0 must be a positive whole number below 2**31.",
        ),
        (Model(preset="4m"), 256, 1, "no model preset '4m'; use one of debug, 3m,"),
    ],
)
def test_an_impossible_shape_is_refused_in_one_sentence(model, vocab, tp, sentence):
    with pytest.raises(ConfigError) as refused:
        llama_config(model, vocab, 64, tp)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "mistral"}', "\xff"])
def test_a_damaged_config_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        llama_config(Model(init_from=str(tmp_path)), 256, 64, tp=1)


def test_z_loss_is_of_training_alone_and_of_labels_that_count():
    model = Llama(PRESETS["debug"], seed=1, z_loss=0.5)
    ids = torch.randint(256, (2, 17))
    labels = ids.roll(-1, 1)
    labels[0, :5] = -100
    with torch.no_grad():
        trained, measured = model(ids, labels), model.eval()(ids, labels)
        squares = model(ids).double().logsumexp(-1).square()[labels != -100]
    torch.testing.assert_close(trained - measured, (0.5 * squares.mean()).float(), rtol=1e-4, atol=1e-5)

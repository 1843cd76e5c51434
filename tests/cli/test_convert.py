"""Hugging Face models become checkpoints and checkpoints Hugging Face models, as transformers reads them."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from pyruntime.cli import main
from pyruntime.train import checkpoint_folder, manifest
from pyruntime.train.config import Model
from tests.train import jobs

SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "tied": {"tie_word_embeddings": True, "rope_scaling": LLAMA3},
    "untied": {"tie_word_embeddings": False, "rope_theta": 500.0},
}


def convert(source, target, *options):
    assert main(["convert", "--source", str(source), "--target", str(target), *options]) == 0


def logits(folder, ids):
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_several_files_goes_there_and_back(tmp_path, kind):
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    LlamaForCausalLM(LlamaConfig(**SIZES, **KINDS[kind])).save_pretrained(theirs, max_shard_size="60KB")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    convert(theirs, ours)
    convert(ours, back, "--max_file_bytes", "50000")
    assert len(list(back.glob("*.safetensors"))) > 2
    ids = torch.randint(301, (2, 40))
    torch.testing.assert_close(logits(back, ids), logits(theirs, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_are_of_the_type_that_was_asked_for(tmp_path, dtype, expected):
    LlamaForCausalLM(LlamaConfig(**SIZES)).half().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "--dtype", dtype)
    convert(tmp_path / "ours", tmp_path / "back")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert {each.dtype for each in found.parameters()} == {expected}


def test_a_converted_model_is_trained_on_at_another_mesh_as_if_it_had_been_started_from(ranks, tmp_path):
    theirs = tmp_path / "theirs"
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 256})).save_pretrained(theirs)
    convert(theirs, tmp_path / "ours")
    config = jobs.changed(jobs.job(tmp_path, steps=4), "model", preset="", hidden_size=None)
    config = jobs.changed(config, "model", intermediate_size=None, init_from=str(theirs))
    assert config.model == Model(init_from=str(theirs))
    jobs.prepare(config)
    saved = checkpoint_folder.find(tmp_path / "ours")
    assert saved.name == "step-000000"
    started, resumed = (ranks.run(jobs.history, 2, config, each)[0] for each in (None, saved))
    assert jobs.curve(started, "loss") == jobs.curve(resumed, "loss")


def test_a_checkpoint_of_a_run_is_what_the_run_left_as_its_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--train.steps", "2", "--train.val_every", "0", "--output.sample_tokens", "0"]
    assert main(["train", "--config", "tiny", *sizes, "--output.run_dir", "run"]) == 0
    convert("run", "out")
    assert "out: weights of step 2, for transformers" in capsys.readouterr().out
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "run" / "model" / name).read_bytes()


def test_the_tokenizer_of_a_run_on_tokens_goes_along_or_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(random.getrandbits(64))
    text = " ".join(map(str, rng.integers(10**6, size=4000)))
    (tmp_path / "text.txt").write_text(text)
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator([text], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    engine.save("bpe.json")
    assert main(["tokenize", "tokens", "--paths", "text.txt", "--tokenizer", "bpe.json"]) == 0
    sizes = ["--train.steps", "1", "--train.val_every", "0", "--output.sample_tokens", "0"]
    paths = ["--data.paths", "tokens", "--output.run_dir", "run", "--output.progress", "off"]
    assert main(["train", "--config", "tiny", *sizes, *paths]) == 0
    convert("run", "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "bpe.json").read_bytes()

    def refusal(target):
        capsys.readouterr()
        assert main(["convert", "--source", "run", "--target", target]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and not (tmp_path / target).exists(), said
        return said

    (tmp_path / "tokens").rename(tmp_path / "elsewhere")
    assert "data.paths tokens, which may have held tokens with theirs, is gone; restore" in refusal("a")
    assert main(["tokenize", "tokens", "--paths", "text.txt"]) == 0
    assert "leads to a tokenizer of 256 tokens, but the model in run/checkpoints/step-000001 has 640" in (
        refusal("b")
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours")
    return folder


def no_model(checkpoint):
    facts = json.loads((checkpoint / "run.json").read_text())
    facts["model"]["hidden_size"] = "64"
    (checkpoint / "run.json").write_text(json.dumps(facts))
    sums = manifest.read(checkpoint) | {"run.json": manifest.checksum(checkpoint / "run.json")}
    manifest.write(checkpoint, sums)


def another_model(checkpoint):
    facts = json.loads((checkpoint / "run.json").read_text())
    facts["model"]["num_hidden_layers"] = 3
    (checkpoint / "run.json").write_text(json.dumps(facts))
    sums = manifest.read(checkpoint) | {"run.json": manifest.checksum(checkpoint / "run.json")}
    manifest.write(checkpoint, sums)


def cut(checkpoint):
    path = checkpoint / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_model, "it does not describe a model (hidden_size='64' must be a positive whole number"),
        (another_model, "Missing key in checkpoint state_dict: model.layers.2"),
        (cut, "rank-00000.safetensors is damaged: it has 100 bytes and was saved with"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(converted, tmp_path, capsys, damage, words):
    folder = shutil.copytree(converted / "ours", tmp_path / "ours")
    damage(folder / "checkpoints" / "step-000000")
    assert main(["convert", "--source", str(folder), "--target", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pyruntime: --source: ") and words in said and said.count("\n") == 1, said


def test_what_cannot_be_converted_is_refused_in_one_sentence(converted, tmp_path, capsys):
    theirs, empty = converted / "theirs", tmp_path / "empty"
    empty.mkdir()
    for source, target, words in (
        (tmp_path / "nowhere", tmp_path / "a", f"--source {tmp_path}/nowhere: there is no such folder."),
        (
            theirs,
            converted / "ours",
            f"--target {converted}/ours exists and is not an empty folder; name a new folder.",
        ),
        (empty, tmp_path / "b", f"--source: {empty} holds no complete checkpoint"),
    ):
        assert main(["convert", "--source", str(source), "--target", str(target)]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said

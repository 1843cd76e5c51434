"""A model that came from Hugging Face leaves with every file and setting that training does not change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from pyruntime.cli import main
from pyruntime.train import run_folder
from pyruntime.train.config import Model
from pyruntime.train.model_of_run import words_of_dtype
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs

OTHERS = {
    "chat_template.jinja": "{{ messages }}",
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "added_tokens.json": "{}",
    "tokenizer.model": "no real one",
    "LICENSE": "none",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}


@pytest.fixture
def source(tmp_path) -> Path:
    """A Llama of fp32 with unusual tokens and keys."""
    folder = tmp_path / "source"
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=[3, 5], pad_token_id=0, max_position_embeddings=128, own_key="kept",
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    vocabulary = {"</s>": 3, "<unk>": 1} | {chr(97 + i): 6 + i for i in range(26)}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "model_max_length": 99}')
    (folder / "additional_chat_templates").mkdir()
    for name, content in OTHERS.items():
        (folder / name).write_text(content)
    return folder


def compare(source: Path, found: Path, dtype: str) -> None:
    for path in source.rglob("*"):
        name = path.relative_to(source)
        if path.is_dir() or path.suffix == ".safetensors" or name.name == "config.json":
            continue
        assert (found / name).read_bytes() == path.read_bytes(), name
    came, left = (json.loads((folder / "config.json").read_text()) for folder in (source, found))
    assert {key for key in came if came[key] != left.get(key)} <= {"dtype", "torch_dtype"}
    assert left.keys() == came.keys() and dtype in (left.get("dtype"), left.get("torch_dtype"))
    model = transformers.AutoModelForCausalLM.from_pretrained(found, dtype="auto")
    assert model.dtype == getattr(torch, dtype)


def trained(group, config) -> Path:
    return run(config, "any", jobs.runtime(group, config), StopRequest())


@pytest.mark.parametrize(("dtype", "named"), [("fp32", "float32"), ("bf16", "bfloat16")])
@pytest.mark.second_tier("fp32-float32")
def test_what_leaves_is_what_came(ranks, source, tmp_path, dtype, named):
    config = jobs.job(tmp_path, steps=1, dtype=dtype)
    config = dataclasses.replace(config, model=Model(init_from=str(source)))
    folder, _ = ranks.run(trained, 2, config)
    compare(source, folder / "model", named)


def test_so_it_does_through_a_checkpoint_and_back(source, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["convert", "--source", str(source), "--target", str(there)]) == 0
    assert main(["convert", "--source", str(there), "--target", str(back)]) == 0
    compare(source, back, "float32")


@pytest.mark.parametrize("damage", ["{", "[1]", "[" * 100_000, None])
def test_settings_that_came_and_are_damaged_are_a_sentence(source, tmp_path, capsys, damage):
    there = tmp_path / "there"
    assert main(["convert", "--source", str(source), "--target", str(there)]) == 0
    kept = there / "came_with" / "config.json"
    kept.unlink() if damage is None else kept.write_text(damage)
    capsys.readouterr()
    assert main(["convert", "--source", str(there), "--target", str(tmp_path / "back")]) == 2
    said = capsys.readouterr().err
    assert f"--source: {kept} is damaged" in said and "copy it again" in said and "Traceback" not in said


@pytest.mark.parametrize(("dtype", "said"), [("fp32", False), ("bf16", True)])
def test_a_run_says_that_weights_leave_in_another_type(source, tmp_path, dtype, said):
    config = dataclasses.replace(jobs.job(tmp_path, dtype=dtype), model=Model(init_from=str(source)))
    words = f"weights came as torch.float32 and leave as torch.bfloat16, which is train.dtype={dtype}"
    assert (words in words_of_dtype(config)) is said


def test_a_checkpoint_copied_out_of_its_run_says_what_is_not_with_it(source, tmp_path, capsys):
    there, out = tmp_path / "there", tmp_path / "out" / "copies"
    assert main(["convert", "--source", str(source), "--target", str(there)]) == 0
    shutil.copytree(there / "checkpoints" / "step-000000", out / "step-000000")
    capsys.readouterr()
    convert = ["convert", "--source", str(out / "step-000000"), "--target"]
    assert main([*convert, str(tmp_path / "without")]) == 0
    said = capsys.readouterr().out
    assert "step-000000 is not in the folder of its run: " in said and f"copy both to {out.parent}" in said
    assert not (tmp_path / "without" / "chat_template.jinja").exists()
    for name in ("config.toml", "came_with"):
        copy = shutil.copytree if (there / name).is_dir() else shutil.copyfile
        copy(there / name, out.parent / name)
    assert main([*convert, str(tmp_path / "with")]) == 0
    assert "is not in the folder" not in capsys.readouterr().out
    compare(source, tmp_path / "with", "float32")


def test_what_came_goes_along_to_another_run_folder(source, tmp_path):
    there, other = tmp_path / "there", tmp_path / "other"
    assert main(["convert", "--source", str(source), "--target", str(there)]) == 0
    config = jobs.changed(jobs.job(tmp_path), "output", run_dir=str(other))
    with contextlib.ExitStack() as held:
        run_folder.make(config, "any", there / "checkpoints" / "step-000000", held)
    for name in OTHERS:
        assert (other / "came_with" / name).read_bytes() == (source / name).read_bytes()

"""Checkpoints: round trips between numbers of ranks and through transformers, and damaged ones."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pyruntime.llama import Llama, load_hf, preset, save_hf
from pyruntime.llama.hf import plan_files, weight_files
from tests.llama.cases import CASES, full_tensors, init_and_save, load_and_save, only_loads


def stored(directory):
    """All tensors of a checkpoint folder, read without our code."""
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def assert_same_tensors(found, exact):
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.second_tier("plain")
def test_saved_at_tp_2_and_loaded_at_1_and_4(ranks, tmp_path, case):
    ranks.run(init_and_save, 2, CASES[case], tmp_path / "two")
    exact = full_tensors(Llama(CASES[case], seed=3))
    assert_same_tensors(stored(tmp_path / "two"), exact)
    for tp in (1, 4):
        ranks.run(load_and_save, tp, tmp_path / "two", tmp_path / str(tp), {})
        assert_same_tensors(stored(tmp_path / str(tp)), exact)


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_we_write(tmp_path, case):
    ours = Llama(CASES[case], seed=6)
    save_hf(ours, tmp_path)
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(CASES[case].vocab_size, (2, 40))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_that_of_the_checkpoint_unless_another_is_asked_for(tmp_path, dtype):
    save_hf(Llama(preset("debug")), tmp_path, dtype=dtype)
    assert {t.dtype for t in stored(tmp_path).values()} == {dtype}
    assert load_hf(tmp_path).norm.weight.dtype == dtype
    assert load_hf(tmp_path, dtype=torch.float32).norm.weight.dtype == torch.float32


def test_large_checkpoints_are_cut_into_files_with_an_index(ranks, tmp_path):
    config, limit = CASES["plain"], 100_000
    ranks.run(init_and_save, 1, config, tmp_path / "one")
    ranks.run(load_and_save, 2, tmp_path / "one", tmp_path / "many", {"max_file_bytes": limit})
    exact = stored(tmp_path / "one")
    files = sorted(tmp_path.glob("many/*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 3 and all(sum(t.nbytes for t in load_file(path).values()) <= limit for path in files)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exact.values())
    assert_same_tensors(stored(tmp_path / "many"), exact)
    assert_same_tensors(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "many").state_dict(), exact)
    ranks.run(load_and_save, 4, tmp_path / "many", tmp_path / "back", {})
    assert_same_tensors(stored(tmp_path / "back"), exact)


def test_files_are_planned_by_size_for_a_model_too_large_to_hold():
    config = preset("llama3-8b")
    content = list(Llama(config, device="meta").shards())
    plan = plan_files(config, content, torch.bfloat16, 5_000_000_000)
    assert next(iter(plan)) == "model-00001-of-00004.safetensors" and len(plan) == 4
    assert [shard.name for part in plan.values() for shard in part] == [shard.name for shard in content]
    assert max(sum(torch.Size(s.shape).numel() * 2 for s in part) for part in plan.values()) <= 5_000_000_000


def test_a_new_checkpoint_leaves_nothing_of_the_old_one(tmp_path):
    save_hf(Llama(CASES["plain"], seed=1), tmp_path, max_file_bytes=100_000)
    (tmp_path / "notes.txt").write_text("kept")
    new = Llama(CASES["gqa-llama3-tied"], seed=2)
    save_hf(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    ]
    assert_same_tensors(full_tensors(load_hf(tmp_path)), full_tensors(new))


def test_saving_marks_the_file_as_pytorchs(tmp_path):
    save_hf(Llama(preset("debug")), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_failed_write_is_an_error_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way")
    first, second = ranks.run(init_and_save, 2, CASES["plain"], tmp_path / "file", expect_errors=True)
    assert isinstance(first, OSError) and str(tmp_path / "file") in str(first)
    assert isinstance(second, RuntimeError) and "Rank 0 could not write the checkpoint" in str(second)


@pytest.fixture
def checkpoint(tmp_path):
    save_hf(Llama(CASES["plain"]), tmp_path)
    return tmp_path


def test_surplus_tensors_of_old_and_tied_checkpoints_are_passed_over(tmp_path):
    model = Llama(CASES["gqa-llama3-tied"])
    save_hf(model, tmp_path)
    tensors = stored(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_tensors(full_tensors(load_hf(tmp_path)), full_tensors(model))


def remove_folder(folder):
    shutil.rmtree(folder)


def remove_config(folder):
    (folder / "config.json").unlink()


def break_config(folder):
    (folder / "config.json").write_text('{"vocab_size": ')


def list_as_config(folder):
    (folder / "config.json").write_text("[]")


def strange_dtype(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "int8"}))


def remove_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 5000)


def drop_tensor(folder):
    tensors = stored(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def add_tensor(folder):
    save_file(stored(folder) | {"model.layers.1.extra": torch.ones(1)}, folder / "model.safetensors")


def widen_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


def index_without_file(folder):
    name = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(stored(folder), name)}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_against_file(folder):
    tensors = stored(folder)
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (folder / "model.safetensors").unlink()
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_without_map(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


DAMAGE = [
    (remove_folder, FileNotFoundError, "There is no checkpoint folder"),
    (remove_config, FileNotFoundError, "holds no config.json"),
    (break_config, ValueError, "config.json is not valid JSON"),
    (list_as_config, ValueError, "must hold a JSON object, not a list"),
    (strange_dtype, ValueError, "says dtype 'int8'"),
    (remove_weights, FileNotFoundError, "it has pytorch_model.bin; save it as safetensors first"),
    (truncate, ValueError, "model.safetensors is not a whole safetensors file"),
    (garble, ValueError, "model.safetensors is not a whole safetensors file"),
    (drop_tensor, ValueError, "lacks model.layers.1.mlp.up_proj.weight"),
    (add_tensor, ValueError, "holds model.layers.1.extra, which a Llama does not have"),
    (
        widen_config,
        ValueError,
        r"mlp.gate_proj.weight in .* has shape \[96, 64\], but by config.json it is \[128, 64\]",
    ),
    (index_without_file, FileNotFoundError, "names model-00001-of-00001.safetensors"),
    (index_against_file, ValueError, "does not hold model.norm.weight"),
    (index_without_map, ValueError, "has no weight_map"),
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGE, ids=[case[0].__name__ for case in DAMAGE])
def test_damaged_checkpoints_are_refused(checkpoint, damage, error, message):
    damage(checkpoint)
    with pytest.raises(error, match=message):
        load_hf(checkpoint)


def test_damaged_checkpoints_are_refused_on_every_rank(ranks, checkpoint):
    truncate(checkpoint)
    for error in ranks.run(only_loads, 2, checkpoint, expect_errors=True):
        assert isinstance(error, ValueError) and "not a whole safetensors file" in str(error)


def test_transformers_ends_and_begins_texts_with_the_separator(tmp_path):
    save_hf(Llama(preset("debug")), tmp_path, separator=7)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for config in (theirs.config, theirs.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (7, 7)
    save_hf(Llama(preset("debug")), tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for config in (theirs.config, theirs.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (None, None)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "deep/model.safetensors"])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "other.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    with pytest.raises(ValueError, match=r"names .* which is no file of its own folder"):
        weight_files(folder)

"""A model of another family is trained on meshes as on one rank, and its folder leaves as it came."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pyruntime.cli import main
from pyruntime.llama import preset
from pyruntime.train import checkpoint_folder
from pyruntime.train.checkpoint_folder import CheckpointFacts
from pyruntime.train.config import Model
from pyruntime.train.errors import ConfigError
from pyruntime.train.resolved import check
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs
from tools import check_parity as parity

SIZES = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
FAMILIES = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "mistral": {"sliding_window": 11},
    "phi3": {"sliding_window": 7},
    "olmo2": {},
}


def written(folder, family, **changes):
    config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def config(request, tmp_path_factory):
    """A job that begins with such a model, for one rank."""
    config = parity.job(tmp_path_factory.mktemp("families"))
    folder = written(tmp_path_factory.mktemp("model"), request.param)
    config = jobs.changed(config, "model", **vars(Model(init_from=str(folder))))
    config = jobs.changed(config, "data", tokenizer="bytes")
    jobs.prepare(config)
    return config


@pytest.fixture(scope="module")
def whole(ranks, config):
    """What one rank makes of it."""
    return ranks.run(steps_of, 1, config)[0]


def steps_of(group, config):
    return parity.steps_of(jobs.runtime(group, config), config)


MESHES = {
    "tp2": {"tp": 2},
    "tp2 in slices": {"tp": 2, "tp_slices": 2},
    "cp2 dp2 zero3": {"cp": 2, "dp": 2, "zero": 3},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 pp2 in slices": {"tp": 2, "pp": 2, "slices": 2, "kind": "seq1f1b"},
    "tp4 full recomputation": {"tp": 4, "recompute": "full"},
    "tp2 cp2 selective recomputation": {"tp": 2, "cp": 2, "recompute": "selective"},
    "cp2 pp2": {"cp": 2, "pp": 2},
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(
    but=["qwen2-tp2 pp2 in slices", "qwen2-cp2 dp2 zero3", "phi3-tp2 pp2", "mistral-cp2 pp2", "olmo2-tp2 pp2"]
)
def test_losses_and_norms_are_those_of_one_rank(ranks, config, whole, name):
    sizes = dict(MESHES[name])
    recompute, count = sizes.pop("recompute", "none"), 4 if sizes.get("dp", 1) == 1 else 2
    pipeline = {key: sizes.pop(key) for key in ("slices", "kind") if key in sizes}
    asked = jobs.changed(config, "train", micro_batch_size=count, activation_checkpointing=recompute)
    asked = jobs.changed(jobs.changed(asked, "parallel", **{"tp": 1} | sizes), "pipeline", **pipeline)
    of_mesh = asked.parallel
    if of_mesh.tp_slices == 2 and "olmo2" in (Path(config.model.init_from) / "config.json").read_text():
        with pytest.raises(ConfigError, match="does not support a model with norms of the results"):
            check(asked, 2)
        return
    found = ranks.run(steps_of, of_mesh.tp * of_mesh.dp * of_mesh.cp * of_mesh.pp, asked)
    assert found[0] == found[-1]
    assert parity.difference(found[0], whole) <= parity.TOLERANCE


@pytest.mark.parametrize("name", ["tp2 pp2", "tp2 cp2 selective recomputation"])
@pytest.mark.second_tier(but=["olmo2-tp2 pp2"])
def test_adapters_learn_as_on_one_rank(ranks, config, name):
    config = jobs.changed(config, "lora", rank=3, alpha=6.0)
    sizes = dict(MESHES[name])
    recompute = sizes.pop("recompute", "none")
    asked = jobs.changed(config, "train", micro_batch_size=4, activation_checkpointing=recompute)
    asked = jobs.changed(asked, "parallel", **{"tp": 1} | sizes)
    if "phi3" in (Path(config.model.init_from) / "config.json").read_text():
        with pytest.raises(ConfigError, match=r"hold q, k and v in one tensor \(Phi-3\), which peft"):
            check(asked, 4)
        return
    found, (whole,) = ranks.run(steps_of, 4, asked), ranks.run(steps_of, 1, config)
    assert parity.difference(found[0], whole) <= parity.TOLERANCE
    assert found[0] == found[-1]


def stored(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_a_folder_goes_through_a_checkpoint_and_back(config, tmp_path):
    check_there_and_back(Path(config.model.init_from), tmp_path)


def test_so_does_one_with_experts(tmp_path):
    sizes = {"num_local_experts": 4, "sliding_window": 6}
    check_there_and_back(written(tmp_path / "source", "mixtral", **sizes), tmp_path)


def check_there_and_back(source, tmp_path):
    (source / "tokenizer_config.json").write_text("{}")
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["convert", "--source", str(source), "--target", str(there)]) == 0
    assert main(["convert", "--source", str(there), "--target", str(back)]) == 0
    came, left = stored(source), stored(back)
    assert came.keys() == left.keys() and all(torch.equal(left[name], came[name]) for name in came)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


def test_a_run_says_what_it_will_train(config, capsys):
    command = ["train", "--model.init_from", config.model.init_from, "--data.tokenizer", "bytes"]
    command += ["--data.paths", config.data.paths[0], "--train.device", "cpu", "--train.seq_len", "32"]
    assert main([*command, "--dry_run", "2", "--parallel.tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "4 layers of 48 features" in said
    window = getattr(transformers.AutoConfig.from_pretrained(config.model.init_from), "sliding_window", None)
    if window is None:
        assert "window" not in said
        return
    assert f"{'3 of them' if window == 5 else 'all'} with a window of {window} tokens" in said


def test_sequences_beyond_what_dynamic_scaling_leaves_alone_are_refused(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = written(tmp_path / "model", "llama", rope_parameters=scaling)
    config = jobs.changed(jobs.job(tmp_path), "model", **vars(Model(init_from=str(folder))))
    config = jobs.changed(config, "data", tokenizer="bytes")
    check(jobs.changed(config, "train", seq_len=128), 1)
    with pytest.raises(
        ConfigError, match=r"max_position_embeddings=128, which is not supported; set train\.seq"
    ):
        check(jobs.changed(config, "train", seq_len=129), 1)


def trained(group, config):
    return run(config, "any", jobs.runtime(group, config), StopRequest())


def test_a_longer_context_does_not_change_what_yarn_begins_with(tmp_path, ranks):
    """transformers takes max_position_embeddings for the original context if config.json names none."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    folder = written(tmp_path / "model", "llama", rope_parameters=scaling)
    hf = json.loads((folder / "config.json").read_text())
    del hf["rope_parameters"]["original_max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(hf))
    config = jobs.changed(
        jobs.job(tmp_path, steps=1, seq_len=140), "model", **vars(Model(init_from=str(folder)))
    )
    (left,) = ranks.run(trained, 1, jobs.changed(config, "data", tokenizer="bytes"))
    scaling = json.loads((left / "model" / "config.json").read_text())
    assert scaling["max_position_embeddings"] == 140
    assert scaling["rope_parameters"]["original_max_position_embeddings"] == 128


def test_a_checkpoint_from_before_a_field_was_there_is_taken_up(monkeypatch, tmp_path):
    without = {"qkv_bias", "sliding_window", "first_window_layer", "merged_files", "norms_after"}
    shape = dataclasses.asdict(preset("llama3-1b"))
    wanted = CheckpointFacts(3, "bf16", shape)
    before = {name: value for name, value in shape.items() if name not in without}
    before["rope_scaling"] = {k: v for k, v in shape["rope_scaling"].items() if not k.startswith("beta")}
    monkeypatch.setattr(checkpoint_folder, "read", lambda _: dataclasses.replace(wanted, model=before))
    assert checkpoint_folder.read_matching(tmp_path, wanted).model == before
    other = dataclasses.replace(wanted, model=shape | {"sliding_window": 9})
    with pytest.raises(ConfigError, match="was saved with sliding_window=None, but the configuration asks"):
        checkpoint_folder.read_matching(tmp_path, other)


@pytest.mark.parametrize("config", ["qwen2"], indirect=True)
def test_pipeline_costs_know_no_window(config, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text("{}")
    asked = jobs.changed(jobs.changed(config, "parallel", tp=1, pp=2), "pipeline", costs=str(file))
    with pytest.raises(ConfigError, match=f"pipeline.costs={file} was measured without a window"):
        check(asked, 2)

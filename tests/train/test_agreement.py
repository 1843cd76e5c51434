"""Ranks that were told different things, or opened different files, end in one sentence before they train."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import pyruntime
from pyruntime.comm import CommError
from pyruntime.llama import Llama, save_hf
from pyruntime.llama.presets import preset
from pyruntime.train import agreement, shape
from pyruntime.train.config import Model, RunConfig
from pyruntime.train.data import corpus
from pyruntime.train.errors import ConfigError
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs

# --- what is compared, without ranks


def test_nothing_is_said_of_ranks_that_agree():
    assert agreement.difference([{"a": "1", "b": "2"}, {"a": "1"}, {"b": "2"}], ["x", "x", "y"]) == ""


def test_key_ranks_hosts_and_both_values_are_named():
    facts = [{"optimizer.lr": "0.1"}] * 3 + [{"optimizer.lr": "0.2"}] + [{"optimizer.lr": "0.1"}] * 2
    said = agreement.difference(facts, ["a", "a", "b", "b", "b", "b"])
    assert "optimizer.lr is 0.1 on ranks 0 to 2, 4 to 5 (2 hosts, as a), 0.2 on rank 3 (host b)." in (
        said.replace(" and 4 to 5", ", 4 to 5")
    )


def test_the_first_keys_that_differ_are_named_and_the_others_counted():
    facts = [{str(key): str(rank) for key in range(7)} for rank in range(2)]
    said = agreement.difference(facts, ["a", "a"])
    assert "2 is 0 on rank 0" in said and "; 4 more differ." in said and "3 is" not in said


def test_a_long_value_is_compared_whole_and_shown_in_part():
    facts = [{"data.weights": "0.1, " * 500 + end} for end in ("1", "2")]
    said = agreement.difference(facts, ["a", "a"])
    assert said and len(said) < 500


def test_another_commit_of_the_same_version_differs(monkeypatch, tmp_path):
    copy = tmp_path / "pyruntime"
    shutil.copytree(Path(pyruntime.__file__).parent, copy, ignore=lambda _, names: {"__pycache__"} & {*names})
    own = agreement.of_config(RunConfig())
    monkeypatch.setattr(pyruntime, "__file__", str(copy / "__init__.py"))
    assert agreement.of_config(RunConfig()) == own
    (copy / "llama" / "rope.py").write_text("# another\n")
    said = agreement.difference([own, agreement.of_config(RunConfig())], ["a", "b"])
    assert "Python files in pyruntime/llama is" in said and "rank 1 (host b)" in said


def test_every_key_is_compared_but_those_that_may_differ():
    found = agreement.of_config(RunConfig())
    keys = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(getattr(RunConfig(), section.name))
    }
    told = {key for key in found if not key.startswith("Python files in ")} - {"pyruntime", "torch"}
    assert told == keys - agreement.MAY_DIFFER.keys()
    assert agreement.MAY_DIFFER.keys() < keys


# --- what ranks do


def run_case(group, config: RunConfig, odd: int, section: str, values: dict):
    """How a run ends on this rank, where rank `odd` alone was told other values."""
    if group.rank() == odd:
        config = jobs.changed(config, section, **values)
    try:
        run(config, "odd", jobs.runtime(group, config), StopRequest())
    except (ConfigError, CommError) as error:
        return type(error).__name__, str(error)
    return "trained", ""


MESHES = {"tp": {}, "dp": {"dp": 4}, "pp": {"pp": 2}, "cp": {"cp": 2}}


@pytest.mark.parametrize(
    ("mesh", "odd", "section", "values", "words"),
    [
        ("tp", 1, "model", {"num_attention_heads": 2}, "model.num_attention_heads is None on"),
        ("tp", 3, "model", {"num_hidden_layers": 1}, "model.num_hidden_layers is None on"),
        ("dp", 2, "optimizer", {"lr": 1e-3}, "optimizer.lr is 0.003 on ranks 0 to 1 and 3 (host"),
        ("dp", 0, "train", {"seed": 7}, "train.seed is 7 on rank 0 (host"),
        ("pp", 1, "train", {"dtype": "bf16"}, "train.dtype is 'fp32' on ranks 0 and 2 to 3 (host"),
        ("pp", 3, "train", {"steps": 3}, "train.steps is "),
        ("cp", 2, "train", {"seq_len": 31}, "train.seq_len is 33 on"),
        ("cp", 1, "data", {"val_fraction": 0.2}, "data.val_fraction is "),
    ],
)
def test_a_rank_that_was_told_something_else_is_named_on_all(
    ranks, tmp_path, mesh, odd, section, values, words
):
    config = jobs.changed(jobs.job(tmp_path, steps=2, batch_size=8), "parallel", **MESHES[mesh])
    for kind, said in ranks.run(run_case, 4, config, odd, section, values):
        assert kind == "ConfigError" and words in said and f"rank {odd} (host" in said, said
    assert not Path(config.output.run_dir).exists()


def in_another(name: str, work, *args):
    """`work`, with what `name` says replaced on one rank: "torch", "shape" or "tokenizer"."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "pyruntime":
            patch.setattr(pyruntime, "__version__", "0.0.1")
        elif name == "torch":
            patch.setattr(agreement.torch, "__version__", "1.13.1")
        else:
            made = shape.llama_config
            changed = {"rope_theta": 5e5} if name == "rope_theta" else {"rms_norm_eps": 1e-2}
            patch.setattr(
                "pyruntime.train.shape.llama_config",
                lambda *given: dataclasses.replace(made(*given), **changed),
            )
        return work(*args)


def faked_case(group, config, name):
    if group.rank() == 1:
        return in_another(name, run_case, group, config, -1, "", {})
    return run_case(group, config, -1, "", {})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pyruntime", f"pyruntime is {pyruntime.__version__} on rank 0"),
        ("torch", "1.13.1 on rank 1"),
        ("rope_theta", "the model's rope_theta is 10000.0 on rank 0"),
        ("rms_norm_eps", "0.01 on rank 1"),
    ],
)
def test_another_version_or_shape_is_named(ranks, tmp_path, name, words):
    for kind, said in ranks.run(faked_case, 2, jobs.job(tmp_path, steps=2), name):
        assert kind == "ConfigError" and words in said, said


# --- files of hosts that differ


def hosts_case(group, config, folders: list[str], faked: str):
    """Rank r finds what the configuration names in folders[r], as on a host of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if faked == "init_from":
            # One path on all hosts, and other files behind it.
            patch.setattr(
                "pyruntime.train.run.weight_files",
                lambda _: {Path(folders[group.rank()]) / "model.safetensors"},
            )
            patch.setattr(agreement, "_boot", lambda: str(group.rank()))
        else:
            opened = corpus.open_corpus

            def open_here(data, texts, *rest):
                here = [dataclasses.replace(text, folder=Path(folders[group.rank()])) for text in texts]
                return opened(data, here, *rest)

            patch.setattr(corpus, "open_corpus", open_here)
        return run_case(group, config, -1, "", {})


def test_one_flipped_value_of_the_first_weights_is_named(ranks, tmp_path):
    sizes = preset("debug", hidden_size=64, intermediate_size=128, vocab_size=256)
    folders = [tmp_path / "one", tmp_path / "other"]
    save_hf(Llama(sizes, None, seed=0), folders[0])
    shutil.copytree(folders[0], folders[1])
    tensors = load_file(folders[1] / "model.safetensors")
    tensors["model.norm.weight"][5] += 1
    save_file(tensors, folders[1] / "model.safetensors", {"format": "pt"})
    config = dataclasses.replace(jobs.job(tmp_path, steps=1), model=Model(init_from=str(folders[0])))
    for kind, said in ranks.run(hosts_case, 2, config, [str(each) for each in folders], "init_from"):
        assert kind == "ConfigError" and "the SHA-256 of model.safetensors is" in said, said
        assert f"model.init_from={folders[0]}" in said and "on rank 1 (host" in said
    same = [str(folders[0])] * 2
    assert {kind for kind, _ in ranks.run(hosts_case, 2, config, same, "init_from")} == {"trained"}


def test_other_tokens_of_the_same_number_are_named(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    ours = jobs.opened(config).sources[0].text.folder
    text = Path(config.data.paths[0])
    text.write_text(text.read_text()[::-1])
    others = jobs.opened(config).sources[0].text.folder
    assert ours != others
    for kind, said in ranks.run(hosts_case, 2, config, [str(others), str(ours)], "data"):
        assert kind == "ConfigError" and "the tokens of held_out is" in said and "on rank 1 (host" in said, (
            said
        )

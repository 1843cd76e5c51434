"""`python -m pyruntime plan` answers, explains, and writes what the trainer takes."""

import dataclasses
import json
import re
import time
import tomllib

import pytest

from pyruntime.cli import main
from pyruntime.cli.plan import parse_tokens
from pyruntime.cli.plan_facts import Asked, settings
from pyruntime.llama.presets import preset
from pyruntime.plan.cluster import find_cluster, to_toml
from pyruntime.plan.mesh import Mesh
from tests.plan.jobs import job

SMALL = ["plan", "--model", "llama3-1b", "--gpus", "8", "--tokens-per-step", "256K", "--seq", "4096"]


def test_a_plan_is_a_table_and_its_files(capsys, tmp_path):
    files = {"json": tmp_path / "out.json", "plot": tmp_path / "out.png", "config": tmp_path / "out.toml"}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert main([*SMALL, "--explain", "1", *flags]) == 0
    shown = capsys.readouterr().out
    assert "llama3-1b: 1.2 B parameters; 8 x H100 80 GB" in shown
    for part in ("step s", "GPU hours", "memory of the fullest rank", "MFU", "The trainer runs it."):
        assert part in shown
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["json"].read_text())["candidates"]
    assert main(["train", "--config", str(files["config"]), "--dry-run", "8"]) == 0
    checked = capsys.readouterr().out
    assert (
        "on 8 rank(s)" in checked
        and "steps of 262,144 tokens" in checked
        and "Nothing was started" in checked
    )


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "64", "--seq", "1"),
        ("--gpus", "10000", "--tokens_per_step", "80M", "--seq", "8192"),
        ("--gpus", "7", "--seq", "4096", "--tokens_per_step", "28672"),
        ("--gpus", "8", "--seq", "1048576"),
        ("--gpus", "8", "--seq", "999983", "--tokens_per_step", "7999864"),
        (
            "--model",
            "llama3-405b",
            "--cluster",
            "frontier",
            "--gpus",
            "5040",
            "--tokens_per_step",
            "82575360",
        ),
    ],
    ids=lambda flags: " ".join(flags),
)
@pytest.mark.second_tier(
    "--gpus 64 --seq 1", "--model llama3-405b --cluster frontier --gpus 5040 --tokens_per_step 82575360"
)
def test_a_plan_of_extreme_numbers_takes_seconds(flags, capsys):
    started = time.process_time()
    assert main(["plan", *flags]) in (0, 2)
    said = capsys.readouterr()
    assert "The trainer runs" in said.out or said.err.count("\n") == 1
    assert time.process_time() - started < 45


def of_cpus(name: str):
    """The cluster of that name, as if the cores that compute also copied."""
    return dataclasses.replace(find_cluster(name), core_bandwidth=1e11)


def cpus(folder, name: str = "dgx-h100") -> str:
    """The file of such a cluster."""
    file = folder / f"{name}-of-cpus.toml"
    file.write_text(to_toml(of_cpus(name)))
    return str(file)


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_folder_of_hugging_face_is_planned_and_its_plan_is_taken(capsys, tmp_path, named):
    shape = preset("3m", head_dim=48, vocab_size=256, tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf()))
    name, path = tmp_path / ("config.json" if named == "file" else ""), tmp_path / "run.toml"
    flags = ["plan", "--model", str(name), "--seq", "256", "--tokens_per_step", "16K", "--top", "1"]
    assert main([*flags, "--only_runnable", "True", "--config", str(path)]) == 0
    assert tomllib.loads(path.read_text())["model"] == {"init_from": str(tmp_path)}
    assert main(["train", "--config", str(path), "--dry-run", "8"]) == 0
    assert f"{shape.parameter_count() / 1e6:.1f} M parameters" in capsys.readouterr().out


def test_a_line_that_the_trainer_runs_passes_its_dry_run(capsys, tmp_path):
    path = tmp_path / "sixth.toml"
    asked = ["--only_runnable", "True", "--top", "6", "--axonn", "False", "--co2", "False"]
    assert main([*SMALL, *asked, "--explain", "6", "--config", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("  runs")]
    assert len(lines) == 6
    assert main(["train", "--config", str(path), "--dry-run", "8"]) == 0
    assert main(["train", "--config", str(path), "--dry-run", "7"]) == 2


def test_the_trainer_is_asked_what_it_runs():
    wanted = dataclasses.replace(job("llama3-8b", "dgx-h100", 16, 64, 8192), cluster=of_cpus("dgx-h100"))
    asked = Asked(wanted)
    assert asked.refusal(Mesh(tp=4, cp=2, dp=2)) is None
    assert asked.refusal(Mesh(tp=2, pp=4, dp=2, kind="zb-v")) is None
    assert asked.refusal(Mesh(tp=2, pp=4, dp=2, zero=3)) is None
    assert asked.refusal(Mesh(pp=8, cp=2, kind="seq1f1b", slices=2)) is None
    assert "pipeline.slices=4 with parallel.cp=2: context.layout=zigzag cuts" in asked.refusal(
        Mesh(pp=8, cp=2, kind="seq1f1b", slices=4)
    )
    assert "tp=16 does not divide num_key_value_heads=8" in asked.refusal(Mesh(tp=16))
    assert asked.refusal(Mesh(x=2, y=2, z=4)) is None
    assert asked.refusal(Mesh(x=4, y=2, dp=2)) is None
    assert "tp=16 does not divide" in asked.refusal(Mesh(x=16))
    assert asked.refusal(Mesh(tp=8, dp=2, tau=3)) is None
    gpt = Asked(job("gpt-1.7b", "dgx-h100", 16, 64))
    assert "architecture" in gpt.refusal(Mesh(tp=4, dp=4))


def test_what_gpus_cannot_do_does_not_run_there():
    one, two = (Asked(job("llama3-8b", "dgx-h100", gpus, 64, 8192)) for gpus in (8, 16))
    runs = [Mesh(tp=8, dp=2), Mesh(tp=2, dp=8, zero=3), Mesh(x=2, y=2, z=4)]
    runs += [Mesh(tp=4, cp=2, dp=2), Mesh(tp=2, pp=4, dp=2, kind="zb-v")]
    assert [two.refusal(mesh) for mesh in runs] == [None] * len(runs)
    for asked in (one, two):
        assert asked.refusal(Mesh(tp=4, dp=asked.job.gpus // 4, tau=3)) is None
        assert settings(asked.job, Mesh(tp=8))["train"]["device"] == "cuda"
    on_cpus = dataclasses.replace(one.job, cluster=of_cpus("dgx-h100"))
    assert "device" not in settings(on_cpus, Mesh(tp=8))["train"]


def test_a_plan_without_master_weights_trains_without_them(capsys, tmp_path):
    totals = {}
    for rounding in ("nearest", "stochastic"):
        files = {"json": tmp_path / f"{rounding}.json", "config": tmp_path / f"{rounding}.toml"}
        flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
        flags += ["--cluster", cpus(tmp_path)]
        assert main([*SMALL, "--rounding", rounding, "--explain", "1", *flags]) == 0
        of_meshes = json.loads(files["json"].read_text())["candidates"]
        totals[rounding] = {each["name"]: each["memory"]["optimizer"] for each in of_meshes}
        written = tomllib.loads(files["config"].read_text())
        assert written.get("optimizer", {}).get("rounding", "nearest") == rounding
    common = totals["stochastic"].keys() & totals["nearest"].keys()
    assert common and all(totals["stochastic"][name] < totals["nearest"][name] for name in common)
    assert main(["train", "--config", str(tmp_path / "stochastic.toml"), "--dry-run", "8"]) == 0


def test_offloaded_states_are_planned_and_their_use_is_explained(capsys, tmp_path):
    file = tmp_path / "offload.toml"
    flags = ["--co2", "False", "--axonn", "False", "--explain", "1"]
    assert main([*SMALL, *flags]) == 0
    assert "so --offload states gains nothing" in capsys.readouterr().out
    assert main([*SMALL, *flags, "--offload", "states", "--config", str(file)]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"[\d.]+ GB of optimizer states lie elsewhere: they are read and written once in a step", said
    )
    assert tomllib.loads(file.read_text())["optimizer"] == {"offload": "states"}
    assert main(["train", "--config", str(file), "--dry-run", "8"]) == 0
    large = ["plan", "--model", "llama3-70b", "--gpus", "8", "--tokens-per-step", "256K", "--seq", "4096"]
    assert main(large) == 2
    assert "use --offload states, take more GPUs" in capsys.readouterr().err
    assert main([*SMALL, "--offload", "states", "--optimizer", "muon"]) == 2
    assert "--offload states works only with --optimizer adamw" in capsys.readouterr().err


@pytest.mark.second_tier
def test_a_plan_with_muon_is_one_that_the_trainer_takes(tmp_path):
    file = tmp_path / "muon.toml"
    asked = [*SMALL, "--optimizer", "muon", "--config", str(file)]
    assert main([*asked, "--cluster", cpus(tmp_path)]) == 0
    assert tomllib.loads(file.read_text())["optimizer"] == {"name": "muon"}
    assert main(["train", "--config", str(file), "--dry-run", "8"]) == 0
    assert main([*asked, "--explain", "1", "--top", "1"]) == 0  # on GPUs
    both = [*SMALL, "--optimizer", "muon", "--rounding", "stochastic"]
    assert main(both) == 2


def test_settings_are_those_of_the_mesh():
    found = settings(
        job("llama3-8b", "dgx-h100", 16, 64, 8192), Mesh(tp=2, dp=4, pp=2, kind="interleaved", virtual=2)
    )
    assert found["parallel"] == {"tp": 2, "pp": 2, "cp": 1, "dp": 4, "zero": 1, "dp_replicate": 1}
    assert found["pipeline"] == {"kind": "interleaved", "slices": 1, "virtual": 2}
    assert found["train"]["batch_size"] == 64 and found["model"]["vocab_size"] == 128256


@pytest.mark.parametrize(
    ("text", "tokens"), [("4M", 2**22), ("4194304", 2**22), ("512k", 2**19), ("1.5M", 3 * 2**19)]
)
def test_numbers_of_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "lama3-8b"], "There is no model 'lama3-8b'; the nearest is llama3-8b."),
        (["--model", "./nowhere"], "There is no checkpoint folder nowhere."),
        (["--model", "docs"], "docs holds no config.json, so it is not a Hugging Face checkpoint folder."),
        (
            ["--cluster", "fronteer"],
            "There is no cluster 'fronteer', and no such file; the nearest is frontier.",
        ),
        (["--gpus", "12"], "12 GPUs do not fill nodes of 8 on dgx-h100; the nearest are 8 and 16."),
        (["--gpus", "0"], "--gpus must be at least 1, found 0."),
        (["--tokens_per_step", "4Q"], "--tokens_per_step 4Q is no number of tokens; write it as"),
        (
            ["--tokens_per_step", "1000"],
            "is no whole number of sequences of 8192 tokens; the nearest is 8192.",
        ),
        (["--seq", "0"], "--seq must be at least 1, found 0."),
        (["--top", "0"], "--top must be at least 1, found 0."),
        (["--tokens", "-1"], "--tokens must be above 0, found -1.0."),
        (["--config", "llama3-70b"], "--config is the file that plan writes, NAME.toml, found"),
        (["--overlap", "some"], "overlap"),
        (["--model", "llama3-405b"], "No mesh of 8 GPUs fits llama3-405b into 80 % of 80 GB; the nearest,"),
        (["--model", "llama3-1b", "--explain", "99"], "--explain 99: the table has 10 lines; use 1 to 10."),
        (["--model", "llama3-1b", "--plot", "/nowhere/a.png"], "/nowhere/a.png: cannot be written:"),
    ],
)
@pytest.mark.second_tier("argv15-/nowhere/a.png: cannot be written:")
def test_a_bad_request_is_one_sentence_and_exit_code_2(capsys, argv, sentence):
    assert main(["plan", "--axonn", "False", *argv]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_the_dry_run_refuses_what_the_run_would(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[parallel]\npp = 64\n[model]\npreset = "3m"\n')
    assert main(["train", "--config", str(path), "--dry-run", "64"]) == 2
    assert "4 layers cannot be cut into 64 stages" in capsys.readouterr().err
    assert main(["train", "--config", str(path), "--dry-run", "many"]) == 2
    assert "--dry_run needs a number of ranks" in capsys.readouterr().err


def test_a_pipeline_across_two_clusters_has_layers_by_speed(capsys, tmp_path):
    path = tmp_path / "both.toml"
    argv = [
        "plan",
        "--model",
        "llama3-8b",
        "--gpus",
        "16",
        "--tokens-per-step",
        "256K",
        "--seq",
        "4096",
        "--top",
        "2",
    ]
    assert main([*argv, "--join", "selene"]) == 0
    shown = capsys.readouterr().out
    assert "8 GPUs of dgx-h100, then 8 of selene" in shown
    assert "The trainer runs the first." in shown
    assert main([*argv, "--join", "selene", "--config", str(path)]) == 0
    layers = tomllib.loads(path.read_text())["pipeline"]["layers"]
    assert sum(layers) == 32 and layers[0] > 2 * layers[-1]
    assert main(["train", "--config", str(path), "--dry-run", "16"]) == 0
    capsys.readouterr()
    assert main([*argv, "--join", "nowhere"]) == 2
    assert main([*argv, "--join", "selene", "--join_bandwidth", "0"]) == 2


def test_a_machine_is_measured(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    assert main(["plan", "--measure", str(path)]) == 0
    assert "links      not measured" in capsys.readouterr().out
    found = tomllib.loads(path.read_text())
    assert found["peak_flops"] > 1e9 and found["gpus_per_node"] == 1
    assert main(["plan", "--measure", "/nowhere/mine.toml"]) == 2

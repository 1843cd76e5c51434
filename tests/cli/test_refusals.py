"""Bad requests end with one sentence on stderr and exit code 2, before anything is started."""

import signal

import pytest

from pyruntime.cli import arguments, main, train
from pyruntime.cli import main as run_command
from pyruntime.cli.main import LAUNCHER_ENDS_US_S
from pyruntime.train import validate
from pyruntime.train.config import Model, RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.signals import StopRequest


def refused(capsys, *argv):
    """Exit code 2 and exactly one line on stderr, which is returned."""
    assert run_command(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pyruntime: ") and err.endswith(".\n") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("word", ["true", "True"])
def test_a_switch_takes_truth_as_configurations_and_as_python_write_it(word):
    for argv in (["--train.ledger", word], [f"--train.ledger={word}"]):
        assert arguments.parse(RunConfig, argv, "train", "").train.ledger is True
    tied = arguments.parse(RunConfig, ["--model.tie_word_embeddings", word], "train", "").model
    assert tied.tie_word_embeddings is True
    text = arguments.parse(RunConfig, ["--output.wandb", "true"], "train", "").output.wandb
    assert text == "true"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["fly"],
            "There is no command fly; use train, tokenize, generate, convert, report, doctor, mesh, "
            "schedule, profile, plan, simulate, tune or members.",
        ),
        (["train", "--config", "no.toml"], "--config no.toml: there is no such file and no such preset;"),
        (["train", "--config"], "--config needs a value."),
        (["train", "--config", "--train.steps", "3"], "--config needs a value."),
        (
            ["train", "--optimizer.lr", "nan"],
            "optimizer.lr must be between 1e-12 and 10, as a step moves each weight by about so much, found "
            "nan.",
        ),
        (["train", "--optimizer.lr", "fast"], "optimizer.lr"),
        (["train", "--train.steps", "1.5"], "train.steps"),
        (["train", "--train.steps", "-3"], "train.steps must be at least 1, found -3."),
        (["train", "--train.steps"], "train.steps"),
        (
            ["train", "--train.stepz", "3"],
            "There is no option --train.stepz; the nearest is --train.steps; see",
        ),
        (["train", "--parallel.slices", "1"], "parallel.slices was removed: it is now called"),
        (["train", "--comm.tuning=off"], "comm.tuning was removed: comm.tier=chunked ignores"),
        (["train", "--stepz=3"], "There is no option --stepz; the nearest is --train.steps;"),
        (["train", "--lr", "3"], "There is no option --lr; the nearest is --optimizer.lr;"),
        (["train", "--confg", "main"], "There is no option --confg; the nearest is --config;"),
        (["train", "--train.frobnicate", "3"], "There is no option --train.frobnicate; see"),
        (["train", "--train.epochs", "3"], "There is no option --train.epochs; see"),
        (["train", "--lora.r", "8"], "There is no option --lora.r; see"),
        (["plan", "--gpu", "8"], "There is no option --gpu; the nearest is --gpus;"),
        (
            ["schedule", "--micro-batch", "8"],
            "There is no option --micro_batch; the nearest is --micro_batches;",
        ),
        (["train", "--train.dtype", "fp8"], "train.dtype"),
        (["train", "--model.hidden_size", "wide"], "model.hidden_size"),
        (["train", "stray"], "stray"),
        (["train", "--parallel.tp", "3"], "parallel.tp=3 but 1 rank(s) were started"),
        (["train", "--data.paths", "/nowhere"], "data.paths: /nowhere does not exist; name files"),
        (
            ["train", "--checkpoint.resume", "/nowhere"],
            "checkpoint.resume: the folder /nowhere does not exist; name a run folder",
        ),
        (["generate"], "checkpoint"),
        (["generate", "--checkpoint", "/tmp", "--chat"], "--chat needs a value, true or false;"),
        (["generate", "--chat", "--prompt", "a"], "--chat needs a value, true or false;"),
        (["generate", "--checkpoint", "/nowhere"], "--checkpoint /nowhere: there is no such folder;"),
        (["generate", "--checkpoint", "/tmp", "--tokens", "0"], "--tokens must be at least 1, found 0."),
        (["generate", "--checkpoint", "/tmp", "--seed", "-1"], "--seed must be at least 0 and below 2**63,"),
        (["generate", "--checkpoint", "/tmp", "--seed", str(2**63)], "--seed must be at least 0"),
        (["generate", "--checkpoint", "/tmp", "--deadline_s", "nan"], "--deadline_s must be at least 0.001"),
        (["generate", "--checkpoint", "/tmp", "--deadline_s", "1e7"], "at most 1000000 seconds"),
        (["train", "--train.seed", str(2**63)], "train.seed must be at least 0 and below 2**63,"),
        (["train", "--comm.deadline_s", "inf"], "comm.deadline_s must be at least 0.001 and at most 1000000"),
        (["train", "--comm.tier", "fused"], "comm.tier"),
        (["doctor", "--timeout_s", "inf"], "--timeout_s must be at least 0.001 and at most 1000000 seconds,"),
        (["doctor", "--timeout_s", "0"], "--timeout_s must be at least 0.001"),
        (["doctor", "--rows", "0"], "--rows must be at least 1, found 0."),
        (["doctor", "--ranks", "-1"], "--ranks must not be negative"),
        (
            ["profile", "--json", "/nowhere/a.json"],
            "--json: /nowhere/a.json is in a folder that does not exist;",
        ),
        (["report", "/tmp", "--cluster", "nope"], "--cluster: There is no cluster 'nope'"),
        (["schedule", "--kind", "2f2b"], "kind"),
        (["schedule", "--stages", "0"], "--stages must be at least 1, found 0."),
        (["schedule", "--slices", "2"], "1f1b does not cut sequences, so slices=2 is not possible;"),
        (
            ["schedule", "--forward", "-1"],
            "forward must be from 0 to 1e+12 seconds, found -1.0.",
        ),
        (["schedule", "--from_csv", "/nowhere"], "--from_csv /nowhere cannot be read:"),
        (["schedule", "--plot", "/nowhere/a.png"], "/nowhere/a.png: cannot be written:"),
        (
            ["schedule", "--from_csv", "/nowhere", "--stages", "2"],
            "--stages and --from_csv, whose file sets it, exclude",
        ),
    ],
)
def test_a_bad_request_is_one_sentence_and_exit_code_2(capsys, argv, sentence):
    assert sentence in refused(capsys, *argv)


def test_an_unknown_key_in_the_file_is_refused(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nstep = 3\n")
    assert f"{path}: [train] has no key step; the nearest is steps." in refused(
        capsys, "train", "--config", str(path)
    )


def test_a_folder_without_checkpoint_cannot_be_resumed(capsys, tmp_path):
    assert "holds no complete checkpoint" in refused(capsys, "train", "--checkpoint.resume", str(tmp_path))


def test_a_wrong_number_of_ranks_in_the_environment_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "WORLD_SIZE=many is not a number of ranks" in refused(capsys, "train", "--config", "tiny")


@pytest.mark.parametrize(("rank", "ended", "lines"), [("0", False, 1), ("1", True, 0), ("1", False, 1)])
def test_rank_0_speaks_for_all_unless_another_rank_alone_refuses(capsys, monkeypatch, rank, ended, lines):
    """The launcher ends the others when rank 0 has spoken; who is not ended speaks too."""
    waits = []

    def wait(stop, seconds):
        waits.append(seconds)
        stop.signum = signal.SIGTERM if ended else 0

    monkeypatch.setattr(StopRequest, "wait", wait)
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
        ("WORLD_SIZE", "2"),
        ("RANK", rank),
    ):
        monkeypatch.setenv(name, value)
    assert main(["train", "--optimizer.lr", "nan"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == lines and ("rank 1: " in said) == (rank == "1" and not ended)
    assert waits == ([] if rank == "0" else [LAUNCHER_ENDS_US_S])


def test_tasks_of_srun_without_torchruns_variables_are_refused(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert "srun has started 4 tasks" in refused(capsys, "train", "--config", "tiny")


def test_going_on_by_itself_needs_a_folder_of_its_own(capsys):
    assert "checkpoint.resume=auto resumes the run in output.run_dir, which is not set" in refused(
        capsys, "train", "--config", "tiny", "--checkpoint.resume", "auto"
    )


def test_flags_change_single_values_of_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[train]\nsteps = 7\ndtype = "fp32"\n')
    config, name = train.read(["--config", str(path), "--train.steps", "9", "--data.paths", "a", "b"])
    assert (config.train.steps, config.train.dtype, config.data.paths) == (9, "fp32", ("a", "b"))
    assert name == "mine"
    assert train.read([f"--config={path}"])[0].train.steps == 7
    assert train.read(["--checkpoint.save_on_stop", "False"])[0].checkpoint.save_on_stop is False


@pytest.mark.parametrize(("text", "tau"), [("auto", "auto"), ("24", 24)])
def test_tau_is_a_number_or_auto(text, tau):
    method = ["--parallel.dp", "2", "--train.micro_batch_size", "4", "--data_parallel.method", "co2"]
    asked = ["--config", "main", *method, "--data_parallel.tau", text]
    config, _ = train.read(asked)
    assert config.data_parallel.tau == tau
    validate.check(config, 2)


def test_a_few_steps_of_the_main_job_need_no_other_flag():
    config, _ = train.read(["--config", "main", "--train.steps", "10"])
    validate.check(config, 1)
    named, _ = train.read(["--config", "main", "--train.steps", "10", "--optimizer.warmup_steps", "11"])
    validate.check(named, 1)


@pytest.mark.parametrize("flag", ["--model.init_from", "--model.init-from"])
def test_a_checkpoint_to_start_from_stands_in_place_of_the_files_model(tmp_path, flag):
    config, _ = train.read(["--config", "main", flag, str(tmp_path)])
    assert config.model == Model(init_from=str(tmp_path))
    config, _ = train.read(["--config", "main", f"{flag}={tmp_path}", "--model.num-hidden-layers", "1"])
    assert config.model.num_hidden_layers == 1  # which the trainer refuses, see tests/train/test_model.py


def test_resuming_takes_the_configuration_of_the_run(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text("{}")
    (tmp_path / "config.toml").write_text('[train]\nsteps = 77\n[output]\nrun_dir = "elsewhere"\n')
    for folder in (tmp_path, checkpoint):
        config, _ = train.read(["--checkpoint.resume", str(folder)])
        assert (config.train.steps, config.output.run_dir) == (77, "")
    assert train.read(["--checkpoint.resume", str(tmp_path), "--config", "tiny"])[0].train.steps == 20


def test_the_first_paragraph_of_a_box_is_the_sentence():
    box = "╭─ Value error ───╮\n│ Error parsing --a: │\n│ not a number. │\n│ ───── │\n│ more │\n╰────╯\n"
    assert arguments.first_finding(box) == "Error parsing --a: not a number"
    assert arguments.first_finding("") == ""


def test_an_option_is_taken_out_of_the_command_line():
    assert arguments.take_option(["a", "--config", "x", "b"], "config") == ("x", ["a", "b"])
    assert arguments.take_option(["--config=x=y"], "config") == ("x=y", [])
    assert arguments.take_option(["--configs", "x"], "config") == (None, ["--configs", "x"])
    with pytest.raises(ConfigError, match=r"--config needs a value\."):
        arguments.take_option(["--config"], "config")


@pytest.mark.parametrize("argv", [("generate", "--checkpoint", "."), ("tune", "--model", "tiny"), ("train",)])
def test_tasks_that_do_not_know_of_each_other_are_refused(capsys, monkeypatch, argv):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert "mpirun has started 2 tasks" in refused(capsys, *argv)

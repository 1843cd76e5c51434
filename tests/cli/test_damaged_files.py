"""Whatever became of the files of a run, a model or a configuration, a command that reads them ends with its
result or with one sentence and exit code 2."""

import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyruntime.cli import main
from pyruntime.train import config_file
from tests.cli.test_damaged_flags import FEW, check_ending
from tests.mutations import contents

TEXT = str(Path(__file__).parent)
TRAIN = [
    "train",
    "--config",
    "tiny",
    "--data.paths",
    TEXT,
    "--train.steps",
    "2",
    "--output.sample_tokens",
    "0",
]
READ = (".json", ".jsonl", ".toml", ".safetensors")
PRESET = (config_file.PRESET_DIR / "llama3-8b.toml").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one rank that kept a ledger."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([*TRAIN, "--train.ledger", "true", "--output.run_dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def files(run):
    """What commands read of it, and its content: checkpoint, model, ledger, curves, configuration."""
    names = [path.relative_to(run) for path in run.rglob("*") if path.suffix in READ]
    return {str(name): (run / name).read_bytes() for name in sorted(names)}


@st.composite
def damages(draw, files):
    """A file and what becomes of it: other bytes, another file's, nothing, a folder."""
    name = draw(st.sampled_from(sorted(files)))
    how = draw(st.sampled_from(["bytes", "bytes", "bytes", "gone", "empty", "another's", "a folder"]))
    if how == "bytes":
        return name, how, draw(contents(files[name]))
    return name, how, files[draw(st.sampled_from(sorted(files)))] if how == "another's" else b""


@pytest.mark.parametrize("command", ["report", "convert", "generate", "train"])
def test_commands_on_damaged_files(run, files, tmp_path, command):
    """With another configuration a run may take any number of steps, so training is given its own."""
    read = {"generate": "model/", "train": "checkpoints/"}.get(command, "")
    damaged, target = tmp_path / "run", tmp_path / "target"
    arguments = {
        "report": [str(damaged)],
        "convert": ["--source", str(damaged), "--target", str(target)],
        "generate": ["--checkpoint", str(damaged / "model"), "--prompt", "a", "--tokens", "1"],
        "train": [*TRAIN[1:], "--checkpoint.resume", str(damaged)],
    }[command]

    @given(damages({name: content for name, content in files.items() if name.startswith(read)}))
    @settings(FEW, max_examples=15 if FEW.derandomize else FEW.max_examples)
    def check(found):
        name, how, content = found
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run, damaged)
        (damaged / name).unlink()
        if how == "a folder":
            (damaged / name).mkdir()
        elif how != "gone":
            (damaged / name).write_bytes(content)
        check_ending(command, *arguments)

    check()


@pytest.mark.parametrize("name", ["model/config.json", "loss.png", "model/model.safetensors"])
def test_a_result_that_cannot_be_written_is_named(run, tmp_path, capsys, name):
    """Full disks are not all that can be: here a folder has a file's name."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / name).unlink()
    (folder / name).mkdir()
    assert main([*TRAIN, "--checkpoint.resume", str(folder)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and " cannot be written: Is a directory (" in said
    assert "go on with --checkpoint.resume" in said


@given(contents(PRESET))
@example(b"[ranks]\n8 = []\n")
@example(b"ranks = [8]\n")
@example(b"[ranks.8.parallel]\ntp = {x = [1]}\n")
@FEW
def test_a_changed_configuration(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "changed.toml"
    path.write_bytes(content)
    check_ending("train", "--config", str(path), "--dry_run", "8")

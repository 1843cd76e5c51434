"""Whatever became of the files of a run, a model or a configuration, a command that reads them ends with its
result or with one sentence and exit code 2."""

import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyruntime.cli import main
from pyruntime.train import config_file
from tests.cli.test_damaged_flags import FEW, check_ending
from tests.mutations import contents

PRESET = (config_file.PRESET_DIR / "llama3-8b.toml").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one rank that kept a ledger."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    sizes = ["--train.steps", "2", "--train.ledger", "true", "--output.sample_tokens", "0"]
    assert main(["train", "--config", "tiny", *sizes, "--output.run_dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def files(run):
    """What commands read of it, and its content: a checkpoint of two steps, a model, a ledger, curves."""
    found = [
        path for path in run.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".toml")
    ]
    found += run.rglob("*.safetensors")
    return {path: path.read_bytes() for path in sorted(found)}


@st.composite
def damages(draw, files):
    """A file and what becomes of it: other bytes, another file's, nothing."""
    path = draw(st.sampled_from(sorted(files)))
    how = draw(st.sampled_from(["bytes", "bytes", "bytes", "gone", "empty", "another's", "a folder"]))
    if how == "bytes":
        return path, how, draw(contents(files[path]))
    return path, how, files[draw(st.sampled_from(sorted(files)))] if how == "another's" else b""


def damage(path, how, content):
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(content)


def mend(path, how, content):
    if how == "a folder":
        path.rmdir()
    path.write_bytes(content)


@pytest.mark.parametrize("command", ["report", "convert", "generate", "train"])
def test_commands_on_damaged_files(run, files, tmp_path, command):
    model = {path: content for path, content in files.items() if path.parent == run / "model"}
    target = tmp_path / "target"
    arguments = {
        "report": [str(run)],
        "convert": ["--source", str(run), "--target", str(target)],
        "generate": ["--checkpoint", str(run / "model"), "--prompt", "a", "--tokens", "1"],
        "train": ["--checkpoint.resume", str(run), "--output.progress", "off", "--output.sample_tokens", "0"],
    }[command]

    @given(damages(model if command == "generate" else files))
    @FEW
    def check(found):
        path, how, content = found
        damage(path, how, content)
        try:
            check_ending(command, *arguments, quiet=command == "train")
        finally:
            shutil.rmtree(target, ignore_errors=True)
            mend(path, how, files[path])
            for other, whole in files.items():  # a run that goes on writes its own
                if other.read_bytes() != whole:
                    other.write_bytes(whole)

    check()


@given(contents(PRESET))
@example(b"[ranks]\n8 = []\n")
@example(b"ranks = [8]\n")
@example(b"[ranks.8.parallel]\ntp = {x = [1]}\n")
@FEW
def test_a_changed_configuration(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "changed.toml"
    path.write_bytes(content)
    check_ending("train", "--config", str(path), "--dry_run", "8")

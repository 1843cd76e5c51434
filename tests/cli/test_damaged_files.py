"""Whatever became of the files of a run, a model or a configuration, a command that reads them ends with its
result or with one sentence and exit code 2."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pyruntime.cli import generate, main
from pyruntime.llama import generate_steps
from pyruntime.train import config_file
from tests.cli.test_damaged_flags import FEW, WORDS, check_ending, command_lines
from tests.mutations import contents, documents, few_or_many

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
def changed_values(draw, content, has_lines):
    """The bytes of a JSON file, or of one of JSON lines, in which some values are others."""
    valid = [json.loads(line) for line in content.splitlines()] if has_lines else json.loads(content)
    changed = draw(documents(valid))
    if has_lines and isinstance(changed, list):
        return "".join(json.dumps(line) + "\n" for line in changed).encode()
    return json.dumps(changed).encode()


@st.composite
def damages(draw, files):
    """A file and what becomes of it: other bytes, other values, another file's, nothing, a folder."""
    name = draw(st.sampled_from(sorted(files)))
    hows = ["bytes", "bytes", "bytes", "gone", "empty", "another's", "a folder"]
    how = draw(st.sampled_from(hows + ["values"] * 3 * name.endswith((".json", ".jsonl"))))
    if how == "bytes":
        return name, how, draw(contents(files[name]))
    if how == "values":
        return name, how, draw(changed_values(files[name], name.endswith(".jsonl")))
    return name, how, files[draw(st.sampled_from(sorted(files)))] if how == "another's" else b""


def check_page(folder: Path) -> None:
    """What a page says of a run is JSON that a browser reads: without NaN."""
    text = (folder / "report.html").read_text()
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    json.loads(data, parse_constant=pytest.fail)
    if (folder / "trace.json").exists():
        json.loads((folder / "trace.json").read_text(), parse_constant=pytest.fail)


@few_or_many(15)
@pytest.mark.parametrize("command", ["report", "convert", "generate", "train"])
@pytest.mark.second_tier(but=["generate-few"])
def test_commands_on_damaged_files(run, files, tmp_path, command, examples):
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
    @examples
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
        if (damaged / "report.html").is_file():
            check_page(damaged)

    check()


@few_or_many(15)
@pytest.mark.parametrize("name", ["ledger/rank-0.json", "metrics.jsonl"])
@pytest.mark.second_tier("ledger/rank-0.json-few")
def test_a_page_of_changed_figures(run, files, tmp_path, name, examples):
    """No figure of a ledger or of a step leads to a traceback, or to a page that a browser does not read."""
    damaged = shutil.copytree(run, tmp_path / "run")

    @given(changed_values(files[name], name.endswith(".jsonl")))
    @examples
    def check(content):
        (damaged / "report.html").unlink(missing_ok=True)
        (damaged / name).write_bytes(content)
        check_ending("report", str(damaged))
        if (damaged / "report.html").is_file():
            check_page(damaged)

    check()


@few_or_many(15)
@pytest.mark.parametrize("command", ["generate", "convert", "train"])
@pytest.mark.second_tier("train-few")
def test_a_model_of_a_changed_shape(run, files, tmp_path, command, examples):
    name = "model/config.json"
    model = shutil.copytree(run / "model", tmp_path / "model")
    target = tmp_path / "target"
    arguments = {
        "generate": ["--checkpoint", str(model), "--prompt", "a", "--tokens", "1"],
        "convert": ["--source", str(model), "--target", str(target)],
        "train": [*TRAIN[3:], "--model.init_from", str(model), "--train.seq_len", "64"],
    }[command]
    arguments += ["--output.run_dir", str(target)] if command == "train" else []

    @given(documents(json.loads(files[name])))
    @example({**json.loads(files[name]), "rope_theta": 10**37})
    @example({**json.loads(files[name]), "rope_theta": 1e-320})
    @example({**json.loads(files[name]), "num_hidden_layers": 2**31 - 1})
    @example({**json.loads(files[name]), "hidden_size": 2**31 - 2})
    @example({**json.loads(files[name]), "intermediate_size": 2**24})
    @example({**json.loads(files[name]), "vocab_size": 2**26})
    @example({**json.loads(files[name]), "head_dim": 2**16})
    @examples
    def check(values):
        shutil.rmtree(target, ignore_errors=True)
        (model / "config.json").write_text(json.dumps(values))
        check_ending(command, *arguments)

    check()


def test_an_empty_answer_is_said(run, monkeypatch, capsys):
    model, tokenizer = generate.load(run / "model", None)
    (first,) = generate_steps(model, torch.tensor([list(b"a")]), 1, temperature=0)
    ask = ["generate", "--checkpoint", str(run / "model"), "--prompt", "a", "--temperature", "0"]
    assert main(ask) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(type(tokenizer), "separator", int(first))
    assert main(ask) == 0
    said = capsys.readouterr()
    assert said.out == "a\n"
    assert said.err.startswith("pyruntime: the model added nothing to the prompt: ")


SAMPLING = {
    "temperature": [*WORDS, "1e-6", "1e6", "1e-45", "1e38"],
    "top_p": [*WORDS, "1e-45", "1e-8", "0.999999999"],
    "top_k": [*WORDS, str(2**31), str(2**63)],
    "seed": [*WORDS, str(2**63), str(2**64)],
    "tokens": ["1", "3", "0", "-1", "1" * 30],
    "prompt": [word for word in WORDS if len(word) < 99],
}


@few_or_many(25)
def test_any_sampling(run, examples):
    @given(command_lines(SAMPLING))
    @example(["--top_p=1e-320"])
    @example(["--temperature=1e-320"])
    @example(["--top_k=" + "1" * 30])
    @examples
    def check(argv):
        check_ending("generate", "--checkpoint", str(run / "model"), "--prompt=a", "--tokens=2", *argv)

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

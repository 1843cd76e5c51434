"""Whatever flags and files say, a command ends with its result or with one sentence and exit code 2."""

import contextlib
import dataclasses
import io
import typing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyruntime import pipeline
from pyruntime.cli import convert, generate, main, plan, report, schedule, tokenize
from pyruntime.pipeline import make_schedule
from pyruntime.plan.cluster import FOLDER
from pyruntime.train.config import RunConfig
from tests.mutations import BOUNDED, contents

FEW = settings(BOUNDED, max_examples=25 if BOUNDED.derandomize else BOUNDED.max_examples)
WORDS = ["", "a", "nan", "inf", "-inf", "-1", "0", "1", "2", "3", "4", "7", "8", "0.5", "1e-320", "1e308",
         "1" * 30, "1" * 5000, "True", "None", "[]", "4K", "1M", "\udcff", "a\0b", "/", "/nowhere/a.png",
         "x" * 5000]  # fmt: skip


def flags(cls: type, leave_out: tuple[str, ...] = (), prefix: str = "") -> dict[str, list[str]]:
    """Every flag of a dataclass and words for its value: any, and those that it takes."""
    found = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            found |= flags(hints[field.name], leave_out, f"{field.name}.")
        elif prefix + field.name not in leave_out:
            found[prefix + field.name] = WORDS + [str(word) for word in typing.get_args(hints[field.name])]
    return found


def command_lines(words: dict[str, list[str]]) -> st.SearchStrategy[list[str]]:
    one = st.sampled_from(sorted(words)).flatmap(
        lambda name: st.sampled_from(words[name]).map(lambda word: f"--{name}={word}")
    )
    return st.lists(one, min_size=1, max_size=4)


def check_ending(*argv: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    said = err.getvalue()
    if code == 0:
        assert said in ("", f"{generate.EMPTY}\n") and out.getvalue()
    else:
        assert code == 2, said
        assert said.startswith("pyruntime: ") and said.endswith(".\n") and said.count("\n") == 1, said
        assert len(said) < 700 + 2 * max(map(len, argv)), said


SCHEDULE = flags(schedule.ScheduleOptions, leave_out=("plot", "csv"))
PLAN = flags(plan.PlanOptions, leave_out=("plot", "json", "config", "measure"))
SMALL = ("--model=gpt-1.7b", "--gpus=4", "--tokens_per_step=64K", "--seq=2048", "--axonn=False")
TRAIN = flags(RunConfig)
OTHERS = {
    "convert": flags(convert.ConvertOptions),
    "generate": flags(generate.GenerateOptions),
    "tokenize": flags(tokenize.TokenizeOptions, leave_out=("workers", "paths")),
    "report": flags(report.ReportOptions),
}
"""Commands that end at once where the file or folder that they read is not there."""


@given(command_lines(SCHEDULE))
@example(["--stages=1000000", "--micro_batches=1000000000"])
@example(["--from_csv=" + "x" * 5000])
@example(["--from_csv=a\0b"])
@example(["--forward=1e308", "--backward_input=1e308"])
@FEW
def test_schedule(argv):
    check_ending("schedule", *argv)


@given(command_lines(PLAN))
@example(["--gpus=" + "1" * 30])
@example(["--cluster=" + "x" * 5000])
@example(["--tokens_per_step=nan"])
@example(["--join=dgx-h100", "--join_bandwidth=inf"])
@FEW
def test_plan(argv):
    check_ending("plan", *SMALL, *argv)


@given(command_lines(TRAIN))
@example(["--output.run_dir=a\0b"])
@example(["--data.paths=" + "x" * 5000])
@example(["--checkpoint.resume=" + "x" * 5000])
@example(["--output.wandb=\udcff"])
@example(["--comm.deadline_s=1e-320"])
@example(["--model.init_from=a\0b"])
@FEW
def test_train(argv):
    check_ending("train", "--dry_run=2", *argv)


@given(command_lines(TRAIN))
@FEW
def test_mesh(argv):
    check_ending("mesh", "--ranks=4", *argv)


@pytest.mark.parametrize("command", OTHERS)
def test_commands_that_read_files(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    paths = ["--paths", "text.txt"] if command == "tokenize" else []

    @given(command_lines(OTHERS[command]))
    @FEW
    def check(argv):
        check_ending(command, *paths, *argv)

    check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(contents(pipeline.to_csv(make_schedule("1f1b", 3, 4)).encode()))
@example(b"kind,1f1b,micro_batches,999999999,slices,999999999,placement,0 0\nF0.0,B0.0\n")
@example(b'"kind,1f1b,micro_batches,1\nF0.0,B0.0\n')
@example(b"kind,a\0b,micro_batches,1,slices,1,placement,0\nF0.0,B0.0\n")
@FEW
def test_schedule_of_a_changed_file(folder, content):
    path = folder / "a.csv"
    path.write_bytes(content)
    check_ending("schedule", "--from_csv", str(path))


@given(contents((FOLDER / "dgx-h100.toml").read_bytes()))
@FEW
def test_plan_for_a_changed_cluster(folder, content):
    path = folder / "a.toml"
    path.write_bytes(content)
    check_ending("plan", "--cluster", str(path), *SMALL)

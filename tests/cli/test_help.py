"""--help documents every field, with its unit where it has one."""

import dataclasses
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import pyruntime
from pyruntime.cli import main
from pyruntime.cli.convert import ConvertOptions
from pyruntime.cli.doctor import DoctorOptions
from pyruntime.cli.generate import GenerateOptions
from pyruntime.cli.members import MembersOptions
from pyruntime.cli.plan import PlanOptions
from pyruntime.cli.profile import ProfileOptions
from pyruntime.cli.schedule import ScheduleOptions
from pyruntime.cli.tune import TuneOptions
from pyruntime.train.config import RunConfig


def flags(config, prefix=""):
    for field in dataclasses.fields(config):
        value = field.default
        if dataclasses.is_dataclass(value):
            yield from flags(value, f"{field.name}.")
        else:
            yield f"--{prefix}{field.name}"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", RunConfig),
        ("mesh", RunConfig),
        ("generate", GenerateOptions),
        ("convert", ConvertOptions),
        ("doctor", DoctorOptions),
        ("schedule", ScheduleOptions),
        ("profile", ProfileOptions),
        ("plan", PlanOptions),
        ("tune", TuneOptions),
        ("members", MembersOptions),
    ],
)
def test_help_shows_every_flag_with_a_sentence(capsys, monkeypatch, command, options):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    words = re.sub(r"[│─╭╮╰╯\s-]*\n[│─╭╮╰╯\s]*", " ", capsys.readouterr().out)
    for flag in flags(options):
        found = re.search(rf"{re.escape(flag)} (.*?) \((required|default: )", words)
        assert found, f"{flag} is not shown"
        assert re.search(r"[A-Z\]}] +\S.*\.$", found[1]), f"{flag} has no sentence: {found[1]}"


def test_help_names_the_presets_and_the_commands(capsys):
    main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "dim1024, dim256, finetune, llama3-405b, llama3-70b, llama3-8b, main, tiny" in shown
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


def test_the_console_command_is_the_program_and_tells_its_version(capsys, monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    command = EntryPoint("pyruntime", project["scripts"]["pyruntime"], "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["pyruntime", "--version"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pyruntime {pyruntime.__version__}\n"
    assert "version" in project["dynamic"]  # the package says it, and nothing else does

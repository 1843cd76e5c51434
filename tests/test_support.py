"""The table of what runs where agrees with the code: refusals happen, and tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pyruntime import _C
from pyruntime.cli.train import read
from pyruntime.train.device import Device, check_device
from pyruntime.train.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference" / "support.md").read_text()
CUDA = Device(torch.device("cuda", 0))
CELL = re.compile(r"works(, .+)?|not run( \(\w\))?|refused \(\w\)|-")


def table(heading: str) -> list[list[str]]:
    """Returns the rows of the table below a heading, as lists of cells."""
    lines = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:2] == "| "]
    return rows[1:]


FEATURES = table("Features")
TESTS = table("A test of each feature")
REFUSALS = {letter: (asked, words.strip("`")) for letter, asked, words in table("What a refusal says")}


def source() -> str:
    """Returns all sources, with adjacent string literals joined."""
    files = [*ROOT.glob("pyruntime/**/*.py"), *ROOT.glob("csrc/**/*.cpp")]
    return re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(path.read_text() for path in files))


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0])
def test_a_feature_has_words_of_the_legend(row):
    _, *cells = row
    assert len(cells) == 5 and all(CELL.fullmatch(cell) for cell in cells), cells
    assert {letter for cell in cells for letter in re.findall(r"\((\w)\)", cell)} <= REFUSALS.keys()


@pytest.mark.parametrize(("number", "row"), list(enumerate(TESTS)))
def test_a_feature_has_tests_that_exist(number, row):
    feature, tests, on_device = row
    assert re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", FEATURES[number][0]) == feature
    kind, _, device_tests = on_device.partition(": ")
    assert kind in (("refused",) if FEATURES[number][3].startswith("refused") else ("works", "not run"))
    assert (kind == "works") == device_tests.startswith("`tests/device/"), on_device
    for name in filter(None, [*tests.split(", "), *device_tests.split(", ")]):
        path, _, function = name.strip("`").partition("::")
        text = (ROOT / path).read_text()
        assert f"def {function or 'test_'}" in text, name


def test_every_feature_has_a_test():
    assert len(TESTS) == len(FEATURES) > 20


def test_every_refusal_is_of_a_feature():
    named = {letter for row in FEATURES for cell in row[1:] for letter in re.findall(r"\((\w)\)", cell)}
    assert named == REFUSALS.keys()


@pytest.mark.parametrize("letter", REFUSALS)
def test_the_code_refuses_in_these_words(letter, monkeypatch):
    asked, words = REFUSALS[letter]
    flags = re.match(r"`(--[\w.]+) (\w+)`", asked)
    if not flags:
        assert words in source(), words
        return
    config, _ = read(["--config", "tiny", *flags.groups()])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(_C, "why_no_device_library", lambda device: "there are none")
    device = Device() if letter == "a" else CUDA
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_device(config, device)


def test_what_the_page_of_errors_quotes_is_in_the_code():
    page, code = (ROOT / "docs" / "reference" / "errors.md").read_text(), source()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    quoted = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell) if " " in words]
    assert len(quoted) > 10
    for words in quoted:
        assert words in code, words

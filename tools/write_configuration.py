"""Writes docs/reference/configuration.md: every option of the trainer, from the docstrings of its fields.

    .venv/bin/python tools/write_configuration.py

tests/test_configuration_page.py fails if the page differs from the one that this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pyruntime.cli.main import USAGE  # noqa: E402
from pyruntime.text import toml_value  # noqa: E402
from pyruntime.train.config import RunConfig  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "configuration.md"
HEAD = """# Configuration

For whoever starts a training run. Here you look up every option of the trainer, its default and its unit.
Options come from a TOML file, `--config run.toml` or the name of a preset, and from the command line, which
wins:

    [parallel]
    tp = 2

    python -m pyruntime train --config run.toml --parallel.dp 2 --train.seq_len 1024

`python -m pyruntime train --help` prints the same. `python tools/write_configuration.py` writes this page.
"""


def documented(section: type) -> dict[str, str]:
    """Returns the docstring of each field, on one line."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def linked(text: str) -> str:
    """Returns the text for a table's cell, with pages of docs/ as links from this page."""
    text = re.sub(r"docs/([\w-]+)/([\w-]+)\.md", r"[\2](../\1/\2.md)", text)
    return text.replace("|", "\\|")


def default_of(value: object) -> str:
    return "none" if value is None else f"`{toml_value(value)}`"


def commands() -> list[str]:
    """Returns a table row for each command of USAGE."""
    return [f"| `{name}` | {does} |" for name, does in re.findall(r"^  (\w+) +(.+)$", USAGE, re.MULTILINE)]


def page() -> str:
    lines = [HEAD, "## Commands", "", "| command | does |", "|---|---|", *commands()]
    for each in dataclasses.fields(RunConfig):
        section = type(each.default)
        says = " ".join(inspect.cleandoc(section.__doc__ or "").split())
        lines += ["", f"## {each.name}", "", *wrapped(linked(says)), "", "| option | default | meaning |"]
        lines.append("|---|---|---|")
        texts = documented(section)
        for field in dataclasses.fields(section):
            default = default_of(field.default)
            lines.append(f"| `--{each.name}.{field.name}` | {default} | {linked(texts[field.name])} |")
    return "\n".join(lines) + "\n"


def wrapped(text: str, width: int = 119) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())

"""Checks the documents: short sentences, few words, each page in its folder, and names that exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pyruntime
from pyruntime.cli.arguments import _names
from pyruntime.cli.main import COMMANDS
from pyruntime.train.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("bench/results/*.md", "csrc/cuda/*.md", "examples/**/*.md", "tests/model/*.md")
"""Documents beside the code that they describe."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", *BESIDE)
    for path in ROOT.glob(pattern)
)
SITE = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
FOLDERS = {"tutorials", "how-to", "reference", "explanation", "figures"}
GENERATED = {"docs/reference/configuration.md"}
"""Pages that tools/write_configuration.py generates from docstrings."""
READ_THROUGH = [page for page in PAGES if not page.startswith(("bench/", "CHANGELOG", *GENERATED))]
"""Pages that a person reads from beginning to end."""
MOST_WORDS, LONGEST_SENTENCE, WIDTH = 35_000, 35, 120
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"(?:bench|csrc|docker|docs|examples|hip|pyruntime|tests|tools)/[\w.*{},/-]*")
"""Paths from the repository's root in texts and commands."""
EVERYWHERE = (
    "config",
    "help",
    "dry_run",
    "profile",
    "ranks",
    "ranks_per_host",
    "gpus",
    "machine",
    "json",
    "trace",
)
"""Options of train, mesh and simulate outside the configuration."""
OURS_TO_EXPLAIN = re.compile(
    r"\b(?:tier|exposed|replica|chunk|displacement|arbiter|companion group|traffic class)s?\b"
)
"""Words of our own in the glossary that mean nothing else on a page for users."""
MADE = re.compile(r"\.(so|log)$|[A-Z]{3,}")
"""Products of builds, and names with a placeholder: test_NAME.cpp."""


@cache
def files() -> frozenset[str]:
    """Returns the files that git tracks or would add; without git, all files of the tree."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    return frozenset(
        name
        for name in names or (p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*"))
        if (ROOT / name).exists()
    )


def alternatives(path: str) -> list[str]:
    """Expands a/{b,c}.h to a/b.h and a/c.h."""
    found = re.search(r"\{([^{}]*)\}", path)
    if not found:
        return [path]
    parts = found[1].split(",")
    return [
        each for part in parts for each in alternatives(path[: found.start()] + part + path[found.end() :])
    ]


def is_there(path: str) -> bool:
    if "*" in path:
        return any(ROOT.glob(path))
    return (ROOT / path).is_dir() or path in files()


def prose(page: str) -> list[str]:
    """Returns the lines of a page without code, tables and pictures."""
    lines = CODE.sub("", (ROOT / page).read_text()).splitlines()
    return [line for line in lines if not line.startswith(("|", "    ", "!["))]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_narrow(page):
    wide = [line for line in prose(page) if len(line) >= WIDTH]
    assert not wide, f"{page} has {len(wide)} lines of {WIDTH} characters or more: {wide[0]}"


def test_all_pages_of_the_site_are_read_in_an_afternoon():
    """A word has a letter or a digit, so bars of tables do not count."""
    counts = {
        page: len(re.findall(r"\S*\w\S*", (ROOT / "docs" / page).read_text()))
        for page in SITE
        if f"docs/{page}" not in GENERATED
    }
    assert sum(counts.values()) < MOST_WORDS, counts


def test_every_page_is_in_the_nav_and_in_a_folder_of_its_type():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == sorted(SITE)
    assert {Path(page).parts[0] for page in SITE if page != "index.md"} == FOLDERS
    assert all(len(Path(page).parts) == 2 for page in SITE if page != "index.md")


def sentences(page: str) -> Iterator[str]:
    """Yields the sentences of the prose: code is one word, a link its text, brackets are left out."""
    text = re.sub(r"^#.*$|^ *(?=[*-] |\d+\. )", "\n\n", "\n".join(prose(page)), flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        line = re.sub(r"`[^`]*`", "code", " ".join(paragraph.split()))
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        line = re.sub(r"\([^()]*\)", "", line).replace("*", "")
        yield from re.split(r"(?<=[.!?])(?<!\bal\.)\s+|:\s", line.lstrip("- 0123456789."))


@pytest.mark.parametrize("page", READ_THROUGH)
def test_a_sentence_is_read_once(page):
    for sentence in sentences(page):
        words = len(re.findall(r"\S*\w\S*", sentence))
        assert words <= LONGEST_SENTENCE, f"{page}: {words} words: {sentence}"
        assert not sentence.startswith("Of "), f"{page}: {sentence}"


@cache
def flags() -> dict[str, set[str]]:
    """Returns the options of each command of `python -m pyruntime`."""
    found = {}
    for command in COMMANDS:
        module = importlib.import_module(f"pyruntime.cli.{command}")
        options = getattr(module, f"{command.title()}Options", RunConfig)
        found[command] = {*dict(_names(options)), *EVERYWHERE}
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_flags_exist_and_have_one_spelling(page):
    text = (ROOT / page).read_text().replace("\\\n", " ")
    sections = {field.name for field in dataclasses.fields(RunConfig)}
    for flag in re.findall(r"--([\w-]+\.[\w-]+)", text):
        if flag.partition(".")[0].replace("-", "_") in sections:
            assert flag in flags()["train"], f"{page}: --{flag}"
    for command, options in re.findall(rf"pyruntime ({'|'.join(COMMANDS)})\b([^\n`#|]*)", text):
        for flag in re.findall(r"(?<=\s)--([a-z][\w.-]*)", options):
            assert flag in flags()[command], f"{page}: {command} --{flag}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.is_file(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", [page for page in SITE if page.startswith(("tutorials/", "how-to/"))])
def test_words_of_our_own_lead_to_the_glossary_where_a_page_first_has_them(page):
    """In headings, code, and the line about GPUs above a page's beginning they need not."""
    lines = CODE.sub("", (ROOT / "docs" / page).read_text()).splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("    ", "![", "#", "GPUs:")))
    text, seen = re.sub(r"`[^`]*`", "code", text), set()
    for found in OURS_TO_EXPLAIN.finditer(text):
        word = found[0].removesuffix("s")
        is_linked = re.match(r"[^\[\]]*\]\(\.\./reference/glossary\.md#", text[found.start() :])
        assert word in seen or is_linked, f"{page} does not link its first {word!r} to the glossary"
        seen.add(word)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and page not in GENERATED])
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    named = {path.rstrip("./,-") for path in OURS.findall(re.sub(r"(?<=[\w.~/])/?" + OURS.pattern, "", text))}
    missing = {
        path for name in named if not MADE.search(name) for path in alternatives(name) if not is_there(path)
    }
    assert not missing, f"{page} names {sorted(missing)}"


def test_pages_that_sources_name_exist():
    sources = [name for name in files() if re.search(r"(\.(py|cpp|h|cuh?|toml|pml|sh)|Makefile)$", name)]
    for name in sources:
        for page in re.findall(r"\bdocs/[\w/-]+\.md", (ROOT / name).read_text()):
            assert page in files(), f"{name} names {page}"


def test_versions_are_the_package_s():
    for page in [page for page in PAGES if page != "CHANGELOG.md"]:
        for version in re.findall(r"pyruntime (\d+\.\d+\.\d+)", (ROOT / page).read_text()):
            assert version == pyruntime.__version__, page
    versions = re.findall(
        r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == pyruntime.__version__

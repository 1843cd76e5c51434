"""The documents: lines and pages of a length that is read, and nothing named that is not there."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import pyruntime

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MOST_WORDS, WIDTH = 1500, 120
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"(?:bench|csrc|docker|docs|examples|hip|pyruntime|tests|tools)/[\w.*{},/-]*")
"""A path from the repository's root, as texts and commands name it."""
MADE = re.compile(r"\.(so|log)$|[A-Z]{3,}")
"""What builds make, and names with a placeholder in them: test_NAME.cpp."""


@cache
def files() -> frozenset[str]:
    """All that git has or would take; a tree without git: all that is there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    return frozenset(
        name
        for name in names or (p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*"))
        if (ROOT / name).exists()
    )


def alternatives(path: str) -> list[str]:
    """a/{b,c}.h as a/b.h and a/c.h."""
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
    """The lines of a page but its code, tables and pictures."""
    lines = CODE.sub("", (ROOT / page).read_text()).splitlines()
    return [line for line in lines if not line.startswith(("|", "    ", "!["))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_narrow(page):
    wide = [line for line in prose(page) if len(line) >= WIDTH]
    assert not wide, f"{page} has {len(wide)} lines of {WIDTH} characters or more: {wide[0]}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.startswith(("docs/figures/", "CHANGELOG"))]
)
def test_a_page_is_read_in_one_sitting(page):
    words = len((ROOT / page).read_text().split())
    assert words < MOST_WORDS, f"{page} has {words} words: figures and history go to docs/figures/"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.is_file(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
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

"""What bench/results holds is cited, a record a line, and what texts say of benchmarks exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from bench.common.records import as_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
INDEX = RESULTS / "README.md"


def names(name: str) -> re.Pattern[str]:
    """Of files: RATE stands for any rate, * for anything."""
    return re.compile(re.escape(name).replace("RATE", r"\d+[mg]bit").replace(r"\*", ".*"))


def texts() -> dict[Path, str]:
    """Every document and every source that tells users what to run."""
    patterns = ("*.md", "Makefile", "docs/**/*.md", "csrc/cuda/*.md", "bench/**/*.py", "bench/results/*.md")
    patterns += ("tools/**/*.py",)
    return {path: path.read_text() for pattern in patterns for path in ROOT.glob(pattern)}


def test_every_result_has_one_row_and_a_document_that_shows_what_was_found():
    rows = [line for line in INDEX.read_text().splitlines() if line.startswith("| `")]
    listed = [(names(re.match(r"\| `([^`]+)`", row)[1]), row) for row in rows]
    kept = subprocess.run(
        ["git", "ls-files", "bench/results"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    files = [str((ROOT / name).relative_to(RESULTS)) for name in kept if not name.endswith(".md")]
    for name in files:
        assert sum(bool(one.fullmatch(name)) for one, _ in listed) == 1, f"{name}: not one row in {INDEX}"
    for one, row in listed:
        assert any(one.fullmatch(name) for name in files), f"no such file: {row}"
        (module,) = set(re.findall(r"-m (bench(?:\.\w+)+|pyruntime \w+)", row))
        texts_of = [(RESULTS / document).read_text() for document in re.findall(r"\]\(([^)]+)\)", row)]
        of_row = [Path(name).name for name in files if one.fullmatch(name)]
        cited = [
            any(
                names(cite).fullmatch(name)
                for cite in re.findall(r"[\w*]+\.(?:json|txt)", text)
                for name in of_row
            )
            for text in texts_of
        ]
        assert any(cited), f"no document names {row}"
        for text, names_it in zip(texts_of, cited, strict=True):
            assert module in text or names_it, f"a document shows nothing of {row}"


def test_each_record_is_one_line():
    for path in RESULTS.rglob("*.json"):
        text = path.read_text()
        assert text == as_lines(json.loads(text)), f"{path}: write it with bench/common/records.py"


def test_every_page_of_tables_is_in_the_index():
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", INDEX.read_text()))
    assert linked == {page.name for page in RESULTS.glob("*.md")} - {INDEX.name}


def test_programs_and_results_that_texts_name_exist():
    for path, text in texts().items():
        for module in set(re.findall(r"-m (bench(?:\.\w+)+)", text)):
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), (path, module)
        for script in set(re.findall(r"\bbench/[\w/]+\.py", text)):
            assert (ROOT / script).is_file(), (path, script)
        if path.suffix == ".md":
            for result in set(re.findall(r"bench/results/([\w*/]+\.(?:json|txt))", text)):
                assert any(RESULTS.glob(result.replace("RATE", "*"))), (path, result)

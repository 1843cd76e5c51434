"""The report of tools/gpu_check.py: all results of one GPU, as one JSON file and one text file.

It is rewritten as a whole after every fact, so it survives whatever ends the program, and the next call
continues it. Results from other versions of the sources are kept until they are measured again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.records import as_lines
from bench.gpu import problem as gpu_problem
from tools.gpu.runner import Outcome, Stage

SOURCES = ("csrc/**/*", "hip/**/*", "pyruntime/**/*", "tests/cuda/**/*", "tests/*.py", "bench/**/*.py")
SOURCES += ("tools/build_*.py", "setup.py")
ENDINGS = (".py", ".cpp", ".h", ".cu", ".cuh", ".toml")
LONGEST_LOG = 1_000_000  # characters of a stage's output that the log keeps
FAILURE_LINES = 12  # of a failed test in the text
UNDER_WAY = "under way"
OF_TESTS = (0, 1, 5)
"""pytest's exit codes when it ran to its end: passed, failed, nothing left to run."""


def fingerprint(root: Path, sources: Iterable[str] = SOURCES) -> str:
    """Returns eight digits that change with any source that is built, tested or measured."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in sources for path in root.glob(pattern)}):
        if path.suffix in ENDINGS and path.is_file():
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def name_of(gpu: str, day: datetime.date) -> str:
    """Returns the report's name, such as nvidia_h200-2026-11-21 for NVIDIA H200."""
    return f"{slug(gpu)}-{day.isoformat()}"


def slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def earlier(folders: Iterable[Path], gpu: str, today: datetime.date, source: str) -> dict[str, Any] | None:
    """Returns the report of this GPU to continue: the newest from today or of the same sources."""
    found = [path for folder in folders for path in folder.glob(f"{slug(gpu)}-????-??-??.json")]
    for path in sorted(found, key=lambda path: (path.stem, path.stat().st_mtime), reverse=True):
        document = json.loads(path.read_text(encoding="utf-8"))
        if path.stem == name_of(gpu, today) or document.get("source") == source:
            return {**document, "name": path.stem}
    return None


class Report:
    """The results of one GPU, from this call and earlier ones."""

    def __init__(
        self,
        device: Mapping[str, Any],
        source: str,
        results: Path,
        out: Path | None = None,
        *,
        logs: Path,
        today: datetime.date,
    ) -> None:
        """`results` and `out` are folders that get the report; `out` also gets the output of all stages."""
        self._folders = [results] if out is None else [results, out]
        self._out, self._logs = out, logs
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        known = earlier(self._folders, device["name"], today, source) or {}
        self.name = known.pop("name", name_of(device["name"], today))
        self.source = source
        self._document: dict[str, Any] = {
            **known,
            "device": dict(device),
            "source": source,
            "stages": known.get("stages", []),
            "tests": known.get("tests", []),
            "results": known.get("results", []),
        }
        for stage in self._document["stages"]:
            if stage["verdict"] == UNDER_WAY:
                stage |= {"verdict": "cut", "text": "the program was ended"}
        self._rows = 0  # that the running benchmark stage has written
        self.write()

    # ---- what is known ----

    def has(self, stage: Stage) -> bool:
        """Whether the stage has run to its end with these sources, passed or not."""
        found = self._stage(stage.name)
        if found is None or found["source"] != self.source or stage.builds:
            return False
        if stage.tests:
            return found["code"] in OF_TESTS
        return found["verdict"] in ("passed", "failed", "timed out")

    def tests_of(self, stage: Stage) -> list[str]:
        """Returns the names of a stage's tests whose outcome with these sources is known."""
        return [test["name"] for test in self._tests(stage.name) if test["source"] == self.source]

    def bad(self, names: Sequence[str]) -> list[str]:
        """Returns those of these stages that did not pass; absent ones do not count."""
        return [name for name in names if self._verdict(name) not in ("passed", "absent")]

    # ---- new facts ----

    def begin(self, stage: Stage) -> None:
        if stage.facts is not None:  # a build may begin while a benchmark writes rows
            self._rows = 0
        self._put(stage, {"verdict": UNDER_WAY, "text": "", "seconds": 0.0, "code": None, "last_lines": []})
        self.write()

    def add(self, stage: Stage, fact: dict[str, Any]) -> None:
        if stage.tests:
            self._add_test(stage, fact)
        elif fact.get("kind") == "machine":
            self._document["facts"] = {name: value for name, value in fact.items() if name != "kind"}
        else:
            mine = {**fact, "part": stage.name, "number": self._rows, "source": self.source}
            self._rows += 1
            self._replace("results", mine, ("part", "number"))
        self.write()

    def end(self, stage: Stage, outcome: Outcome) -> None:
        if outcome.verdict in ("absent", "not run"):
            found = self._stage(stage.name)
            if found is not None and found["verdict"] not in ("absent", "not run"):
                return  # an earlier result says more
        by_itself = outcome.code is not None and outcome.code in OF_TESTS
        if stage.tests and outcome.begun and outcome.verdict != "cut" and not by_itself:
            how = f"{outcome.verdict}, {outcome.text}; with it the process of all tests of its stage"
            self._add_test(stage, {"name": outcome.begun, "verdict": "failed", "seconds": 0.0, "text": how})
        verdict = outcome.verdict
        if stage.facts is not None and outcome.verdict in ("passed", "failed"):
            self._forget_what_is_gone(stage)
            verdict = self._verdict_of_tests(stage, outcome) if stage.tests else self._of_rows(stage, outcome)
        # If it passed, only its last line is kept, the summary.
        lines = outcome.last_lines[-1:] if verdict == "passed" else outcome.last_lines
        found = {"verdict": verdict, "text": outcome.text, "seconds": outcome.seconds, "code": outcome.code}
        self._put(stage, {**found, "last_lines": list(lines)})
        self.write()
        if self._out is not None:
            _write(self._out / "gpu-check.log", self._log())

    def _add_test(self, stage: Stage, fact: dict[str, Any]) -> None:
        self._replace("tests", {"stage": stage.name, **fact, "source": self.source}, ("stage", "name"))

    def _verdict_of_tests(self, stage: Stage, outcome: Outcome) -> str:
        """Passed if, over all calls, some of its tests passed and none failed."""
        verdicts = [test["verdict"] for test in self._tests(stage.name)]
        fine = outcome.code in OF_TESTS and "failed" not in verdicts and "passed" in verdicts
        return "passed" if fine else "failed"

    def _of_rows(self, stage: Stage, outcome: Outcome) -> str:
        rows = [row for row in self._document["results"] if row["part"] == stage.name]
        wrong = any(row.get("kind") == "error" or row.get("wrong") for row in rows)
        return "failed" if wrong else outcome.verdict

    def _forget_what_is_gone(self, stage: Stage) -> None:
        """Drops results of other sources that a stage which ran to its end did not find again."""
        self._document["tests"] = [
            test
            for test in self._document["tests"]
            if test["stage"] != stage.name or test["source"] == self.source
        ]
        if not stage.tests:
            self._document["results"] = [
                row
                for row in self._document["results"]
                if row["part"] != stage.name or row["number"] < self._rows
            ]

    # ---- the files ----

    def write(self) -> None:
        """Replaces each file as a whole, so a reader finds the old or the new one, even after a crash."""
        document, text = as_lines(self._document), self.text()
        for folder in self._folders:
            _write(folder / f"{self.name}.json", document)
            _write(folder / f"{self.name}.txt", text + "\n")

    def text(self) -> str:
        """Returns stages, failures and figures as text."""
        device = self._document["device"]
        head = f"{device['name']}, torch {device.get('torch', '?')}, sources {self.source}"
        parts = [head, self._table(), self._failures(), self._figures()]
        return "\n\n".join(part for part in parts if part)

    def _table(self) -> str:
        rows = []
        for stage in self._document["stages"]:
            older = "" if stage["source"] == self.source else f" (sources {stage['source']})"
            last = stage["last_lines"][-1:] if stage["verdict"] == "passed" else []
            what = self._counted(stage["name"]) or (last or [stage["text"]])[0]
            what += f"; {stage['text']}" if stage["verdict"] in ("cut", "timed out") else ""
            rows.append(
                f"{stage['name']:24} {stage['verdict']:10} {stage['seconds']:6.1f} s  {what[:110]}{older}"
            )
        return "\n".join(rows)

    def _counted(self, stage: str) -> str:
        verdicts = [test["verdict"] for test in self._tests(stage)]
        kinds = [(verdicts.count(kind), kind) for kind in ("passed", "failed", "skipped")]
        return ", ".join(f"{count} {kind}" for count, kind in kinds if count)

    def _failures(self) -> str:
        texts = []
        for test in self._document["tests"]:
            if test["verdict"] == "failed":
                lines = test["text"].splitlines()[-FAILURE_LINES:]
                texts.append("\n".join([f"failed: {test['name']}", *(f"    | {line}" for line in lines)]))
        for stage in self._document["stages"]:
            if stage["verdict"] in ("failed", "timed out") and not self._tests(stage["name"]):
                lines = stage["last_lines"][-FAILURE_LINES:]
                texts.append("\n".join([f"failed: {stage['name']}", *(f"    | {line}" for line in lines)]))
        return "\n\n".join(texts)

    def _figures(self) -> str:
        return gpu_problem.summary(self._document["results"])

    def _log(self) -> str:
        """Returns the output of all stages as one text; long outputs keep their beginning and end."""
        texts = []
        for stage in self._document["stages"]:
            log = self._logs / f"{stage['name']}.txt"
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else stage["text"]
            if len(text) > LONGEST_LOG:
                text = f"{text[: LONGEST_LOG // 2]}\n[...]\n{text[-LONGEST_LOG // 2 :]}"
            texts.append(f"==== {stage['name']}: {stage['verdict']}, {stage['seconds']:.1f} s\n{text}")
        return "\n\n".join(texts)

    # ---- the document ----

    def _stage(self, name: str) -> dict[str, Any] | None:
        return next((stage for stage in self._document["stages"] if stage["name"] == name), None)

    def _verdict(self, name: str) -> str:
        found = self._stage(name)
        return "not run" if found is None else found["verdict"]

    def _tests(self, stage: str) -> list[dict[str, Any]]:
        return [test for test in self._document["tests"] if test["stage"] == stage]

    def _put(self, stage: Stage, found: dict[str, Any]) -> None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._replace("stages", {"name": stage.name, **found, "date": date, "source": self.source}, ("name",))

    def _replace(self, where: str, made: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Replaces the row with the same keys, or appends one."""
        rows = self._document[where]
        for index, row in enumerate(rows):
            if all(row[key] == made[key] for key in keys):
                rows[index] = made
                return
        rows.append(made)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)

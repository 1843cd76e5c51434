"""Finds compilers and ninja for the builds of this folder, and writes and runs their ninja files."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Source = tuple[str, Path, tuple[str, ...]]
"""An object: its name, its source and its macros."""


def find_compiler(name: str, variables: Iterable[str], usual: Path) -> Path | None:
    """Returns bin/`name` in the folder that the first set variable names, and searches nowhere else then. If
    none is set: `name` on PATH, else in the folder `usual`."""
    for variable in variables:
        if os.environ.get(variable):
            named = Path(os.environ[variable]) / "bin" / name
            return named if named.exists() else None
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    installed = usual / "bin" / name
    return installed if installed.exists() else None


def find_ninja() -> str:
    """Returns ninja's path, even if this Python's environment is not activated. Raises RuntimeError."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    ninja = shutil.which("ninja", path=folders)
    if ninja is None:
        raise RuntimeError("kernels and C++ tests need ninja, which was not found: run `pip install ninja`.")
    return ninja


def recipe(
    compiler: str, flags: Iterable[str], objects: Iterable[Source], *, link_flags: str, language: str = ""
) -> tuple[list[str], list[str]]:
    """Returns the lines of a ninja file that compiles `objects`, each named by its output path, and these
    names. Its rules are "compile", which keeps its output in $out.log and shows it only on failure, and
    "link"."""
    lines = [
        "ninja_required_version = 1.3",
        f"flags = {' '.join(flags)}",
        "rule compile",
        f"  command = {compiler} -MD -MF $out.d $flags $architectures $macros {language}-c $in -o $out "
        "> $out.log 2>&1 || (cat $out.log; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        f"  command = {compiler} -shared {link_flags} $in -o $out",
        "  description = link $out",
    ]
    made = []
    for name, source, macros in objects:
        lines += [f"build {name}: compile {source}", f"  macros = {' '.join(macros)}"]
        made.append(name)
    return lines, made


def run_ninja(folder: Path, recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Writes the ninja file and runs it in `folder`, with MAX_JOBS jobs or else one for each core."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(recipe)
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    command = [find_ninja(), "-C", str(folder), "-j", jobs, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def main(doc: str | None, build: Callable[[], Path]) -> None:
    """Runs a build script without arguments: prints what was built, or exits with a sentence why not."""
    argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        print(build())
    except RuntimeError as error:
        raise SystemExit(str(error)) from None

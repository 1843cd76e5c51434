"""Writes stubs for kernels that do not compile, so that the others still link. Calling a stub is an error
that says that the kernel was left out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

NAME = "left_out"
SENTENCE = "this kernel was left out of the library, because {} did not compile."

HEAD = """#include "cuda/portable/checks.h"
// A launcher returns a code; functions that launchers call throw. Their real parameters need not be known.
#define LAUNCHER(number, symbol)                                          \\
  extern "C" PYRUNTIME_API int left_out_##number() __asm__(symbol);       \\
  int left_out_##number() {                                               \\
    return pyruntime::portable::remember_error(PYRUNTIME_DEVICE_ERROR, kWhy); \\
  }
#define FUNCTION(number, symbol)                                \\
  extern "C" void left_out_##number() __asm__(symbol);          \\
  void left_out_##number() { throw pyruntime::portable::DeviceError(kWhy); }
"""


def failed_objects(said: str) -> list[Path]:
    """Returns the objects that ninja, going on after failures, could not build."""
    return [Path(path) for path in re.findall(r"^FAILED: (?:\[code=\d+\] )?(\S+\.o)\b", said, re.MULTILINE)]


def write(folder: Path, kept: Iterable[Path], failed: Iterable[Path], headers: Iterable[Path]) -> None:
    """Writes the stubs' source for the `failed` objects: the functions of pyruntime that `kept` objects call,
    or `headers` declare, and no kept object defines."""
    wanted, had = set[str](), set[str]()
    for path in kept:
        for line in subprocess.run(["nm", "-P", path], capture_output=True, text=True).stdout.splitlines():
            symbol, kind = line.split()[:2]
            if "pyruntime" in symbol:
                (wanted if kind == "U" else had).add(symbol)
    for header in headers:
        wanted |= set(re.findall(r"^PYRUNTIME_API int (pyruntime_\w+)\(", header.read_text(), re.MULTILINE))
    why = SENTENCE.format(", ".join(sorted(path.stem for path in failed)))
    lines = [HEAD, f'static const char kWhy[] = "{why}";']
    for number, symbol in enumerate(sorted(wanted - had)):
        lines.append(f'{"FUNCTION" if symbol.startswith("_Z") else "LAUNCHER"}({number}, "{symbol}")')
    (folder / f"{NAME}.cu").write_text("\n".join(lines) + "\n")

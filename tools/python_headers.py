"""Checks for Python's C headers, which distributions ship in a separate package."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def refuse_without() -> None:
    """Raises SystemExit if this Python has no C headers: the core cannot be compiled."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SystemExit(
            f"{sys.executable} has no C headers (no Python.h in {folder}), which pyruntime's core "
            f"needs: install them, on Debian and Ubuntu with `apt-get install python{version}-dev`."
        )

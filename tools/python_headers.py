"""The C headers of Python, which distributions keep in a package of its own."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def refuse_without() -> None:
    """Raises SystemExit where this Python has none: the core cannot be compiled."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SystemExit(
            f"{sys.executable} has no C headers (no Python.h in {folder}), which pyruntime's core is "
            f"compiled with: install them, on Debian and Ubuntu with `apt-get install python{version}-dev`."
        )

"""The versions of torch that the core is known to build against and to run with.

CONTRIBUTING.md says how each was checked.
"""

from __future__ import annotations

import re

KNOWN = ("2.11", "2.12", "2.13", "2.14", "2.15")
DEFAULT = "2.13.0"
"""What is installed where there is none, and what the whole test suite runs on."""


def is_known(version: str) -> bool:
    """Of a version as torch says it: "2.11.0+cu130"."""
    found = re.match(r"\d+\.\d+", version)
    return found is not None and found[0] in KNOWN


def refuse_unknown(version: str) -> None:
    """Raises SystemExit for a torch whose C++ interfaces may be others."""
    if not is_known(version):
        raise SystemExit(
            f"pyruntime is known to build and to run with torch {', '.join(KNOWN[:-1])} and {KNOWN[-1]} and "
            f"found torch {version}: run `pip install torch=={DEFAULT}` first."
        )

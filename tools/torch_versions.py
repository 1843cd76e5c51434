"""The torch versions that the core builds and runs with (CONTRIBUTING.md says how each was checked)."""

from __future__ import annotations

import re

KNOWN = ("2.11", "2.12", "2.13", "2.14", "2.15")
DEFAULT = "2.13.0"
"""The version that is installed if there is none; the whole test suite runs on it."""


def is_known(version: str) -> bool:
    """Whether the version, as torch spells it ("2.11.0+cu130"), is supported."""
    found = re.match(r"\d+\.\d+", version)
    return found is not None and found[0] in KNOWN


def refuse_unknown(version: str) -> None:
    """Raises SystemExit for a torch whose C++ interfaces may differ."""
    if not is_known(version):
        raise SystemExit(
            f"pyruntime builds and runs with torch {', '.join(KNOWN[:-1])} and {KNOWN[-1]}, and this is "
            f"torch {version}: run `pip install torch=={DEFAULT}` first."
        )

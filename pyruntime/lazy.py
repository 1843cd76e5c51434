"""Imports names of a package on first use, so that its pure parts (plans, schedules) load without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def names_of(package: str, places: Mapping[str, str], modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `package` (PEP 562). `places` maps each name to its module; `modules` are
    submodules that are imported on first use."""

    def get(name: str) -> Any:
        if name in places:
            value = getattr(importlib.import_module(places[name]), name)
        elif name in modules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get

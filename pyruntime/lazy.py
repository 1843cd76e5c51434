"""Names of a package that are imported when they are first asked for.

So that its pure parts (plans, schedules, configurations) can be imported without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def names_of(package: str, places: Mapping[str, str], modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """A `__getattr__` for `package` (PEP 562): `places` says in which module a name is; `modules` are
    submodules that are there without being imported."""

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

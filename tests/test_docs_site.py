"""The API reference has all that is public, and all that is public can be imported from where it is said to
be."""

from __future__ import annotations

import importlib
import inspect
import re

import pyruntime
from tools.docs_site import pages


def test_every_public_name_is_on_its_module_s_page():
    found = pages()
    assert {
        "pyruntime",
        "pyruntime.comm",
        "pyruntime.nn",
        "pyruntime.ops",
        "pyruntime.symm_mem",
    } <= found.keys()
    for module, text in found.items():
        exported = importlib.import_module(module)
        places = re.findall(r"^(?:::: |- \[\w+\]\[)([\w.]+)\]?$", text, re.M)
        named = dict(reversed(place.rsplit(".", 1)) for place in places)
        assert named.keys() == set(exported.__all__), module
        for name, place in named.items():
            assert getattr(importlib.import_module(place), name) is getattr(exported, name)


def test_what_is_public_says_what_it_does():
    for module in pages():
        exported = importlib.import_module(module)
        for name in exported.__all__:
            each = getattr(exported, name)
            if inspect.isclass(each) or inspect.isfunction(each):
                assert inspect.getdoc(each), f"{module}.{name} has no docstring"
    assert pyruntime.__doc__

"""The C++ core's types for mypy are those of the built core."""

from __future__ import annotations

import ast

import pyruntime._C as core
from tools import make_stub


def test_the_stub_is_what_the_built_core_gives():
    assert make_stub.stub() == make_stub.STUB.read_text(), "run `make build` and tools/make_stub.py"


def test_every_name_of_the_core_is_in_the_stub_and_the_other_way_round():
    tree = ast.parse(make_stub.STUB.read_text())
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert named.keys() == {name for name in vars(core) if not name.startswith("__")}
    for name, node in named.items():
        if isinstance(node, ast.ClassDef):
            members = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            there = {member for member in vars(getattr(core, name)) if not member.startswith("_")}
            assert members - {"__init__"} == there

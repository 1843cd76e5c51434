"""What a machine can hold of a house that a stranger can carry: short functions, no circles, one name for one
thing, no state of modules, folders that a person takes in, and options that are decisions.

Exceptions are named here, and there may be fewer of them, never more."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

from pyruntime.train.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FUNCTION = 80  # lines
LARGEST_FOLDER = 25  # files


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the product by its name."""
    found = {}
    for path in sorted((ROOT / "pyruntime").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.FunctionDef):
                yield name, node
            yield from functions(node, name)


LONG_FUNCTIONS: set[str] = set()


def test_functions_are_short():
    """A docstring does not count."""
    long = set()
    for name, tree in modules().items():
        for qualified, node in functions(tree, name):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert node.end_lineno is not None
            if node.end_lineno - first.lineno + 1 > LONGEST_FUNCTION:
                long.add(qualified)
    assert long == LONG_FUNCTIONS


def imports(name: str, tree: ast.Module) -> set[str]:
    """The modules of the product that it imports when it is imported."""
    found: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert not node.level, f"{name} imports by a relative name"
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if alias.name != "_C":  # the core, which is no module of Python
                    found.add(whole if whole in modules() else base)
        else:
            todo += ast.iter_child_nodes(node)
    return (found & modules().keys()) - {name}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_no_modules_import_each_other():
    assert circles({name: imports(name, tree) for name, tree in modules().items()}) == []


CLASS_NAMES_USED_TWICE = {
    "Action",
    "Axes",
    "Axis",
    "Block",
    "Choice",
    "Context",
    "Cut",
    "Facts",
    "Job",
    "Kind",
    "Linear",
    "Link",
    "Options",
    "Order",
    "Part",
    "Pipeline",
    "Plan",
    "Progress",
    "Sample",
    "Shard",
    "Source",
    "Span",
    "State",
    "Step",
    "Timeline",
    "_Run",
    "_Sum",
}


def test_a_class_name_is_one_thing():
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name for name, where in places.items() if len(where) > 1} == CLASS_NAMES_USED_TWICE


MUTABLE = {
    "dict",
    "list",
    "set",
    "defaultdict",
    "Counter",
    "deque",
    "WeakKeyDictionary",
    "WeakValueDictionary",
}
MUTABLE |= {"WeakSet", "OrderedDict"}
MODULES_WITH_STATE = {
    "pyruntime.any_model.regions._marked_kinds",
    "pyruntime.any_model.regions._whole_kinds",
    "pyruntime.comm.companions._companions",
    "pyruntime.context.agreement._agreed",
    "pyruntime.data_parallel.shard._HANDLES",
    "pyruntime.data_parallel.written._registrations",
    "pyruntime.data_parallel.written._watching",
}


def state_of(tree: ast.Module) -> Iterator[str]:
    """Names of the module that begin as empty containers, or are assigned to within functions."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        is_empty = (isinstance(value, ast.Dict) and not value.keys) or (
            isinstance(value, ast.List) and not value.elts
        )
        called = value.func if isinstance(value, ast.Call) and not value.args else None
        kind = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if isinstance(target, ast.Name) and target.id != "__all__" and (is_empty or kind in MUTABLE):
            yield target.id
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def test_modules_keep_no_state():
    found = {f"{name}.{each}" for name, tree in modules().items() for each in state_of(tree)}
    assert found == MODULES_WITH_STATE


SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
LARGE_FOLDERS: set[str] = set()


def test_a_folder_has_no_more_files_than_a_person_takes_in():
    tops = [ROOT / "pyruntime", ROOT / "csrc"]
    folders = [*tops, *(folder for top in tops for folder in top.rglob("*/"))]
    large = {
        str(folder.relative_to(ROOT))
        for folder in folders
        if len([each for each in folder.iterdir() if each.suffix in SOURCES and each.stem != "__init__"])
        > LARGEST_FOLDER
    }
    assert large == LARGE_FOLDERS


def options(kind: type, prefix: str = "") -> Iterator[str]:
    """The trainer's options: fields of its configuration that are no groups of fields."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        name, of = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(of):
            yield from options(of, f"{name}.")
        else:
            yield name


def test_every_option_of_the_trainer_is_a_decision():
    """A new one is written here by whoever has answered who would set it, and when."""

    listed = (ROOT / "tests/options.txt").read_text().split()
    assert sorted(options(RunConfig)) == listed

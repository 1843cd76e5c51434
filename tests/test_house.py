"""Checks the structure of the sources: short functions, no import circles, one meaning for each name, no
module state, small folders, and only options that someone would set.

Exceptions are listed here; the lists may only shrink."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

from pyruntime import choices
from pyruntime.replicas import METHODS
from pyruntime.train.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FUNCTION = 80  # lines
LARGEST_FOLDER = 25  # files


@cache
def modules() -> dict[str, ast.Module]:
    """Returns every module of the product by its name."""
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
    """Docstrings do not count."""
    long = set()
    for name, tree in modules().items():
        for qualified, node in functions(tree, name):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert node.end_lineno is not None
            if node.end_lineno - first.lineno + 1 > LONGEST_FUNCTION:
                long.add(qualified)
    assert long == LONG_FUNCTIONS


def imports(name: str, tree: ast.Module) -> set[str]:
    """Returns the modules of the product that a module imports at its import."""
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
    """Returns the sets of modules that import each other (Tarjan 1972)."""
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


def test_a_class_name_is_one_thing():
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


SAME_IDEA_IN_SEVERAL_ROOMS = {
    "agreement.py",
    "attention.py",
    "config.py",
    "convert.py",
    "errors.py",
    "mesh.py",
    "plot.py",
    "rebalance.py",
    "replicas.py",
    "touched.py",
}


def test_a_file_name_is_one_thing():
    names = Counter(path.name for path in (ROOT / "pyruntime").rglob("*.py") if path.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} == SAME_IDEA_IN_SEVERAL_ROOMS


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
STATE_THAT_STAYS = {
    # An entry ends with its process group, which is torch's and takes no attributes.
    "pyruntime.comm.companions._companions",
    # The stream of a device beside the caller's, for the losses of all routers.
    "pyruntime.nn.router._stream_of",
    # The connections to the job's store, which a later Runtime reuses and others may still need.
    "pyruntime.comm.rendezvous._connect",
    "pyruntime.comm.rendezvous._generation",
    # torch's hooks belong to the process and are added once.
    "pyruntime.nn.module.register_with_torch",
    # Results that never change.
    "pyruntime.any_model.activations.row_shard._rule_of",
    "pyruntime.choices.values",
    "pyruntime.cli.arguments._docs",
    "pyruntime.comm.ranges.nvtx_domain",
    "pyruntime.nn.cut._rule_of",
    "pyruntime.train.validate._hints",
}


def state_of(tree: ast.Module) -> Iterator[str]:
    """Yields names of the module and its classes that start as empty containers or that functions assign to,
    and functions that cache all their results."""
    classes = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in itertools.chain(tree.body, *classes):
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
        elif isinstance(node, ast.FunctionDef) and "functools.cache" in map(ast.unparse, node.decorator_list):
            yield node.name


def test_modules_and_classes_keep_no_state():
    found = {f"{name}.{each}" for name, tree in modules().items() for each in state_of(tree)}
    assert found == STATE_THAT_STAYS


def known_choices() -> dict[str, set[str]]:
    """Returns the values of every choice by the choice's name."""
    found = {name: set(choices.values(choice)) for name, choice in vars(choices).items() if name[0] != "_"}
    return {name: values for name, values in found.items() if values}


def lists_of_words(tree: ast.Module) -> Iterator[tuple[ast.AST, set[str], bool]]:
    """Yields the words in each tuple, list, set, mapping's keys (then True), and enumeration."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    told |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and names_all(node)}
    for node in ast.walk(tree):
        if id(node) in told:
            continue
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            parts = node.keys if isinstance(node, ast.Dict) else node.elts
            words = {each.value for each in parts if isinstance(each, ast.Constant)}
            yield node, {word for word in words if isinstance(word, str)}, isinstance(node, ast.Dict)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for run in re.findall(r"[\w-]+(?:(?:,| or| and|, or|, and) [\w-]+)+", node.value):
                yield node, set(re.split(r",? (?:or |and )?", run)), False


def names_all(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "__all__"


def test_values_of_a_choice_are_listed_in_its_home_alone():
    """pyruntime/choices.py is the home, from which other lists are made. A mapping may name all values, to
    add something to each. A single value is a branch of code, and a list with mostly other words is another
    list."""
    for module, tree in modules().items():
        if module == choices.__name__:
            continue
        for node, words, is_mapping in lists_of_words(tree):
            for name, values in known_choices().items():
                both = words & values
                listed = len(both) > 1 and len(both) >= len(words - values)
                where = f"{module}:{getattr(node, 'lineno', 0)}"
                assert not listed or (is_mapping and values <= words), (
                    f"{where} spells {name}: {sorted(both)}"
                )


def test_tables_of_documents_have_every_value_of_a_choice():
    """Except values that stand for another one, or for none."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for table in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
            words = {
                word for row in table.splitlines() for word in re.findall(r"`([\w-]+)`", row.split("|")[1])
            }
            for name, values in known_choices().items():
                both = words & values
                if len(both) > 1 and len(both) >= len(words - values):
                    assert values - words <= {"auto", "none", "every_step"}, f"{path}: {name} has {values}"


def test_methods_of_replicas_are_those_of_their_choice():
    assert {"every_step", *METHODS} == set(choices.values(choices.ReplicaMethod))


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
    """Yields the trainer's options: fields of its configuration that are not groups of fields."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        name, of = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(of):
            yield from options(of, f"{name}.")
        else:
            yield name


def test_every_option_of_the_trainer_is_a_decision():
    """tests/options.txt says who would set each option, and when."""
    listed = [line.split(maxsplit=1) for line in (ROOT / "tests/options.txt").read_text().splitlines()]
    assert sorted(options(RunConfig)) == [name for name, _ in listed]


def test_what_only_cuda_has_is_asked_in_one_folder():
    """Elsewhere torch.accelerator and torch.get_device_module() are asked, which know any device."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if not name.startswith("pyruntime.cuda")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
    ]
    assert not found

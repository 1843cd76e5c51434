"""Pages of the API reference: one for every module that says in `__all__` what is public (`make api`).

mkdocs calls `on_files` (mkdocs.yml). Nothing is imported: the sources are parsed here for who defines a name,
and by mkdocstrings for the docstrings.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pyruntime"


def modules() -> dict[str, ast.Module]:
    """The package and what lies right in it, by name."""
    sources = [PACKAGE / "__init__.py", *PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("[!_]*.py")]
    return {name_of(source): ast.parse(source.read_text()) for source in sorted(sources)}


def name_of(source: Path) -> str:
    return ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def public(module: ast.Module) -> list[str]:
    """What `__all__` lists; nothing where there is none."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def defined_in(name: str, module: str, known: dict[str, ast.Module]) -> str:
    """The module that defines what `module` calls `name`, which it may have imported."""
    for node in ast.walk(known[module]) if module in known else ():
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return defined_in(name, node.module or "", known)
    return module


def pages() -> dict[str, str]:
    """The text of every page, by its module. What several modules offer is on the page of one, the last, and
    the others refer to it."""
    known, offered, at = modules(), {}, {}
    for module, tree in known.items():
        names = sorted(public(tree), key=str.lower)
        offered[module] = {name: f"{defined_in(name, module, known)}.{name}" for name in names}
        at |= dict.fromkeys(offered[module].values(), module)
    made = {}
    for module, places in offered.items():
        lines = [f"# {module}", "", ast.get_docstring(known[module]) or "", ""]
        lines += [f"- [{name}][{place}]" for name, place in places.items() if at[place] != module]
        lines += [f"\n::: {place}" for place in places.values() if at[place] == module]
        if places:
            made[module] = "\n".join(lines)
    return made


def on_files(files, config):
    from mkdocs.structure.files import File

    for module, text in pages().items():
        files.append(File.generated(config, f"{module}.md", content=text))
    return files

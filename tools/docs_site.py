"""Hooks for mkdocs (mkdocs.yml) that add pages to the site (`make docs`) beyond docs/.

- A page of reference/api/ for every module with an `__all__`. Nothing is imported: the sources are parsed
here
  to find who defines a name, and by mkdocstrings for the docstrings.
- A page of repository/ for each document beside the sources (REPOSITORY) to which pages of docs/ link. Links
  to other files of the repository become plain text.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pyruntime"
API, COPIES = "reference/api/", "repository/"
REPOSITORY = ("*.md", "bench/results/*.md", "csrc/cuda/README.md", "tests/model/README.md", "examples/*/*.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def modules() -> dict[str, ast.Module]:
    """Returns the package, its subpackages and its top modules, parsed, by name."""
    sources = [PACKAGE / "__init__.py", *PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("[!_]*.py")]
    return {name_of(source): ast.parse(source.read_text()) for source in sorted(sources)}


def name_of(source: Path) -> str:
    return ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def public(module: ast.Module) -> list[str]:
    """Returns the names in `__all__`; empty without one."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def defined_in(name: str, module: str, known: dict[str, ast.Module]) -> str:
    """Returns the module that defines `name` of `module`, which may have imported it."""
    for node in ast.walk(known[module]) if module in known else ():
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return defined_in(name, node.module or "", known)
    return module


def pages() -> dict[str, str]:
    """Returns the text of every page, by its module. A name that several modules export is on the page of the
    last one; the others link to it."""
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


def copies() -> dict[str, Path]:
    """Returns the documents outside docs/ that the site includes, by their paths on the site."""
    found = (path for pattern in REPOSITORY for path in sorted(ROOT.glob(pattern)))
    return {f"{COPIES}{path.relative_to(ROOT).as_posix()}": path for path in found}


def relinked(text: str, place: str, source: Path) -> str:
    """Returns the text of `source`, at `place` on the site, with its links changed to the site."""
    there = {path: name for name, path in copies().items()}

    def link(found: re.Match[str]) -> str:
        picture, shown, target = found.groups()
        name, hash_, anchor = target.partition("#")
        if "://" in target or not name:
            return found[0]
        path = (source.parent / name).resolve()
        if path.is_relative_to(ROOT / "docs"):
            on_site = path.relative_to(ROOT / "docs").as_posix()
        elif path in there:
            on_site = there[path]
        else:
            return shown
        relative = os.path.relpath(on_site, Path(place).parent)
        return f"{picture}[{shown}]({relative}{hash_}{anchor})"

    return LINK.sub(link, text)


def on_config(config):
    """Adds the API reference's pages at the end of the nav's Reference."""
    (reference,) = (section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"API": [{module: f"{API}{module}.md"} for module in pages()]})
    return config


def on_files(files, config):
    from mkdocs.structure.files import File

    made = {f"{API}{module}.md": text for module, text in pages().items()}
    made |= {place: relinked(path.read_text(), place, path) for place, path in copies().items()}
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Changes links from a page of docs/ to files outside docs/ into links on the site."""
    source = page.file.abs_src_path
    return markdown if source is None else relinked(markdown, page.file.src_uri, Path(source))

"""The site of docs/: its API reference has every public name under its module, and a browser shows its pages
with navigation and search."""

from __future__ import annotations

import functools
import http.server
import importlib
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyruntime
from tests import browser
from tools.docs_site import ROOT, pages, relinked

SECTIONS = ("Tutorials", "How-to", "Reference", "Explanation", "Figures")


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


def test_links_lead_to_the_copies_on_the_site():
    source, place = ROOT / "docs" / "figures" / "results.md", "figures/results.md"
    text = "[a](one-network.md#linears) ![b](../pictures/x.svg) "
    text += "[c](../../bench/results/linears.md) [d](../../setup.py)"
    assert relinked(text, place, source) == (
        "[a](one-network.md#linears) ![b](../pictures/x.svg) [c](../repository/bench/results/linears.md) d"
    )
    copy = ROOT / "bench" / "results" / "linears.md"
    text = "[a](../../docs/figures/results.md) [b](gemm.md)"
    assert relinked(text, "repository/bench/results/linears.md", copy) == (
        "[a](../../../figures/results.md) [b](gemm.md)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The folder of the built site, and its address."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.second_tier
@browser.needed
def test_a_browser_shows_pages_with_the_nav_and_the_search(site, tmp_path):
    _, address = site
    for page, heading in {"index": "", "figures/results": "What is missed"}.items():
        shown = browser.document(f"{address}/{page}.html", tmp_path / "profile")
        tabs = re.findall(r'class="md-tabs__link"[^>]*>\s*([^<]*?)\s*<', shown)
        assert {*SECTIONS} <= {*tabs}, page
        assert 'class="js' in shown and "md-search__input" in shown, "the page's own programs did not run"
        assert heading in shown


@pytest.mark.second_tier
def test_nothing_on_the_site_comes_from_the_network(site):
    folder, _ = site
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*src=.?https?:|<link[^>]*rel=.?(?:stylesheet|preload)[^>]*https?:"
    )
    for page in folder.rglob("*.html"):
        assert not loaded.search(page.read_text()), page


@pytest.mark.second_tier
def test_the_search_knows_every_section(site):
    folder, _ = site
    index = (folder / "search" / "search_index.json").read_text()
    for place in ("tutorials/", "how-to/", "reference/api/", "explanation/", "figures/", "repository/bench/"):
        assert f'"location":"{place}' in index

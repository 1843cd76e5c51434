"""The page of options is the one generated from them."""

from __future__ import annotations

from tools import write_configuration


def test_the_page_is_current():
    assert write_configuration.PAGE.read_text() == write_configuration.page(), (
        "run `.venv/bin/python tools/write_configuration.py`"
    )

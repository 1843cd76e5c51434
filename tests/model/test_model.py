"""In all states of small configurations every op ends and reads what its own flight wrote; a model that lacks
a rule of the protocol is found out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model import spin

needs_spin = pytest.mark.skipif(bool(spin.why_not()), reason=spin.why_not() or "spin is there")


def name_of(case: spin.Case) -> str:
    return case.name.replace(" ", "-")


@pytest.mark.spin
@needs_spin
@pytest.mark.parametrize("case", spin.SOUND, ids=name_of)
def test_every_op_ends_and_reads_its_own_flight(case: spin.Case, tmp_path: Path) -> None:
    outcome = spin.check(case, tmp_path)
    assert not outcome.error, outcome.output


@pytest.mark.spin
@needs_spin
@pytest.mark.parametrize("case", spin.MUTANTS, ids=name_of)
def test_a_protocol_that_lacks_a_rule_fails(case: spin.Case, tmp_path: Path) -> None:
    outcome = spin.check(case, tmp_path)
    assert case.error in outcome.error, outcome.output


def test_every_mutant_is_tried() -> None:
    written = {
        mutant
        for model in spin.FOLDER.glob("*.pml")
        for mutant in re.findall(r"MUTANT_\w+", model.read_text())
    }
    assert written == {macro for case in spin.MUTANTS for macro in case.macros.split() if "MUTANT" in macro}

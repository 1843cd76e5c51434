"""The search considers every legal mesh, leaves out what does not fit, and is quick."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import pyruntime.plan
from pyruntime.plan.findings import document, nothing_fits, table
from pyruntime.plan.mesh import Mesh, check_job, sequences
from pyruntime.plan.search import Result, SearchSpace, each_shape, gpu_hours, meshes, pareto, search
from tests.plan.jobs import job


@pytest.fixture(scope="module")
def found() -> Result:
    return search(job("llama3-8b", "dgx-h100", 64, 256, 8192))


@pytest.mark.second_tier
def test_a_thousand_gpus_are_searched_in_seconds_and_little_memory():
    program = (
        "import re, time\n"
        "from tests.plan.jobs import job; from pyruntime.plan.search import search\n"
        "found = search(job('llama3-70b', 'frontier', 1024, 512, 8192))\n"
        # Not ru_maxrss, which begins with what the process that started this one holds.
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read()).group(1)\n"
        "print(found.considered, time.process_time(), peak)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    considered, seconds, kilobytes = int(out[0]), float(out[1]), int(out[2])
    assert considered > 10_000
    assert seconds < 30 and kilobytes < 500_000


def test_meshes_are_legal_and_each_is_there_once():
    wanted = job("llama3-8b", "dgx-h100", 48, 96, 8192)
    every = list(meshes(wanted, SearchSpace()))
    assert len(every) == len(set(every)) > 500
    for mesh in every:
        assert mesh.ranks == 48
        assert wanted.batch % (mesh.samples * mesh.micro_batch) == 0
        assert 8 % mesh.tp == 0 and 8 % mesh.x == 0
        assert mesh.cp == 1 or 8192 % (2 * mesh.cp) == 0
        assert mesh.dp % mesh.replicate == 0
        if mesh.kind == "interleaved":
            assert mesh.micro_batches(96) % mesh.pp == 0
    assert {mesh.kind for mesh in every} == {"1f1b", "interleaved", "zb-h1", "zb-v", "seq1f1b"}
    assert {mesh.tp for mesh in every} == {1, 2, 4, 8}
    assert any(mesh.is_axonn for mesh in every) and any(mesh.tau for mesh in every)
    assert any(mesh.replicate > 1 for mesh in every)
    assert not any(mesh.skip for mesh in every)  # which would change the model


def test_what_was_not_asked_for_is_not_searched():
    none = SearchSpace(axonn=False, co2=False, hybrid=False, recompute=False, kinds=("1f1b",))
    for mesh in meshes(job("llama3-8b", "dgx-h100", 16, 64, 8192), none):
        assert not mesh.is_axonn and not mesh.tau and mesh.replicate == 1 and mesh.recompute == "none"
        assert mesh.kind == "1f1b"


def test_candidates_fit_and_come_fastest_first(found):
    assert all(each.memory.total <= 0.8 * 80e9 and each.verdict == "fits" for each in found.candidates)
    totals = [each.total for each in found.candidates]
    # Within what the model cannot tell apart, simplicity decides.
    assert all(later > 0.99 * earlier for earlier, later in pairwise(totals))
    assert found.too_big + len(found.candidates) <= found.considered


@pytest.mark.second_tier
def test_risky_meshes_are_there_when_asked_for(found):
    more = search(found.job, risky=True)
    assert {each.verdict for each in more.candidates} == {"fits", "risky"}
    assert len(more.candidates) > len(found.candidates)


def test_nothing_beats_the_pareto_front_in_both(found):
    front = pareto(found.candidates)
    assert len(front) > 3
    for each in front:
        for other in found.candidates:
            assert other.total >= each.total or other.memory.total >= each.memory.total


def test_each_size_is_shown_once(found):
    shown = [
        (e.mesh.tp, e.mesh.cp, e.mesh.pp, e.mesh.dp, e.mesh.x, e.mesh.y, e.mesh.z, e.mesh.tau > 0)
        for e in each_shape(found.candidates, lambda each: True)
    ]
    assert len(shown) == len(set(shown)) > 20


def test_the_simpler_of_two_equals_comes_first():
    alone = search(job("llama3-8b", "dgx-h200", 1, 8, 2048), SearchSpace(recompute=False), risky=True)
    assert alone.candidates == ()  # 18 bytes for each of 8 B parameters are 145 GB
    assert alone.nearest is not None and "needs" in nothing_fits(alone)
    two = search(job("llama3-1b", "dgx-h200", 8, 64, 2048), SearchSpace(hybrid=False))
    first = two.candidates[0].mesh
    assert (first.tau, first.replicate, first.recompute) == (0, 1, "none")


def test_cost_is_gpus_times_hours():
    wanted = job("llama3-8b", "dgx-h100", 64, 256, 8192)
    assert gpu_hours(wanted, 3.6, 1000 * wanted.tokens) == pytest.approx(64)


def test_the_table_and_the_document_say_the_same(found):
    shown = list(each_shape(found.candidates, lambda each: True))[:5]
    text = table(found, shown, lambda mesh: None if mesh.pp == 1 else "no pipelines", 1e12)
    lines = text.splitlines()
    assert len(lines) == 6
    read = json.loads(document(found, shown, lambda each: None, 1e12))
    for line, each, one in zip(lines[1:], shown, read["candidates"], strict=True):
        assert f"{each.total:.3f}" in line and each.mesh.text() in line
        assert line.endswith("runs" if each.mesh.pp == 1 else "not yet")
        assert one["step_seconds"] == each.total == pytest.approx(sum(one["seconds"].values()))
        assert one["memory_bytes"] == pytest.approx(sum(one["memory"].values()))
        assert Mesh(**{**one["mesh"], "layers": tuple(one["mesh"]["layers"])}) == each.mesh
    assert len(read["pareto"]) == len(pareto(found.candidates))


@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [
        (20, "20 GPUs do not fill nodes of 8 on dgx-h100; the nearest are 16 and 24."),
        (0, "gpus must be at least 1, found 0."),
    ],
)
def test_gpus_that_do_not_fill_nodes_are_refused(gpus, sentence):
    with pytest.raises(ValueError) as refused:
        check_job(replace(job("llama3-8b", "dgx-h100", 8, 8), gpus=gpus))
    assert str(refused.value) == sentence


def test_tokens_that_are_no_whole_sequences_are_refused_with_the_nearest():
    assert sequences(2**22, 8192) == 512
    with pytest.raises(ValueError, match="the nearest is 3997696"):
        sequences(4_000_000, 8192)


def test_no_legal_mesh_is_said_so():
    assert "There is no legal mesh of 64 GPUs for 3 sequences" in nothing_fits(
        search(job("debug", "dgx-h100", 64, 3, 127), SearchSpace(axonn=False, co2=False))
    )


def test_the_planner_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; import pyruntime.plan.search, pyruntime.plan.holmes"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_planner_knows_of_no_models_code_executor_or_trainer():
    pure = {"actions", "closed_forms", "schedules", "simulated", "skipping", "split", "v_schedule"}
    allowed = {f"pyruntime.pipeline.{name}" for name in pure} | {"pyruntime.text", "pyruntime.choices"}
    sources = list(Path(pyruntime.plan.__file__).parent.glob("*.py"))
    assert len(sources) > 10
    for source in sources:
        for name in re.findall(r"^\s*(?:from|import) (pyruntime[\w.]*)", source.read_text(), re.MULTILINE):
            assert name.startswith("pyruntime.plan") or name in allowed, f"{source.name} imports {name}"


def test_a_node_has_so_few_meshes_that_a_search_takes_half_a_second():
    """About 0.1 ms for each on one core."""
    assert search(job("llama3-8b", "dgx-h100", 8, 64, 8192)).considered < 5_000

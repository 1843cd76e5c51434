"""tools/gpu_check.py on a machine that is pretended (pretended_machine.py): whatever ends it leaves a whole
report, and the next call goes on."""

from __future__ import annotations

import datetime
import json
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.cuda.gpu.pretended_machine import Machine
from tools.build_cuda import ROOT


@pytest.fixture
def tools():
    from tools import gpu_check
    from tools.gpu import report, runner, stages

    return type("Tools", (), {"check": gpu_check, "report": report, "runner": runner, "stages": stages})


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_run_that_is_killed_anywhere_leaves_a_whole_report_and_the_next_goes_on(tmp_path):
    machine = Machine(tmp_path)
    found: list[str] = []
    for gate, last in (
        ("core", ""),
        ("chunked 1", "chunked-0"),
        ("sm90 0 whole", "alone-2"),
        ("training 1", "gather-host-chunked: figure 1"),
        ("memcheck smoke-hopper", "on_a_gpu-2"),
    ):
        pid = machine.kill_at(gate, last)
        report = machine.report()
        known = [test["name"] for test in report["tests"]] + [row["text"] for row in report["results"]]
        assert set(found) <= set(known)  # nothing is lost
        assert not last or any(last in name for name in known)
        found = known
        assert any(stage["verdict"] == "under way" for stage in report["stages"])
        assert machine.text().startswith("NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, sources ")
        until = time.monotonic() + 10
        while is_running(pid):  # what it had started ends with it
            assert time.monotonic() < until, gate
            time.sleep(0.05)
    code, said = machine.run()
    report = machine.report()
    verdicts = {stage["name"]: stage["verdict"] for stage in report["stages"]}
    failed = {name for name, verdict in verdicts.items() if verdict != "passed"}
    # What the pretended machine has wrong: test fused-1, and the part "support".
    assert (code, failed) == (1, {"tests fused", "tests fused, hopper", "support"}), said
    assert report["facts"] == {"system": "pretended"}
    again = {name for name in machine.ran if machine.ran.count(name) > 1}
    gates = {"core", "chunked 1", "sm90 0 whole", "training 0", "training 1"}
    assert again == {*gates, "memcheck smoke-hopper"}  # and of a part what came before the gate
    assert {"graph 2", "graph 2 whole", "racecheck smoke-hopper"} <= set(machine.ran)
    order = [stage["name"] for stage in report["stages"] if not stage["name"].endswith("kernels")]
    first = ["core", "load", "smoke-portable", "tests chunked", "tests fused", "tests graph", "tests alone"]
    assert order[: len(first)] == first
    text = machine.text()
    assert "2 passed, 1 failed" in text and "rank 0 waits for rank 1" in text
    assert "note: training: figure 1" in text and "2 passed, 1 skipped" in text


def test_what_is_known_of_these_sources_is_not_asked_for_again(tmp_path):
    machine = Machine(tmp_path)
    out = tmp_path / "out"
    code, said = machine.run("--only", "test", "--out", str(out))
    assert code == 1 and "without cross_entropy" in said  # which the pretended nvcc cannot compile
    assert {path.suffix for path in out.iterdir()} == {".json", ".txt", ".log"}
    assert "==== tests chunked: passed" in (out / "gpu-check.log").read_text()
    before = machine.ran
    assert "link portable" in before and "link hopper" in before and "gemms-hopper 0" not in before
    machine.run("--only", "test")
    assert machine.ran == before
    (tmp_path / "tests/cuda/cases.py").write_text("# the tests' source is another one")
    machine.run("--only", "test")
    new = machine.ran[len(before) :]
    assert "chunked 0" in new and "core" not in new  # what was built is still right
    assert {test["source"] for test in machine.report()["tests"]} == {machine.report()["source"]}


class Told:
    """A record of what a runner says."""

    def __init__(self) -> None:
        self.facts: list[dict] = []
        self.begun: list[str] = []

    def begin(self, stage) -> None:
        self.begun.append(stage.name)

    def add(self, stage, fact) -> None:
        self.facts.append(fact)

    def end(self, stage, outcome) -> None: ...


def run(tools, folder: Path, *stages, budget_s: float = 60.0):
    told = Told()
    over = tools.runner.run_stages(stages, told, root=folder, logs=folder, budget_s=budget_s)
    return over, told


def stage(tools, name: str, program: str, limit_s: float = 30.0, kind: str = "test", **more):
    return tools.runner.Stage(name, kind, (sys.executable, "-S", "-c", program), limit_s, **more)


def test_a_stage_that_fails_or_hangs_is_recorded_and_the_next_ones_run(tools, tmp_path):
    hangs = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '100'])"
    over, told = run(
        tools,
        tmp_path,
        stage(tools, "breaks", "print('about to'); raise SystemExit(3)"),
        stage(tools, "hangs", hangs, limit_s=0.5),
        tools.runner.Stage("no program", "test", (str(tmp_path / "missing"),), 5.0),
        stage(tools, "elsewhere", "", absent="no such GPU"),
        stage(tools, "needs", "", needs=("breaks",)),
        stage(tools, "works", "print('fine')"),
    )
    verdicts = ["failed", "timed out", "failed", "absent", "not run", "passed"]
    names = ["breaks", "hangs", "no program", "elsewhere", "needs", "works"]
    assert [over[name].verdict for name in names] == verdicts
    assert over["breaks"].text == "exit code 3" and over["breaks"].last_lines[-1] == "about to"
    assert over["hangs"].last_lines[-1] == "begun" and over["hangs"].seconds < 10
    assert "exit code 127" in over["no program"].text
    assert told.begun == ["breaks", "hangs", "no program", "works"]


def test_the_end_of_a_call_cuts_what_runs_and_the_rest_is_left_to_the_next(tools, tmp_path):
    waits = stage(tools, "long", "import time; time.sleep(60)", facts=tmp_path / "facts", tests=True)
    device = {"name": "GPU", "torch": "2.11"}
    report = tools.report.Report(
        device, "aaaa", tmp_path / "r", logs=tmp_path, today=datetime.date(2026, 1, 2)
    )
    stages = [waits, stage(tools, "never", "")]
    least_s = tools.runner.LEAST_S
    over = tools.runner.run_stages(stages, report, root=tmp_path, logs=tmp_path, budget_s=least_s + 0.5)
    assert [over[name].verdict for name in ("long", "never")] == ["cut", "not run"]
    left = tools.stages.left_to_do(stages, report, {"test"}, set())
    assert [one.name for one in left] == ["long", "never"]


def test_a_build_runs_beside_tests_that_do_not_need_it_and_beside_no_benchmark(tools, tmp_path):
    said = f"import sys, time; file = open({str(tmp_path / 'order')!r}, 'a'); file.write(sys.argv[1] + '\\n')"

    def saying(name: str, kind: str, after: str = "", **more):
        command = (sys.executable, "-S", "-c", f"{said}; file.flush(); {after}", name)
        return tools.runner.Stage(name, kind, command, 30.0, **more)

    gate = (
        f"[time.sleep(0.01) for _ in range(3000) if 'test' not in open({str(tmp_path / 'order')!r}).read()]"
    )
    run(
        tools,
        tmp_path,
        saying("build", "build", f"{gate}; file.write('built\\n')"),
        saying("needs it", "test", needs=("build",)),
        saying("bench", "bench"),
        saying("test", "test"),
    )
    order = (tmp_path / "order").read_text().splitlines()
    assert (set(order[:2]), order[2:]) == ({"build", "test"}, ["built", "needs it", "bench"])


@pytest.mark.parametrize("ends", ["os.abort()", "time.sleep(100)"])
def test_the_test_in_which_a_process_ends_or_hangs_is_named(tools, tmp_path, ends):
    facts = tmp_path / "facts"
    lines = [{"begun": "a"}, {"name": "a", "verdict": "passed", "seconds": 1.0, "text": ""}, {"begun": "b"}]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"half'
    program = f"import os, time; open({str(facts)!r}, 'w').write({text!r}); {ends}"
    made = stage(tools, "tests", program, limit_s=0.5, facts=facts, tests=True)
    device = {"name": "GPU", "torch": "2.11"}
    report = tools.report.Report(
        device, "aaaa", tmp_path / "r", logs=tmp_path, today=datetime.date(2026, 1, 2)
    )
    tools.runner.run_stages([made], report, root=tmp_path, logs=tmp_path, budget_s=60.0)
    document = json.loads((tmp_path / "r" / "gpu-2026-01-02.json").read_text())
    assert [(test["name"], test["verdict"]) for test in document["tests"]] == [
        ("a", "passed"),
        ("b", "failed"),
    ]
    assert not report.has(made) and report.tests_of(made) == ["a", "b"]  # what follows is still to be run


@pytest.mark.parametrize("cupy", [True, False])
def test_tile_variants_run_where_cupy_is(tools, monkeypatch, tmp_path, cupy):
    found = object() if cupy else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(tools.stages.build_sm90, "local_cutlass", lambda: None)
    stages = tools.stages.Plan(ROOT, tmp_path, (9, 0), "mark").stages()
    (made,) = (made for made in stages if made.name == "tests variants")
    assert made.command[-3:] == ("tests/cuda/compiled/test_variants.py", "-k", "on_a_gpu")
    assert ("cupy" in made.absent) != cupy


def test_stages_are_all_that_there_is_to_do_and_fit_their_calls(tools, tmp_path):
    stages = tools.stages.Plan(ROOT, tmp_path, (9, 0), "mark").stages()
    assert {made.kind for made in stages} == set(tools.stages.KINDS)
    assert len({made.name for made in stages}) == len(stages)
    budget = tools.check.BUDGET_S
    assert sum(made.limit_s for made in stages if made.kind == "bench") <= budget - 30
    assert sum(made.limit_s for made in stages if made.kind == "sanitize") <= budget - 30
    files = {word for made in stages if made.tests for word in made.command if word.endswith(".py")}
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    assert {path.relative_to(ROOT).as_posix() for path in marked if path != Path(__file__)} <= files
    kernels = next(made for made in stages if made.name == "portable kernels")
    assert kernels.environment["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert all("--maxfail=6" in made.command for made in stages if made.tests)
    others = tools.stages.Plan(ROOT, tmp_path, (8, 0), "mark").stages()
    (hopper,) = (made for made in others if made.name == "hopper kernels")
    assert hopper.absent and tools.stages.own_architecture((8, 6)) == "8.6"
    assert all("hopper kernels" in made.needs for made in others if made.name.endswith("hopper"))


def test_a_report_goes_on_with_one_of_its_day_or_of_its_sources(tools, tmp_path):
    assert tools.report.name_of("NVIDIA H200", datetime.date(2026, 11, 21)) == "nvidia_h200-2026-11-21"
    for day, source in ((1, "aaaa"), (2, "bbbb")):
        path = tmp_path / f"{tools.report.name_of('NVIDIA H200', datetime.date(2026, 11, day))}.json"
        path.write_text(json.dumps({"source": source}))

    def found(day: int, source: str) -> str | None:
        got = tools.report.earlier([tmp_path], "NVIDIA H200", datetime.date(2026, 11, day), source)
        return got and got["name"]

    assert found(2, "cccc") == "nvidia_h200-2026-11-02"
    assert found(5, "aaaa") == "nvidia_h200-2026-11-01"
    assert found(5, "cccc") is None


def test_headers_are_taken_from_the_wheel_that_is_pinned(tools, tmp_path):
    wheel = tmp_path / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("cutlass_library/source/include/cutlass/version.h", "// here")
        file.writestr("cutlass_library/__init__.py", "")
    headers = tools.check.unpack_cutlass(wheel, tmp_path / "build") / "cutlass_library/source/include"
    assert (headers / "cutlass/version.h").exists()
    assert headers == tmp_path / "build" / "4.2.0.0" / "cutlass_library" / "source" / "include"
    with pytest.raises(ValueError, match=r"give the path of nvidia_cutlass-4\.2\.0\.0"):
        tools.check.unpack_cutlass(tmp_path / "nvidia_cutlass-3.0.0.0-py3-none-any.whl", tmp_path / "build")

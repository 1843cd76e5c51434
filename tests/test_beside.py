"""Files of tests in two workers run at the same time; while a test marked alone runs, no other does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEET = """
import pathlib, time

def test_meets_the_other_file():
    mine, other = (pathlib.Path(__file__).with_name(name) for name in {names})
    mine.touch()
    end = time.monotonic() + 30
    while not other.exists():
        assert time.monotonic() < end, "no other test runs beside this one"
        time.sleep(0.01)
"""
ALONE = """
import pathlib, time, pytest

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    running = pathlib.Path(__file__).with_name("running")
    for _ in range(20):
        assert not running.exists()
        time.sleep(0.01)
"""
OTHERS = """
import pathlib, time, pytest

@pytest.mark.parametrize("number", range(30))
def test_other(number):
    running = pathlib.Path(__file__).with_name("running")
    running.touch()
    time.sleep(0.03)
    running.unlink()
"""


def in_two_workers(folder: Path, **files: str) -> str:
    """Runs these files of tests in two workers and returns pytest's last line."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.beside", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-c", "/dev/null", "-n", "2", "--dist", "loadfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_files_of_tests_run_beside_each_other(tmp_path):
    texts = {name: MEET.format(names=names) for name, names in (("a", ("a", "b")), ("b", ("b", "a")))}
    assert "2 passed" in in_two_workers(tmp_path, **texts)


def test_no_other_test_runs_beside_one_that_is_marked_alone(tmp_path):
    assert "33 passed" in in_two_workers(tmp_path, alone=ALONE, others=OTHERS)

"""Makes the project's virtual environment, around an existing torch if there is one.

    python3 tools/make_venv.py VENV [--torch REQUIREMENT]

If the running Python can import a torch of a supported version, that one is used in place. Otherwise
REQUIREMENT (arguments of pip install, options too; by default torch==2.13.0) is installed into VENV. Later
installations do not bring a second torch: pip runs under a constraint that names the one in use. At the end
the package itself is installed in place (editable), which builds the C++ core.

Exit code 1 and one sentence on stderr if the machine lacks something.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (checked before code that needs a newer Python)
    sys.exit(
        "pyruntime needs Python 3.11 or newer and {} is {}.{}: install one and name it, for example "
        "`make PYTHON=python3.11 build`.".format(sys.executable, *sys.version_info[:2])
    )

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

if __package__:
    from tools import python_headers
    from tools.torch_versions import DEFAULT, KNOWN, is_known
else:  # run as a script
    import python_headers
    from torch_versions import DEFAULT, KNOWN, is_known

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ("setuptools>=77", "wheel")
PROBE = """
import importlib.metadata, json, pathlib
try:
    import torch
    for_pip = importlib.metadata.version("torch")
except Exception:  # if it does not import or pip does not see it, another is installed
    print(json.dumps(None))
else:
    print(json.dumps([torch.__version__, for_pip, str(pathlib.Path(torch.__file__).parent.parent)]))
"""


TORCHRUN = """#!/bin/sh
exec "$(dirname "$0")/python" -m torch.distributed.run "$@"
"""


class Torch(NamedTuple):
    """A torch. version: as torch spells it, "2.13.0+cu130". for_pip: as its distribution does, "2.13.0" on
    PyPI, which pip treats as another version. folder: the one that has the package."""

    version: str
    for_pip: str
    folder: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", metavar="REQUIREMENT", default=f"torch=={DEFAULT}")
    arguments = parser.parse_args()
    if Path(sys.prefix).resolve() == arguments.venv.resolve():  # this is the environment's own Python
        os.execv(sys._base_executable, [sys._base_executable, *sys.argv])
    check_machine()

    found = importable_torch(sys.executable)
    if found is not None and not is_known(found.version):
        print(f"Not using torch {found.version} of {sys.executable}: supported are {', '.join(KNOWN)}.")
        found = None
    python = create(arguments.venv, shares_system_packages=found is not None)
    if found is not None:
        use_torch_of(python, found)
    elif importable_torch(python) is None:
        pip(python, *shlex.split(arguments.torch))
    torch = importable_torch(python)
    if torch is None:
        sys.exit(f"torch does not import in {arguments.venv}: see what `{python} -c 'import torch'` says.")
    put_torchrun(python)
    print(f"Using torch {torch.version} from {torch.folder}.", flush=True)

    constraints = arguments.venv / "constraints.txt"
    constraints.write_text(f"torch=={torch.for_pip}\n")
    # Programs go into this environment even if the outer one has them: only this one's bin folder is used.
    pip(python, "--quiet", "--ignore-installed", "--no-deps", *programs())
    pip(python, "--quiet", "-c", str(constraints), *BUILD_TOOLS)
    pip(python, "--quiet", "-c", str(constraints), "--no-build-isolation", "-e", f"{ROOT}[dev,docs]")


def check_machine() -> None:
    """Exits with one sentence if the venv module, the C++ compiler or Python's headers are missing."""
    missing = [module for module in ("venv", "ensurepip") if importlib.util.find_spec(module) is None]
    if missing:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(
            f"{sys.executable} has no module {missing[0]}, which a virtual environment needs: install it, on "
            f"Debian and Ubuntu with `apt-get install python{version}-venv`."
        )
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        sys.exit(
            f"no C++ compiler was found on PATH (looked for {compiler}): install one, on Debian and Ubuntu "
            "with `apt-get install g++`."
        )
    python_headers.refuse_without()


def create(venv: Path, *, shares_system_packages: bool) -> str:
    """Creates (or keeps, if it still works) the environment and returns the path of its Python."""
    command = [sys.executable, "-m", "venv", str(venv)]
    if shares_system_packages:
        command.append("--system-site-packages")
    if subprocess.run(command).returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed; see its message above.")
    return str(venv.absolute() / "bin" / "python")


def importable_torch(python: str) -> Torch | None:
    """Returns the torch that `python` imports, or None."""
    probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    answer = json.loads(probe.stdout.splitlines()[-1]) if probe.returncode == 0 and probe.stdout else None
    return Torch(*answer) if answer else None


def use_torch_of(python: str, found: Torch) -> None:
    """Makes `python` see the found torch, even one in another virtual environment.

    --system-site-packages searches only the base Python; a .pth file adds the folder of that environment.
    """
    if importable_torch(python) is not None:
        return
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    Path(packages, "torch_of_outer_environment.pth").write_text(found.folder + "\n")


def put_torchrun(python: str) -> None:
    """Adds a torchrun to the environment of `python` if it has none: an outer environment's torchrun would
    start ranks on the outer Python, which lacks this package."""
    program = Path(python).parent / "torchrun"
    if not program.exists():
        program.write_text(TORCHRUN)
        program.chmod(0o755)


def programs() -> list[str]:
    """Returns the requirements of the dev extra that are programs, not modules."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [line for line in extras["dev"] if re.match("clang-format|hadolint|ninja|ruff", line)]


def pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    print("+", " ".join(command), flush=True)
    if subprocess.run(command).returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed; see pip's message above.")


if __name__ == "__main__":
    main()

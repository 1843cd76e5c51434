"""Writes pyruntime/_C.pyi, the types of the C++ core, from the built core.

    make build && .venv/bin/python tools/make_stub.py

pybind11 keeps every signature in the docstrings; mypy's stubgen reads them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mypy import stubgen

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "pyruntime" / "_C.pyi"
HEAD = '"""Types of the C++ core (csrc/bindings). Written by tools/make_stub.py; not edited by hand."""\n'
# pybind11's names of numbers, a class that torch has moved, and a std::string that also takes bytes.
SIMPLER = {
    r"typing\.Supports(Int|Float) \| typing\.SupportsIndex": lambda found: found[1].lower(),
    r"torch\.distributed\.distributed_c10d": lambda _: "torch.distributed",
    r"import typing\n": lambda _: "",
    r"(def tell\(arg0: str, arg1: str, arg2: str)": lambda found: f"{found[1]} | bytes",
}


def stub() -> str:
    """Returns the text of the stub for the core that this Python imports."""
    with tempfile.TemporaryDirectory() as folder:
        stubgen.main(["-q", "-m", "pyruntime._C", "-o", folder])
        text = Path(folder, "pyruntime", "_C.pyi").read_text()
    for pattern, simpler in SIMPLER.items():
        text = re.sub(pattern, simpler, text)
    for command in (["check", "--fix", "--select", "I,UP"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "-q", "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(ruff, cwd=ROOT, check=True, capture_output=True, text=True, input=text).stdout
    return f"{HEAD}\n{text}"


def main() -> None:
    STUB.write_text(stub())
    print(f"wrote {STUB.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""Builds pyruntime._C, the C++ core, against the installed torch, and for a torch with CUDA or ROCm also the
kernels of csrc/cuda. Everything else is in pyproject.toml."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))  # missing when pip runs this file
import build_cuda  # noqa: E402
import build_hip  # noqa: E402
import python_headers  # noqa: E402
import torch_versions  # noqa: E402

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise SystemExit(
        "pyruntime is built against the torch of its environment, and none was found: pip hides it from a "
        f"build by default. Run `pip install torch=={torch_versions.DEFAULT} setuptools wheel ninja` "
        "and then pip again with --no-build-isolation."
    ) from None


def sources() -> list[str]:
    """Returns all of csrc except csrc/cuda, whose kernels nvcc or hipcc builds into a separate library, and
    csrc/sim, which is compiled where it is first used (pyruntime/clock/device_build.py)."""
    found = sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "csrc").rglob("*.cpp")
        if path.relative_to(ROOT).parts[1] not in ("cuda", "sim")
    )
    if not found:
        raise SystemExit(f"no C++ source was found under {ROOT / 'csrc'}; the source tree is incomplete.")
    return found


def extension():
    """Returns the extension module.

    torch's headers are system headers (-isystem), so our warnings do not apply to them. ninja does not watch
    system headers; torch's version is a macro, so that a new torch rebuilds everything.
    """
    built = CppExtension(
        name="pyruntime._C",
        sources=sources(),
        extra_compile_args=[
            "-std=c++20",  # required by torch 2.13; explicit, so that the precompiled header uses it too
            "-O3",
            "-g0",
            "-Wall",
            "-Wextra",
            "-fopenmp",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
            f'-DPYRUNTIME_TORCH_VERSION="{torch.__version__}"',
            *(f"-isystem{path}" for path in include_paths()),
        ],
        extra_link_args=["-Wl,-O1", "-Wl,--as-needed"],
    )
    built.include_dirs = [str(ROOT / "csrc")]
    built.depends = []
    return built


class Build(BuildExtension):
    """torch's builder, with warnings as errors in a build in place (development) unless --lenient is given.

    The objects of a build in place (`setup.py build_ext --inplace` or `pip install -e .`) are under build/,
    in a folder for each Python and torch, so that ninja rebuilds only changed files.
    """

    user_options: ClassVar = [
        *BuildExtension.user_options,
        ("lenient", None, "warnings are no errors in place either: for a compiler that is not the project's"),
    ]
    boolean_options: ClassVar = [*BuildExtension.boolean_options, "lenient"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.lenient = False

    def finalize_options(self) -> None:
        super().finalize_options()
        self.for_development = bool(self.inplace or getattr(self, "editable_mode", False))
        if not self.for_development:
            return
        tag = f"{platform.machine()}-cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}"
        self.build_temp = str(ROOT / "build" / f"inplace-{tag}{'-lenient' if self.lenient else ''}")
        for ext in [] if self.lenient else self.extensions:
            ext.extra_compile_args = [*ext.extra_compile_args, "-Werror"]

    def build_extensions(self) -> None:
        python_headers.refuse_without()
        if self.for_development:
            (ext,) = self.extensions
            ext.extra_compile_args = [*ext.extra_compile_args, *self.precompiled_header()]
        super().build_extensions()
        # The import compares this version with the torch that it finds (pyruntime/comm/core.py).
        (self.package_folder / "torch_version.txt").write_text(f"{torch.__version__}\n")
        # A torch for CPUs cannot use kernels.
        if torch.version.hip:
            self.build_hip_kernels()
        elif torch.version.cuda:
            self.build_cuda_kernels()

    def build_cuda_kernels(self) -> None:
        """Builds the kernels of csrc/cuda if nvcc is there; otherwise the build is for CPUs, as doctor
        says."""
        if build_cuda.find_nvcc() is not None:
            self.build_kernels("CUDA", build_cuda, strict=self.for_development)

    def build_hip_kernels(self) -> None:
        """Builds the kernels of csrc/cuda for AMD GPUs. Warnings are no errors: ROCm's compilers differ."""
        if build_hip.find_hipcc() is None:
            warnings.warn(
                f"torch {torch.__version__} is for ROCm {torch.version.hip} and hipcc was not found, so this "
                "build is for CPUs: put the hipcc of that ROCm on PATH, or name its folder in ROCM_PATH, "
                "and build again.",
                stacklevel=1,
            )
            return
        self.build_kernels("HIP", build_hip, strict=False)

    @property
    def package_folder(self) -> Path:
        """The folder of the extension and the files beside it."""
        # Not self.inplace: setuptools clears it during the build.
        return (ROOT if self.for_development else Path(self.build_lib).resolve()) / "pyruntime"

    def build_kernels(self, kind: str, how: ModuleType, strict: bool) -> None:
        """Builds kernels. If that fails, an installation, with any compiler, continues without; in place it
        ends."""
        try:
            how.build(self.package_folder / how.LIBRARY.name, strict=strict)
        except RuntimeError as error:
            if self.for_development:
                raise SystemExit(str(error)) from None
            warnings.warn(f"pyruntime is installed without {kind} kernels: {error}", stacklevel=1)

    def precompiled_header(self) -> list[str]:
        """Parses csrc/precompiled.h once for all sources, which halves the time of a full build; GCC only.

        Returns the flags that make a source use it. If it does not fit a source, GCC says so and reads the
        header itself.
        """
        compiler = os.environ.get("CXX", "c++")
        version = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True)
        if "Free Software Foundation" not in version.stdout:
            return []
        header = Path(self.build_temp, "precompiled.h").resolve()
        flags = [*self.compiler.compiler_so[1:], *self.extensions[0].extra_compile_args]
        command = [*shlex.split(compiler), *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
        text = (ROOT / "csrc" / "precompiled.h").read_text()
        recipe = "\n".join([version.stdout, *command, text])
        made = header.with_suffix(".recipe")
        if not made.exists() or made.read_text() != recipe:
            header.parent.mkdir(parents=True, exist_ok=True)
            made.unlink(missing_ok=True)
            header.write_text(text)
            if subprocess.run(command).returncode != 0:
                raise SystemExit("csrc/precompiled.h does not compile; see the compiler's message above.")
            made.write_text(recipe)
        return ["-include", str(header), "-Winvalid-pch", "-Wno-error=invalid-pch"]


class BuildPython(build_py):
    """Copies the package, and in an installation what is compiled at run time: the kernels' headers
    (pyruntime/cuda/nvrtc_tiles.py), and the simulated device (pyruntime/clock/device_build.py). A build in
    place finds them in the source folder."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "pyruntime")
        for folder, paths in (("cuda/headers", portable_headers()), ("clock/sources", simulated_device())):
            for path in paths:
                target = package / folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(path), str(target))


def portable_headers() -> list[Path]:
    """Returns the headers that NVRTC reads: kernels, the launchers' structures, and the CUDA dialect."""
    cuda = ROOT / "csrc" / "cuda"
    return sorted([*cuda.glob("*.h"), *(cuda / "portable").rglob("*.h"), *(cuda / "portable").rglob("*.cuh")])


def simulated_device() -> list[Path]:
    """Returns the sources of the simulated device, and the launchers' structures."""
    csrc = ROOT / "csrc"
    return sorted(
        [*(csrc / "sim").rglob("*.cpp"), *(csrc / "sim").rglob("*.h"), *csrc.glob("cuda/**/launchers.h")]
    )


os.chdir(ROOT)
# A compiler takes up to 1 GB, so one for each core, not ninja's two more.
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
# Finds ninja of this Python's environment even if the environment is not activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
torch_versions.refuse_unknown(torch.__version__)
setup(license="Apache-2.0", ext_modules=[extension()], cmdclass={"build_ext": Build, "build_py": BuildPython})

"""Where CUTLASS's headers come from, and what is built without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import build_cuda, build_sm90


def test_hopper_is_wanted_under_both_of_its_names() -> None:
    assert build_sm90.is_wanted(build_cuda.architecture_flags())
    assert build_sm90.is_wanted(build_cuda.architecture_flags("9.0"))
    assert build_sm90.is_wanted(build_cuda.architecture_flags("Ampere;Hopper"))
    assert not build_sm90.is_wanted(build_cuda.architecture_flags("8.0+PTX;12.0"))


def test_every_configuration_is_one_object() -> None:
    names = [name for name, *_ in build_sm90.kernels()]
    assert len(set(names)) == len(names) == 8


def nvcc_of(folder: Path, release: str) -> Path:
    """What says that it is the nvcc of that toolkit."""
    made = folder / "nvcc"
    made.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.40'\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("release", "is_built"),
    [("11.8", False), ("12.4", False), ("12.5", True), ("12.10", True), ("13.0", True)],
)
def test_a_toolkit_without_the_call_for_tensor_maps_builds_without_hopper_and_says_so(
    release, is_built, monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setattr(build_sm90, "find_cutlass", lambda: Path("/headers"))
    flags = build_cuda.architecture_flags()
    lines, _ = build_sm90.ninja_lines(Path("/build"), flags, nvcc_of(tmp_path, release))
    assert any("PYRUNTIME_WITH_SM90" in line for line in lines) == is_built
    told = (
        f"{tmp_path}/nvcc is of CUDA {release}, and the kernels for Hopper need CUDA 12.5 or newer: the "
        "library is built without the kernels for Hopper; portable ones replace them.\n"
    )
    assert capsys.readouterr().err == ("" if is_built else told)


def test_an_nvcc_that_names_no_release_ends_the_build(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build_sm90, "find_cutlass", lambda: Path("/headers"))
    with pytest.raises(RuntimeError, match="names no release of CUDA; it said:"):
        build_sm90.ninja_lines(Path("/build"), build_cuda.architecture_flags(), nvcc_of(tmp_path, "new"))


def test_without_headers_the_launchers_alone_are_built_and_the_build_says_so(
    monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setattr(build_sm90, "find_cutlass", lambda: None)
    nvcc = nvcc_of(tmp_path, "12.5")
    lines, objects = build_sm90.ninja_lines(Path("/build"), build_cuda.architecture_flags(), nvcc)
    assert objects == ["/build/sm90_launchers.o"]
    assert not any("PYRUNTIME_WITH_SM90" in line for line in lines)
    assert "the library is built without the kernels for Hopper" in capsys.readouterr().err
    build_sm90.ninja_lines(Path("/build"), build_cuda.architecture_flags("8.0"), nvcc)
    assert capsys.readouterr().err == ""  # nobody has asked for them


def test_an_installed_package_is_used_where_it_has_the_version_that_is_pinned(tmp_path, monkeypatch) -> None:
    headers = tmp_path / build_sm90.HEADERS
    (headers / "cutlass").mkdir(parents=True)
    (tmp_path / "cutlass_library" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for version, found in ((build_sm90.pinned_version(), headers), ("3.0.0.0", None)):
        major, minor, patch = version.split(".")[:3]
        (headers / "cutlass/version.h").write_text(
            f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH {patch} \n"
        )
        assert build_sm90._installed() == found


@pytest.mark.parametrize("layout", build_sm90.LAYOUTS)
def test_configurations_name_what_the_header_has(layout: str) -> None:
    header = (build_sm90.ROOT / "csrc/cuda/launchers.h").read_text()
    assert f"PYRUNTIME_{layout} =" in header

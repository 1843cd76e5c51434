"""How the kernels for Hopper are launched, without one: the library's objects linked with a runtime that is
made up (fake_runtime.cpp). Grids, clusters, tensor maps, and what happens where the driver refuses a map."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu import library as abi
from tests.cuda.compiled.test_build import library  # noqa: F401  (a fixture)
from tests.cuda.compiled.test_sm90 import group_of_two, headers, matmul, pytestmark  # noqa: F401
from tools import build_cuda

MULTIPROCESSORS = 132
"""As fake_runtime.cpp has them."""
OK, DEVICE_ERROR = abi.OK, abi.DEVICE_ERROR


@pytest.fixture(scope="module")
def faked(library: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:  # noqa: F811
    path = tmp_path_factory.mktemp("faked") / "libfaked.so"
    objects = sorted(str(made) for made in library.parent.glob("*.o"))
    source = Path(__file__).parent / "fake_runtime.cpp"
    command = [build_cuda.find_nvcc(), "-std=c++17", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC"]
    command += ["-o", path, source, *objects]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loaded = ctypes.CDLL(str(path))
    loaded.pyruntime_error.restype = ctypes.c_char_p
    return loaded


def gather(faked: ctypes.CDLL, **changes: int | None) -> int:
    group, request = group_of_two(64, 1 << 20), matmul(**changes)
    return faked.pyruntime_sm90_all_gather_matmul(ctypes.byref(group), ctypes.byref(request), None)


def scatter(faked: ctypes.CDLL, stream: int = 0, **changes: int | None) -> int:
    group, request = group_of_two(1 << 12, 1 << 28), matmul(**changes)
    return faked.pyruntime_sm90_matmul_reduce_scatter(
        ctypes.byref(group), ctypes.byref(request), ctypes.c_void_p(stream)
    )


def last_launch(faked: ctypes.CDLL) -> tuple[int, int, int, int]:
    out = (ctypes.c_longlong * 4)()
    faked.fake_last_launch(out)
    return tuple(out)


def boxes(faked: ctypes.CDLL) -> list[tuple[int, int]]:
    out, found = (ctypes.c_uint * 2)(), []
    for encoding in range(faked.fake_encodings()):
        faked.fake_box(encoding, out)
        found.append(tuple(out))
    return found


@pytest.mark.parametrize("tiles", [abi.SMALL, abi.LARGE])
@pytest.mark.parametrize(("launch", "maps"), [(gather, 6), (scatter, 3)])
def test_a_map_that_the_driver_refuses_is_an_error_with_its_name_and_nothing_is_launched(
    faked: ctypes.CDLL, launch: Callable[..., int], maps: int, tiles: int, capfd: pytest.CaptureFixture[str]
) -> None:
    faked.fake_begin(0)
    assert launch(faked, tiles=tiles) == OK
    assert (faked.fake_encodings(), faked.fake_launches()) == (maps, 1)
    for refused in range(1, maps + 1):
        faked.fake_begin(refused)
        assert launch(faked, tiles=tiles) == DEVICE_ERROR
        assert (faked.fake_encodings(), faked.fake_launches()) == (refused, 0)
        said = faked.pyruntime_error().decode()
        assert said.startswith("the driver refuses a tensor map with cudaErrorInvalidValue (1): [")
        assert " elements at 0x" in said and said.endswith("; nothing was launched.")
    faked.fake_begin(0)
    assert launch(faked, tiles=tiles) == OK and faked.fake_launches() == 1
    assert capfd.readouterr().err == ""  # CUTLASS, left to itself, prints


@pytest.mark.parametrize("tiles", [abi.SMALL, abi.LARGE])
def test_grids_are_resident_in_clusters_of_two(faked: ctypes.CDLL, tiles: int) -> None:
    many = {"m": 8192, "n": 8192, "ldc": 8192, "tiles": tiles}
    for changes, blocks in (
        ({}, MULTIPROCESSORS),
        ({"spare_blocks": 1}, MULTIPROCESSORS - 2),
        ({"most_blocks": 77}, 76),
        ({"most_blocks": 1}, 2),
        ({"m": 1, "n": 8}, 2),
    ):
        faked.fake_begin(0)
        assert scatter(faked, **(many | changes)) == OK
        grid, threads, cluster, shared_bytes = last_launch(faked)
        assert (grid, threads, cluster) == (blocks, 384, 2)
        assert shared_bytes <= 227 * 1024


def test_a_stream_with_a_part_of_the_device_has_a_grid_that_is_resident_there(faked: ctypes.CDLL) -> None:
    """Whichever stream came first; and the driver is asked once for each."""
    many = {"m": 8192, "n": 8192, "ldc": 8192, "tiles": abi.LARGE}
    before = None
    for _ in range(2):
        for stream, blocks in ((0, MULTIPROCESSORS), (64, 32), (128, 32)):
            assert scatter(faked, stream, **many) == OK
            assert last_launch(faked)[0] == blocks
        before = before or faked.fake_questions()
    assert faked.fake_questions() == before


def test_blocks_fetch_half_of_what_they_share(faked: ctypes.CDLL) -> None:
    result = (64, 64)
    faked.fake_begin(0)
    assert scatter(faked, tiles=abi.SMALL) == OK
    assert boxes(faked) == [(64, 64), (64, 128), result]  # side by side: of A
    faked.fake_begin(0)
    assert scatter(faked, tiles=abi.LARGE) == OK
    assert boxes(faked) == [(64, 128), (64, 128), result]  # below each other: of B, which is 256 wide

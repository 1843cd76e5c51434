"""The instructions that hipcc makes of the kernels keep to the rules of isa_rules.py; each rule finds what it
is there to find: it is shown the same listing with one thing broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from bench.gpu.cdna_code import FLAG, WIDE_LOAD, Kernel, kernels_in
from bench.gpu.cdna_model import GPUS, Tile, estimate, tile_of
from tests.cuda.compiled import isa_rules
from tests.cuda.compiled.clang import clang_for, listing_for, why_none
from tools import build_cuda, build_hip

pytestmark = [
    pytest.mark.hipcc,
    pytest.mark.skipif(
        build_hip.find_hipcc() is None,
        reason="hipcc was not found; `tools/get_tool.sh hipcc` installs it",
    ),
]

GFX90A = GPUS["MI250X"]
NAMES = [name for name, *_ in build_cuda.sources() if name not in build_cuda.OF_CORE]
FUSED = list(build_cuda.instances())
MAIN = "GatherJob_LargeTiles_Bf16"


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build_hip.build(build_hip.BUILD / "libpyruntime_hip.so")


@cache
def listing(name: str) -> str:
    return build_hip.assembly(name, "gfx90a")


def tiles_in(text: str) -> list[Tile]:
    return [tile for kernel in kernels_in(text) if (tile := tile_of(kernel)) is not None]


def complaints(text: str, architecture: str) -> list[str]:
    """Of all rules, each with the rule's name in front."""
    found = []

    def ask(rule: Callable[..., list[str]], *of: object) -> None:
        found.extend(f"{rule.__name__}: {said}" for said in rule(*of))

    for kernel in kernels_in(text):
        ask(isa_rules.calls_nothing, kernel)
        ask(isa_rules.no_scratch, kernel)
        ask(isa_rules.integer_atomics, kernel)
        ask(isa_rules.flags_follow_data, kernel)
        ask(isa_rules.polls_read_past_the_caches, kernel, architecture)
        if "ScatterJob" in kernel.name:
            ask(isa_rules.stores_leave_before_signals, kernel)
    for tile in tiles_in(text):
        ask(isa_rules.multiplies, tile, architecture)
        ask(isa_rules.loads_run_ahead, tile)
        ask(isa_rules.fits, tile)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kernels_keep_to_the_rules(name: str) -> None:
    if "amdhsa_kernel" in listing(name):  # launchers alone have none
        assert complaints(listing(name), "gfx90a") == []


@pytest.mark.parametrize("name", FUSED)
def test_objects_of_fused_gemms_hold_one_for_each_layout(name: str) -> None:
    assert sorted(tile.layout for tile in tiles_in(listing(name))) == ["NN", "NT"]


def kernel_named(name: str, words: str) -> Kernel:
    (found,) = [kernel for kernel in kernels_in(listing(name)) if words in kernel.name]
    return found


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("chunks", "raise_flags"),
        ("workspace", "finish_slot"),
        ("ScatterJob_SmallTiles_Bf16", "Bf16, 0,"),
        ("ScatterJob_LargeTiles_Fp16", "Fp16, 1,"),
    ],
)
def test_who_signals_stores_flags(name: str, kernel: str) -> None:
    assert FLAG in kernel_named(name, kernel).lines


@pytest.mark.parametrize("name", [name for name in FUSED if name.startswith("ScatterJob")])
def test_parts_go_to_their_owner_as_16_bytes(name: str) -> None:
    for tile in tiles_in(listing(name)):
        assert tile.code.count("flat_store_dwordx4") + tile.code.count("global_store_dwordx4") >= 1


@pytest.mark.parametrize("name", FUSED)
def test_the_loop_reaches_its_share_of_the_peak(name: str) -> None:
    """By the model of bench/gpu/cdna_model.py."""
    for tile in tiles_in(listing(name)):
        assert estimate(tile, GFX90A).of_peak >= 0.70, tile.code.name


def resource(field: str, value: int) -> Callable[[str], str]:
    return lambda text: re.sub(rf"(\.{field}: +)\d+", rf"\g<1>{value}", text)


def before_end(line: str) -> Callable[[str], str]:
    return lambda text: text.replace("\ts_endpgm", f"\t{line}\n\ts_endpgm", 1)


def sub(pattern: str, new: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, new, text)


@pytest.mark.parametrize(
    ("name", "broken", "rule"),
    [
        (MAIN, sub("v_mfma_f32_16x16x16bf16_1k", "v_fma_f32"), "multiplies"),
        (MAIN, sub("v_mfma_f32_16x16x16bf16_1k", "v_mfma_f32_16x16x16f16"), "multiplies"),
        (MAIN, sub(WIDE_LOAD, "flat_load_dwordx4"), "multiplies"),
        (MAIN, sub(WIDE_LOAD, "global_load_dwordx2"), "multiplies"),
        (
            MAIN,
            sub(rf"(\t{WIDE_LOAD} .*\n)", r"\1\ts_waitcnt vmcnt(0)\n"),
            "loads_run_ahead",
        ),
        (MAIN, before_end("s_swappc_b64 s[30:31], s[0:1]"), "calls_nothing"),
        (MAIN, resource("private_segment_fixed_size", 16), "no_scratch"),
        (MAIN, before_end("buffer_store_dword v0, off, s[0:3], 0 offset:4"), "no_scratch"),
        (MAIN, before_end("scratch_load_dword v0, off, s33"), "no_scratch"),
        (MAIN, resource("vgpr_count", 264), "fits"),
        (MAIN, resource("group_segment_fixed_size", 32 * 1024), "fits"),
        (MAIN, resource("max_flat_workgroup_size", 256), "fits"),
        ("ScatterJob_SmallTiles_Bf16", resource("group_segment_fixed_size", 9 * 1024), "fits"),
        (MAIN, before_end("global_atomic_add_f32 v0, v1, s[0:1]"), "integer_atomics"),
        (MAIN, before_end("flat_atomic_pk_add_f16 v[0:1], v2"), "integer_atomics"),
        (MAIN, before_end("global_atomic_inc v0, v1, s[0:1]"), "integer_atomics"),
        ("chunks", sub(r"\tbuffer_wbl2.*\n", ""), "flags_follow_data"),
        ("chunks", sub(r"vmcnt\(0\)", "vmcnt(1)"), "flags_follow_data"),
        ("workspace", sub(rf"(\t{FLAG}\n)", r"\tglobal_store_dword v0, v1, s[0:1]\n\1"), "flags_follow_data"),
        ("ScatterJob_SmallTiles_Bf16", sub(r"\tbuffer_wbl2.*\n", ""), "flags_follow_data"),
        ("chunks", sub(r"\tbuffer_invl2\n", ""), "polls_read_past_the_caches"),
        ("chunks", sub(r"vmcnt\(0\)", "vmcnt(1)"), "polls_read_past_the_caches"),
        (
            "ScatterJob_SmallTiles_Bf16",
            sub(r"s_waitcnt vmcnt\(0\)\n", "s_nop 0\n"),
            "stores_leave_before_signals",
        ),
    ],
)
def test_a_rule_finds_what_is_broken(name: str, broken: Callable[[str], str], rule: str) -> None:
    text = broken(listing(name))
    assert text != listing(name)
    assert {said.partition(":")[0] for said in complaints(text, "gfx90a")} >= {rule}


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", NAMES)
def test_for_newer_gpus_they_keep_to_the_same_rules(name: str, architecture: str) -> None:
    if clang_for(architecture) is None:
        pytest.skip(why_none(architecture))
    text = listing_for(architecture, name)
    if "amdhsa_kernel" in text:  # launchers alone have none
        assert complaints(text, architecture) == []
    assert "scratch_" not in text

"""Reads the machine code of each CUDA kernel from the library itself, without CUDA's tools.

A library or object of nvcc has fat binaries, each with one ELF file (a cubin) for every GPU that it was
compiled for. A kernel is a section `.text.NAME` of 128-bit instructions; their low 12 bits are the opcode
(compute capability 7.0 and newer; names as cuobjdump prints them).
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FAT_BINARY = struct.pack("<I", 0xBA55ED50)
ELF = 2  # the kind of an entry of a fat binary; PTX is 1
REGISTER_COUNT = 0x2F  # an attribute in .nv.info: (symbol, registers)
INFO_HAS_SIZE = 4  # an attribute's format: its payload follows, with its size in front

OPCODES = {
    "HMMA": 0x23C,  # mma.sync
    "HGMMA": 0x9F0,  # wgmma
    "LDSM": 0x83B,  # ldmatrix
    "STSM": 0x844,  # stmatrix
    "LDGSTS": 0xFAE,  # cp.async
    "UTMALDG": 0x5B4,  # a load by TMA
    "UTMALDG.MULTICAST": 0x3B4,
    "UTMASTG": 0x3B5,
    "USETMAXREG": 0x9C8,
    "FENCE.VIEW.ASYNC": 0x3C6,  # fence.proxy.async
    "LDG": 0x981,
    "STG": 0x986,
    "BRA": 0x947,
}
LDG_CONSTANT = 0x980  # LDG with an address from a uniform register or a constant
BYTES_OF_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}
"""Bytes of a global load or store, by its bits 73 to 75."""


@dataclass(frozen=True)
class Loop:
    """The instructions from a backward branch's target to the branch."""

    begin: int
    end: int
    opcodes: Counter[str]
    instructions: int
    loaded_bytes: int  # from global memory, by one thread in one turn
    stored_bytes: int


@dataclass(frozen=True)
class Kernel:
    """A kernel for one GPU: its C++ `name`, and `architecture` 80, 90, ..."""

    name: str
    architecture: int
    registers: int
    opcodes: Counter[str]
    instructions: int
    loops: tuple[Loop, ...]

    def innermost(self, opcode: str) -> Loop | None:
        """Returns the loop with the highest share of this instruction, the shortest of several, or None."""
        found = [loop for loop in self.loops if loop.opcodes[opcode]]
        return min(found, key=lambda loop: loop.instructions, default=None)


def kernels_in(path: Path) -> list[Kernel]:
    """Returns all kernels of a library or object of nvcc. Raises ValueError if there are none."""
    found = [
        kernel
        for architecture, cubin in cubins(path.read_bytes())
        for kernel in _kernels(architecture, cubin)
    ]
    if not found:
        raise ValueError(f"{path} holds no kernel for a GPU; build it with tools/build_cuda.py.")
    return found


def cubins(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (compute capability, ELF file) of every fat binary in `data`."""
    at = data.find(FAT_BINARY)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, length = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if kind == ELF:
                yield architecture, data[entry + head : entry + head + length]
            entry += head + length
        at = data.find(FAT_BINARY, end)


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Yields (name, content, index of the section that it describes) of each section."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQII", cubin, table + i * size) for i in range(count)]
    names = heads[names_index][4]
    for name, _, _, _, offset, length, link, _ in heads:
        text = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        yield text, cubin[offset : offset + length], link


def _kernels(architecture: int, cubin: bytes) -> Iterator[Kernel]:
    sections = list(_sections(cubin))
    registers = _registers(sections)
    for name, code, _ in sections:
        if name.startswith(".text."):
            symbol = name.removeprefix(".text.")
            yield read_kernel(demangled(symbol), architecture, registers.get(symbol, 0), code)


def demangled(symbol: str) -> str:
    """Returns the C++ name, with template arguments and without namespaces and parameters."""
    library = ctypes.CDLL("libstdc++.so.6")
    demangle = library.__cxa_demangle
    demangle.restype, demangle.argtypes = ctypes.c_void_p, [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    status = ctypes.c_int()
    text = demangle(symbol.encode(), None, None, ctypes.addressof(status))
    if status.value != 0 or text is None:
        return symbol
    name = ctypes.string_at(text).decode()
    library.free.argtypes = [ctypes.c_void_p]
    library.free(text)
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", name.removeprefix("void "))
    return re.sub(r"\(.*\)$", "", name).replace("> >", ">>")


def _registers(sections: list[tuple[str, bytes, int]]) -> dict[str, int]:
    by_name = {name: content for name, content, _ in sections}
    symbols, names = by_name.get(".symtab", b""), by_name.get(".strtab", b"")
    info, found, at = by_name.get(".nv.info", b""), {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == INFO_HAS_SIZE and attribute == REGISTER_COUNT:
            symbol, count = struct.unpack_from("<II", info, at + 4)
            (name,) = struct.unpack_from("<I", symbols, symbol * 24)  # an entry of an ELF table has 24 bytes
            found[names[name : names.index(b"\0", name)].decode()] = count
        at += 4 + (size if form == INFO_HAS_SIZE else 0)
    return found


def read_kernel(name: str, architecture: int, registers: int, code: bytes) -> Kernel:
    """Makes a kernel from its instructions."""
    words = [low | high << 64 for low, high in struct.iter_unpack("<QQ", code)]
    loops = []
    for end, word in enumerate(words):
        begin = branch_target(word, end, architecture)
        # The assembler puts a branch to itself behind the end; that is no loop.
        if begin is not None and 0 <= begin < end:
            loops.append(_loop(words[begin : end + 1], begin, end))
    return Kernel(name, architecture, registers, _count(words), len(words), tuple(loops))


def branch_target(word: int, index: int, architecture: int) -> int | None:
    """Returns the index of the instruction to which the one at `index` branches; None if it is no branch.

    The distance is in quarters of an instruction. From 9.0 on its low 8 bits are stored apart.
    """
    if word & 0xFFF != OPCODES["BRA"]:
        return None
    distance = word >> 34 & (1 << 48) - 1
    if distance >> 47:
        distance -= 1 << 48
    if architecture >= 90:
        distance = distance << 8 | word >> 16 & 0xFF
    return index + 1 + distance // 4


def _count(words: Iterable[int]) -> Counter[str]:
    found = Counter(word & 0xFFF for word in words)
    return Counter({name: found[number] for name, number in OPCODES.items() if found[number]})


def _loop(words: list[int], begin: int, end: int) -> Loop:
    def moved(*opcodes: int) -> int:
        return sum(BYTES_OF_WIDTH.get(word >> 73 & 7, 0) for word in words if word & 0xFFF in opcodes)

    return Loop(
        begin,
        end,
        _count(words),
        len(words),
        moved(OPCODES["LDG"], LDG_CONSTANT),
        moved(OPCODES["STG"]),
    )

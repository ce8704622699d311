"""Relocations of aarch64 objects: hand-made files are linked, and what the patched instructions then say is read back
by a disassembler. Nothing is run."""

from __future__ import annotations

import struct

import capstone
import pytest

from adaptc.backends.cpu import elf, launch
from adaptc.errors import ArtifactError

ADRP, ADD, LDR_Q, LDR_X = 0x90000000, 0x91000000, 0x3DC00000, 0xF9400000
BL, B, NOP = 0x94000000, 0x14000000, 0xD503201F
GOT, LOW_ADD, LOW_16, LOW_GOT = 311, 277, 299, 312


Relocations = list[tuple[int, int, int, int]]


def object_of(code: list[int], relocations: Relocations, constants: bytes = b"", machine: int = 183) -> bytes:
    """An ET_REL file: .text of ``code`` with an exported ``start``, .rodata with a local symbol at its byte 16 (symbol
    1), ``start`` (symbol 2). Relocations are (word of .text, type, symbol, addend)."""
    names, strings = b"\0.text\0.rodata\0.rela\0.symtab\0.strtab\0", b"\0data\0start\0"
    text = struct.pack(f"<{len(code)}I", *code)
    rela = b"".join(struct.pack("<QQq", 4 * at, number << 32 | kind, add) for at, kind, number, add in relocations)
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    symbols += struct.pack("<IBBHQQ", 1, 0x01, 0, 2, 16, 0) + struct.pack("<IBBHQQ", 6, 0x12, 0, 1, 0, 0)
    parts = [(b"", 0, 0, 0, 0, 1, 0), (text, 1, 6, 0, 0, 16, 0), (constants, 1, 2, 0, 0, 16, 0),
             (rela, 4, 0, 4, 1, 8, 24), (symbols, 2, 0, 5, 2, 8, 24), (strings, 3, 0, 0, 0, 1, 0), (names, 3, 0, 0, 0, 1, 0)]  # fmt: skip
    places = [0, 1, 7, 15, 21, 29, 0]
    body, rows = b"", []
    for name, (content, kind, flags, link, info, align, entry) in zip(places, parts):
        body += b"\0" * (-len(body) % 16)
        where = (64 + len(body), len(content))
        rows.append(struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, *where, link, info, align, entry))
        body += content
    body += b"\0" * (-len(body) % 16)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 1, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, 7, 6)
    return header + body + b"".join(rows)


def linked(code: list[int], relocations: Relocations, constants: bytes = bytes(8192)):
    """(instructions of .text at their final addresses, address of ``start``, that of the local symbol, the image)."""
    image = elf.Image({"k.o": object_of(code, relocations, constants)})
    start = image.address("start")
    text = bytes(image._memory[: 4 * len(code)])
    decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    decoder.detail = True
    page = -(-4 * len(code) // 4096) * 4096
    return list(decoder.disasm(text, start)), start, start + page + 16, image


def number(instruction, index: int) -> int:
    operand = instruction.operands[index]
    return operand.mem.disp if operand.type == capstone.arm64.ARM64_OP_MEM else operand.imm


@pytest.mark.parametrize("addend", [0, 32, 4096 + 48])
def test_addresses_of_constants(addend):
    code = [NOP] * 1030 + [ADRP, ADD, ADRP, LDR_Q]
    pairs = [(1030, 275), (1031, LOW_ADD), (1032, 275), (1033, LOW_16)]
    found, _, data, _ = linked(code, [(at, kind, 1, addend) for at, kind in pairs])
    high, low, again, offset = found[-4:]
    assert [i.mnemonic for i in found[-4:]] == ["adrp", "add", "adrp", "ldr"]
    assert number(high, 1) + number(low, 2) == data + addend == number(again, 1) + number(offset, 1)


def test_an_address_from_the_offset_table():
    found, _, data, image = linked([ADRP, LDR_X], [(0, GOT, 1, 0), (1, LOW_GOT, 1, 0)])
    slot = number(found[0], 1) + number(found[1], 1) - image._base
    assert struct.unpack_from("<Q", image._memory, slot) == (data,)


@pytest.mark.parametrize("kind, word", [(283, BL), (282, B)])
def test_branches(kind, word):
    found, start, _, _ = linked([NOP, NOP, word], [(2, kind, 2, 0)])
    assert found[2].mnemonic in ("bl", "b") and number(found[2], 0) == start
    found, start, _, _ = linked([word, NOP, NOP], [(0, kind, 2, 8)])
    assert number(found[0], 0) == start + 8


def test_differences_in_data():
    found, start, data, image = linked([NOP, 0, NOP, 0, 0, 0, 0, 0], [(1, 261, 1, 4), (4, 257, 1, 0), (6, 260, 2, 0)])
    assert struct.unpack_from("<i", image._memory, 4) == (data - start,)
    assert struct.unpack_from("<Qq", image._memory, 16) == (data, -24)


def test_it_is_not_run_on_another_machine(monkeypatch):
    monkeypatch.setattr(launch.platform, "machine", lambda: "x86_64")
    with pytest.raises(ArtifactError, match="object k.o is not for x86_64 CPUs"):
        launch.Library({"k.o": object_of([NOP], [], bytes(32))})
    monkeypatch.setattr(launch.platform, "machine", lambda: "aarch64")
    assert launch.Library({"k.o": object_of([NOP], [], bytes(32))}).address("start")


def test_what_is_out_of_reach_or_unknown_is_said():
    with pytest.raises(ArtifactError, match="28-bit relocation of 'data' is out of reach"):
        linked([BL], [(0, 283, 1, 1 << 27)])
    with pytest.raises(ArtifactError, match="relocation type 4 "):  # one of x86-64's
        linked([NOP], [(0, 4, 1, 0)])
    with pytest.raises(ArtifactError, match="x86-64 or aarch64"):
        elf.read_object(object_of([NOP], [], machine=40), "arm.o")

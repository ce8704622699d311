"""Relocatable ELF objects: reading, linking against each other and mapping into memory. Standard library only.

Only what kernels need: ET_REL files of x86-64 and aarch64 with allocated sections, symbols and RELA relocations
(System V ABI, AMD64 supplement, table 4.9; ELF for the Arm 64-bit Architecture, section 5.7). Every offset, index and
size is checked before use; whatever is wrong with a file is an ArtifactError that names it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
from dataclasses import dataclass
from collections.abc import Callable, Container, Mapping

from adaptc.errors import ArtifactError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_MAGIC = b"\x7fELF\x02\x01\x01"  # 64-bit, little-endian, version 1
_ET_REL, _EM_X86_64, _EM_AARCH64 = 1, 62, 183
_SYMTAB, _RELA_TABLE, _NOBITS, _REL_TABLE = 2, 4, 8, 9
_WRITE, _ALLOC, _EXECUTE, _TLS = 0x1, 0x2, 0x4, 0x400
_UNDEFINED, _ABSOLUTE, _RESERVED = 0, 0xFFF1, 0xFF00
_GOT_SYMBOL = "_GLOBAL_OFFSET_TABLE_"
_LOCAL_BINDING, _WEAK_BINDING = 0, 2
_DEFAULT_VISIBILITY, _HIDDEN = 0, 2
_VISIBILITY_AT = 5  # byte of a symbol table entry
_MAX_IMAGE = 1 << 30
"""Bytes all kernels of a plan may take: far above any real plan, and 32-bit displacements within it always reach."""


@dataclass(frozen=True)
class Section:
    name: str
    flags: int
    align: int
    size: int
    content: memoryview
    """Empty for sections without bytes in the file (zero-filled memory)."""


@dataclass(frozen=True)
class Symbol:
    """``section`` None: undefined (to be found in another object), or absolute when ``absolute``."""

    name: str
    section: int | None
    value: int
    absolute: bool
    exported: bool
    weak: bool


@dataclass(frozen=True)
class Relocation:
    section: int
    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True)
class Object:
    """A parsed relocatable object. Sections that take no memory are None, so that indices are the file's."""

    name: str
    machine: int
    sections: tuple[Section | None, ...]
    symbols: tuple[Symbol, ...]
    relocations: tuple[Relocation, ...]

    def exports(self) -> tuple[str, ...]:
        """Sorted names of the symbols that other objects and the launcher can use."""
        return tuple(sorted(symbol.name for symbol in self.symbols if symbol.exported))

    def undefined(self) -> tuple[str, ...]:
        """Sorted names of the symbols that other objects must define."""
        used = {r.symbol for r in self.relocations}
        return tuple(
            sorted(
                s.name
                for i, s in enumerate(self.symbols)
                if i in used and s.section is None and not s.absolute and s.name != _GOT_SYMBOL
            )
        )


def _slice(data: memoryview, offset: int, size: int, what: str) -> memoryview:
    if offset + size > len(data):
        raise ArtifactError(f"{what} lies at bytes {offset}..{offset + size}, but the file has {len(data)}.")
    return data[offset : offset + size]


def _string(table: memoryview, offset: int, what: str) -> str:
    if offset >= len(table):
        raise ArtifactError(f"{what} has its name at byte {offset} of a string table of {len(table)}.")
    end = bytes(table[offset : offset + 4096]).find(0)
    if end < 0:
        raise ArtifactError(f"{what} has a name that doesn't end.")
    return bytes(table[offset : offset + end]).decode("utf-8", "replace")


def _table(data: memoryview, entry: struct.Struct, stride: int, what: str):
    if stride != entry.size or len(data) % entry.size:
        raise ArtifactError(f"{what} has {len(data)} bytes in entries of {stride}; entries must have {entry.size}.")
    return entry.iter_unpack(data)


def read_object(data: bytes | memoryview, name: str) -> Object:
    """Parses one relocatable object; ``name`` is used in errors. Raises ArtifactError for anything malformed."""
    try:
        return _read(memoryview(data).cast("B"), name)
    except ArtifactError as error:
        raise ArtifactError(
            f"object {name} is damaged: {error.message}", hint=error.hint or "Compile the model again."
        ) from error


def hide(data: bytes, exports: Container[str]) -> bytes:
    """A well-formed object with every symbol but ``exports`` made invisible to other objects."""
    changed = bytearray(data)
    header = _HEADER.unpack_from(data)
    rows = [_SECTION.unpack_from(data, header[6] + i * _SECTION.size) for i in range(header[12])]
    for _, type_, _, _, at, size, link, *_ in rows:
        if type_ != _SYMTAB:
            continue
        strings = memoryview(data)[rows[link][4] :]
        for entry in range(at, at + size, _SYMBOL.size):
            name_at, info, _, section, *_ = _SYMBOL.unpack_from(data, entry)
            defined = section != _UNDEFINED and info >> 4 != _LOCAL_BINDING
            if defined and _string(strings, name_at, "a symbol") not in exports:
                changed[entry + _VISIBILITY_AT] = _HIDDEN
    return bytes(changed)


def _read(data: memoryview, name: str) -> Object:
    header = _HEADER.unpack(_slice(data, 0, _HEADER.size, "its header"))
    magic, kind, machine, table_at, stride, count, names_index = (*header[:3], header[6], *header[11:])
    if magic[: len(_MAGIC)] != _MAGIC or kind != _ET_REL or machine not in RULES:
        raise ArtifactError("it is not a relocatable ELF file for x86-64 or aarch64.")
    raw = _slice(data, table_at, stride * count, "the section table")
    rows = list(_table(raw, _SECTION, stride, "the section table"))
    if names_index >= count:
        raise ArtifactError(f"section {names_index} should hold the names, but there are {count} sections.")

    def content(index: int, what: str) -> memoryview:
        if index >= count:
            raise ArtifactError(f"{what} is section {index} of {count}.")
        row = rows[index]
        return data[:0] if row[1] == _NOBITS else _slice(data, row[4], row[5], what)

    names = content(names_index, "the table of section names")
    sections: list[Section | None] = []
    for index, (name_at, type_, flags, _, _, size, _, _, align, _) in enumerate(rows):
        if not flags & _ALLOC:
            sections.append(None)
            continue
        title = _string(names, name_at, f"section {index}")
        align = align or 1
        if align & (align - 1) or align > mmap.PAGESIZE or flags & _TLS or size > _MAX_IMAGE:
            raise ArtifactError(f"section {title} has alignment {align}, flags {flags:#x}, size {size}.")
        if flags & _WRITE and flags & _EXECUTE:
            raise ArtifactError(f"section {title} is both writable and executable.")
        sections.append(Section(title, flags, align, size, content(index, f"section {title}")))

    tables = [i for i, row in enumerate(rows) if row[1] == _SYMTAB]
    if len(tables) > 1:
        raise ArtifactError(f"it has {len(tables)} symbol tables.")
    symbols = tuple(_symbols(rows, content, sections, tables[0])) if tables else ()
    relocations = _relocations(rows, content, sections, tables, len(symbols), RULES[machine])
    return Object(name, machine, tuple(sections), symbols, tuple(relocations))


def _symbols(rows, content, sections, table: int):
    strings = content(rows[table][6], "the string table")
    entries = _table(content(table, "the symbol table"), _SYMBOL, rows[table][9], "the symbol table")
    for index, (name_at, info, other, shndx, value, _) in enumerate(entries):
        title = _string(strings, name_at, f"symbol {index}") if name_at else ""
        section = None
        if shndx not in (_UNDEFINED, _ABSOLUTE):
            if shndx >= _RESERVED or shndx >= len(sections):
                raise ArtifactError(f"symbol {title!r} lies in section {shndx} of {len(sections)}.")
            if sections[shndx] is not None:
                section = shndx
                if value > sections[shndx].size:
                    raise ArtifactError(f"symbol {title!r} lies outside section {sections[shndx].name}.")
        binding = info >> 4
        exported = binding != _LOCAL_BINDING and other & 3 == _DEFAULT_VISIBILITY and section is not None
        yield Symbol(title, section, value, shndx == _ABSOLUTE, exported, binding == _WEAK_BINDING)


def _relocations(rows, content, sections, tables, symbols: int, rules: Mapping[int, Rule]):
    for index, (_, type_, _, _, _, _, link, target, _, stride) in enumerate(rows):
        if type_ not in (_RELA_TABLE, _REL_TABLE):
            continue
        if target >= len(sections):
            raise ArtifactError(f"relocations of section {target}, but there are {len(sections)} sections.")
        if sections[target] is None:
            continue
        if type_ == _REL_TABLE or [link] != tables:
            raise ArtifactError(f"relocations of section {sections[target].name} are not RELA of its symbol table.")
        for offset, info, addend in _table(content(index, "relocations"), _RELA, stride, "a relocation table"):
            kind, symbol = info & 0xFFFFFFFF, info >> 32
            if kind == 0:
                continue
            rule = rules.get(kind)
            if rule is None:
                raise ArtifactError(f"relocation type {kind} in section {sections[target].name} is unknown.")
            if symbol >= symbols or offset + rule.bytes > len(sections[target].content):
                raise ArtifactError(f"a relocation at {sections[target].name}+{offset} points outside the file.")
            yield Relocation(target, offset, kind, symbol, addend)


@dataclass(frozen=True)
class Rule:
    """How a relocation is computed: S symbol, A addend, P place, G address of the symbol's slot in the offset
    table, T address of that table.

    bytes    that it changes
    signed   how the value is read where it must fit
    slot     whether the symbol needs a slot in the offset table
    bits     that the value must fit; 0 = any value, cut off
    insert   (what the place holds, value) → what it holds then; by default the value alone
    """

    bytes: int
    signed: bool
    value: Callable[[int, int, int, int, int], int]
    slot: bool = False
    bits: int = 32
    insert: Callable[[int, int], int] = lambda old, value: value


def _pc(s: int, a: int, p: int, g: int, t: int) -> int:
    return s + a - p


def _got_pc(s: int, a: int, p: int, g: int, t: int) -> int:
    return g + a - p


_X86_64: dict[int, Rule] = {
    1: Rule(8, True, lambda s, a, p, g, t: s + a),  # R_X86_64_64
    2: Rule(4, True, _pc),  # R_X86_64_PC32
    4: Rule(4, True, _pc),  # R_X86_64_PLT32: everything is within reach, no stub is needed
    9: Rule(4, True, _got_pc, slot=True),  # R_X86_64_GOTPCREL
    10: Rule(4, False, lambda s, a, p, g, t: s + a),  # R_X86_64_32
    11: Rule(4, True, lambda s, a, p, g, t: s + a),  # R_X86_64_32S
    24: Rule(8, True, _pc),  # R_X86_64_PC64
    25: Rule(8, True, lambda s, a, p, g, t: s + a - t),  # R_X86_64_GOTOFF64
    26: Rule(4, True, lambda s, a, p, g, t: t + a - p),  # R_X86_64_GOTPC32
    27: Rule(8, True, lambda s, a, p, g, t: g - t + a, slot=True),  # R_X86_64_GOT64
    28: Rule(8, True, _got_pc, slot=True),  # R_X86_64_GOTPCREL64
    29: Rule(8, True, lambda s, a, p, g, t: t + a - p),  # R_X86_64_GOTPC64
    31: Rule(8, True, lambda s, a, p, g, t: s + a - t),  # R_X86_64_PLTOFF64
    41: Rule(4, True, _got_pc, slot=True),  # R_X86_64_GOTPCRELX
    42: Rule(4, True, _got_pc, slot=True),  # R_X86_64_REX_GOTPCRELX
}


def _page(address: int) -> int:
    return address & ~0xFFF


def _adr(old: int, pages: int) -> int:
    """The immediate of adrp, in pages: two low bits at 29, nineteen at 5."""
    count = pages >> 12
    return old & 0x9F00001F | (count & 3) << 29 | (count >> 2 & 0x7FFFF) << 5


def _branch(old: int, distance: int) -> int:
    """The immediate of b and bl, in instructions."""
    return old & 0xFC000000 | distance >> 2 & 0x3FFFFFF


def _low12(scale: int) -> Rule:
    """The offset within a page in an add or a load of 2^scale bytes."""
    return Rule(4, False, lambda s, a, p, g, t: (s + a & 0xFFF), bits=0,
                insert=lambda old, value: old & 0xFFC003FF | value >> scale << 10)  # fmt: skip


_AARCH64: dict[int, Rule] = {
    257: Rule(8, True, lambda s, a, p, g, t: s + a),  # R_AARCH64_ABS64
    260: Rule(8, True, _pc),  # R_AARCH64_PREL64
    261: Rule(4, True, _pc),  # R_AARCH64_PREL32
    275: Rule(4, True, lambda s, a, p, g, t: _page(s + a) - _page(p), bits=33, insert=_adr),  # ADR_PREL_PG_HI21
    277: _low12(0),  # ADD_ABS_LO12_NC
    278: _low12(0),  # LDST8_ABS_LO12_NC
    282: Rule(4, True, _pc, bits=28, insert=_branch),  # JUMP26
    283: Rule(4, True, _pc, bits=28, insert=_branch),  # CALL26
    284: _low12(1),  # LDST16_ABS_LO12_NC
    285: _low12(2),  # LDST32_ABS_LO12_NC
    286: _low12(3),  # LDST64_ABS_LO12_NC
    299: _low12(4),  # LDST128_ABS_LO12_NC
    311: Rule(4, True, lambda s, a, p, g, t: _page(g) - _page(p), slot=True, bits=33, insert=_adr),  # ADR_GOT_PAGE
    312: Rule(4, False, lambda s, a, p, g, t: g & 0xFFF, slot=True, bits=0,
              insert=lambda old, value: old & 0xFFC003FF | value >> 3 << 10),  # LD64_GOT_LO12_NC
}  # fmt: skip

MACHINES = {"x86_64": _EM_X86_64, "aarch64": _EM_AARCH64}
"""The files' machine by the system's name of it."""

RULES: dict[int, dict[int, Rule]] = {_EM_X86_64: _X86_64, _EM_AARCH64: _AARCH64}
"""Relocation types by number, by the file's machine."""


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


class Image:
    """Objects linked against each other and mapped: code read-execute, constants read-only, data read-write. Where
    instruction caches don't follow stores (aarch64), Linux makes them, as pages become executable.

    ``objects`` maps names to file contents. Raises ArtifactError for malformed objects, symbols that no object
    defines (all are named) and names that two objects define.
    """

    def __init__(self, objects: Mapping[str, bytes | memoryview]):
        parsed = [read_object(objects[name], name) for name in sorted(objects)]
        self.machines = {obj.machine: obj.name for obj in parsed}
        places, spans, size = _layout(parsed)
        # the memory is allocated before symbols have addresses, and is writable until all relocations are applied
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._base = ctypes.addressof(anchor)
        del anchor
        self.symbols = self._exports(parsed, places)
        self._copy(parsed, places)
        self._relocate(parsed, places, spans[2][0])
        for (start, end), protection in zip(spans, (mmap.PROT_READ | mmap.PROT_EXEC, mmap.PROT_READ)):
            if end > start and _libc().mprotect(self._base + start, end - start, protection):
                number = ctypes.get_errno()
                raise ArtifactError(
                    f"the kernels' memory can't be made executable: {os.strerror(number)}.",
                    hint="This system's policy forbids code that is loaded at run time.",
                )

    def address(self, symbol: str) -> int:
        """Address of an exported symbol; ArtifactError when no object defines it."""
        if symbol not in self.symbols:
            raise ArtifactError(f"kernel {symbol!r} is in none of the objects.", hint="Compile the model again.")
        return self.symbols[symbol]

    def _exports(self, parsed, places) -> dict[str, int]:
        found: dict[str, int] = {}
        weak: dict[str, int] = {}
        for index, obj in enumerate(parsed):
            for symbol in obj.symbols:
                if not symbol.exported or not symbol.name:
                    continue
                address = self._base + places[index, symbol.section] + symbol.value
                if symbol.weak:
                    weak.setdefault(symbol.name, address)
                elif symbol.name in found:
                    raise ArtifactError(f"object {obj.name} defines {symbol.name!r}, which another object defines too.")
                else:
                    found[symbol.name] = address
        missing = sorted({name for obj in parsed for name in obj.undefined()} - set(found) - set(weak))
        if missing:
            raise ArtifactError(
                f"the objects use symbols that none of them defines: {', '.join(missing)}.",
                hint="Kernels must not call libraries; compile the model again.",
            )
        return {**weak, **found}

    def _copy(self, parsed, places) -> None:
        for index, obj in enumerate(parsed):
            for number, section in enumerate(obj.sections):
                if section is not None and len(section.content):
                    start = places[index, number]
                    self._memory[start : start + len(section.content)] = section.content

    def _relocate(self, parsed, places, table: int) -> None:
        slots: dict[int, int] = {}
        for index, obj in enumerate(parsed):
            for relocation in obj.relocations:
                rule = RULES[obj.machine][relocation.kind]
                symbol = obj.symbols[relocation.symbol]
                if symbol.name == _GOT_SYMBOL:
                    target = self._base + table
                elif symbol.absolute:
                    target = symbol.value
                elif symbol.section is None:
                    target = self.symbols[symbol.name] if symbol.name else 0
                else:
                    target = self._base + places[index, symbol.section] + symbol.value
                slot = 0
                if rule.slot:
                    offset = slots.setdefault(target, table + 8 * len(slots))
                    struct.pack_into("<Q", self._memory, offset, target & 0xFFFFFFFFFFFFFFFF)
                    slot = self._base + offset
                place = places[index, relocation.section] + relocation.offset
                value = rule.value(target, relocation.addend, self._base + place, slot, self._base + table)
                low, high = (-(1 << rule.bits - 1), 1 << rule.bits - 1) if rule.signed else (0, 1 << rule.bits)
                if rule.bytes == 4 and rule.bits and not low <= value < high:
                    raise ArtifactError(
                        f"object {obj.name}: a {rule.bits}-bit relocation of {symbol.name or 'a section'!r} is out of "
                        "reach.",
                        hint="The object was not compiled as position-independent code; compile the model again.",
                    )
                old = int.from_bytes(self._memory[place : place + rule.bytes], "little")
                raw = (rule.insert(old, value) & (1 << 8 * rule.bytes) - 1).to_bytes(rule.bytes, "little")
                self._memory[place : place + rule.bytes] = raw


def _layout(parsed) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]], int]:
    """Offsets of every section by (object, section), the spans of code, constants and data, and the whole size.

    The offset table is at the start of the data span."""
    places: dict[tuple[int, int], int] = {}
    spans: list[tuple[int, int]] = []
    slots = sum(1 for obj in parsed for relocation in obj.relocations if RULES[obj.machine][relocation.kind].slot)
    at = 0
    for wanted, reserved in ((_EXECUTE, 0), (0, 0), (_WRITE, 8 * slots)):
        start = at = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        at += reserved
        for index, obj in enumerate(parsed):
            for number, section in enumerate(obj.sections):
                if section is None or section.flags & (_EXECUTE | _WRITE) != wanted:
                    continue
                at = -(-at // section.align) * section.align
                places[index, number] = at
                at += section.size
                if at > _MAX_IMAGE:
                    raise ArtifactError(f"object {obj.name}: all kernels together take more than {_MAX_IMAGE} bytes.")
        spans.append((start, at))
    return places, spans, max(-(-at // mmap.PAGESIZE), 1) * mmap.PAGESIZE

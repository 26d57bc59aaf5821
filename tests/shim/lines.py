"""Finds the source line of an address, from the line table (DWARF 4) of a shared object in ELF form.

Elsewhere there is no answer: None.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path


def line_of(path: Path, site: int) -> tuple[str, int] | None:
    """File and line of the call that returns to `site` (relative to the image's start)."""
    data = path.read_bytes()
    if site == 0 or data[:5] != b"\x7fELF\x02":
        return None
    table = _section(data, b".debug_line")
    before: tuple[int, int, str] | None = None
    for row in _rows(table):
        if before is not None and before[0] < site <= row[0]:
            return before[2], before[1]
        before = row if row[1] else None  # 0 ends a sequence
    return None


def _section(data: bytes, wanted: bytes) -> bytes:
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, start + index * size) for index in range(count)]
    for section in sections:
        at = sections[names][4] + section[0]
        if data[at : data.index(b"\0", at)] == wanted:
            return data[section[4] : section[4] + section[5]]
    return b""


class _Reader:
    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        value, self.at = self.data[self.at : end].decode(), end + 1
        return value

    def number(self, *, signed: bool = False) -> int:
        """LEB128."""
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value


def _rows(table: bytes) -> Iterator[tuple[int, int, str]]:
    """(address, line, file) in the order of the table; line 0 at the end of each sequence."""
    start = 0
    while start < len(table):
        reader = _Reader(table, start)
        end = start + 4 + reader.take("I")
        if reader.take("H") == 4:
            yield from _unit(reader, end)
        start = end


def _unit(reader: _Reader, end: int) -> Iterator[tuple[int, int, str]]:
    program = reader.take("I") + reader.at
    step, _, _, base, span, first = (reader.take(form) for form in "BBBbBB")
    lengths = [reader.take("B") for _ in range(first - 1)]
    while reader.text():  # directories
        pass
    files = [""]
    while name := reader.text():
        files.append(name)
        for _ in range(3):
            reader.number()
    reader.at = program
    address, file, line = 0, 1, 1
    while reader.at < end:
        code = reader.take("B")
        if code >= first:
            address += (code - first) // span * step
            line += base + (code - first) % span
            yield address, line, files[file]
        elif code == 0:
            size = reader.number()
            after = reader.at + size
            kind = reader.take("B")
            if kind == 1:
                yield address, 0, ""
                address, file, line = 0, 1, 1
            elif kind == 2:
                address = reader.take("Q")
            reader.at = after
        elif code == 1:
            yield address, line, files[file]
        elif code == 2:
            address += reader.number() * step
        elif code == 3:
            line += reader.number(signed=True)
        elif code == 4:
            file = reader.number()
        elif code == 8:
            address += (255 - first) // span * step
        elif code == 9:
            address += reader.take("H")
        else:
            for _ in range(lengths[code - 1]):
                reader.number()

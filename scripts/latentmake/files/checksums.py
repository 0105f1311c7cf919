"""Checksums in the header of a cache file: of its tensors' bytes, and of the header itself.

Both are in no key and no recipe: a file without them stays fresh. XXH3 takes a small part of the
time of reading (https://github.com/Cyan4973/xxHash), and lets other threads run meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_CHECKSUM, _HEADER_CHECKSUM = "latentmake.checksum", "latentmake.header_checksum"
_TENSORS, _HEADER = "xxh3_128:", "xxh3_64:"
_ZEROS = "0" * 16

PLACEHOLDERS = {_CHECKSUM: _TENSORS + 2 * _ZEROS, _HEADER_CHECKSUM: _HEADER + _ZEROS}
"""Metadata of a file to write, for the checksum of all tensor bytes in the order of the file, and
of the header's JSON in which these digits of its own are zeros."""

STAMPED = re.compile(
    rf'"{re.escape(_CHECKSUM)}":"({_TENSORS}[0-9a-f]{{32}})",'
    rf'"{re.escape(_HEADER_CHECKSUM)}":"{_HEADER}([0-9a-f]{{16}})",'
    r'"latentmake\.key":"([^"\\]*)"'.encode()
)
"""Checksums and key in a header, whose keys are in order. No text in it fits: JSON escapes quotes.
"""


def of_tensors(pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the checksum of the bytes of a file's tensors."""
    import xxhash  # planning writes no cache file

    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return f"{_TENSORS}{found.hexdigest()}"


def filled(
    metadata: Mapping[str, str], pieces: Iterable[bytes | bytearray | memoryview]
) -> dict[str, str]:
    """Return metadata in order, with the checksum of the tensors if it has a place for it."""
    found = dict(sorted(metadata.items()))
    if _CHECKSUM in found:
        found |= PLACEHOLDERS | {_CHECKSUM: of_tensors(pieces)}
    return found


def sealed(header: bytes) -> bytes:
    """Return a header's JSON with its own checksum, if it has a place for it."""
    import xxhash

    found = STAMPED.search(header)
    if found is None:
        return header
    start, end = found.span(2)
    return header[:start] + xxhash.xxh3_64_hexdigest(header).encode() + header[end:]


def header_is_intact(header: bytes, found: re.Match[bytes]) -> bool:
    """Whether a header's JSON has its own checksum, as `STAMPED` found it there."""
    import xxhash

    start, end = found.span(2)
    bare = b"".join((header[:start], _ZEROS.encode(), header[end:]))
    return xxhash.xxh3_64_hexdigest(bare).encode() == found[2]

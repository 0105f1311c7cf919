"""Messages between a process that reads files and the one that asks it.

A request is a line of JSON. An answer is messages: a head, and the bytes that it announces.
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<BQII")
"""Kind, then of a frame its index, height and width; of JSON (FAULT, MEDIA) its length, 0 and 0."""

FRAME, ALIVE, DONE, FAULT, MEDIA = range(5)

SIGN_SECONDS = 0.2
"""Time between two signs of life while frames are decoded that nobody asked for."""

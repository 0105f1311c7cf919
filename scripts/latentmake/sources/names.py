"""Names of files that caches cannot be named after."""

from __future__ import annotations

from latentmake.layouts.plain import LATENTS_ENDING

_SHORT = 256 - len(LATENTS_ENDING)  # names of fewer characters need no closer look


def unusable_name(path: str) -> str | None:
    """Return why caches cannot be named after a file; None where they can."""
    if len(path) < _SHORT and path.isascii() and path.isprintable() and "/" not in path:
        return None
    stem = path.rpartition("/")[2].rpartition(".")[0]
    if len(stem.encode("utf-8", "surrogateescape")) > 255 - len(LATENTS_ENDING):
        return "has a name too long for its cache file"
    if not path.isprintable() and any(ord(character) < 32 for character in path):
        return "has a control character in its name"
    folders = path.split("/")[:-1]
    if "" in folders or any(len(each.encode("utf-8", "replace")) > 255 for each in folders):
        return "has a folder in its name that no disk can have"  # an object's may
    try:
        path.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    return None

"""Names of one folder under Linux, WSL and Windows.

What is published is often used by another system than the one that made it. A path is translated
by the user's maps and by WSL's rule for drives: `X:/` lies under `/mnt/x`.
"""

from __future__ import annotations

import ntpath
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Literal

System = Literal["linux", "windows", "wsl"]

_WINDOWS = re.compile(r"[A-Za-z]:([/\\]|$)|[/\\]{2}[^/\\]")


def is_windows(path: str) -> bool:
    r"""Whether a path is an absolute one of Windows: `D:\x`, `D:/x` or `\\server\share`."""
    return _WINDOWS.match(path) is not None


def is_text(path: str) -> bool:
    """Whether a path is UTF-8; a foreign one may be none."""
    try:
        return path.isascii() or bool(path.encode())
    except UnicodeEncodeError:
        return False


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/folder`."""
    return "://" in path


def absolute(path: str) -> str:
    """Return a path as an absolute one; a path of Windows stays as it is."""
    return path if is_windows(path) else os.path.abspath(path)  # noqa: PTH100 -- links stay


def backslashed(path: str) -> str:
    """Return a path with the separators of Windows."""
    return path.replace("/", "\\")


def translate(path: str, to: System, maps: Iterable[Mapping[str, str | None]]) -> str | None:
    """Return an absolute path as another system names it, with forward slashes.

    Of all names that the path begins with, component by component, the longest decides; a map wins
    over `/mnt/x`, earlier maps over later ones. Upper and lower case differ, but not in names of
    Windows.

    Args:
        path: of any system.
        to: the system.
        maps: each system -> its name of one folder, if it has one.

    Returns:
        None where `to` has no name for the path. Linux and WSL know every path that is not one of
        Windows by its own name.
    """
    parts = _parts(path)
    crosses = (parts[0] == "/") == (to == "windows")
    if crosses and (drive := re.match(r"([A-Z]):/|//mnt/([a-z])(/|$)", "/".join(parts))):
        letter = drive[1] or drive[2]
        mount = f"/mnt/{letter.lower()}"
        maps = [*maps, {"windows": f"{letter}:", "linux": mount, "wsl": mount}]
    found = [
        (len(prefix), [*_parts(target), *parts[len(prefix) :]])
        for names in maps
        if (target := names.get(to))
        for prefix in map(_parts, filter(None, names.values()))
        if _folded(parts)[: len(prefix)] == _folded(prefix)
    ]
    if crosses and not found:
        return None
    root, *rest = max(found, key=lambda each: each[0], default=(0, parts))[1]
    return root + "/".join(rest)


def _parts(path: str) -> list[str]:
    """Split an absolute path: `/a/b` is `/ a b`, `x:/a` is `X:/ a`, `//s/a` is `// s a`."""
    if not is_windows(path):
        return ["/", *filter(None, posixpath.normpath(path).split("/"))]
    path = ntpath.normpath(path).replace("\\", "/")
    root = "//" if path.startswith("//") else f"{path[0].upper()}:/"
    return [root, *filter(None, path[2:].split("/"))]


def _folded(parts: list[str]) -> list[str]:
    """Return parts as they are compared: Windows does not tell upper from lower case."""
    return parts if parts[0] == "/" else [part.casefold() for part in parts]

"""Names of files on other systems, URLs, and names that are no text.

Published files are often used on another system than the one that made them. Paths are translated
by the user's maps and by WSL's rule for drives: `X:/` is `/mnt/x`.
"""

from __future__ import annotations

import ntpath
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Literal

System = Literal["linux", "windows", "wsl"]

_WINDOWS = re.compile(r"[A-Za-z]:([/\\]|$)|[/\\]{2}[^/\\]")


def is_windows(path: str) -> bool:
    r"""Whether a path is an absolute path of Windows: `D:\x`, `D:/x` or `\\server\share`."""
    return _WINDOWS.match(path) is not None


def is_text(path: str) -> bool:
    """Whether a path is valid UTF-8; names on a disk may have other bytes."""
    try:
        return path.isascii() or bool(path.encode())
    except UnicodeEncodeError:
        return False


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/folder`."""
    return "://" in path


def absolute(path: str) -> str:
    """Return the absolute path of a path; a Windows path stays as it is."""
    return path if is_windows(path) else os.path.abspath(path)  # noqa: PTH100 -- links stay


def translate(path: str, to: System, maps: Iterable[Mapping[str, str | None]]) -> str | None:
    """Return the name of an absolute path on another system, with forward slashes.

    The longest folder of the maps that contains the path decides. A map wins over `/mnt/x`, and
    earlier maps win over later ones. Only Windows paths ignore case.

    Args:
        path: path of any system.
        to: system of the result.
        maps: maps of one folder each: system -> name of the folder there, or None.

    Returns:
        The path; None if `to` has no name for it. On Linux and WSL, every path that is not a
        Windows path keeps its name by default.
    """
    place = _pure(path)
    if drive := re.match(r"([A-Za-z]):/|/mnt/([a-z])(?:/|$)", place.as_posix()):
        letter = drive[1] or drive[2]
        mount = f"/mnt/{letter.lower()}"
        maps = [*maps, {"windows": f"{letter.upper()}:", "linux": mount, "wsl": mount}]
    matches = [
        (len(prefix.parts), _pure(target) / place.relative_to(prefix))
        for names in maps
        if (target := names.get(to))
        for prefix in map(_pure, filter(None, names.values()))
        if type(prefix) is type(place) and place.is_relative_to(prefix)
    ]
    if not matches and isinstance(place, PureWindowsPath) != (to == "windows"):
        return None
    name = max(matches, key=lambda match: match[0], default=(0, place))[1].as_posix()
    return name.rstrip("/") if name.startswith("//") else name  # a share's name ends in no slash


def _pure(path: str) -> PurePath:
    if is_windows(path):
        return PureWindowsPath(ntpath.normpath(f"{path}/"))
    return PurePosixPath(posixpath.normpath(path))

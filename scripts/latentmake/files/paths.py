"""Names of one folder under Linux, WSL and Windows.

What is published is often used by another system than the one that made it. A path is translated
by the user's maps and by WSL's rule for drives: `X:/` lies under `/mnt/x`.
"""

from __future__ import annotations

import ntpath
import os
import posixpath
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from latentmake.config.machines import PathMap

System = Literal["linux", "windows", "wsl"]

_WINDOWS = re.compile(r"[A-Za-z]:([/\\]|$)|[/\\]{2}[^/\\]")
_DRIVE = re.compile(r"[A-Za-z]:")
_MOUNT = re.compile(r"[a-z]")


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


def normalized(path: str) -> str:
    """Return a folder's path as paths below it begin."""
    return path.rstrip("/") if is_remote(path) else os.path.normpath(path)


def absolute(path: str) -> str:
    """Return a path as an absolute one; a path of Windows stays as it is."""
    return path if is_windows(path) else os.path.abspath(path)  # noqa: PTH100 -- links stay


def backslashed(path: str) -> str:
    """Return a path with the separators of Windows."""
    return path.replace("/", "\\")


def translate(path: str, to: System, maps: Sequence[PathMap]) -> str | None:
    """Return an absolute path as another system names it, with forward slashes.

    Of all names that the path begins with, component by component, the longest decides; a map wins
    over `/mnt/x`, earlier maps over later ones. Upper and lower case differ, but not in names of
    Windows.

    Returns:
        None where `to` has no name for the path. Linux and WSL know every path that is not one of
        Windows by its own name.
    """
    parts = _parts(path)
    found: list[tuple[int, list[str]]] = []
    for names in maps:
        if (target := getattr(names, to)) is not None:
            for name in (names.linux, names.windows, names.wsl):
                prefix = _parts(name) if name is not None else []
                if prefix and _begins(parts, prefix):
                    found.append((len(prefix), _parts(target) + parts[len(prefix) :]))
    if found := [*found, *_drive(parts, to)]:
        return _joined(max(found, key=lambda each: each[0])[1])
    return _joined(parts) if _of_windows(parts) == (to == "windows") else None


def _parts(path: str) -> list[str]:
    """Split an absolute path: `/a/b` is `"" a b`, `x:/a` is `X: a`, `//s/a` is `"" "" s a`."""
    if not is_windows(path):
        return posixpath.normpath("/" + path.lstrip("/")).rstrip("/").split("/")
    parts = ntpath.normpath(path).replace("\\", "/").rstrip("/").split("/")
    return [parts[0].upper(), *parts[1:]]


def _of_windows(parts: list[str]) -> bool:
    return _DRIVE.fullmatch(parts[0]) is not None or parts[:2] == ["", ""]


def _joined(parts: list[str]) -> str:
    # A root keeps its slash: `X:` alone would be the folder that one happens to stand in.
    return parts[0] + "/" if len(parts) == 1 else "/".join(parts)


def _begins(parts: list[str], prefix: list[str]) -> bool:
    start = parts[: len(prefix)]
    if _of_windows(parts) and _of_windows(prefix):
        return [part.casefold() for part in start] == [part.casefold() for part in prefix]
    return start == prefix and _of_windows(parts) == _of_windows(prefix)


def _drive(parts: list[str], to: System) -> list[tuple[int, list[str]]]:
    """Apply WSL's rule for drives: number of components taken, and the path; empty where none."""
    if to == "windows":
        if len(parts) > 2 and parts[:2] == ["", "mnt"] and _MOUNT.fullmatch(parts[2]):
            return [(3, [f"{parts[2].upper()}:", *parts[3:]])]
    elif _DRIVE.fullmatch(parts[0]):
        return [(1, ["", "mnt", parts[0][0].lower(), *parts[1:]])]
    return []

"""The hub's local cache: where a repository's files lie in it, and how they get there.

A pinned commit gives the path of each file without a look at the disk. Nothing here reaches the
network.
"""

from __future__ import annotations

import os
from pathlib import Path

_FILES = (".safetensors", ".gguf", ".pth", ".pt", ".bin", ".ckpt", ".json")
_SNAPSHOTS = "snapshots"


def cache() -> Path:
    """Return the folder of the local hub cache, by the variables that huggingface_hub reads."""
    known = os.environ.get
    home = known("HF_HOME") or f"{known('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    place = known("HF_HUB_CACHE") or known("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(place)).expanduser()


def place_of(hub: str, revision: str, *below: str | None) -> Path:
    """Return the path of a file or folder of a repository in the local hub cache.

    Args:
        hub: OWNER/NAME.
        revision: a commit.
        below: folder and file inside the repository, as far as they are given.
    """
    return _repository(hub) / _SNAPSHOTS / revision / Path(*filter(None, below))


def _repository(hub: str) -> Path:
    return cache() / "--".join(["models", *hub.split("/")])


def known_commit(hub: str, branch: str = "main") -> str | None:
    """Return the commit of a branch that lies in the local hub cache, if any."""
    try:
        found = (_repository(hub) / "refs" / branch).read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return found if (_repository(hub) / _SNAPSHOTS / found).is_dir() else None


def snapshots(hub: str) -> list[Path]:
    """Return the folders of all commits of a repository in the local hub cache."""
    return sorted((_repository(hub) / _SNAPSHOTS).glob("*"))


def absence(path: str | Path) -> str:
    """Return what is wrong with a path where nothing lies, with the command that fetches it."""
    command = download(path)
    return f"is not in the local hub cache: run `{command}`" if command else "does not exist"


def download(path: str | Path) -> str:
    """Return the command that fetches a missing path of the hub cache; "" for any other path."""
    parts = Path(path).parts
    for index, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[index + 1] == _SNAPSHOTS:
            hub, revision = "/".join(part.split("--")[1:]), parts[index + 2]
            below = "/".join(parts[index + 3 :])
            if below and not below.endswith(_FILES):
                below = f'--include "{below}/*"'
            return " ".join(filter(None, ["hf download", hub, below, f"--revision {revision}"]))
    return ""

"""Order file, lock and captions of a training, as every trainer reads them.

The planner writes the order without importing torch; the trainer reads nothing else but the
manifest and lock named in it. The digests of what trained weights came from are kept beside them:
as long as they equal those of the order, there is nothing to train.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from latentmake.errors import CacheError, TrainingError
from latentmake.files.safetensors import read_head
from latentmake.plan.lock import read_lock
from latentmake.plan.reasons import Difference, short, text_of, value_differences
from latentmake.training.json_file import JsonFile

BASIS = "trained_on.json"
_Order = TypeVar("_Order", bound=BaseModel)


class Wanted(JsonFile):
    """Digests of everything that shapes trained weights.

    Attributes:
        data: of the manifest's caches.
        settings: of all settings that shape the weights.
        weights: of the network that is trained, and its noise schedule.
        resumed: of the checkpoint that the training began with; "" for none.
        version: of the trainer; a record without it is of version 1.
    """

    data: str
    settings: str
    weights: str
    resumed: str = ""
    version: int = 1


class Basis(JsonFile):
    """What trained weights came from, by name; a file beside them, which nothing depends on.

    Attributes:
        wanted: the digests that decide.
        settings: of the trainer, all that shape the weights.
        data: of the lock.
        network: place of the network.
    """

    wanted: Wanted
    settings: dict[str, str]
    data: dict[str, str]
    network: str

    @classmethod
    def of(cls, run: str, wanted: Wanted, settings: Mapping[str, object], network: str) -> Self:
        """Return that of a run's lock as it is now."""
        texts = [
            {name: text_of(value) for name, value in each.items()}
            for each in (settings, read_lock(run).data_values())
        ]
        return cls(wanted=wanted, settings=texts[0], data=texts[1], network=network)

    def differences(self, folder: Path, was: Wanted | None) -> list[Difference]:
        """Return what differs from the last training, whose record is in a folder.

        Records of earlier releases have digests alone.
        """
        if was is None:
            return [Difference("it has not been trained yet")]
        now, known = self.wanted, Basis.read(folder / BASIS)
        old = known if known and known.wanted == was else self.model_copy(update={"network": ""})
        # A release may know more settings than the one that trained.
        settings = {key: self.settings.get(key, value) for key, value in old.settings.items()}
        found = []
        if was.data != now.data:
            changed = value_differences(old.data, self.data)
            found += changed or [Difference("the dataset changed")]
        if was.settings != now.settings:
            changed = value_differences(old.settings, settings)
            found += changed or [Difference("the settings changed")]
        if was.weights != now.weights:
            ends = [f" ({place})" if place else "" for place in (old.network, self.network)]
            digests = short(was.weights) + ends[0], short(now.weights) + ends[1]
            found.append(Difference("network's digest", *digests))
        if was.resumed != now.resumed:
            first = short(was.resumed) or "none", short(now.resumed) or "none"
            found.append(Difference("checkpoint that it begins with", *first))
        return found + value_differences(
            {"version of the trainer": was.version}, {"version of the trainer": now.version}
        )


def read_order(path: Path, kind: type[_Order]) -> _Order:
    """Read a training order that a user may have touched.

    Raises:
        TrainingError: it is missing, or not an order.
    """
    hint = "run the build's command again, which writes it anew"
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TrainingError(
            f"the training order cannot be read ({error.strerror})", where=path, hint=hint
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise TrainingError(
            f"is not a training order ({key}: {first['msg']})", where=path, hint=hint
        ) from None


def lock_digest(path: str) -> str:
    """Return the digest of all keys that a `dataset.lock` holds, of items that train.

    Raises:
        TrainingError: it is missing or damaged.
    """
    lock = _lock(path)
    return str(lock.get("trained") or lock["digest"])


def lock_content(path: str) -> str:
    """Return the digest of all keys that a `dataset.lock` holds, of items held out too.

    Raises:
        TrainingError: it is missing or damaged.
    """
    return str(_lock(path)["digest"])


def _lock(path: str) -> dict[str, Any]:
    try:
        lock = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        lock = None
    if not isinstance(lock, dict) or not isinstance(lock.get("digest"), str):
        raise TrainingError(
            "the lock of the run's caches is missing or damaged",
            where=path,
            hint="delete it, and run the build's command again",
        )
    return lock


def caption_in(path: str) -> str:
    """Return the caption in the header of a cache file of text, in our layout or musubi-tuner's."""
    try:
        metadata = read_head(Path(path)).metadata
    except (OSError, ValueError) as error:
        raise CacheError(
            f"this cache file cannot be read ({error})",
            where=path,
            hint="delete it and run the build's command again, which encodes it anew",
        ) from None
    return (metadata.get("caption") or metadata.get("caption1") or "").strip()

"""Parts of an evaluation that are there already: of the last results, and of a killed process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from latentmake import digest
from latentmake.files import atomic, cachefile
from latentmake.training.evaluation import METRICS, Clip, Losses, Metrics

if TYPE_CHECKING:
    import torch

_FOLDER = ".parts"
_LATENTS = "latents"


class Parts:
    """Losses, clips and drawn latents in the folder of an evaluation, each by its key.

    Args:
        folder: of `metrics.json` and clips.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._losses: dict[str, Losses] = {}
        self._clips: dict[tuple[str, str], Clip] = {}
        self._known: set[str] = set()
        metrics = Metrics.read(folder / METRICS)
        for result in metrics.results if metrics else ():
            for losses in result.losses.values():
                self._losses[losses.key] = losses
            for clip in result.clips.values():
                self._known.add(clip.file)
                self._take(clip)
        for path in (folder / _FOLDER).glob("*.json"):
            try:
                values = json.loads(path.read_bytes())
                if "file" in values:
                    self._take(Clip.model_validate(values))
                else:
                    found = Losses.model_validate(values)
                    self._losses[found.key] = found
            except (OSError, ValueError, TypeError, ValidationError):
                continue  # it is made again

    def _take(self, clip: Clip) -> None:
        try:
            if digest.of_file(self._folder / clip.file) == clip.digest:
                self._clips[clip.key, clip.file] = clip
        except OSError:
            pass  # it is made again

    def losses(self, key: str) -> Losses | None:
        """Return the losses of a key, where they are known."""
        return self._losses.get(key)

    def clip(self, key: str, file: str) -> Clip | None:
        """Return the clip of a key in a file, where it is there."""
        return self._clips.get((key, file))

    def put_losses(self, losses: Losses) -> None:
        """Keep losses."""
        self._losses[losses.key] = losses
        atomic.write(self._path(losses.key, "json"), losses.model_dump_json().encode())

    def put_clip(self, clip: Clip) -> None:
        """Keep what is known of a clip that was written."""
        self._clips[clip.key, clip.file] = clip
        path = self._path(clip.key + clip.file, "json")
        atomic.write(path, clip.model_dump_json().encode())

    def latents(self, key: str) -> torch.Tensor | None:
        """Return the drawn latents of a clip, where they wait for the VAE."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self._path(key, "safetensors"))[_LATENTS]
        except (OSError, SafetensorError, KeyError):
            return None

    def put_latents(self, key: str, latents: torch.Tensor) -> None:
        """Keep the drawn latents of a clip until it is decoded."""
        data = cachefile.serialize({_LATENTS: latents}, {})
        atomic.write(self._path(key, "safetensors"), data)

    def _path(self, key: str, ending: str) -> Path:
        return self._folder / _FOLDER / f"{digest.of_bytes(key.encode())[:32]}.{ending}"

    def finish(self, metrics: Metrics) -> None:
        """Write the results, and remove what only a killed process would need and old clips."""
        metrics.write(self._folder / METRICS)
        for file in self._known - {clip.file for clip in metrics.clips()}:
            (self._folder / file).unlink(missing_ok=True)
        shutil.rmtree(self._folder / _FOLDER, ignore_errors=True)

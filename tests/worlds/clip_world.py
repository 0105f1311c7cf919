"""Orders for clips of videos, and an encoder that tells exactly which pixels it saw."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from item_world import work_of
from latentmake.base import digest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.reading import Sample
from latentmake.formats.readers import Readers
from latentmake.formats.video import probe
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Media, Span, clips, kept_indices
from latentmake.plan.orders import Order, Target, Work
from numpy.typing import NDArray
from safetensors.torch import load_file

MODEL = Model.model_validate({"vae": "vae", "text": ["t5"], "task": "t2v-1.3B-FC"})
SIZE = Size(64, 48)


def item_of(
    stem: str,
    path: Path,
    *,
    sizes: Sequence[Size] = (SIZE,),
    span: Span | None = None,
    control: Path | None = None,
    media: Media | None = None,
    **ways: Any,
) -> Work:
    """Return an item with a target for each clip and size."""
    if media is None:
        (media,) = probe(str(path))
    asked = Dataset.model_construct(**{"frame_extraction": "chunk", **ways})
    found = clips(media.frames, asked, span or Span(), media.timing)
    targets = tuple(
        Target(
            f"{size.width}x{size.height}",
            f"cache/{stem}_{clip.start:03}-{clip.frames:03}_{size.width}.safetensors",
            None,
            size,
            clip,
        )
        for size in sizes
        for clip in found
    )
    return work_of(
        stem, str(path), None, targets, (str(control),) if control else (), media=media, span=span
    )


def order_of(*items: Work, **dataset: Any) -> Order:
    """Return an order for clips, cropped to exactly the size of their targets."""
    settings = Dataset(**{"path": "data", "target_frames": [5], "fit": "crop", **dataset})
    return Order(
        kind="latents",
        dataset="waves",
        model="wan",
        dataset_settings=settings,
        model_settings=MODEL,
        recipe={"made": "for this test"},
        items=items,
    )


def fingerprint(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Return numbers that tell pixels from all others."""
    found = hashlib.sha256(str(pixels.shape).encode())
    found.update(np.ascontiguousarray(pixels).data)
    return torch.tensor([1, *found.digest()], dtype=torch.float32)


class Encoder:
    """Encodes clips to their fingerprints; `look` sees each batch before."""

    def __init__(self, look: Callable[[list[Sample]], object] = bool) -> None:
        self.stems: list[str] = []
        self.batches: list[int] = []
        self._look = look

    def __call__(self, samples: list[Sample]) -> list[tuple[dict[str, Any], dict[str, str]]]:
        self._look(samples)
        self.batches.append(len(samples))
        self.stems += [sample.item.stem for sample in samples]
        results = []
        for sample in samples:
            assert not isinstance(sample.content, str)
            tensors = {"latents": fingerprint(sample.content)}
            if sample.control is not None:
                tensors["control"] = fingerprint(sample.control)
            results.append((tensors, {}))
        return results


def whole(path: Path) -> list[NDArray[np.uint8]]:
    """Decode a video from its beginning to its end."""
    with av.open(str(path)) as file:
        return [np.array(frame.to_image()) for frame in file.decode(video=0)]


def check_caches(
    work: Work,
    frames: list[NDArray[np.uint8]],
    scaled: Callable[[NDArray[np.uint8], Size], NDArray[np.uint8]],
) -> int:
    """Compare all caches of an item with its decoded frames; return how many there are."""
    item, targets, _ = work
    assert item.media
    kept = [index for index, _ in kept_indices(len(frames), None, item.span or Span())]
    for target in targets:
        start, length, _ = target.clip or Clip(0, 1)
        chosen = [frames[index] for index in kept[start : start + length]]
        expected = np.stack([scaled(frame, target.size or SIZE) for frame in chosen])
        found = load_file(target.path)["latents"]
        assert torch.equal(found, fingerprint(expected)), target
    return len(targets)


def key_of(work: Work) -> str:
    """Return the digest of an item's source."""
    return digest.of_file(Path(work.item.source or ""))


class InProcess(Readers):
    """Reads in the process of the test."""

    def each(
        self, path: str, make: Callable[..., Iterator[Any]], *arguments: object
    ) -> Iterator[Any]:
        return (value for value in make(*arguments) if value is not None)

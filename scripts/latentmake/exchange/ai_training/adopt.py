"""Adoption of ai-training's files where encoding would give the same shapes.

No network is loaded: shape, dtype and values are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from latentmake.caches.inputs import Reading, caption_of
from latentmake.data.item import Item
from latentmake.errors import CacheError
from latentmake.exchange.adoption import File, OtherSizeError, OutdatedError, header_of
from latentmake.exchange.ai_training.export import from_bytes
from latentmake.exchange.shapes import Latents, Text
from latentmake.files import cachefile
from latentmake.geometry.buckets import Size
from latentmake.layouts import layout
from latentmake.plan.orders import Order
from latentmake.plan.target import Target

if TYPE_CHECKING:
    import torch


class AiTraining(NamedTuple):
    """Files beside the images of a run's datasets.

    Attributes:
        roots: dataset -> its folder.
        ending: of files of latents; None where none are adopted.
        latents: their channels, factor, scaling and shift; None likewise.
        texts: the text encoders, in order; none where no embeddings are adopted.
        sizes: the run's resolutions.
    """

    roots: dict[str, str]
    ending: str | None
    latents: Latents | None
    texts: list[Text]
    sizes: list[Size]
    careful: bool = False

    def takes(self, work: Order) -> bool:
        """Whether a kind is adopted."""
        return self.ending is not None if work.kind == "latents" else bool(self.texts)

    def candidates(self, work: Order, item: Item, target: Target) -> Iterator[tuple[Path, ...]]:
        """Yield the file of latents, or one of each text encoder, where all are there."""
        text = work.kind == "text"
        endings = [each.ending for each in self.texts] if text else [self.ending]
        paths = tuple(Path(f"{self.roots[work.dataset]}/{item.stem}{each}") for each in endings)
        if all(path.is_file() for path in paths):
            yield paths

    def name(self, work: Order, path: Path) -> str:
        """Return the path below the folder of the dataset."""
        return str(path).removeprefix(f"{self.roots[work.dataset]}/")

    def check(
        self, files: Sequence[File], work: Order, source: Reading, target: Target, key: str
    ) -> bool:
        """Check files; return whether they tell what they were made of: exports of ours do."""
        found = self._tensors(files, work)
        for file, tensor in zip(files, found, strict=True):
            if not tensor.isfinite().all():
                raise CacheError("holds values that are not finite", where=file.path)
            if not tensor.any():
                raise CacheError("holds nothing but zeros", where=file.path)
        if work.kind == "text":
            for file, tensor, text in zip(files, found, self.texts, strict=True):
                _check_text(file, tensor, text)
        else:
            self._check_latents(files[0], tuple(found[0].shape), work, source, target)
        ours = [header for file in files if (header := header_of(file.path)) is not None]
        if any(header.key != key for header in ours):
            what = f"is of what {source.item.name} held before it was edited"
            raise OutdatedError(what, where=files[0].path)
        return len(ours) == len(files)

    def _check_latents(
        self,
        file: File,
        found: tuple[int, ...],
        work: Order,
        source: Reading,
        target: Target,
    ) -> None:
        path, settings = source.item.source or "", work.dataset_settings
        assert self.latents is not None
        shapes: dict[Size, tuple[int, ...]] = {}
        for size in self.sizes:
            sides = work.layout.place(source.size, size, settings, path).target[::-1]
            shapes[size] = (
                self.latents.channels,
                *(side // self.latents.factor for side in sides),
            )
        if found not in shapes.values():
            wanted = " or ".join(str(list(each)) for each in dict.fromkeys(shapes.values()))
            raise CacheError(f"is {list(found)} and not {wanted}", where=file.path)
        if shapes[target.size or Size(0, 0)] != found:
            raise OtherSizeError("is of another resolution", where=file.path)

    def made(
        self, files: Sequence[File], work: Order, source: Reading, stamp: dict[str, str]
    ) -> bytes:
        """Return the cache file: the tensors under our names, in the model's dtype."""
        from latentmake.caches.encoders.device import DTYPES

        dtype, item, settings = str(work.recipe["dtype"]), source.item, work.dataset_settings
        tensors: dict[str, torch.Tensor] = {}
        for index, (file, tensor) in enumerate(zip(files, self._tensors(files, work), strict=True)):
            stored = tensor.to(DTYPES[dtype])
            if stored is not tensor and not stored.isfinite().all():
                raise CacheError(f"holds values too large for {dtype}", where=file.path)
            text = work.kind == "text"
            tensors[layout.hidden_state(index) if text else layout.LATENTS] = stored
        if work.kind == "text":
            metadata = {"caption": caption_of(source.data, item.source, settings)}
        else:
            assert self.latents is not None
            height, width = (
                side * self.latents.factor for side in tensors[layout.LATENTS].shape[1:]
            )
            scaling, shift = self.latents.scaling, self.latents.shift
            metadata = layout.plain_latents_metadata(scaling, shift, source.size, (width, height))
        return cachefile.serialize(tensors, {**metadata, **stamp})

    def _tensors(self, files: Sequence[File], work: Order) -> list[torch.Tensor]:
        padded = [work.kind == "text" and text.tokens.padded for text in self.texts] or [False]
        found = []
        for file, pads in zip(files, padded, strict=False):
            try:
                found.append(from_bytes(work.kind, pads, file.data))
            except CacheError as error:
                raise CacheError(error.what, where=file.path) from None
        return found


def _check_text(file: File, tensor: torch.Tensor, text: Text) -> None:
    shape, longest = tuple(tensor.shape), text.tokens.longest
    tokens = range(longest if text.tokens.padded else 1, longest + 1)
    if len(shape) == 2 and shape[0] in tokens and shape[1] == text.width:
        return
    wanted = longest if text.tokens.padded else f"1 to {longest}"
    raise CacheError(f"is {list(shape)} and not [{wanted}, {text.width}]", where=file.path)

"""Adoption of ai-training's files (github.com/ppbrown/ai-training), which `export` describes.

They are adopted where encoding would give the same shapes. No network is loaded: shape, dtype and
values are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from latentmake.caches.inputs import Reading, caption_of
from latentmake.errors import CacheError, ConfigError
from latentmake.exchange.adoption import OtherSizeError, OutdatedError, header_of
from latentmake.exchange.export import from_bytes, named_files
from latentmake.files import cachefile
from latentmake.geometry.buckets import Size
from latentmake.layouts import layout
from latentmake.models.shapes import Latents, Text, latents_shape, unknown_shape
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Target, Work

if TYPE_CHECKING:
    import torch


def plan_adopt(facts: Facts, name: str) -> AiTraining:
    """Return the files to adopt for a run's stale targets.

    Raises:
        ConfigError: it cannot be adopted.
        ModelError: a model's configuration cannot be read.
    """
    run = facts.config.runs[name]
    ending, texts = named_files(facts, name)
    for dataset in run.datasets:
        what = hint = ""
        if texts and facts.config.datasets[dataset].composed:
            what = f"the texts of {dataset} are not just what its caption files hold, as adopted "
            what += "embeddings are"
            hint = f"leave out models.{run.model}.ai_training.text, so that they are encoded"
        if facts.config.datasets[dataset].remote:
            what = f"the dataset {dataset} lies at a URL, and caches are adopted from folders on "
            what += "disk"
            hint = "copy it to a folder, or let its caches be encoded"
        if what:
            raise ConfigError(what, where=f"run {name}", hint=hint)
    latents = latents_shape(facts.config.models[run.model].vae) if ending else None
    if ending and latents is None:
        raise unknown_shape(f"models.{run.model}.vae")
    return AiTraining(
        roots={dataset: facts.scan(dataset).root for dataset in run.datasets},
        ending=ending,
        latents=latents,
        texts=texts,
        sizes=[Size(size.width, size.height) for size in run.resolutions],
    )


class AiTraining(NamedTuple):
    """Files beside the images of a run's datasets; see `adoption.Format`.

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

    def takes(self, order: Order) -> bool:
        """Whether a kind is adopted."""
        return self.ending is not None if order.kind == "latents" else bool(self.texts)

    def candidates(self, order: Order, work: Work, target: Target) -> Iterator[list[Path]]:
        """Yield the file of latents, or one of each text encoder, where all are there."""
        text, root = order.kind == "text", self.roots[order.dataset]
        endings = [each.ending for each in self.texts] if text else [self.ending]
        paths = [Path(f"{root}/{work.item.stem}{each}") for each in endings]
        if all(path.is_file() for path in paths):
            yield paths

    def check(
        self, files: Mapping[Path, bytes], order: Order, reading: Reading, target: Target, key: str
    ) -> bool:
        """Check files; return whether they tell what they were made of: exports of ours do."""
        found = self._tensors(files, order)
        for path, tensor in found.items():
            if not tensor.isfinite().all():
                raise CacheError("holds values that are not finite", where=path)
            if not tensor.any():
                raise CacheError("holds nothing but zeros", where=path)
        if order.kind == "text":
            for (path, tensor), text in zip(found.items(), self.texts, strict=True):
                _check_text(path, tuple(tensor.shape), text)
        else:
            (tensor,) = found.values()
            self._check_latents(tuple(tensor.shape), order, reading, target)
        ours = [header for path in files if (header := header_of(path)) is not None]
        if any(header.key != key for header in ours):
            raise OutdatedError(f"is of what {reading.work.item.name} held before it was edited")
        return len(ours) == len(files)

    def _check_latents(
        self, found: tuple[int, ...], order: Order, reading: Reading, target: Target
    ) -> None:
        assert self.latents is not None
        shapes: dict[Size, tuple[int, ...]] = {}
        for size in self.sizes:
            placed = order.layout.place(reading.size, size, order.dataset_settings)
            sides = (side // self.latents.factor for side in placed.target[::-1])
            shapes[size] = (self.latents.channels, *sides)
        if found not in shapes.values():
            wanted = " or ".join(str(list(each)) for each in dict.fromkeys(shapes.values()))
            raise CacheError(f"is {list(found)} and not {wanted}")
        if target.size is None or shapes[target.size] != found:
            raise OtherSizeError("is of another resolution")

    def made(
        self, files: Mapping[Path, bytes], order: Order, reading: Reading, stamp: dict[str, str]
    ) -> bytes:
        """Return the cache file: the tensors under our names, in the model's dtype."""
        from latentmake.caches.encoders.device import DTYPES

        dtype, text = str(order.recipe["dtype"]), order.kind == "text"
        tensors: dict[str, torch.Tensor] = {}
        for index, (path, tensor) in enumerate(self._tensors(files, order).items()):
            stored = tensor.to(DTYPES[dtype])
            if stored is not tensor and not stored.isfinite().all():
                raise CacheError(f"holds values too large for {dtype}", where=path)
            tensors[layout.hidden_state(index) if text else layout.LATENTS] = stored
        if text:
            caption = caption_of(reading.data, reading.work.item.source, order.dataset_settings)
            return cachefile.serialize(tensors, {"caption": caption, **stamp})
        assert self.latents is not None
        _, factor, scaling, shift = self.latents
        height, width = (side * factor for side in tensors[layout.LATENTS].shape[1:])
        metadata = layout.plain_latents_metadata(scaling, shift, reading.size, (width, height))
        return cachefile.serialize(tensors, {**metadata, **stamp})

    def _tensors(self, files: Mapping[Path, bytes], order: Order) -> dict[Path, torch.Tensor]:
        padded = [text.tokens.padded for text in self.texts] if order.kind == "text" else [False]
        found = {}
        for (path, data), pads in zip(files.items(), padded, strict=True):
            try:
                found[path] = from_bytes(order.kind, pads, data)
            except CacheError as error:
                raise CacheError(error.what, where=path) from None
        return found


def _check_text(path: Path, shape: tuple[int, ...], text: Text) -> None:
    longest = text.tokens.longest
    tokens = range(longest if text.tokens.padded else 1, longest + 1)
    if len(shape) != 2 or shape[0] not in tokens or shape[1] != text.width:
        wanted = longest if text.tokens.padded else f"1 to {longest}"
        raise CacheError(f"is {list(shape)} and not [{wanted}, {text.width}]", where=path)

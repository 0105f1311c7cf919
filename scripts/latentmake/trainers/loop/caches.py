"""Cache files of a manifest's items: headers are read at once, contents batch by batch.

Contents are not kept in memory. The operating system caches the files, once for all processes, so
reading a file again costs little more than a copy.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from latentmake.base.errors import CacheError, TrainingError
from latentmake.base.regular import read_regular
from latentmake.formats.cachefile import KEY, ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.formats.integrity import FLOATS, verify
from latentmake.formats.safetensors import Head, read_head
from latentmake.geometry.buckets import Size, cover
from latentmake.layouts.names import encoder_name, hidden_state
from latentmake.runs.rows import Row, rows_of


class Batch(NamedTuple):
    """Examples of one shape.

    Attributes:
        latents: tensor [batch, channels, height, width] or [batch, channels, frames, height,
            width], float32, scaled for the network.
        text: tensor [batch, tokens, width] in the dtype of the caches, or float32 if they differ;
            shorter embeddings end in zeros.
        mask: tensor [batch, tokens], True where there is a token; None if all have equal length.
        indices: indices of the examples.
        more: further tensors [batch, ...] by name, in the dtype of the caches.
        weights: factors of the examples' losses, [batch], float32; None if all are 1.
    """

    latents: torch.Tensor
    text: torch.Tensor
    mask: torch.Tensor | None
    indices: Sequence[int] = ()
    more: Mapping[str, torch.Tensor] = {}
    weights: torch.Tensor | None = None

    def pinned(self) -> Batch:
        """Return a copy in pinned memory, which is copied to a GPU faster."""
        fields = self._asdict().items()
        tensors: dict[str, Any] = {
            name: value.pin_memory() for name, value in fields if torch.is_tensor(value)
        }
        more = {name: tensor.pin_memory() for name, tensor in self.more.items()}
        return self._replace(**tensors, more=more)


def copied(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy a tensor to a device. If it lies in pinned memory, the CPU does not wait for the copy.

    The dtype is changed on the device, because a converted tensor would no longer be pinned.
    """
    there = tensor.to(device, non_blocking=device.type != "mps")
    return there if dtype is None else there.to(dtype)


def pad(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack embeddings [tokens, width] of different lengths, with zeros at the ends.

    Returns:
        Embeddings [batch, most tokens, width], and their mask [batch, most tokens], which is None
        if all have equal length.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    lengths = [len(text) for text in texts]
    if len(set(lengths)) == 1:
        return padded, None
    return padded, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


HINT = "delete it and run the build's command again, which encodes it anew"
FORM = r"(_\d+x\d+x\d+)?(_b?float\w+)?"
"""Regular expression of the shape and dtype that musubi-tuner appends to a tensor's name."""

_THREADS = 8  # threads that read headers; a disk or a network serves several reads at once
_CHUNK = 256  # files that a thread takes at a time
_AHEAD = 4  # batches read before they are needed, for each thread


class CacheTensors(NamedTuple):
    """Tensors that a training reads from the cache files of a layout.

    Both mappings go from the name of a tensor, without the shape and dtype that musubi-tuner
    appends, to the number of its dimensions.

    Attributes:
        latents: tensors of a file of latents: first [channels, (frames,) height, width].
        text: tensors of a file of text: hidden states [tokens, width], and perhaps a vector
            [width].
        scaled: whether the scale is read from the header of the latents.
    """

    latents: Mapping[str, int]
    text: Mapping[str, int]
    scaled: bool = False


PLAIN = CacheTensors({"latents": 3}, {hidden_state(0): 2}, scaled=True)
_SECOND = {hidden_state(1): 2, f"{encoder_name(1)}.pooled": 1}
SDXL = PLAIN._replace(text={**PLAIN.text, **_SECOND})
WAN = CacheTensors({"latents": 4}, {"varlen_t5": 2})
"""Tensors of musubi-tuner's caches. Their latents are already scaled for the network."""


class CacheFile(NamedTuple):
    """A cache file, and the tensors that are read from it.

    Attributes:
        path: path of the file.
        tensors: names of the tensors and their shapes; the first are the latents, or the text.
        scaling: factor of the latents: the network sees (latents - shift) * scaling; 1 for text.
        shift: shift in this formula; 0 for text.
        pixels: image pixels per column of the latents; 1 for text.
        time_ids: SDXL's conditions (section 2.2 of https://arxiv.org/abs/2307.01952): height and
            width of the image, top and left of the crop, height and width of the crop, in pixels.
        key: key of the target, from the header.
    """

    path: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    scaling: float = 1.0
    shift: float = 0.0
    pixels: float = 1.0
    time_ids: tuple[float, ...] = ()
    key: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, (frames,) height and width; of text: tokens, and width of all hidden states."""
        first, *others = (shape for _, shape in self.tensors)
        if len(first) > 2:
            return first
        return first[0], first[1] + sum(shape[1] for shape in others if len(shape) == 2)

    def read(self) -> list[torch.Tensor]:
        """Return the tensors as they are stored.

        The file may have been written again since its header was read, with the same shapes.

        Raises:
            CacheError: the file is missing or damaged, or has other shapes now.
        """
        with naming(self.path):
            values = load(read_regular(self.path, None))
        if any(name not in values or values[name].shape != shape for name, shape in self.tensors):
            what = "has another shape than when the training began"
            raise CacheError(what, where=self.path, hint="run the build's command again")
        return [values[name] for name, _ in self.tensors]


class Example(NamedTuple):
    """An item at one resolution, or one of its clips.

    Attributes:
        latents: cache file of the latents.
        text: cache file of the caption's embedding.
        repeats: how often an epoch shows the example.
        weight: factor of its loss.
    """

    latents: CacheFile
    text: CacheFile
    repeats: int
    weight: float = 1.0


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn errors of reading a cache file into a CacheError that names the file."""
    try:
        yield
    except FileNotFoundError:
        hint = "run the build's command again, which encodes it anew"
        raise CacheError("this cache file is missing", where=path, hint=hint) from None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        what = f"this cache file cannot be read ({error})"
        raise CacheError(what, where=path, hint=HINT) from None


def _find(head: Head, name: str, dimensions: int) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's name and shape in a file; a ValueError says why it does not fit."""
    entry = next((entry for entry in head.entries if re.fullmatch(name + FORM, entry)), None)
    if entry is None:
        raise ValueError(f"has no tensor `{name}`")
    dtype, shape, *_ = head.tensors[entry]
    if len(shape) != dimensions or 0 in shape:
        raise ValueError(f"`{entry}` has the shape {list(shape)}")
    if dtype not in FLOATS:
        raise ValueError(f"`{entry}` is stored as {dtype}")
    return entry, shape


def inspect(path: str, wanted: Mapping[str, int], *, scaled: bool = False) -> CacheFile:
    """Read the header of a cache file and find tensors in it; if `scaled`, read their scale too.

    Raises:
        CacheError: the file is missing or damaged, or lacks a tensor or its scale.
    """
    with naming(path):
        head = read_head(path)
        tensors = tuple(_find(head, *tensor) for tensor in wanted.items())
        stored = CacheFile(path, tensors, key=head.metadata.get(KEY, ""))
        if not scaled:
            return stored
        names = ("scaling_factor", "shift_factor", "pixel_width", "pixel_height")
        sides = (ORIGINAL_WIDTH, ORIGINAL_HEIGHT)
        numbers = (float(head.metadata.get(name, 0)) for name in (*names, *sides))
        scaling, shift, width, height, *original = numbers
        _, rows, columns = stored.shape
        if width * rows != height * columns:
            raise ValueError(f"has latents {list(stored.shape)} of {width:g} x {height:g} pixels")
        if not scaling:
            raise ValueError("has no number `scaling_factor` in its header")
        target = Size(int(width), int(height))
        image = Size(*map(int, original)) if all(original) else target
        _, left, top, _ = cover(image, target, sys.maxsize)
        return stored._replace(
            scaling=scaling,
            shift=shift,
            pixels=width / columns,
            time_ids=(image.height, image.width, top, left, height, width),
        )


def inspect_all(
    paths: Iterable[str], wanted: Mapping[str, int], *, scaled: bool = False
) -> dict[str, CacheFile]:
    """Return path -> cache file; headers are read in several threads. See `inspect`."""
    distinct = list(dict.fromkeys(paths))
    chunks = [distinct[start : start + _CHUNK] for start in range(0, len(distinct), _CHUNK)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headers") as pool:
        files = pool.map(
            lambda chunk: [inspect(path, wanted, scaled=scaled) for path in chunk], chunks
        )
        return {file.path: file for chunk in files for file in chunk}


def check_bytes(path: str) -> None:
    """Compare a cache file with the checksums in its header, if it has any; raises CacheError."""
    with naming(path):
        checked = verify(path, values=False)
    if checked.has_checksum and checked.damage is not None:
        what = f"this cache file is damaged: {checked.damage}"
        raise CacheError(what, where=path, hint=HINT)


def joined(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a caption by name.

    `text` [tokens, width] has the hidden states of all encoders side by side. If one of the tensors
    is a vector [width], it is `text_embeds`.
    """
    states = [tensor for tensor in tensors if tensor.ndim == 2]
    named = {"text": torch.cat(states, dim=1) if states[1:] else states[0]}
    if len(states) < len(tensors):
        named["text_embeds"] = tensors[-1]
    return named


def read_text(path: str, tensors: CacheTensors) -> dict[str, torch.Tensor]:
    """Return the tensors of a cache file of text by name, see `joined`; float32.

    Raises:
        CacheError: the file is missing or damaged, or holds NaN or infinite values.
    """
    check_bytes(path)
    embedding = [tensor.float() for tensor in inspect(path, tensors.text).read()]
    if not _is_finite(embedding):
        raise CacheError("holds NaN or infinite values", where=path, hint=HINT)
    return joined(embedding)


def read_items(manifest: Path, *, held_out: bool = False) -> list[Row]:
    """Read the items to train on, or the held-out items; raises TrainingError if there are none."""
    if items := [row for row in rows_of(manifest) if row.validation == held_out]:
        return items
    what, hint = "nothing to train on: all items were skipped", "see the run's datasets"
    if held_out:
        what = "the manifest names no item held out of training"
        hint = "set `validation: {items: 16}` of the run"
    raise TrainingError(what, where=manifest, hint=hint)


class Caches:
    """Cache files of a manifest's items.

    Their headers are read at once, their contents when a batch needs them.

    Args:
        items: rows of the manifest.
        tensors: tensors to read from each file.
        root: folder to which the paths in the manifest are relative; by default the working
            directory.
        resolution: resolution to read; by default all resolutions of the items.
        prior_loss_weight: factor of the loss of regularisation images.

    Attributes:
        examples: each clip of each item at each resolution, with the first variant of its text;
            after these, the same latents with the other variants.
        rows: row of the manifest of each example with the first variant.
        resolutions: resolution of each example with the first variant.
        variants: index of an example -> indices of the examples with all variants of its text, for
            items with several variants.
        channels: channels of all latents.
        text_width: width of all embeddings.

    Raises:
        CacheError: a file is missing or damaged.
    """

    def __init__(
        self,
        items: Iterable[Row],
        tensors: CacheTensors = PLAIN,
        *,
        root: str = "",
        resolution: str | None = None,
        prior_loss_weight: float = 1.0,
    ) -> None:
        self._names = [*tensors.latents]
        self._sized = len(tensors.text) > 1
        self._checked: set[str] = set()
        named = [
            (row, size, path)
            for row in items
            for size in sorted(row.latents)
            if resolution in (None, size)
            for path in row.latents_at(size)
        ]
        several = [row.texts_at(size) for row, size, _ in named]
        within = partial(os.path.join, root)  # an absolute path stays as it is
        latents = inspect_all(
            (within(path) for *_, path in named), tensors.latents, scaled=tensors.scaled
        )
        texts = inspect_all(map(within, chain.from_iterable(several)), tensors.text)
        self.rows = [row for row, *_ in named]
        self.resolutions = [size for _, size, _ in named]
        self.examples = [
            Example(
                latents[within(path)],
                texts[within(text)],
                row.repeats,
                prior_loss_weight if row.is_reg else 1.0,
            )
            for (row, _, path), (text, *_) in zip(named, several, strict=True)
        ]
        self._weighted = any(example.weight != 1 for example in self.examples)
        self.channels = self.examples[0].latents.shape[0]
        self.text_width = self.examples[0].text.shape[1]
        self.variants: dict[int, list[int]] = {}
        for index, (_, *others) in enumerate(several):
            if others:
                first, like = len(self.examples), self.examples[index]
                self.examples += [like._replace(text=texts[within(path)]) for path in others]
                self.variants[index] = [index, *range(first, len(self.examples))]

    def __len__(self) -> int:
        """Return the number of examples, not counting other variants of their texts."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Read the tensors of an example, by name.

        These are `latents`, scaled for the network, and `text`; for SDXL also `text_embeds` and
        `time_ids` [6], see `CacheFile`.

        Raises:
            CacheError: a file is missing or damaged.
        """
        example = self.examples[index]
        for path in (example.latents.path, example.text.path):
            if path not in self._checked:
                check_bytes(path)
                self._checked.add(path)
        tensors = dict(zip(self._names, example.latents.read(), strict=True))
        scaled = tensors["latents"].float().sub_(example.latents.shift)
        tensors["latents"] = scaled.mul_(example.latents.scaling)
        sizes = {"time_ids": torch.tensor(example.latents.time_ids)} if self._sized else {}
        return tensors | joined(example.text.read()) | sizes

    def batch(self, indices: Sequence[int], *, pin: bool = False) -> Batch:
        """Read examples of one shape; if `pin`, into pinned memory."""
        items = [self[index] for index in indices]
        texts = [item.pop("text") for item in items]
        if len({text.dtype for text in texts}) > 1:
            texts = [text.float() for text in texts]
        more = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        latents, (text, mask) = more.pop("latents"), pad(texts)
        weights = [self.examples[index].weight for index in indices] if self._weighted else None
        weighted = None if weights is None else torch.tensor(weights)
        batch = Batch(latents, text, mask, indices, more, weighted)
        return batch.pinned() if pin else batch

    def prefetched(
        self, batches: Iterable[Sequence[int]], *, threads: int = 1, pin: bool = False
    ) -> Generator[Batch, None, None]:
        """Yield batches in their order; threads (at least one) read ahead."""
        threads, remaining = max(1, threads), iter(batches)
        read = partial(self.batch, pin=pin)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="caches")
        try:
            first = islice(remaining, _AHEAD * threads)
            waiting = deque(pool.submit(read, indices) for indices in first)
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(pool.submit(read, indices) for indices in islice(remaining, 1))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def find_not_finite(caches: Caches, indices: Iterable[int]) -> list[str]:
    """Return the paths of the examples' files that hold NaN or infinite values, without repetition.

    Encoders do not write such values, and a search in every batch would take time. A training
    therefore searches only when its loss is NaN or infinite.
    """
    examples = [caches.examples[index] for index in indices]
    files = {file.path: file for example in examples for file in (example.latents, example.text)}
    return [path for path, file in files.items() if not _is_finite(file.read())]


def _is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

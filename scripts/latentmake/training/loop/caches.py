"""Items of a manifest and their cache files: headers at once, content batch by batch.

Files are read when their batch comes: the system keeps them in memory as far as they fit, once for
all processes, and reading them again costs little more than a copy.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from latentmake.errors import CacheError, TrainingError
from latentmake.files.cachefile import KEY, ORIGINAL_HEIGHT, ORIGINAL_WIDTH
from latentmake.files.check import verify
from latentmake.files.safetensors import DTYPES, Head, read_head
from latentmake.geometry.buckets import Size, cover
from latentmake.layouts.tensors import encoder_name, hidden_state
from latentmake.regular import read_regular
from latentmake.training.rows import Row, rows_of


class Batch(NamedTuple):
    """Examples of one shape.

    Attributes:
        latents: [batch, channels, height, width], or [batch, channels, frames, height, width];
            float32, as the network sees them.
        text: [batch, tokens, width], in the caches' number format, float32 where they differ;
            shorter embeddings end in zeros.
        mask: [batch, tokens], True where a token is; None where all have equal length.
        indices: of the examples.
        more: further tensors [batch, ...] by name, in the caches' number format.
        weights: factor of the loss of each example, [batch], float32; None where all are 1.
    """

    latents: torch.Tensor
    text: torch.Tensor
    mask: torch.Tensor | None
    indices: Sequence[int] = ()
    more: Mapping[str, torch.Tensor] = {}
    weights: torch.Tensor | None = None

    def pinned(self) -> Batch:
        """Return a copy in pinned memory, from which a GPU takes it faster."""
        fields = self._asdict().items()
        tensors: dict[str, Any] = {x: y.pin_memory() for x, y in fields if torch.is_tensor(y)}
        more = {name: each.pin_memory() for name, each in self.more.items()}
        return self._replace(**tensors, more=more)


def copied(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy a tensor to a device; the CPU does not wait for it where it lies in pinned memory.

    The dtype is changed on the device: changed before, the tensor would no longer be pinned.
    """
    there = tensor.to(device, non_blocking=device.type != "mps")
    return there if dtype is None else there.to(dtype)


def pad(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack embeddings [tokens, width] of different lengths, with zeros at the ends.

    Returns:
        [batch, most tokens, width], and their mask [batch, most tokens]; None where all have equal
        length.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    lengths = [len(text) for text in texts]
    if len(set(lengths)) == 1:
        return padded, None
    return padded, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


HINT = "delete it and run the build's command again, which encodes it anew"
FORM = r"(_\d+x\d+x\d+)?(_b?float\w+)?"
"""Regular expression of shape and dtype, which musubi-tuner has behind a tensor's name."""

_THREADS = 8  # that read headers: a disk or a network answers several at once
_CHUNK = 256  # files a thread takes at a time
_AHEAD = 4  # batches read before they are needed, for each thread


class Sought(NamedTuple):
    """A tensor to find in cache files: its name without shape and dtype, its number of sides."""

    name: str
    dimensions: int

    def find(self, head: Head) -> tuple[str, tuple[int, ...]]:
        """Return its name and shape in a file; a ValueError says that it is not there."""
        name = next((each for each in head.entries if re.fullmatch(self.name + FORM, each)), None)
        if name is None:
            raise ValueError(f"has no tensor `{self.name}`")
        dtype, shape, *_ = head.tensors[name]
        if len(shape) != self.dimensions or 0 in shape:
            raise ValueError(f"`{name}` has the shape {list(shape)}")
        if dtype not in DTYPES or not DTYPES[dtype].exponent:
            raise ValueError(f"`{name}` is stored as {dtype}")
        return name, shape


class CacheTensors(NamedTuple):
    """Tensors that a training reads from the cache files of a layout.

    Attributes:
        latents: of one file: [channels, (frames,) height, width], then further ones.
        text: of one file: hidden states [tokens, width], and a vector [width] where there is one.
        scaled: whether the header of the latents has their scale.
    """

    latents: tuple[Sought, ...]
    text: tuple[Sought, ...]
    scaled: bool = False


PLAIN = CacheTensors((Sought("latents", 3),), (Sought(hidden_state(0), 2),), scaled=True)
_SECOND = Sought(hidden_state(1), 2), Sought(f"{encoder_name(1)}.pooled", 1)
SDXL = PLAIN._replace(text=(*PLAIN.text, *_SECOND))
WAN = CacheTensors((Sought("latents", 4),), (Sought("varlen_t5", 2),))
"""Of musubi-tuner's caches, whose latents are scaled already."""


class Stored(NamedTuple):
    """A cache file, with the tensors in it that are read.

    Attributes:
        found: names of the tensors and their shapes; the first are the latents, or the text.
        scaling: the network sees (x - shift) * scaling; 1 for text.
        shift: see there; 0 for text.
        pixels: image pixels per column of the latents; None where the file does not say.
        time_ids: height and width of the image, top and left of the crop, height and width of the
            crop in pixels: SDXL's conditions (section 2.2 of https://arxiv.org/abs/2307.01952).
        key: of the build, in its header.
    """

    path: str
    found: tuple[tuple[str, tuple[int, ...]], ...]
    scaling: float = 1.0
    shift: float = 0.0
    pixels: float | None = None
    time_ids: tuple[float, ...] = ()
    key: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, (frames,) height, width; or tokens, width of all hidden states together."""
        first, *others = (shape for _, shape in self.found)
        if len(first) > 2:
            return first
        return first[0], first[1] + sum(shape[1] for shape in others if len(shape) == 2)

    def read(self) -> list[torch.Tensor]:
        """Return the tensors as they are stored, also in a file written anew, of the same shapes.

        Raises:
            CacheError: the file is missing or damaged, or has other shapes now.
        """
        with naming(self.path):
            tensors = load(read_regular(self.path, None))
        if any(name not in tensors or tensors[name].shape != shape for name, shape in self.found):
            what = "has another shape than when the training began"
            raise CacheError(what, where=self.path, hint="run the build's command again")
        return [tensors[name] for name, _ in self.found]


class Example(NamedTuple):
    """An item at one resolution, or one of its clips.

    An epoch shows it `repeats` times. `weight` is the factor of its loss.
    """

    latents: Stored
    text: Stored
    repeats: int
    weight: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, (frames,) height and width of its latents."""
        return self.latents.shape


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Raise a CacheError that names a cache file where reading it shows that it is damaged."""
    try:
        yield
    except FileNotFoundError:
        hint = "run the build's command again, which encodes it anew"
        raise CacheError("this cache file is missing", where=path, hint=hint) from None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        what = f"this cache file cannot be read ({error})"
        raise CacheError(what, where=path, hint=HINT) from None


def inspect(path: str, sought: Iterable[Sought], *, scaled: bool = False) -> Stored:
    """Read the header of a cache file and find tensors in it, latents with their scale.

    Raises:
        CacheError: the file is missing or damaged, or lacks a tensor or its scale.
    """
    with naming(path):
        head = read_head(path)
        found = tuple(each.find(head) for each in sought)
        stored = Stored(path, found, key=head.metadata.get(KEY, ""))
        if not scaled:
            return stored
        names = ("scaling_factor", "shift_factor", "pixel_width", "pixel_height")
        sides = (ORIGINAL_WIDTH, ORIGINAL_HEIGHT)
        numbers = (float(head.metadata.get(name, 0)) for name in (*names, *sides))
        scaling, shift, width, height, *original = numbers
        _, rows, columns = stored.shape
        if height and width * rows != height * columns:
            raise ValueError(f"has latents {list(stored.shape)} of {width:g} x {height:g} pixels")
        if not scaling:
            raise ValueError("has no number `scaling_factor` in its header")
        target = Size(int(width), int(height))
        image = Size(*map(int, original)) if all(original) else target
        _, left, top, _ = cover(image, target, sys.maxsize)
        return stored._replace(
            scaling=scaling,
            shift=shift,
            pixels=width / columns or None,
            time_ids=(image.height, image.width, top, left, height, width),
        )


def inspect_all(
    paths: Iterable[str], sought: Collection[Sought], *, scaled: bool = False
) -> dict[str, Stored]:
    """Read the headers of many cache files, each once, several at a time; see `inspect`."""
    distinct = list(dict.fromkeys(paths))
    chunks = [distinct[start : start + _CHUNK] for start in range(0, len(distinct), _CHUNK)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headers") as pool:
        found = pool.map(
            lambda chunk: [inspect(path, sought, scaled=scaled) for path in chunk], chunks
        )
        return {each.path: each for chunk in found for each in chunk}


def check_bytes(path: str) -> None:
    """Compare a cache file with the checksums in its header, if it has any; raises CacheError."""
    with naming(path):
        checked = verify(path, values=False)
    if checked.has_checksum and checked.damage is not None:
        what = f"this cache file is damaged: {checked.damage}"
        raise CacheError(what, where=path, hint=HINT)


def joined(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a caption's tensors by name.

    `text` [tokens, width] are the hidden states of all encoders side by side; `text_embeds`
    [width] is there where a vector is read.
    """
    states = [each for each in tensors if each.ndim == 2]
    found = {"text": torch.cat(states, dim=1) if states[1:] else states[0]}
    return found | ({} if len(states) == len(tensors) else {"text_embeds": tensors[-1]})


def read_text(path: str, tensors: CacheTensors) -> dict[str, torch.Tensor]:
    """Return the embedding in a cache file of text, float32; see `joined`; raises CacheError."""
    check_bytes(path)
    found = [each.float() for each in inspect(path, tensors.text).read()]
    if not _is_finite(found):
        raise CacheError("holds NaN or infinite values", where=path, hint=HINT)
    return joined(found)


def read_items(manifest: Path, *, held_out: bool = False) -> list[Row]:
    """Read the items to train on, or those held out, without skipped ones; raises TrainingError."""
    if items := [row for row in rows_of(manifest) if row.validation == held_out]:
        return items
    what, hint = "nothing to train on: all items were skipped", "see the run's datasets"
    if held_out:
        what = "the manifest names no item held out of training"
        hint = "set `validation: {items: 16}` of the run"
    raise TrainingError(what, where=manifest, hint=hint)


class Caches:
    """Cache files of a manifest's items: headers at once, content when a batch needs it.

    Args:
        items: of the manifest.
        tensors: what to read of each file.
        root: folder that the paths in the manifest are below; by default the working directory.
        resolution: of the items' resolutions the one to read; by default all of them.
        prior_loss_weight: factor of the loss of regularisation images.

    Attributes:
        examples: each item at each resolution; behind them, the same with further variants of
            their texts.
        rows: the item of each of the former.
        resolutions: its resolution.
        variants: example -> itself and those with other variants, where there are several.
        channels: of all latents.
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
        self._names = [each.name for each in tensors.latents]
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
        within = partial(os.path.join, root)  # but where a path is absolute
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
        self._weighted = any(each.weight != 1 for each in self.examples)
        self.channels = self.examples[0].latents.shape[0]
        self.text_width = self.examples[0].text.shape[1]
        self.variants: dict[int, list[int]] = {}
        for index, (_, *others) in enumerate(several):
            if others:
                first, like = len(self.examples), self.examples[index]
                self.examples += [like._replace(text=texts[within(path)]) for path in others]
                self.variants[index] = [index, *range(first, len(self.examples))]

    def __len__(self) -> int:
        """Return the number of examples without those of further variants."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Read the tensors of an example by name: `latents` as the network sees them, `text`.

        For SDXL also `text_embeds`, and `time_ids` [6], see `Stored`.

        Raises:
            CacheError: a file has become damaged.
        """
        example = self.examples[index]
        for path in (example.latents.path, example.text.path):
            if path not in self._checked:
                check_bytes(path)
                self._checked.add(path)
        found = dict(zip(self._names, example.latents.read(), strict=True))
        scaled = found["latents"].float().sub_(example.latents.shift)
        found["latents"] = scaled.mul_(example.latents.scaling)
        sizes = {"time_ids": torch.tensor(example.latents.time_ids)} if self._sized else {}
        return found | joined(example.text.read()) | sizes

    def batch(self, indices: Sequence[int], *, pin: bool = False) -> Batch:
        """Read the examples of these indices, all of one shape, into pinned memory if asked."""
        items = [self[index] for index in indices]
        texts = [each.pop("text") for each in items]
        if len({each.dtype for each in texts}) > 1:
            texts = [each.float() for each in texts]
        more = {name: torch.stack([each[name] for each in items]) for name in items[0]}
        latents, (text, mask) = more.pop("latents"), pad(texts)
        weights = [self.examples[index].weight for index in indices] if self._weighted else None
        weighted = None if weights is None else torch.tensor(weights)
        batch = Batch(latents, text, mask, indices, more, weighted)
        return batch.pinned() if pin else batch

    def prefetched(
        self, batches: Iterable[Sequence[int]], *, threads: int = 1, pin: bool = False
    ) -> Generator[Batch, None, None]:
        """Read batches in threads (at least one) ahead of their use; yield them in their order."""
        threads, remaining = max(1, threads), iter(batches)
        read = partial(self.batch, pin=pin)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="caches")
        try:
            waiting = deque(pool.submit(read, each) for each in islice(remaining, _AHEAD * threads))
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(pool.submit(read, each) for each in islice(remaining, 1))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def find_not_finite(caches: Caches, indices: Iterable[int]) -> list[str]:
    """Return the paths of the examples' files that hold NaN or infinite values, each once.

    No encoder of the build writes such values, and a search at every batch would take time: a
    training searches only when its loss is NaN or infinite.
    """
    examples = [caches.examples[index] for index in indices]
    files = {each.path: each for example in examples for each in (example.latents, example.text)}
    return [path for path, file in files.items() if not _is_finite(file.read())]


def _is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

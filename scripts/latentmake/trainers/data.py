"""What a trainer reads: the items its manifest names, and nothing else.

The caches of a small dataset stay in memory; those of a large one are read when their batch comes,
in a thread of its own while the network computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from latentmake.errors import CacheError, TrainingError

__all__ = [
    "HIDDEN_STATE",
    "Batch",
    "Caches",
    "Example",
    "Item",
    "Scale",
    "pad",
    "prefetched",
    "read_items",
    "read_scale",
    "read_text",
]

HIDDEN_STATE = "text_encoder.hidden_state"
_MEMORY = 2 << 30  # bytes of caches that are kept in memory
_AHEAD = 3  # batches read before they are needed
_MEND = "delete it and give the build's command again, which encodes it anew"


class Item(BaseModel):
    """One line of a manifest; an item set aside has a reason instead of caches."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dataset: str
    stem: str
    source: str
    repeats: int = Field(1, ge=1)
    latents: dict[str, str] = {}
    text: str = ""
    aside: str | None = None


class Example(NamedTuple):
    """An item at one resolution: what a batch is made of.

    Attributes:
        shape: channels, height and width of its latents.
        repeats: how often an epoch shows it.
    """

    latents: Path
    text: Path
    shape: tuple[int, int, int]
    repeats: int


class Batch(NamedTuple):
    """Examples of one shape.

    Attributes:
        latents: [batch, channels, height, width], float32, as the network sees them.
        text: [batch, tokens, width], float32; shorter embeddings end in zeros.
        mask: [batch, tokens], True where a token is; None where all have equal length.
        indices: which examples these are.
    """

    latents: torch.Tensor
    text: torch.Tensor
    mask: torch.Tensor | None
    indices: tuple[int, ...] = ()


class Scale(NamedTuple):
    """How cached latents relate to the network's, (x - shift) * scaling, and to pixels.

    Attributes:
        pixels: how many pixels wide one latent is; None where the file does not say.
    """

    scaling: float
    shift: float
    pixels: float | None


def read_items(manifest: Path) -> list[Item]:
    """Read the items to train on, without those set aside.

    Raises:
        TrainingError: the manifest is missing, damaged or empty.
    """
    mend = "give the build's command again, which writes it anew"
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise TrainingError("the manifest cannot be read", where=manifest, mend=mend) from None
    items: list[Item] = []
    aside = 0
    for number, line in enumerate(lines, 1):
        try:
            item = Item.model_validate_json(line)
            if item.aside is None and not (item.latents and item.text):
                raise ValueError("caches are missing")
        except (ValidationError, ValueError):
            raise TrainingError(
                f"line {number} of the manifest is damaged", where=manifest, mend=mend
            ) from None
        if item.aside is None:
            items.append(item)
        else:
            aside += 1
    if not items:
        what = f"all {aside} items were set aside" if aside else "the manifest has no items"
        raise TrainingError(
            f"nothing to train on: {what}", where=manifest, mend="see the run's datasets"
        )
    return items


def _damaged(path: Path, error: Exception) -> CacheError:
    if isinstance(error, FileNotFoundError):
        return CacheError(
            "this cache file is missing",
            where=path,
            mend="give the build's command again, which encodes it anew",
        )
    return CacheError(f"this cache file cannot be read ({error})", where=path, mend=_MEND)


def _number(metadata: dict[str, str], key: str, path: Path, default: str | None = None) -> float:
    try:
        return float(metadata.get(key, default) or "")
    except ValueError:
        raise CacheError(f"has no number `{key}` in its header", where=path, mend=_MEND) from None


def _finite(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    if not torch.isfinite(tensor).all():
        raise CacheError("holds values that are no numbers", where=path, mend=_MEND)
    return tensor


def _read_latents(path: Path) -> torch.Tensor:
    """Return latents [channels, height, width] as the network sees them: (x - shift) * scaling."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            latents: torch.Tensor = file.get_tensor("latents").float()
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None
    shift = _number(metadata, "shift_factor", path, "0.0")
    scaling = _number(metadata, "scaling_factor", path)
    return _finite((latents - shift) * scaling, path)


def read_text(path: Path) -> torch.Tensor:
    """Return the embedding [tokens, width] of the first text encoder, float32.

    Raises:
        CacheError: it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return _finite(file.get_tensor(HIDDEN_STATE).float(), path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None


def _shape(path: Path, name: str, dimensions: int) -> tuple[int, ...]:
    try:
        with safe_open(path, framework="pt") as file:
            shape = tuple(int(side) for side in file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None
    if len(shape) != dimensions:
        raise CacheError(f"`{name}` has the shape {list(shape)}", where=path, mend=_MEND)
    return shape


def read_scale(path: Path) -> Scale:
    """Read how the latents of a cache file relate to the network's and to pixels.

    Raises:
        CacheError: it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            width = int(file.get_slice("latents").get_shape()[-1])
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None
    pixels = _number(metadata, "pixel_width", path) if "pixel_width" in metadata else None
    return Scale(
        _number(metadata, "scaling_factor", path),
        _number(metadata, "shift_factor", path, "0.0"),
        pixels / width if pixels else None,
    )


def pad(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack embeddings of different lengths.

    Args:
        texts: each [tokens, width].

    Returns:
        [batch, most tokens, width] with zeros at the ends, and the mask [batch, most tokens] that
        is True where a token is; no mask where all have equal length.
    """
    lengths = torch.tensor([len(text) for text in texts])
    longest = int(lengths.max())
    if bool((lengths == longest).all()):
        return torch.stack(list(texts)), None
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    return padded, torch.arange(longest)[None, :] < lengths[:, None]


class Caches:
    """The cache files of a manifest: their shapes at once, their content when a batch needs it.

    Attributes:
        examples: an entry for each item at each resolution.
        text_width: width of all embeddings.
        channels: channels of all latents.

    Raises:
        CacheError: a file is missing or damaged, or its width or channels differ from the others'.
    """

    def __init__(self, items: Sequence[Item], memory: int = _MEMORY) -> None:
        texts = dict.fromkeys(Path(item.text) for item in items)
        widths = {path: _shape(path, HIDDEN_STATE, 2)[1] for path in texts}
        self.examples = [
            Example(Path(path), Path(item.text), self._latents_shape(Path(path)), item.repeats)
            for item in items
            for _, path in sorted(item.latents.items())
        ]
        self.channels = self._same(
            {each.latents: each.shape[0] for each in self.examples}, "channels"
        )
        self.text_width = self._same(widths, "values a token")
        files = [*texts, *dict.fromkeys(each.latents for each in self.examples)]
        # float32 in memory; the caches may be half as wide.
        self._keep = 2 * sum(path.stat().st_size for path in files) <= memory
        self._kept: dict[Path, torch.Tensor] = {}

    @staticmethod
    def _latents_shape(path: Path) -> tuple[int, int, int]:
        channels, height, width = _shape(path, "latents", 3)
        return channels, height, width

    @staticmethod
    def _same(values: dict[Path, int], what: str) -> int:
        first, value = next(iter(values.items()))
        for path, other in values.items():
            if other != value:
                raise CacheError(
                    f"has {other} {what}, but {first} has {value}", where=path, mend=_MEND
                )
        return value

    def _get(self, path: Path, *, text: bool) -> torch.Tensor:
        tensor = self._kept.get(path)
        if tensor is None:
            tensor = read_text(path) if text else _read_latents(path)
            if self._keep:
                self._kept[path] = tensor
        return tensor

    def batch(self, indices: Sequence[int]) -> Batch:
        """Read the examples of these indices, all of one shape.

        Raises:
            CacheError: a file has become damaged.
        """
        examples = [self.examples[index] for index in indices]
        latents = torch.stack([self._get(each.latents, text=False) for each in examples])
        text, mask = pad([self._get(each.text, text=True) for each in examples])
        return Batch(latents, text, mask, tuple(indices))


def prefetched(caches: Caches, batches: Iterable[Sequence[int]]) -> Generator[Batch]:
    """Read batches some way ahead, in one thread, in their order."""
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="caches") as reader:
        try:
            for indices in batches:
                waiting.append(reader.submit(caches.batch, indices))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()

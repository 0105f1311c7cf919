"""Rows of musubi-tuner's architectures: its scripts, and the files that they make.

One `Scripts` says all that differs between architectures whose caches its own scripts make; layout,
recipe, launch, checks and publication ask it. Sources: musubi-tuner's *_cache_*.py and *_train*.py,
dataset/architectures.py, dataset/bucket.py and dataset/cache_io.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Setting: TypeAlias = str | int | float | bool | list[str] | None
"""Value of a trainer's key, or of a flag of its script."""

ATTENTIONS: Mapping[str, int | None] = dict.fromkeys(("sdpa", "flash_attn", "xformers"))
"""Attentions of most networks, for batches of any size."""


class Vae(NamedTuple):
    """Sizes that tell one VAE from another.

    Attributes:
        axes: 2 for pictures, 3 for videos.
        channels: of its latents.
        colours: channels of the pictures that it takes.
    """

    axes: int
    channels: int
    colours: int = 3


class File(NamedTuple):
    """A file or folder of weights that a script takes.

    Attributes:
        flag: its flag, `--vae`.
        key: the model's key that names it; `text`, `text.1` for the first and second text encoder.
        required: whether the script refuses to run without it.
        kind: what it holds, as `models.encoder_files` names it; "" where that is not checked.
        vae: sizes of a VAE.
        form: what its path may be.
    """

    flag: str
    key: str
    required: bool = True
    kind: str = ""
    vae: Vae | None = None
    form: Literal["file", "folder", "either"] = "file"


@dataclass(frozen=True)
class Script:
    """One of musubi-tuner's scripts.

    Attributes:
        name: its file's name.
        files: weights that it takes.
        dtype_flag: flag of the dtype that it encodes in; None where that is fixed.
        switches: flags, each with the key of the model that sets it.
        reads_controls: whether what it makes depends on the control images.
    """

    name: str
    files: tuple[File, ...] = ()
    dtype_flag: str | None = None
    switches: tuple[tuple[str, str], ...] = ()
    reads_controls: bool = False


class Rule(NamedTuple):
    """Restriction of a flag that a training script knows.

    Attributes:
        flag: the flag.
        values: the values that it takes; none: it refuses the flag; None: it takes any.
        most: the largest number that it takes.
        needs: flags that must stand beside it.
        without: flags that must not.
    """

    flag: str
    values: tuple[str, ...] | None = None
    most: int | None = None
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Version(NamedTuple):
    """Version of an architecture: one value of the model's `task`.

    Attributes:
        latents: arguments that it adds to the script of latents.
        text: the same for the script of embeddings.
        training: the same for the training script.
        controls: fewest and most control images of an item; None for any number.
        images: whether items may be images.
        videos: whether items may be videos.
        one_frame: whether it is trained on one frame: a dataset's `fp_1f_*` count, and an item has
            a control image for each of `fp_1f_clean_indices`.
        needs: keys of the model that it needs besides the architecture's.
        tensors: beginnings of names of tensors that latents hold besides `latents_`.
        boundary: timestep, in thousandths, between its networks for high and for low noise; None
            where it has one network.
    """

    latents: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    controls: tuple[int, int | None] = (0, 0)
    images: bool = True
    videos: bool = False
    needs: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    boundary: int | None = None
    one_frame: bool = False

    def caching(self, kind: str) -> tuple[str, ...]:
        """Return the arguments that it adds to the script of `latents` or `text`."""
        return self.text if kind == "text" else self.latents


@dataclass(frozen=True)
class Scripts:
    """An architecture as musubi-tuner knows it.

    Attributes:
        title: as people call it.
        suffix: of the names of its cache files, without underscores.
        header: its name in their headers.
        latents: the script that caches latents.
        text: the script that caches embeddings.
        training: the script that trains.
        network: module of its LoRA.
        tensors: beginnings of names of tensors, all of which a cache of text holds.
        versions: what the model's `task` may be; "" where it has none.
        pixels: side of a latent, in pixels.
        rounded: arguments of the script of latents, each with the multiples, in pixels, that sides
            are enlarged to.
        frames: frames of a latent after the first.
        fps: frames a second of its videos, which `source_fps` converts to.
        batch: most items of a batch of its training; None for any number.
        precisions: what `mixed_precision` may be.
        settings: values that its guide recommends for the trainer's keys, and for further flags of
            the training script (`--lr_scheduler`).
        sections: whether a clip has a file of latents for each section of `fp_latent_window_size`.
        layers: whether an item has several target images, its layers.
        mark: pattern that only names of tensors of its DiT match.
        channels: kind of latents -> channels; of kinds that are not here they are not known.
        fp8: keys of the trainer that may be set together to keep weights in 8 bits.
        rules: what the training script refuses.
        control_latents: whether each control has a tensor `latents_control`; else others hold it.
        equal_shapes: whether all latents of a file have the same frames, height and width.
        attentions: value of the trainer's `attention` -> the largest batch that it takes without
            `--split_attn`; None: any.
        stamp: entry that the header of its DiT's file must have; None where none is demanded.
        sized_controls: whether control images may have sizes of their own: `no_resize_control` and
            `control_resolution` count.
    """

    title: str
    suffix: str
    header: str
    latents: Script
    text: Script
    training: Script
    network: str
    tensors: tuple[str, ...]
    versions: Mapping[str, Version] = field(default_factory=lambda: {"": Version()})
    pixels: int = 8
    rounded: Mapping[str, int] = field(default_factory=dict)
    frames: int = 4
    fps: float = 16.0
    batch: int | None = None
    precisions: tuple[str, ...] = ("bf16", "fp16", "no")
    settings: Mapping[str, Setting] = field(default_factory=dict)
    sections: bool = False
    layers: bool = False
    mark: str = "$^"
    channels: Mapping[str, int] = field(default_factory=dict)
    fp8: tuple[tuple[str, ...], ...] = (("fp8_base",), ("fp8_base", "fp8_scaled"))
    rules: tuple[Rule, ...] = ()
    control_latents: bool = True
    equal_shapes: bool = False
    stamp: tuple[str, str] | None = None
    attentions: Mapping[str, int | None] = field(default_factory=lambda: dict(ATTENTIONS))
    sized_controls: bool = False

    @property
    def counts_controls(self) -> bool:
        """Whether latents hold a tensor for each control image."""
        return self.latents.reads_controls and self.control_latents

"""Layouts: names, sizes and clips of the cache files that each trainer reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar

from latentmake.base.errors import SourceError
from latentmake.config.architectures import MUSUBI, SDSCRIPTS, WAN
from latentmake.config.datasets import BUCKET_STEPS, Dataset
from latentmake.config.makers import ClipOutput
from latentmake.config.models import Model
from latentmake.geometry.buckets import (
    Placement,
    Size,
    control_size,
    cover,
    nearest_bucket,
    shrink,
    widths,
)
from latentmake.geometry.clips import WAN_FPS, Clip, Media, Span, clips, sections

SIZED = re.compile(r"(.+)_(\d{4,})x(\d{4,})", re.DOTALL)
"""Name of a latents cache without its ending, in layouts whose names contain an image size."""

_PLACE = r"(?:_\d{5}\d*-\d{3}\d*(?:-\d{4}\d*)?)?_\d{4}\d*x\d{4}\d*"
"""Pattern of clip, section and size in the name of a latents cache.

It avoids `{4,}`, which Snakemake cannot read in the pattern of a wildcard.
"""

_RESOLUTION = re.compile(r"(?:text[^@]*@)?(\d+)(?:x(\d+))?")


CAPTIONS = "captions"
"""Kind of made captions; in `cache/{dataset}`, their folder, which takes the place of a model."""


@cache
def kind_of(part: str) -> str:
    """Return the kind of a part by its name: a resolution, a text (`text.1@512`) or a captioner."""
    if part.startswith("text"):
        return "text"
    return "latents" if part[:1].isdecimal() or part == "latents" else CAPTIONS


@lru_cache(maxsize=256)
def resolution_of(part: str) -> Size | None:
    """Return the resolution of latents, or of the latents beside which the texts lie."""
    sides = _RESOLUTION.fullmatch(part)
    return Size(int(sides[1]), int(sides[2] or sides[1])) if sides else None


def row_of(part: str) -> str:
    """Return a part's row in tables (`latents 64`, `text`); all variants of a text share one."""
    if (kind := kind_of(part)) != "text":
        return f"latents {part}" if kind == "latents" else part
    text, _, resolution = part.partition("@")
    return f"{text.partition('.')[0]} {resolution}".rstrip()


class Layout:
    """File names, sizes and clips of the caches that one trainer reads.

    A part of a dataset and model is a resolution (`64`, `512x768`) or a text (`text`, `text.1`,
    `text@512`).

    Attributes:
        name: name of the layout, as `layout_of` takes it.
        encoding: code that makes the caches: `plain`, `wan` or `sdscripts`.
        encoders: kind -> module and function of `encode.encoders` that load the encoder.
        text_ending: end of the name of a text cache; None if texts are not cached.
        latents_ending: end of the name of a latents cache.
        longest_ending: longest text that follows an item's own name in a file name.
        external: whether another program trains on the files. Their names then contain the size of
            an image or the clip of a video, so planning must probe images and videos. A row of the
            manifest names caption and control file, `config.root` checks the resolutions, and
            `adopt_from` of a dataset may name folders with caches of that program.
        flat: whether all caches of a resolution, texts too, lie in one folder without sub-folders.
            The trainer trains on all files there. So files of skipped items must be removed, and
            further texts of an item belong to further items, named `{stem}.v1` and so on.
        sections: whether a clip has a file for each of its sections.
        clip_name: pattern of the name of a clip, whose first group is the name of its video.
        bucket_side: step between the sides of musubi-tuner's buckets in pixels; None if the
            dataset sets it.
        has_frames: whether latents have an axis of frames, [C, F, h, w], and caches have the
            tensors of musubi-tuner.
        npz: whether cache files are `.npz` and not `.safetensors`.
        numbered_controls: whether an item has several control images with numbers in their names;
            else it has one with its own name.
        controlled_text: whether embeddings depend on control images.
        rate: frame rate that `source_fps` converts videos to.
        like_sdscripts: whether texts and images are the same as in sd-scripts: see
            `data.texts.variants`; CLIP's released tokenizers read the captions; T5 attends to the
            padding of captions; the alpha channel is dropped before an image is scaled. Recipes of
            latents then contain the model's architecture.
    """

    name: str
    encoding: str
    encoders: ClassVar = {"latents": ("vae", "latents"), "text": ("text", "text")}
    text_ending: str | None
    latents_ending: str
    longest_ending: str
    external = True
    flat = False
    has_frames = False
    sections = False
    clip_name: re.Pattern[str] | None = None
    bucket_side: int | None = None
    npz = False
    numbered_controls = False
    controlled_text = False
    rate: float = WAN_FPS
    like_sdscripts = False

    # -- names ------------------------------------------------------------------------------------

    def parts(self, resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
        """Return the parts of a dataset and model; `texts` are the names of text variants."""
        names = list(resolutions)
        if self.flat:
            return [*names, *(f"{text}@{name}" for text in texts for name in names)]
        return [*names, *(texts if self.text_ending else ())]

    def folder(self, dataset: str, model: str, part: str) -> str:
        """Return the folder of a part's cache files.

        In a flat layout, the first text lies beside the latents, where musubi-tuner looks for it.
        """
        return f"cache/{dataset}/{model}/{part.removeprefix('text@')}"

    def base(self, stem: str) -> str:
        """Return the beginning of the names of an item's cache files."""
        return stem.rpartition("/")[2] if self.flat else stem

    def named(
        self,
        folder: str,
        part: str,
        stem: str,
        media: Media | None,
        settings: Dataset | None,
        span: Span | None = None,
    ) -> Sequence[tuple[str, Clip | None]]:
        """Return the cache files of an item in a part.

        Args:
            folder: folder of the part.
            part: name of the part.
            stem: stem of the item.
            media: size and length of the image or video; None if the layout does not need them.
            settings: the dataset's section of the configuration; None for prompts.
            span: frames of the video that the item uses.

        Returns:
            Pairs of a path and the clip or section in it; None for images and texts.
        """
        name = f"{folder}/{self.base(stem)}"
        if kind_of(part) == "text":
            return [(f"{name}{self.text_ending}", None)]
        if not self.external:
            return [(f"{name}{self.latents_ending}", None)]
        assert media is not None
        size = Size(media.width, media.height)
        cut: list[Clip] | None = None
        if settings is not None and settings.video:
            resolution = resolution_of(part)
            assert resolution is not None
            size = self.size(size, resolution, settings)
            cut = self.clips(media, settings, span)
            if self.sections:
                window = settings.fp_latent_window_size
                cut = [section for clip in cut for section in sections(clip, window)]
        ending = f"_{size.width:04d}x{size.height:04d}{self.latents_ending}"
        if cut is None:
            return [(f"{name}{ending}", None)]
        return [(f"{name}{_place(clip)}{ending}", clip) for clip in cut]

    def owners(self, name: str) -> Sequence[str]:
        """Return possible `base`s of the item that a file in a part's folder belongs to.

        The result is empty if the file is not a cache file.
        """
        if self.text_ending and name.endswith(self.text_ending):
            return (name.removesuffix(self.text_ending),)
        if not name.endswith(self.latents_ending):
            return ()
        base = name.removesuffix(self.latents_ending)
        if self.external:
            if not (sized := SIZED.fullmatch(base)):
                return ()
            base = sized[1]
        clip = self.clip_name.fullmatch(base) if self.clip_name else None
        return (base, clip[1]) if clip else (base,)

    def ending(self, kind: str) -> str:
        """Return a pattern of the text after an item's stem in the names of its caches.

        The pattern never matches if the layout has no caches of the kind.
        """
        if kind == "text":
            return re.escape(self.text_ending) if self.text_ending else "(?!)"
        return (_PLACE if self.external else "") + re.escape(self.latents_ending)

    def identity(self, stem: str, path: str) -> str:
        """Return the name under which a target's key enters the digest of its part."""
        return path.rpartition("/")[2] if self.flat else stem

    # -- sizes and clips --------------------------------------------------------------------------

    def size(self, image: Size, resolution: Size, settings: Dataset) -> Size:
        """Return the size that an image or a frame is scaled and cropped to; see `place`."""
        if settings.fit == "crop":
            return resolution
        step = self.bucket_side or settings.bucket_reso_steps or BUCKET_STEPS
        area = resolution.width * resolution.height
        if settings.bucket_no_upscale and image.width * image.height <= area:
            return Size(*(max(side // step * step, step) for side in image))
        beyond = step if self.bucket_side else 1
        return nearest_bucket(image, resolution, widths(resolution, step, beyond))

    def place(self, image: Size, resolution: Size, settings: Dataset, path: str = "") -> Placement:
        """Return the placement of an image or a frame in its target size; raises SourceError.

        Args:
            image: size of the image in pixels: upright for `plain`, else as stored.
            resolution: resolution in pixels.
            settings: the dataset's section of the configuration.
            path: path of the image, for the message.
        """
        size = self.size(image, resolution, settings)
        return cover(image, size, settings.max_image_pixels, path)

    def controls(self, sizes: Iterable[Size], settings: Dataset) -> list[Size]:
        """Return the sizes that control images of these sizes are scaled to."""
        return [control_size(size, settings, self.bucket_side or 1) for size in sizes]

    def clips(self, media: Media, settings: Dataset, span: Span | None = None) -> list[Clip]:
        """Return the clips of a video or a span of it; with sections, only clips that have one."""
        cut = clips(media.frames, settings, span or Span(), media.timing, self.rate)
        window = settings.fp_latent_window_size
        return [clip for clip in cut if not self.sections or sections(clip, window)]

    def view(
        self,
        image: Size,
        resolution: Size,
        settings: Dataset,
        *,
        is_text: bool = False,
        clip: Clip | None = None,
        span: Span | None = None,
        rotation: int = 0,
        controls: Sequence[Size] = (),
    ) -> tuple[str, Placement | None]:
        """Return the view of a target: the part of its key that depends on size and clip.

        The placement of the image is returned, too; None for a text.

        Different settings that place an image in the same way have the same view, such as
        `80x72+8+4:64x64`. In musubi-tuner's layouts the target size determines the placement, so
        the view is `64x64`. Clips add their frames. If all frames of the file are kept, the first
        frame is counted in the file, so that equal clips of different spans have one key. Sizes
        of control images are added if one differs from the target size. The view of a text always
        has them, because its pictures get these sizes before they are resized for the encoder.

        Args:
            image: size of the image or video, as `place` takes it.
            resolution: resolution of the part, in pixels.
            settings: the dataset's section of the configuration.
            is_text: whether the target is a text with control images.
            clip: clip or section of a video that the target is made from.
            span: part of the video in which the clip's frames are counted.
            rotation: display rotation in degrees clockwise, which is applied first.
            controls: sizes of the control images in pixels, if the view depends on them.

        Raises:
            SourceError: a source of this size cannot be encoded.
        """
        if self.bucket_side is None:
            placement = self.place(image, resolution, settings)
            (width, height), left, top, target = placement
            return f"{width}x{height}+{left}+{top}:{target.width}x{target.height}", placement
        step = self.bucket_side
        size = self.size(image, resolution, settings)
        placed = None if is_text else cover(image, size, settings.max_image_pixels)
        usual = _name(size)
        sizes = [usual]
        if controls:
            sizes = [_name(control_size(control, settings, step)) for control in controls]
        if is_text:
            return f"controls:{'+'.join(sizes if len({*sizes}) > 1 else sizes[:1])}", placed
        view = usual
        if clip is not None:
            start, (first, _, stride, _) = clip.start, span or Span()
            section = "" if clip.section is None else f"#{clip.section}"
            if settings.source_fps is None:
                start, first = first + start * stride, 0
            view += f":{start}-{clip.frames}{section}"
            if stride > 1:
                view += f"x{stride}"
            if first > 0:
                view += f"+{first}"
            if settings.control_directory:  # control frames are scaled to their own bucket first
                view += f"@{_name(resolution)}"
        if rotation != 0:
            view += f":r{rotation}"
        return view if {*sizes} == {usual} else "+".join((view, *sizes)), placed

    # -- texts and manifests ----------------------------------------------------------------------

    def row(self, targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return the entries of a manifest's row for an item's cache files.

        Args:
            targets: part -> paths.

        Returns:
            `latents` (resolution -> path), `text` (path or None) and, if there are several texts,
            `variants` (all paths). In a flat layout, `latents` is resolution -> paths, `text` is
            resolution -> path, and `variants` is resolution -> all paths.
        """
        latents: dict[str, list[str]] = {}
        texts: dict[str, dict[str, str]] = {}
        for part, paths in targets.items():
            if kind_of(part) == "text":
                text, _, resolution = part.partition("@")
                texts.setdefault(text, {})[resolution] = paths[0]
            else:
                latents[part] = list(paths)
        row: dict[str, Any] = {"text": texts.get("text", {})}
        if len(texts) > 1:
            several = [*texts.values()]
            row["variants"] = {name: [paths[name] for paths in several] for name in texts["text"]}
        if self.flat:
            return {"latents": latents, **row}
        first = {part: paths[0] for part, paths in latents.items()}
        return {"latents": first, **{key: paths.get("") for key, paths in row.items()}}


def _name(size: Size) -> str:
    return f"{size.width}x{size.height}"


def _place(clip: Clip) -> str:
    section = "" if clip.section is None else f"-{clip.section:04d}"
    return f"_{clip.start:05d}-{clip.frames:03d}{section}"


class Plain(Layout):
    """Layout of our own trainers, for all architectures.

    cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors   latents [C, h, w], unscaled
    cache/{dataset}/{model}/text/{stem}.text.safetensors              {encoder}.hidden_state [T, D]
    cache/{dataset}/{model}/text.1/{stem}.text.safetensors            a further text variant

    Images in sub-folders keep their relative path.
    """

    name = "plain"
    encoding = "plain"
    text_ending = ".text.safetensors"
    latents_ending = ".latents.safetensors"
    longest_ending = latents_ending
    external = False


class MadeCaptions(Layout):
    """Layout of made captions: cache/{dataset}/captions/{captioner}/{stem}.json."""

    name = CAPTIONS
    encoding = CAPTIONS
    encoders: ClassVar = {CAPTIONS: ("captions", "captions")}
    text_ending = None
    latents_ending = longest_ending = ".json"
    external = False


class Musubi(Layout):
    """Layout of musubi-tuner, for one of its architectures; "" stands for Wan.

    cache/{dataset}/{model}/{resolution}/{base}_{W}x{H}_wan.safetensors             images
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}_{W}x{H}_wan.safetensors clips
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}-{section}_{W}x{H}_fp.safetensors
    cache/{dataset}/{model}/{resolution}/{base}_wan_te.safetensors                  text
    cache/{dataset}/{model}/text.1@{resolution}/{base}_wan_te.safetensors           another text

    `wan` is the suffix of the architecture. All caches of a resolution, with the texts, lie in one
    folder, which is a `cache_directory` of musubi-tuner. W x H is the original size of an image,
    and the bucket of a clip. Names, tensors and metadata are those of musubi-tuner 0.3.4
    (dataset/image_video_dataset.py and cache_io.py there).
    """

    encoding = "wan"
    encoders: ClassVar = {"latents": ("wan", "latents"), "text": ("text", "umt5")}
    flat = True
    has_frames = True

    def __init__(self, architecture: str = "") -> None:
        # Wan came first: its layout has no suffix, because its models have no `architecture`.
        self.name = f"musubi-{architecture}" if architecture else "musubi"
        scripts = MUSUBI[architecture or WAN.name]
        self.bucket_side = scripts.side
        # Our own encoders take one control, and none for texts.
        self.numbered_controls = not scripts.encodes
        self.controlled_text = not scripts.encodes and scripts.text.reads_controls
        self.rate = scripts.fps
        self.sections = scripts.sections
        self.text_ending = f"_{scripts.suffix}_te.safetensors"
        self.latents_ending = f"_{scripts.suffix}.safetensors"
        section = "-0000" * self.sections
        self.longest_ending = f"_00000-000{section}_00000x00000{self.latents_ending}"
        self.clip_name = re.compile(r"(.+)_\d{5,}-\d{3,}" + r"-\d{4,}" * self.sections)


class SdScripts(Layout):
    """Layout of sd-scripts, for one of its architectures.

    cache/{dataset}/{model}/{resolution}/{stem}_{W}x{H}_sdxl.npz   latents
    cache/{dataset}/{model}/text/{stem}_te_outputs.npz             text
    cache/{dataset}/{model}/text.1/{stem}_te_outputs.npz           a further text variant

    W x H is the original size of an image, as stored. Images in sub-folders keep their relative
    path. sd-scripts needs caches beside the images, so its training gets a folder of links. It
    encodes captions of Stable Diffusion 1.x and 2.x while it trains, so these have no text caches.
    Names and arrays are those of its library/strategy_*.py.
    """

    encoding = "sdscripts"
    npz = True
    like_sdscripts = True

    def __init__(self, architecture: str) -> None:
        strategies = self._strategies = SDSCRIPTS[architecture]
        self.name = f"sdscripts-{architecture}"
        self.latents_ending = strategies.latents_ending
        self.text_ending = strategies.text_ending
        # The training's folder has an item with several texts several times: `.v12` and so on.
        longest = max(f"_00000x00000{self.latents_ending}", self.text_ending or "", key=len)
        self.longest_ending = f"{longest}.v000"

    def size(self, image: Size, resolution: Size, settings: Dataset) -> Size:
        """Return the size that an image is scaled and cropped to."""
        return self.place(image, resolution, settings).target

    def place(self, image: Size, resolution: Size, settings: Dataset, path: str = "") -> Placement:
        """Return the placement of an image, as stored, in its target size; raises SourceError."""
        limit = settings.max_image_pixels
        if settings.fit == "crop":  # `enable_bucket = false`
            return cover(image, resolution, limit, path)
        step, no_upscale, least, most = settings.bucketing(self._strategies)
        if not no_upscale:
            target = nearest_bucket(image, resolution, range(least, most + 1, step), most)
            return cover(image, target, limit, path)
        try:
            return shrink(image, resolution, step)
        except ValueError as error:
            what = f"{error} ({image.width} x {image.height})"
            hint = "remove it, or leave out the dataset's `bucket_no_upscale`"
            raise SourceError(what, where=path, hint=hint) from None


def released_clip(model: Model, number: int) -> ClipOutput | None:
    """Return the tensors to keep of a CLIP, if its released tokenizer reads the captions.

    sd-scripts always loads the tokenizer of openai/clip-vit-large-patch14 or
    laion/CLIP-ViT-bigG-14-laion2B-39B-b160k, ignores the one beside the model, and sets the token
    of padding itself.

    Args:
        model: model of the caches.
        number: index of the text encoder.

    Returns:
        None if the text encoder is not a CLIP, or uses the tokenizer of its folder.
    """
    clips = model.spec.clips if layout_of(model.layout_name).like_sdscripts else ()
    return clips[number] if number < len(clips) else None


@cache
def layout_of(name: str) -> Layout:
    """Return a layout by its name: `plain`, `musubi` (Wan), `musubi-qwen_image`, `captions`...

    Raises:
        KeyError: there is no layout of this name.
    """
    kind, _, architecture = name.partition("-")
    layouts: dict[str, Callable[[Any], Layout]]
    layouts = {"plain": lambda _: Plain(), "musubi": Musubi, "sdscripts": SdScripts}
    layouts[CAPTIONS] = lambda _: MadeCaptions()
    return layouts[kind](architecture)

"""Layouts: names of the cache files that each trainer reads, and their other peculiarities."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from latentmake.config.architectures import ARCHITECTURES, WAN, ArchitectureName, ClipOutput
from latentmake.config.datasets import BUCKET_STEPS, Dataset
from latentmake.config.models import Model
from latentmake.errors import SourceError
from latentmake.geometry.buckets import (
    Placement,
    Size,
    control_size,
    cover,
    nearest_bucket,
    shrink,
    widths,
)
from latentmake.geometry.clips import WAN_FPS, AnyClip, Clip, Media, Span, clips, sections

SIZED = re.compile(r"(.+)_(\d{4,})x(\d{4,})", re.DOTALL)
"""The name of a latents cache without its ending, where it contains the size of the image."""

_PLACE = r"(?:_\d{5}\d*-\d{3}\d*(?:-\d{4}\d*)?)?_\d{4}\d*x\d{4}\d*"
"""Pattern of the clip, its section and the size in the name of a latents cache.

Snakemake reads no `{4,}` in the pattern of a wildcard.
"""

_RESOLUTION = re.compile(r"(\d+)(?:x(\d+))?")


class PartName(NamedTuple):
    """What the name of a part says: `64`, `512x768`, `text`, `text.1`, `text.1@512x768`."""

    kind: str  # `latents` or `text`
    text: str  # which text they hold: `text`, `text.1`
    size: Size | None  # resolution of the latents, or of those beside which texts lie


@lru_cache(maxsize=256)
def parsed(part: str) -> PartName:
    """Return what the name of a part says."""
    is_text = part.startswith("text")
    text, _, resolution = part.partition("@") if is_text else ("", "", part)
    sides = _RESOLUTION.fullmatch(resolution)
    size = Size(int(sides[1]), int(sides[2] or sides[1])) if sides else None
    return PartName("text" if is_text else "latents", text, size)


class Layout:
    """A layout: data, and functions of these.

    A part of a dataset and model is a resolution (`64`, `512x768`) or a text (`text`, `text.1`,
    `text@512`).

    Attributes:
        external: whether another program trains on the files. Their names contain the size or the
            clips of images and videos, so that planning must probe these; a manifest's row names
            caption and control file; `config.root` knows the rule of its resolutions; and
            `adopt_from` of a dataset may name files of its own making.
        flat: whether the caches of a resolution, texts too, lie flat in one folder. The trainer
            trains on all files there: those of skipped items must go, and the further texts of an
            item belong to further items, named `{stem}.v1` and so on.
        clip_name: pattern of the name of a clip, whose first group is the name of its video.
        bucket_side: step between the sides of musubi-tuner's buckets, in pixels; None: a dataset
            says it.
        scales_alpha: whether transparency takes part in scaling, though it is dropped at the end.
        numbered_controls: whether an item has several control images, by numbers in their names;
            else the one of its own name.
    """

    name: str  # as `layout_of` takes it
    encoding: str  # what makes its caches: `plain`, `wan` or scripts of a trainer
    text_ending: str | None  # end of the name of a text cache; None where text is not cached
    latents_ending: str  # end of the name of a latents cache
    longest_ending: str  # the longest text that follows an item's own name in that of a cache file
    external = True
    flat = False
    sections = False  # whether a clip has a file for each of its sections
    clip_name: re.Pattern[str] | None = None
    bucket_side: int | None = None
    npz = False  # whether cache files are .npz and not .safetensors
    scales_alpha = True
    names_architecture = False  # whether the recipe of latents contains the model's architecture
    numbered_controls = False
    controlled_text = False  # whether text depends on control images
    rate: float = WAN_FPS  # frames a second that `source_fps` converts videos to
    released_tokens = False  # whether its trainer reads captions by CLIP's released tokenizers
    pads_t5 = False  # whether T5's captions are padded, and the padding is visible to it
    like_sdscripts = False  # whether its texts are made as there, see `data.texts.variants`

    def encoder(self, kind: str) -> tuple[str, str]:
        """Return the module of `caches.encoders`, and its function, that load an encoder."""
        own = self.encoding == "wan"
        if kind == "text":
            return "text", "umt5" if own else "text"
        return "wan" if own else "vae", "latents"

    # -- names ------------------------------------------------------------------------------------

    def parts(self, resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
        """Return the parts of one dataset and model; `texts` has a name for each variant."""
        names = list(resolutions)
        if self.flat:
            return [*names, *(f"{text}@{name}" for text in texts for name in names)]
        return [*names, *(texts if self.text_ending else ())]

    def folder(self, dataset: str, model: str, part: str) -> str:
        """Return the folder of a part's cache files.

        The first text of a resolution lies beside its latents, where musubi-tuner looks for it.
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
    ) -> Sequence[tuple[str, AnyClip | None]]:
        """Return the cache files of one item in one part's folder, each with its frames, if any.

        `span` is the item's part of a video.
        """
        name, (kind, _, resolution) = f"{folder}/{self.base(stem)}", parsed(part)
        if kind == "text":
            return [(f"{name}{self.text_ending}", None)]
        if not self.external:
            return [(f"{name}{self.latents_ending}", None)]
        assert media is not None
        size = Size(media.width, media.height)
        places: list[tuple[str, AnyClip | None]] = [("", None)]
        if settings is not None and settings.video:
            assert resolution is not None
            size, window = self.size(size, resolution, settings), settings.fp_latent_window_size
            found = self.clips(media, settings, span)
            files = [x for clip in found for x in sections(clip, window)]
            places = [(_place(each), each) for each in (files if self.sections else found)]
        ending = f"_{size.width:04d}x{size.height:04d}{self.latents_ending}"
        return [(f"{name}{place}{ending}", clip) for place, clip in places]

    def owners(self, name: str) -> Sequence[str]:
        """Return the bases that a file below a part's folder may belong to; none: no cache file."""
        if self.text_ending and name.endswith(self.text_ending):
            return (name.removesuffix(self.text_ending),)
        if not name.endswith(self.latents_ending):
            return ()
        found = name.removesuffix(self.latents_ending)
        if self.external:
            if not (sized := SIZED.fullmatch(found)):
                return ()
            found = sized[1]
        clip = self.clip_name.fullmatch(found) if self.clip_name else None
        return (found, clip[1]) if clip else (found,)

    def ending(self, kind: str) -> str:
        """Return the pattern of what follows an item's stem in the names of its caches of a kind.

        It matches nothing where the layout has no caches of the kind.
        """
        if kind == "text":
            return re.escape(self.text_ending) if self.text_ending else "(?!)"
        return (_PLACE if self.external else "") + re.escape(self.latents_ending)

    def identity(self, stem: str, path: str) -> str:
        """Return the name under which a target's key enters the digest of its part."""
        return path.rpartition("/")[2] if self.flat else stem

    # -- sizes and clips --------------------------------------------------------------------------

    def size(self, image: Size, resolution: Size, settings: Dataset) -> Size:
        """Return the size that an image or a frame is brought to; see `place`."""
        if settings.fit == "crop":
            return resolution
        step = self.bucket_side or settings.bucket_reso_steps or BUCKET_STEPS
        area = resolution.width * resolution.height
        if settings.bucket_no_upscale and image.width * image.height <= area:
            return Size(*(max(side // step * step, step) for side in image))
        beyond = step if self.bucket_side else 1
        return nearest_bucket(image, resolution, widths(resolution, step, beyond))

    def place(self, image: Size, resolution: Size, settings: Dataset, path: str = "") -> Placement:
        """Return how an image or a frame is brought to its size; raises SourceError.

        `image` is its own size in pixels: upright for `plain`, as stored for the others; `path` is
        for the error.
        """
        size = self.size(image, resolution, settings)
        return cover(image, size, settings.max_image_pixels, path)

    def clips(self, media: Media, settings: Dataset, span: Span | None = None) -> list[Clip]:
        """Return the clips that are made of a video, or of a span of it; in sections, if any."""
        found = clips(media.frames, settings, span or Span(), media.timing, self.rate)
        window = settings.fp_latent_window_size
        return [clip for clip in found if not self.sections or sections(clip, window)]

    def view(
        self,
        image: Size,
        resolution: Size,
        settings: Dataset,
        *,
        is_text: bool = False,
        clip: AnyClip | None = None,
        span: Span | None = None,
        rotation: int = 0,
        controls: Sequence[Size] = (),
    ) -> str:
        """Return the view of a target that depends on a size: the part of its key on size and clip.

        Settings that place an image alike give the same pixels and one view: `80x72+8+4:64x64`. In
        musubi-tuner the size says it all: `64x64`. Its clips are named by their frames; the first
        one is counted in the file where all frames of it are kept, so that equal clips of several
        spans have one key. Sizes of control images are named where one is unusual, and always for
        a text, whose pictures get these sizes before they are resized for the text encoder.

        Args:
            image: size of the image or video, as `place` takes it.
            resolution: the size asked for, in pixels.
            settings: the dataset's section of the configuration.
            is_text: whether it is a text with control images.
            clip: frames of a video that it is made of.
            span: part of the video that the clip's frames are counted in.
            rotation: degrees clockwise by which frames are turned before anything else.
            controls: sizes of its control images, in pixels, where these count.

        Raises:
            SourceError: no target can be made of a source of this size.
        """
        if self.bucket_side is None:
            (width, height), left, top, target = self.place(image, resolution, settings)
            return f"{width}x{height}+{left}+{top}:{target.width}x{target.height}"
        step, most = self.bucket_side, settings.control_resolution
        area, keeps = most.width * most.height if most else None, settings.no_resize_control
        size = self.size(image, resolution, settings)
        if not is_text:
            cover(image, size, settings.max_image_pixels)  # which refuses a narrow one
        usual = _name(size)
        sizes = [_name(control_size(each, area, step, keeps=keeps)) for each in controls] or [usual]
        if is_text:
            return f"controls:{'+'.join(sizes if len({*sizes}) > 1 else sizes[:1])}"
        found = usual
        if clip is not None:
            start, (first, _, stride, _) = clip.start, span or Span()
            if settings.source_fps is None:
                start, first = first + start * stride, 0
            found += f":{start}-{clip.frames}" + "".join(f"#{number}" for number in clip[2:])
            found += f"x{stride}" * (stride > 1) + f"+{first}" * (first > 0)
            if settings.control_directory:  # it is first brought to a bucket of its own
                found += f"@{_name(resolution)}"
        found += f":r{rotation}" * (rotation != 0)
        return found if {*sizes} == {usual} else "+".join((found, *sizes))

    # -- texts and manifests ----------------------------------------------------------------------

    def row(self, targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return the entries of a manifest's row for an item's cache files.

        Args:
            targets: part -> paths.

        Returns:
            `latents` (resolution -> path), `text` (path, or None) and, where there are several
            texts, `variants`: the paths of all of them. Where they lie flat, latents have several
            paths, and texts are those of each resolution.
        """
        latents: dict[str, list[str]] = {}
        texts: dict[str, dict[str, str]] = {}
        for part, paths in targets.items():
            if text := parsed(part).text:
                texts.setdefault(text, {})[part.partition("@")[2]] = paths[0]
            else:
                latents[part] = list(paths)
        row: dict[str, Any] = {"text": texts.get("text", {})}
        if len(texts) > 1:
            several = texts.values()
            row["variants"] = {each: [x[each] for x in several] for each in texts["text"]}
        if self.flat:
            return {"latents": latents, **row}
        first = {part: paths[0] for part, paths in latents.items()}
        return {"latents": first, **{key: found.get("") for key, found in row.items()}}


def _name(size: Size) -> str:
    return f"{size.width}x{size.height}"


def _place(clip: AnyClip) -> str:
    section = "".join(f"-{number:04d}" for number in clip[2:])
    return f"_{clip.start:05d}-{clip.frames:03d}{section}"


class Plain(Layout):
    """Layout of our own trainers, whatever the architecture.

    cache/{dataset}/{model}/{resolution}/{stem}.latents.safetensors   latents [C, h, w], unscaled
    cache/{dataset}/{model}/text/{stem}.text.safetensors              {encoder}.hidden_state [T, D]
    cache/{dataset}/{model}/text.1/{stem}.text.safetensors            the same of another variant

    Images in sub-folders keep their relative path.
    """

    name = "plain"
    encoding = "plain"
    text_ending = ".text.safetensors"
    latents_ending = ".latents.safetensors"
    longest_ending = latents_ending
    external = False


class Musubi(Layout):
    """Layout of musubi-tuner, for one of its architectures; "" stands for Wan.

    cache/{dataset}/{model}/{resolution}/{base}_{W}x{H}_wan.safetensors             images
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}_{W}x{H}_wan.safetensors clips
    cache/{dataset}/{model}/{resolution}/{base}_{start}-{frames}-{section}_{W}x{H}_fp.safetensors
    cache/{dataset}/{model}/{resolution}/{base}_wan_te.safetensors                  text
    cache/{dataset}/{model}/text.1@{resolution}/{base}_wan_te.safetensors           another text

    `wan` is the suffix of the architecture. Caches of a resolution lie flat in one folder, a
    `cache_directory` of musubi-tuner, with the text in each. W x H is an image's own size, and a
    clip's bucket. Names, tensors and metadata are those of musubi-tuner 0.3.4
    (dataset/image_video_dataset.py and cache_io.py there).
    """

    encoding = "wan"
    flat = True

    def __init__(self, architecture: str = "") -> None:
        # Wan's is as old as the layout, and a model of it has no `architecture`.
        self.name = f"musubi-{architecture}" if architecture else "musubi"
        spec = ARCHITECTURES[architecture] if architecture else WAN
        scripts = spec.scripts
        assert scripts is not None
        self.bucket_side = spec.side
        # Our encoders take one control, and need none for text.
        self.numbered_controls = not spec.encodes
        self.controlled_text = not spec.encodes and scripts.text.reads_controls
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
    cache/{dataset}/{model}/text.1/{stem}_te_outputs.npz           the same of another variant

    W x H is an image's own size, as stored. Images in sub-folders keep their relative path.
    sd-scripts wants caches beside images: a folder of links is made for its training. It encodes
    the captions of Stable Diffusion 1.x and 2.x while it trains, so that these have no text. Names
    and arrays are those of its library/strategy_*.py.
    """

    encoding = "sdscripts"
    npz = True
    scales_alpha = False
    released_tokens = True
    pads_t5 = True
    like_sdscripts = True
    names_architecture = True

    def __init__(self, architecture: ArchitectureName) -> None:
        self._architecture = ARCHITECTURES[architecture]
        self.name = f"sdscripts-{architecture}"
        strategies = self._architecture.strategies
        assert strategies is not None
        self.latents_ending = strategies.latents_ending
        self.text_ending = strategies.text_ending
        # An item with several texts is deployed under several names: `.v12` and so on.
        longest = max(f"_00000x00000{self.latents_ending}", self.text_ending or "", key=len)
        self.longest_ending = f"{longest}.v000"

    def size(self, image: Size, resolution: Size, settings: Dataset) -> Size:
        """Return the size that an image is brought to."""
        return self.place(image, resolution, settings).target

    def place(self, image: Size, resolution: Size, settings: Dataset, path: str = "") -> Placement:
        """Return how an image, as stored, is brought to its size."""
        limit = settings.max_image_pixels
        if settings.fit == "crop":  # `enable_bucket = false`
            return cover(image, resolution, limit, path)
        step, no_upscale, least, most = settings.bucketing(self._architecture)
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
    """Return what is kept of a CLIP whose captions its released tokenizer reads, not its folder's.

    sd-scripts loads openai/clip-vit-large-patch14, or laion/CLIP-ViT-bigG-14-laion2B-39B-b160k,
    whatever lies beside a model, and sets the token of padding itself.
    """
    clips = model.spec.clips if layout_of(model.layout_name).released_tokens else ()
    return clips[number] if number < len(clips) else None


@cache
def layout_of(name: str) -> Layout:
    """Return a layout by its name: `plain`, `musubi` (Wan), `musubi-qwen_image` and so on.

    Raises:
        KeyError: there is no such architecture.
    """
    kind, _, architecture = name.partition("-")
    layouts: dict[str, Callable[[Any], Layout]]
    layouts = {"plain": lambda _: Plain(), "musubi": Musubi, "sdscripts": SdScripts}
    return layouts[kind](architecture)

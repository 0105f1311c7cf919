"""Sections `datasets` and `captions`: folders or lists of captioned images or videos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from latentmake.config.captioners import Captioner, NamedCaptioners
from latentmake.config.fields import (
    COLOUR,
    GEOMETRY,
    MACHINE,
    MANIFEST,
    TEXT,
    Applies,
    Closed,
    DiskPath,
    Ending,
    Listed,
    Number,
    Real,
    ResolutionField,
    Shapes,
    shaped,
    worded,
)

if TYPE_CHECKING:
    from latentmake.config.makers import Architecture


_VARIED = Applies(
    "needs `variants: 2` or more: what an item's only text lacks is never seen",
    when=lambda captions: captions.variants > 1,
)
_DROPPED = Shapes("text", applies=[_VARIED])


class Captions(Closed, shapes=TEXT):
    """Changes to captions before they are encoded, under the names of sd-scripts."""

    variants: Number = Field(1, ge=1, le=1000)
    """Number of texts of each item. The random choices of a variant depend only on `seed`, the
    item's name and the number of the variant: editing another item does not change them, and more
    variants keep the first ones. A larger number encodes only the new ones."""
    seed: Number = Field(0, ge=0)
    """Seed of all random choices of this section."""
    caption_and_tags: Literal["join", "tags_first", "pick"] = "join"
    """Text of an item that has a caption and tags. `join`: the caption, then the tags, as in
    sd-scripts. `tags_first`: the tags, then the caption. `pick`: one of the two, so that the
    network learns to follow either."""
    caption_separator: str = Field(",", min_length=1)
    """Text between two tags, and between caption and tags. Tags that were shuffled are joined by it
    and a space; with `layout: sdscripts` by `, `, as there."""
    caption_prefix: str | None = Field(None, min_length=1)
    """Text before the caption, with a space; with `enable_wildcard` before each of its lines, but
    with `layout: sdscripts` before the first. `{folder}` stands for the name of the image's folder,
    without the repeats of a name such as `10_sks man`."""
    caption_suffix: str | None = Field(None, min_length=1)
    """Text after the caption, with a space; with `enable_wildcard` after each of its lines, and
    with `layout: sdscripts` after the last. `{folder}` as in `caption_prefix`."""
    caption_dropout_rate: Real = shaped(0.0, _DROPPED, ge=0, lt=1)
    """Share of the variants that are the empty caption. It needs `variants` of 2 or more."""
    enable_wildcard: bool = False
    """Take one line of a caption with several lines, then one alternative of each `{a|b}`; `{{`
    and `}}` are braces. Without it all lines are encoded, with `layout: sdscripts` only the
    first."""
    shuffle_caption: bool = False
    """Shuffle the tags."""
    keep_tokens: Number = Field(0, ge=0)
    """Number of tags at the beginning that are neither shuffled nor dropped."""
    keep_tokens_separator: str | None = Field(None, min_length=1)
    """Marker such as `|||`: tags before it, and after a second one, stay in place. It overrides
    `keep_tokens` where it occurs, and is never encoded; with `layout: sdscripts` it is, where
    nothing is shuffled or dropped. The build warns of a `|||` that is encoded without this key."""
    caption_tag_dropout_rate: Real = shaped(0.0, _DROPPED, ge=0, lt=1)
    """Share of the tags that are dropped. It needs `variants` of 2 or more."""
    secondary_separator: str | None = Field(None, min_length=1)
    """Separator such as `;;;` between tags that are shuffled and dropped together. In the text it
    becomes `caption_separator`."""
    replacements: dict[
        str,
        Annotated[
            str | Annotated[list[str], Field(min_length=1)],
            worded("should be text, or a list of texts; put them in quotes"),
        ],
    ] = Field({})
    """Words and their replacements, applied last. The word `''` stands for the complete caption
    and may have a list of texts, one of which is taken."""

    @property
    def joint(self) -> str:
        """Text that joins shuffled tags: `caption_separator`, with a space at its end."""
        separator = self.caption_separator
        return separator if separator[-1].isspace() else f"{separator} "

    @property
    def random(self) -> bool:
        """Whether two variants of an item can differ."""
        return (
            self.enable_wildcard
            or self.shuffle_caption
            or self.caption_and_tags == "pick"
            or self.caption_dropout_rate > 0
            or self.caption_tag_dropout_rate > 0
            or isinstance(self.replacements.get(""), list)
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.variants > 1 and not self.random:
            raise ValueError(
                f"`variants: {self.variants}` of one and the same text: set `shuffle_caption`, "
                "`enable_wildcard` or a dropout rate, or leave out `variants`"
            )
        if any(isinstance(text, list) for word, text in self.replacements.items() if word):
            raise ValueError("`replacements` has a list for a word: only '' may have one")
        return self


_LISTS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

BUCKET_STEPS = 16
"""Default step between sides of buckets in pixels, except for sd-scripts."""

_PLACING = (
    *("fit", "bucket_reso_steps", "min_bucket_reso", "max_bucket_reso", "bucket_no_upscale"),
    "no_resize_control",
)
"""Keys of a dataset that decide about size and crop of its images and control images."""

_OF_VIDEOS = Applies("is about videos: it needs `target_frames`", when=lambda data: data.video)
_OF_IMAGES = Applies(
    "is about images: leave it out, or leave out `target_frames`", when=lambda data: not data.video
)
_ON_DISK = Applies(
    "is not for a dataset at a URL, whose captions are taken as they are",
    when=lambda data: not data.remote,
)
_NO_REMOTE_LIST = Applies(
    "is a list at a URL, and lists are read from a disk: copy it",
    when=lambda data: not (data.is_list and data.remote),
)
_LATENT_FRAMES = Applies(
    "has a length that is not 4 n + 1, such as 1, 5 or 81",
    when=lambda data: all(frames % 4 == 1 for frames in data.target_frames),
)
_NO_LAYERS = Applies(
    "is not for `multiple_target`, whose layers are images without a caption file",
    when=lambda data: data.is_list or not data.multiple_target,
)
_NO_LIST = Applies("is not for a list, which has the captions", when=lambda data: not data.is_list)
_MERGED = Applies("needs a `metadata_file`", when=lambda data: data.metadata_file is not None)
_CONTROLLED = Applies("takes no control images", row=lambda model: model.version.controls[1] != 0)
_SIZED = Applies(
    "takes control images of the item's own size only",
    row=lambda model: model.spec.sized_controls,
)
_LAYERED = Applies("has one target image", row=lambda model: model.spec.layers)
_IN_SECTIONS = Applies("has no sections", row=lambda model: model.spec.sections)
_FILMED = Applies("takes no videos", row=lambda model: model.version.videos)
_OF_ONE_FRAME = Applies("is not trained on one frame", row=lambda model: model.version.one_frame)
_REGULARISED = Applies(
    "is trained without regularisation images, which neither musubi-tuner nor the trainer wan has",
    row=lambda model: not model.spec.has_tasks,
)

_BUCKETS = Shapes("latents", indirect=True, when=("fit", ("bucket",)))
_SMALL_BUCKETS = Shapes("latents", indirect=True, when=("fit", ("bucket",)), applies=[_OF_IMAGES])
_SDSCRIPTS_BUCKETS = Shapes(
    "latents", layouts=("sdscripts",), indirect=True, when=("fit", ("bucket",))
)
_LENGTHS = Shapes("latents", layouts=("musubi",), indirect=True, applies=[_LATENT_FRAMES, _FILMED])
_CLIPS = Shapes("latents", layouts=("musubi",), indirect=True, applies=[_OF_VIDEOS])
_CONTROLS = Shapes("latents", "text", layouts=("musubi",), indirect=True, applies=[_CONTROLLED])
_CONTROL_SIZES = Shapes(
    "latents", "text", layouts=("musubi",), indirect=True, applies=[_OF_IMAGES, _SIZED]
)
_LAYERS = Shapes("latents", layouts=("musubi",), indirect=True, applies=[_OF_IMAGES, _LAYERED])
_SECTIONS = Shapes("latents", layouts=("musubi",), applies=[_IN_SECTIONS])
_ONE_FRAME = Shapes("latents", layouts=("musubi",), applies=[_OF_IMAGES, _OF_ONE_FRAME])
_CAPTION_FILES = Shapes("text", applies=[_NO_LAYERS])
_NO_CAPTIONER = Applies(
    "has no effect beside a `captioner`, which captions every image without a caption",
    when=lambda data: not data.captioner,
)


class Bucketing(NamedTuple):
    """Settings of sd-scripts' buckets, in pixels."""

    bucket_reso_steps: int  # divisor of the sides of buckets
    bucket_no_upscale: bool  # whether a small image keeps its size
    min_bucket_reso: int  # smallest side of a bucket; a multiple of the steps
    max_bucket_reso: int


class Dataset(Closed):
    """Folders of images or videos with captions, or lists of such files."""

    path: DiskPath = Field(
        min_length=1, json_schema_extra=Shapes("machine", applies=[_NO_REMOTE_LIST])
    )
    """Folder of the images or videos; a [URL](#images-at-a-url) such as `s3://bucket/folder`; or a
    `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` [list](#lists) that names files and captions."""
    flat: bool = shaped(False, MANIFEST)
    """Ignore sub-folders, as musubi-tuner and sd-scripts do. In a list, drop folders from item
    names."""
    caption_extension: Ending = shaped(".txt", TEXT)
    """Ending of the caption file beside an image or video."""
    tags_extension: Ending | None = shaped(None, Shapes("text", applies=[_ON_DISK]))
    """Ending of a second file beside an image, with tags, such as `.tags`.
    [`captions.caption_and_tags`](captions.md#caption_and_tags) says how caption and tags are
    combined."""
    metadata_file: DiskPath | None = shaped(
        None, Shapes("text", applies=[_ON_DISK, _NO_LIST, _NO_LAYERS]), min_length=1
    )
    """File with the captions of many images: a `.json` or `.jsonl` of sd-scripts, or the
    `metadata.csv` or `metadata.jsonl` of an image folder. A [list](#lists) has the same rows.
    Names are below the dataset's folder, from the working directory, or absolute; sd-scripts' may
    lack the ending."""
    metadata_captions: Literal["override", "join"] | None = shaped(
        None, Shapes("text", applies=[_MERGED])
    )
    """Caption of an image that has both a caption file and an entry in `metadata_file`. `override`
    takes the entry; `join` takes the text of the file, then that of the entry. By default two
    different captions are an error."""
    captions: Captions | None = shaped(None, Shapes("text", applies=[_ON_DISK]))
    """[Processing of captions](captions.md) before they are encoded: prefix, tags, wildcards,
    dropout, variants."""
    captioner: NamedCaptioners = shaped({}, _CAPTION_FILES)
    """[Captioner](captioners.md), or several of them, that write the caption of each image or video
    without one. A caption that a person wrote, such as `a.txt` beside `a.png`, always comes first.
    Captions of several captioners are combined as
    [`captions.caption_and_tags`](captions.md#caption_and_tags) says."""
    fit: Literal["crop", "bucket"] = shaped("crop", GEOMETRY)
    """Fitting of images to a resolution. `crop` scales an image to cover the resolution and cuts
    off the rest around the centre. `bucket` picks the size with the nearest aspect ratio from a
    list of sizes of about the same area, so that little is cut off. An image that is scaled and
    cut as before keeps its latents. For videos `bucket` is the default, and `crop` gives every
    clip the size of the resolution and is not possible with `encoder: musubi`."""
    bucket_reso_steps: Number | None = shaped(None, _BUCKETS, ge=8)
    """Step between bucket sides in pixels, with `fit: bucket`. By default 16; for sd-scripts 64,
    and 32 for SDXL. It must be a multiple of the VAE's factor (8 for Stable Diffusion); for
    sd-scripts, see [architectures](architectures.md). Leave it out for musubi-tuner, whose steps
    are fixed. A batch holds items of one size, so larger steps give fewer sizes and fuller
    batches."""
    min_bucket_reso: Number | None = shaped(None, _SDSCRIPTS_BUCKETS, ge=8)
    """Shortest side of a bucket in pixels, rounded down to the steps; by default 256. Every
    resolution must be at least as large. For sd-scripts."""
    max_bucket_reso: Number | None = shaped(None, _SDSCRIPTS_BUCKETS, ge=8)
    """Longest side of a bucket in pixels, rounded up to the steps; by default 1024. For
    sd-scripts."""
    bucket_no_upscale: bool = shaped(False, _SMALL_BUCKETS)
    """Do not enlarge images. With `fit: bucket`, an image whose area is not larger than that of
    the resolution keeps its size, with each side rounded down to the bucket steps. Not for
    videos."""
    flip_aug: bool = shaped(False, Shapes("latents", layouts=("sdscripts",)))
    """Encode each image flipped too; the training picks one of the two at random. For
    sd-scripts."""
    alpha_mask: bool = shaped(False, Shapes("latents", layouts=("sdscripts",)))
    """Cache the alpha channel as a loss mask, which the training uses with `--masked_loss`. Opaque
    images get a mask of ones. For sd-scripts."""
    exif_rotation: bool = shaped(True, Shapes("latents", layouts=("plain",)))
    """Apply the EXIF orientation of images. Set `false` for a trainer that ignores it. The
    orientation of TIFF files is always applied."""
    background: Annotated[str, StringConstraints(pattern=COLOUR)] = shaped(
        "white", Shapes("latents", layouts=("plain",))
    )
    """Colour behind transparent pixels: `white`, `black`, `gray` or `"#rrggbb"`, in quotes because
    `#` begins a comment."""
    max_image_pixels: Number = shaped(178_956_970, MACHINE, gt=0)
    """Largest image, or frame of an `.npz` clip, in pixels (width times height). A larger one is
    refused before it is decoded, because a small file can unpack to more than your memory."""
    num_repeats: Number = shaped(1, MANIFEST, ge=1, le=1_000_000)
    """Times that each item is seen in an epoch. Use it to balance the datasets of a run."""
    is_reg: bool = shaped(False, Shapes("manifest", applies=[_REGULARISED]))
    """Images for regularisation, as in sd-scripts: pictures of the class, such as other men beside
    `sks man`. An epoch shows them as often, all together, as the other images of the run. Their
    loss is multiplied by the trainer's [`prior_loss_weight`](trainer-sd.md#prior_loss_weight). See
    [regularisation images](#regularisation-images). For `sd` and `sdscripts`."""
    missing_caption: Literal["error", "empty"] = shaped("error", _CAPTION_FILES)
    """Images without a caption file: `error` makes them faulty items, `empty` gives them the empty
    caption."""
    class_tokens: str | None = shaped(
        None, Shapes("text", applies=[_NO_LAYERS, _NO_CAPTIONER]), min_length=1
    )
    """Caption of every image without a caption file, such as `sks man`, as in sd-scripts.
    `{folder}` stands for the name of the image's folder, without the repeats of a name such as
    `10_sks man`. It takes precedence over `missing_caption`."""
    empty_caption: Literal["error", "allow"] = shaped("error", TEXT)
    """Caption files without text: `error` makes their items faulty, `allow` takes them as the
    empty caption."""
    on_error: Literal["fail", "skip"] = shaped("fail", MANIFEST)
    """Effect of faulty items. In both cases Latentmake first finishes all other items and names
    each bad file with its fault. `fail` then stops; fix the files and run the same command, and
    finished items are not encoded again. `skip` trains without the faulty items and lists them in
    `manifest.jsonl` and `dataset.lock`; a file that you fix later is included again. Use `skip`
    for large collections."""
    adopt_from: Listed[DiskPath] = shaped([], MACHINE)
    """Folders with caches that musubi-tuner, sd-scripts or ai-training made of these items.
    `latentmake adopt` takes them over in place of encoding; see the guides for
    [musubi-tuner](../guides/musubi-tuner.md) and [kohya](../guides/kohya.md). Caches
    of [ai-training](../trainers/ai-training.md) lie beside the images by default."""
    control_directory: DiskPath | None = shaped(None, _CONTROLS, min_length=1)
    """Folder of [control images](#control-images-and-layers), named as the items that they
    control; for videos and a Wan model, of control videos. A changed control image rebuilds
    latents; embeddings too for Qwen-Image-Edit and HiDream O1."""
    no_resize_control: bool = shaped(False, _CONTROL_SIZES)
    """Keep the size of control images, with each side rounded down to a multiple of the
    architecture's bucket step. By default control images get the size of the image that they
    control."""
    control_resolution: ResolutionField | None = shaped(None, _CONTROL_SIZES)
    """Target area of control images, which keep their aspect ratio. With `no_resize_control`, only
    larger images are scaled down. Smaller ones keep their size, which must be a multiple of the
    patch size."""
    multiple_target: bool = shaped(False, _LAYERS)
    """Images without a caption are [layers](#control-images-and-layers) of other images. For
    Qwen-Image-Layered."""
    fp_latent_window_size: Number = shaped(9, _SECTIONS, ge=1)
    """Latent frames of a section. For FramePack."""
    fp_1f_clean_indices: Listed[Annotated[Number, Field(ge=0)]] | None = shaped(
        None, _ONE_FRAME, min_length=1
    )
    """Time index of each control image; an item has as many control images as there are indices.
    For FramePack with `task: one_frame`."""
    fp_1f_target_index: Number | None = shaped(None, _ONE_FRAME, ge=0)
    """Time index of the image that is trained; required for FramePack with `task: one_frame`."""
    fp_1f_no_post: bool = shaped(False, _ONE_FRAME)
    """Do not add an empty frame behind the control images. For FramePack with `task: one_frame`."""
    target_frames: Listed[Annotated[Number, Field(ge=1)]] | None = shaped(None, _LENGTHS)
    """Lengths of the clips in frames, each 4 n + 1, such as `[1, 25, 45]`. This key makes the
    dataset one of [videos](#videos)."""
    frame_extraction: Literal["head", "chunk", "slide", "uniform", "full"] = shaped("head", _CLIPS)
    """Clips to cut from a video. `head`: one at its beginning. `chunk`: one after the other.
    `slide`: one every `frame_stride` frames. `uniform`: `frame_sample` clips, evenly spread.
    `full`: one clip of all frames, up to `max_frames`."""
    frame_stride: Number = shaped(1, _CLIPS, ge=1)
    """Frames from the beginning of one clip to that of the next, with `frame_extraction: slide`."""
    frame_sample: Number = shaped(1, _CLIPS, ge=1)
    """Number of clips of each length, with `frame_extraction: uniform`."""
    max_frames: Number = shaped(129, _CLIPS, ge=1)
    """Largest number of frames, with `frame_extraction: full`."""
    sample_stride: Number = shaped(1, _CLIPS, ge=1)
    """Use every n-th frame of a video, after the conversion by `source_fps`. With `2`, a clip
    shows twice the time."""
    source_fps: Annotated[
        Annotated[Real, Field(gt=0)] | Literal["auto"] | None,
        worded("should be a number of frames a second above 0, or auto"),
    ] = shaped(None, Shapes("latents", layouts=("musubi",), applies=[_OF_VIDEOS]))
    """Frame rate of the videos. Frames are dropped to get the rate that the model was trained
    with: 16 for Wan, 24 for HunyuanVideo and Kandinsky 5, 30 for FramePack. `auto` reads the
    timestamps of each file, so variable rates come out right, and repeats a frame that is shown
    longer. By default every frame is used."""
    display_rotation: bool = shaped(False, _CLIPS)
    """Apply the rotation metadata of videos before anything else. Without it, videos of phones
    often lie on their side."""
    short_videos: Literal["skip", "error"] = shaped(
        "skip", Shapes("manifest", applies=[_OF_VIDEOS])
    )
    """Videos that are too short for every length of `target_frames`. `skip` leaves them out with a
    note, as musubi-tuner does; `error` makes them faulty items, see `on_error`."""

    @property
    def remote(self) -> bool:
        """Whether the dataset or its control images lie at a URL."""
        return any("://" in (path or "") for path in (self.path, self.control_directory))

    @property
    def is_list(self) -> bool:
        """Whether `path` is a list of files, not a folder."""
        return self.path.lower().endswith(_LISTS) and not Path(self.path).is_dir()

    @property
    def folder(self) -> str:
        """Folder of the dataset, or the folder that holds the list."""
        return str(Path(self.path).parent) if self.is_list else self.path

    @property
    def own_clips(self) -> list[str]:
        """Keys that give clips which musubi-tuner's own caching scripts cannot make.

        musubi-tuner's trainer can still read the caches.
        """
        is_set = {
            "path": self.is_list,
            "fit": self.fit == "crop",
            "sample_stride": self.sample_stride > 1,
            "source_fps": self.source_fps == "auto",
            "display_rotation": self.display_rotation,
        }
        return [key for key, value in is_set.items() if self.video and value]

    def bucketing(self, architecture: Architecture) -> Bucketing:
        """Return the settings of sd-scripts' buckets, with the defaults of an architecture.

        Source: `adjust_min_max_bucket_reso_by_steps` of its library/train_util.py.
        """
        steps = self.bucket_reso_steps or architecture.bucket_steps
        least, most = self.min_bucket_reso or 256, self.max_bucket_reso or 1024
        least, most = least - least % steps, most + -most % steps
        return Bucketing(steps, self.bucket_no_upscale, least, most)

    def sdscripts_buckets(self, architecture: Architecture) -> dict[str, object]:
        """Return the keys of sd-scripts' dataset file that decide how images are fitted."""
        if self.fit != "bucket":
            return {"enable_bucket": False}
        return {"enable_bucket": True, **self.bucketing(architecture)._asdict()}

    def placing(self) -> dict[str, object]:
        """Return the keys on size and crop of images that differ from their defaults."""
        return self.model_dump(include={*_PLACING}, exclude_defaults=True)

    def placed(self, keys: Mapping[str, object]) -> Dataset:
        """Return the settings with other keys on size and crop; missing keys get their defaults."""
        fields = type(self).model_fields
        return self.model_copy(update={key: keys.get(key, fields[key].default) for key in _PLACING})

    @property
    def captioners(self) -> dict[str, Captioner]:
        """Sections of its captioners, by their names."""
        return {name: section for name, section in self.captioner.items() if section}

    @property
    def composed(self) -> bool:
        """Whether texts depend on more than the caption files: changes, tags or a metadata file."""
        return bool(self.captions or self.tags_extension or self.metadata_file)

    @property
    def text_variants(self) -> int:
        """Number of texts of each item."""
        return self.captions.variants if self.captions else 1

    @property
    def video(self) -> bool:
        """Whether its items are videos."""
        return self.target_frames is not None

    @model_validator(mode="before")
    @classmethod
    def _clips_are_bucketed(cls, values: Any) -> Any:
        # musubi-tuner always puts clips into buckets, whatever its configuration says.
        if isinstance(values, dict) and values.get("target_frames") is not None:
            return {"fit": "bucket", **values}
        return values

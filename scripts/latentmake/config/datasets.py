"""Folders of captioned images or videos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from latentmake.config.architectures import Architecture
from latentmake.config.captions import Captions
from latentmake.config.fields import (
    COLOUR,
    Closed,
    DiskPath,
    Ending,
    Number,
    Place,
    Real,
    ResolutionField,
    listed,
    worded,
)
from latentmake.config.shapes import GEOMETRY, MACHINE, MANIFEST, TEXT, Shapes

_LISTS = (".jsonl", ".json")

BUCKET_STEPS = 16
"""Sides of buckets are multiples of this where a dataset says nothing, in pixels."""


_BUCKETS = Shapes("latents", indirect=True, when=("fit", ("bucket",)))
_SDSCRIPTS_BUCKETS = Shapes(
    "latents", layouts=("sdscripts",), indirect=True, when=("fit", ("bucket",))
)
_CLIPS = Shapes("latents", layouts=("musubi",), indirect=True)
_CONTROLS = Shapes("latents", "text", layouts=("musubi",), indirect=True)
_LAYERS = Shapes("latents", layouts=("musubi",), indirect=True)
_FRAMEPACK = Shapes("latents", layouts=("musubi",))


class Bucketing(NamedTuple):
    """Settings of sd-scripts' buckets, in pixels.

    Attributes:
        bucket_reso_steps: sides of buckets are multiples of this.
        bucket_no_upscale: whether a small image keeps its size.
        min_bucket_reso: smallest side of a bucket; a multiple of the steps.
        max_bucket_reso: largest side of a bucket; likewise.
    """

    bucket_reso_steps: int
    bucket_no_upscale: bool
    min_bucket_reso: int
    max_bucket_reso: int


class Dataset(Closed):
    """A folder of images or videos with a caption file beside each, or a list of such files."""

    aliases: ClassVar[dict[str, str]] = {"adopt": "adopt_from"}

    path: Place = Field(min_length=1, json_schema_extra=MACHINE)
    """Folder of the images or videos, with sub-folders; s3://bucket/folder for images on an S3
    server. Or a .jsonl or .json file whose rows name them and their captions."""
    flat: bool = Field(False, json_schema_extra=MANIFEST)
    """As musubi-tuner and sd-scripts read a folder: without its sub-folders; items of a list are
    named by their files alone."""
    caption_extension: Ending = Field(".txt", json_schema_extra=TEXT)
    """Ending of the caption file that lies beside an image."""
    tags_extension: Ending | None = Field(None, json_schema_extra=TEXT)
    """Ending of a file of tags that lies beside an image, such as .tags."""
    metadata_file: DiskPath | None = Field(None, min_length=1, json_schema_extra=TEXT)
    """File with the captions of many images: sd-scripts' .json or .jsonl, or the metadata.csv or
    metadata.jsonl of an image folder."""
    metadata_captions: Literal["override", "join"] | None = Field(None, json_schema_extra=TEXT)
    """Images with a caption file and an entry in metadata_file: the entry counts, or is appended to
    the file's text; by default two that differ are an error."""
    captions: Captions | None = None
    """Changes to captions before they are encoded."""
    fit: Literal["crop", "bucket"] = Field("crop", json_schema_extra=GEOMETRY)
    """crop: cover the resolution and cut its centre. bucket: keep the aspect ratio as nearly as a
    list of sizes of the same area allows."""
    bucket_reso_steps: Number | None = Field(None, ge=8, json_schema_extra=_BUCKETS)
    """Sides of buckets are multiples of this, in pixels; by default 16, and for sd-scripts 64
    (SDXL: 32)."""
    min_bucket_reso: Number | None = Field(None, ge=8, json_schema_extra=_SDSCRIPTS_BUCKETS)
    """No side of a bucket is smaller, in pixels (sd-scripts)."""
    max_bucket_reso: Number | None = Field(None, ge=8, json_schema_extra=_SDSCRIPTS_BUCKETS)
    """No side of a bucket is larger, in pixels (sd-scripts)."""
    bucket_no_upscale: bool = Field(False, json_schema_extra=_BUCKETS)
    """Images smaller than the resolution keep their own size, rounded down."""
    flip_aug: bool = Field(False, json_schema_extra=Shapes("latents", layouts=("sdscripts",)))
    """Encode each image flipped too; its training picks one (sd-scripts)."""
    alpha_mask: bool = Field(False, json_schema_extra=Shapes("latents", layouts=("sdscripts",)))
    """Cache transparency as a mask of the loss (sd-scripts)."""
    exif_rotation: bool = Field(True, json_schema_extra=Shapes("latents", layouts=("plain",)))
    """Turn an image as its EXIF orientation says before anything else."""
    background: Annotated[str, StringConstraints(pattern=COLOUR)] = Field(
        "white", json_schema_extra=Shapes("latents", layouts=("plain",))
    )
    """Colour that shows through transparent pixels: white, black, gray or #rrggbb."""
    max_image_pixels: Number = Field(178_956_970, gt=0, json_schema_extra=MACHINE)
    """An image of more pixels is refused as a decompression bomb."""
    num_repeats: Number = Field(1, ge=1, le=1_000_000, json_schema_extra=MANIFEST)
    """Repeats of each item in an epoch."""
    missing_caption: Literal["error", "empty"] = Field("error", json_schema_extra=TEXT)
    """empty: an image without a caption file gets the empty caption."""
    class_tokens: str | None = Field(None, min_length=1, json_schema_extra=TEXT)
    """Caption of every image without a caption file, such as `sks man` (sd-scripts); it counts
    whatever `missing_caption` says."""
    empty_caption: Literal["error", "allow"] = Field("error", json_schema_extra=TEXT)
    """allow: a caption file without text is a caption without text."""
    on_error: Literal["fail", "skip"] = Field("fail", json_schema_extra=MANIFEST)
    """Damaged items: fail after all others are done, or skip them, named in manifest and output."""
    adopt_from: Annotated[
        list[DiskPath], BeforeValidator(listed, json_schema_input_type=DiskPath | list[DiskPath])
    ] = Field([], json_schema_extra=Shapes("machine", layouts=("musubi", "sdscripts")))
    """Folders with caches that musubi-tuner or sd-scripts made of these items, to be adopted."""
    control_directory: Place | None = Field(None, min_length=1, json_schema_extra=_CONTROLS)
    """Folder of control images, named as what they control, several with _0, _1 and so on behind
    that name; of videos the control videos (Wan)."""
    no_resize_control: bool = Field(False, json_schema_extra=_CONTROLS)
    """Control images keep their size, cut to multiples of the bucket steps."""
    control_resolution: ResolutionField | None = Field(None, json_schema_extra=_CONTROLS)
    """Control images are brought to this size's area and keep their shape; with no_resize_control
    only larger ones. By default they are brought to the size of what they control."""
    multiple_target: bool = Field(False, json_schema_extra=_LAYERS)
    """Images without a caption, named as one that has it with _1, _2 and so on behind, are its
    layers (Qwen-Image-Layered)."""
    fp_latent_window_size: Number = Field(9, ge=1, json_schema_extra=_FRAMEPACK)
    """Latent frames of a section (FramePack)."""
    fp_1f_clean_indices: Annotated[
        list[Annotated[Number, Field(ge=0)]] | None,
        BeforeValidator(listed, json_schema_input_type=int | list[int] | None),
    ] = Field(None, min_length=1, json_schema_extra=_FRAMEPACK)
    """Index of each control image in time (FramePack, one frame)."""
    fp_1f_target_index: Number | None = Field(None, ge=0, json_schema_extra=_FRAMEPACK)
    """Index in time of the frame that is trained (FramePack, one frame)."""
    fp_1f_no_post: bool = Field(False, json_schema_extra=_FRAMEPACK)
    """No empty frame is added behind the control images (FramePack, one frame)."""
    target_frames: Annotated[
        list[Annotated[Number, Field(ge=1)]] | None,
        BeforeValidator(listed, json_schema_input_type=int | list[int] | None),
    ] = Field(None, json_schema_extra=_CLIPS)
    """Makes this a dataset of videos: lengths of its clips in frames, 4 n + 1 each."""
    frame_extraction: Literal["head", "chunk", "slide", "uniform", "full"] = Field(
        "head", json_schema_extra=_CLIPS
    )
    """Clips of a video: its beginning; one after the other; one every frame_stride frames;
    frame_sample of them; or one of all frames."""
    frame_stride: Number = Field(1, ge=1, json_schema_extra=_CLIPS)
    """slide: frames from the beginning of a clip to that of the next."""
    frame_sample: Number = Field(1, ge=1, json_schema_extra=_CLIPS)
    """uniform: clips of a video."""
    max_frames: Number = Field(129, ge=1, json_schema_extra=_CLIPS)
    """full: frames kept of a video."""
    sample_stride: Number = Field(1, ge=1, json_schema_extra=_CLIPS)
    """Every n-th frame of a video is used, after the conversion by source_fps."""
    source_fps: Annotated[
        Annotated[Real, Field(gt=0)] | Literal["auto"] | None,
        worded("should be a number of frames a second above 0, or auto"),
    ] = Field(None, json_schema_extra=Shapes("latents", layouts=("musubi",)))
    """Frame rate of the videos: frames are dropped to get 16 a second, for HunyuanVideo and
    Kandinsky 5 24, for FramePack 30. auto: as each file's own timestamps say. By default each frame
    is kept."""
    display_rotation: bool = Field(False, json_schema_extra=_CLIPS)
    """Turn the frames of a video as its rotation metadata says."""
    short_videos: Literal["skip", "error"] = Field("skip", json_schema_extra=MANIFEST)
    """Videos too short for any clip: skip leaves them out with a line, error makes them faulty."""

    @property
    def remote(self) -> bool:
        """Whether any of it lies on an S3 server."""
        return any((each or "").startswith("s3://") for each in (self.path, self.control_directory))

    @property
    def is_list(self) -> bool:
        """Whether `path` names a list of files and not a folder."""
        return self.path.lower().endswith(_LISTS) and not Path(self.path).is_dir()

    @property
    def folder(self) -> str:
        """The folder, or that of the list."""
        return str(Path(self.path).parent) if self.is_list else self.path

    @property
    def own_clips(self) -> list[str]:
        """Keys of clips that musubi-tuner's own scripts would not make of its folder.

        Its trainer reads the caches all the same.
        """
        asked = {
            "path": self.is_list,
            "fit": self.fit == "crop",
            "sample_stride": self.sample_stride > 1,
            "source_fps": self.source_fps == "auto",
            "display_rotation": self.display_rotation,
        }
        return [key for key, is_asked in asked.items() if self.video and is_asked]

    @property
    def bucket_steps(self) -> int:
        """Steps between sides of buckets, but for sd-scripts; in pixels."""
        return self.bucket_reso_steps or BUCKET_STEPS

    def bucketing(self, architecture: Architecture) -> Bucketing:
        """Return the settings of sd-scripts' buckets, with the defaults of an architecture.

        Source: `adjust_min_max_bucket_reso_by_steps` of its library/train_util.py.
        """
        steps = self.bucket_reso_steps or architecture.bucket_steps
        least, most = self.min_bucket_reso or 256, self.max_bucket_reso or 1024
        least, most = least - least % steps, most + -most % steps
        return Bucketing(steps, self.bucket_no_upscale, least, most)

    @property
    def composed(self) -> bool:
        """Whether its texts are more than the content of its caption files."""
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
        # musubi-tuner puts clips into buckets whatever its configuration says.
        if isinstance(values, dict) and values.get("target_frames") is not None:
            return {"fit": "bucket", **values}
        return values

    @model_validator(mode="after")
    def _texts(self) -> Self:
        if self.tags_extension == self.caption_extension:
            raise ValueError("`tags_extension` is that of the captions")
        if self.metadata_captions is not None and self.metadata_file is None:
            raise ValueError("`metadata_captions` needs a `metadata_file`")
        if self.is_list and self.path.startswith("s3://"):
            raise ValueError("`path` is a list on S3, and lists are read from a disk: copy it")
        if self.is_list and self.metadata_file is not None:
            raise ValueError("`path` is a list, which has the captions: leave out `metadata_file`")
        if self.composed and self.path.startswith("s3://"):
            raise ValueError("captions of a dataset on S3 are taken as they are")
        return self

    @model_validator(mode="after")
    def _targets(self) -> Self:
        if not self.multiple_target or self.is_list:
            return self
        if key := self.first_set("metadata_file", "missing_caption", "class_tokens"):
            raise ValueError(f"layers are images without a caption file: leave out `{key}`")
        return self

    @model_validator(mode="after")
    def _clips(self) -> Self:
        if self.target_frames is None:
            about = ("frame_extraction", "frame_stride", "frame_sample", "max_frames")
            others = ("sample_stride", "source_fps", "display_rotation", "short_videos")
            if key := self.first_set(*about, *others):
                raise ValueError(f"`{key}` is about videos: it needs `target_frames`")
            return self
        images = ("no_resize_control", "control_resolution", "multiple_target")
        if key := self.first_set(
            *images, "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"
        ):
            raise ValueError(f"`{key}` is about images: leave it out, or leave out `target_frames`")
        if self.bucket_no_upscale:
            raise ValueError("clips of videos have no `bucket_no_upscale`: leave it out")
        for frames in self.target_frames:
            if frames % 4 != 1:
                below = max((frames - 1) // 4 * 4 + 1, 1)
                raise ValueError(
                    f"target_frames: {frames} is not 4 n + 1; use {below} or {below + 4}"
                )
        return self

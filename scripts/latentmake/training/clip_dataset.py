"""ClipDataset: clips of videos as a torch dataset, cut while they are read; `collate_fn`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset

from latentmake.caches.pixels.scaling import Cut, Film, cut
from latentmake.config.root import Config, parse
from latentmake.data.datasets import Datasets
from latentmake.data.item import Item
from latentmake.data.probe import indices_of, prompt_of
from latentmake.errors import ConfigError, DatasetError
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, SourceFps, Span
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Musubi
from latentmake.models.files import T5_LENGTH

_NAME = "source"
_WORDS = {  # of a configuration's faults -> of the arguments
    **{"target_frames.0": "frames", "target_frames": "frames", "sample_stride": "stride"},
    f"runs.{_NAME}.resolutions.0": "ClipDataset",
    f"runs.{_NAME}.resolutions": "ClipDataset, height or width",
    f"datasets.{_NAME}": "ClipDataset",
}


class _Clips(Musubi):
    """Names of clips, of which no cache is made: those of two folders may be the same."""

    flat = False


class _Listing(Datasets):
    def layout(self, model: str) -> Musubi:
        return _Clips()


class ClipDataset(TorchDataset[dict[str, Any]]):
    """Clips of a folder of videos, or of a JSONL list of videos or of .npz clips.

    Nothing is written: a clip is the name of a video and the place of its frames. Its pixels are
    those that the caches of a run of one `[width, height]` with `fit: crop` are made of: scaled to
    cover the size, cut around the centre. It can be pickled, and holds no open file.

    Args:
        source: folder with a caption file beside each video, or a JSONL file of objects with
            `video` (or `npz`, `clip`, `file`, `file_name`, `path`, `media_path`) and `prompt` (or
            `text`, `caption`). Paths are below the list's folder, from the working directory where
            nothing lies there, or absolute.
        frames: of a clip, 4 n + 1.
        height: of a frame, a multiple of 16, in pixels.
        width: likewise.
        stride: every so many frames of a file one is taken.
        source_fps: frame rate of the files: frames are dropped to get 16 a second. By default each
            frame is kept.
        settings: further keys of a dataset in the configuration: `frame_extraction: "chunk"` for
            all clips of a video one after the other (by default its first alone),
            `missing_caption`, `captions`, ...

    Raises:
        UserError: a setting is wrong, or videos or captions are faulty, which are named; with
            `on_error: "skip"` these are left out.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        frames: int = 81,
        height: int = 480,
        width: int = 832,
        stride: int = 1,
        source_fps: SourceFps = None,
        **settings: Any,
    ) -> None:
        self.source = os.fspath(source)
        config = _config(
            {
                "path": self.source,
                "target_frames": frames,
                "fit": "crop",
                **({"sample_stride": stride} if stride != 1 else {}),
                **({"source_fps": source_fps} if source_fps is not None else {}),
            },
            settings,
            (width, height),
        )
        self._settings = config.datasets[_NAME]
        self._size = Size(width, height)
        facts = _Listing(config, Memo(None))
        items, faults = facts.items(_NAME, _NAME)
        if faults and self._settings.on_error != "skip":
            lines = " | ".join(fault.line for fault in faults)
            hint = 'correct or remove them, or give on_error="skip"'
            raise DatasetError(f"{len(faults)} faulty: {lines}", where=self.source, hint=hint)
        layout, clips = facts.layout(_NAME), list[tuple[Item, Clip]]()
        for item in items:
            assert item.media is not None
            found = layout.clips(item.media, self._settings, item.span)
            clips += [(item, clip) for clip in found]
        self._clips = clips * self._settings.num_repeats
        self._prompts = {item.stem: prompt_of(item) for item in items}

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read a clip.

        Returns:
            `pixel_values` [F, 3, H, W], float32, -1 to 1; `prompt`; `row`: `video`, `first_frame`
            (its index in the file), `stride`, and the other columns of a list.

        Raises:
            SourceError: the video is damaged, gone, or was changed since it was listed.
        """
        (item, clip), settings = self._clips[index], self._settings
        indices = indices_of(item, clip, settings.source_fps)
        key, rotation = (self._size, self._size), item.media.rotation if item.media else 0
        film = Film(item.image, rotation, settings.max_image_pixels)
        cuts = cut(film, [Cut(indices, 0, len(indices), [key])])
        (pixels,) = (made[key] for made in cuts if made is not None)
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        place = {
            "video": item.image,
            "first_frame": indices[0],
            "stride": (item.span or Span()).stride,
        }
        return {
            "pixel_values": values.float() / 127.5 - 1.0,
            "prompt": self._prompts[item.stem],
            "row": {**(item.row or {}), **place},
        }


def _config(
    dataset: dict[str, Any], settings: dict[str, Any], resolution: tuple[int, int]
) -> Config:
    """Return the configuration of a run of one dataset, whose encoders nobody reads."""
    model = {"task": "t2v-1.3B", "vae": "-", "text": {"path": "-", "tokenizer": "-"}}
    run = {"datasets": [_NAME], "model": _NAME, "resolutions": [list(resolution)]}
    values = {"datasets": {_NAME: dataset | settings}, "models": {_NAME: model}}
    try:
        return parse({**values, "runs": {_NAME: run}})
    except ConfigError as error:
        line = str(error)
        for word, argument in _WORDS.items():
            line = line if word.removesuffix(".0") in settings else line.replace(word, argument)
        raise ConfigError(line) from None


class _Batch(dict[str, Any]):
    """A batch, where `frames` is another name of `pixel_values`, which is copied only once."""

    def __missing__(self, key: str) -> Any:
        if key == "frames" and "pixel_values" in self:
            return self["pixel_values"]
        raise KeyError(key)


def collate_fn(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a batch of items of one shape, of a ClipDataset or a CachedClipDataset.

    Embeddings are padded with zeros to 512 tokens, as Wan's network was trained and as diffusers'
    WanPipeline does; to the longest where one is longer.

    Returns:
        Every tensor of the items, stacked: `pixel_values` [B, F, 3, H, W], which `batch["frames"]`
        gives too, or `latents` [B, 16, f, h, w], `text` [B, 512, D] and `mask` [B, 512], true where
        a caption has tokens; `prompts` and `rows`, lists of B.

    Raises:
        ValueError: the shapes of items differ, which are named.
    """
    batch = _Batch({f"{name}s": [item[name] for item in items] for name in ("prompt", "row")})
    for name in [name for name, value in items[0].items() if isinstance(value, torch.Tensor)]:
        tensors = [item[name] for item in items]
        if name == "text":
            text = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
            missing = max(0, T5_LENGTH - text.shape[1])
            batch["text"] = torch.nn.functional.pad(text, (0, 0, 0, missing))
            lengths = torch.tensor([len(tensor) for tensor in tensors])
            batch["mask"] = torch.arange(text.shape[1] + missing) < lengths[:, None]
            continue
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            raise ValueError(
                f"{name} of one batch have the shapes {shapes}: use batch_size=1, or a batch "
                "sampler that groups items of one shape"
            )
        batch[name] = torch.stack(tensors)
    return batch

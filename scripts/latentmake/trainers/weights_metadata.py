"""Metadata in the header of trained weights: what they are, and what they were trained on.

| key | reader |
|---|---|
| `latentmake.*` | `latentmake explain` finds the training in the run's history |
| `modelspec.*` | ComfyUI, SwarmUI, Hugging Face (https://github.com/Stability-AI/ModelSpec) |
| `ss_*` | A1111, Forge, sd-scripts' tools (sd-scripts' `train_network.py`) |

`trainer.metadata` decides how much of the data the header tells. The metadata follow from the
training's order, its items and its record, so equal trainings write equal files. The date is an
exception, so only `full` has it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import latentmake
from latentmake.base import atomic, digest
from latentmake.formats import cachefile
from latentmake.formats.media import drawn_picture
from latentmake.formats.safetensors import read_head
from latentmake.layouts.layout import resolution_of
from latentmake.pages.page import embedded
from latentmake.runs.history import RosterItem, history_folder, items_of
from latentmake.runs.order import Record, RunFiles, RunOrder

SAFE = frozenset(
    {"modelspec." + key for key in ("sai_model_spec", "architecture", "implementation")}
    | {"modelspec." + key for key in ("resolution", "prediction_type", "timestep_range")}
    | {"format", "ss_v2", "ss_base_model_version", "ss_sd_model_hash", "ss_new_sd_model_hash"}
    | {f"ss_network_{key}" for key in ("module", "dim", "alpha", "args")}
    | {"ss_resolution", "ss_clip_skip", "ss_steps", "ss_epoch", "ss_num_epochs", "ss_unet_lr"}
)
"""Keys of a launched trainer that tell nothing about captions and file names."""
_DESCRIBED = ".described.safetensors"  # end of the name of a copy
_LARGEST = 2 << 30  # bytes of weights that are copied
_COMMON = 3  # items that must have a tag before `standard` names it
_TAGS = 20  # tags in `modelspec.tags`
_SIDE = 256  # longest side of the thumbnail, in pixels
_SETTINGS = {
    "network_dim": ("network_dim", "rank"),
    "network_alpha": ("network_alpha", "alpha", "network_dim", "rank"),
    "learning_rate": ("learning_rate",),
    "lr_scheduler": ("lr_scheduler",),
    "lr_warmup_steps": ("lr_warmup_steps",),
    "optimizer": ("optimizer", "optimizer_type"),
    "batch_size_per_device": ("train_batch_size", "batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_checkpointing": ("gradient_checkpointing",),
    "mixed_precision": ("mixed_precision",),
    "max_grad_norm": ("max_grad_norm",),
    "noise_offset": ("noise_offset",),
    "min_snr_gamma": ("snr_gamma",),
    "zero_terminal_snr": ("zero_terminal_snr",),
    "prior_loss_weight": ("prior_loss_weight",),
    "seed": ("seed",),
}
"""Key of kohya, without `ss_` -> the trainer's keys, of which the first that is set counts."""


def metadata_of(order: RunOrder, record: Record, steps: int | None = None) -> dict[str, str]:
    """Return the metadata of a training's weights; empty if the user wants none.

    Args:
        order: order of the training.
        record: record of the training, with the digest of its roster.
        steps: steps that the weights were trained.
    """
    trainer: Any = getattr(order, "trainer", None)
    mode = getattr(trainer, "metadata", "none")
    if mode == "none":
        return {}
    training = history_folder(order.run, record.parts, record.roster)
    learned = [item for item in _items(training) if not item.validation]
    counts = frequencies(learned, full=mode == "full")
    said = {
        "latentmake.version": latentmake.__version__,
        "latentmake.run": order.run,
        "latentmake.training": training.name,
        "latentmake.roster": record.roster,
        "latentmake.parts": digest.canonical(record.parts),
        "latentmake.items": str(len(learned)),
        **_modelspec(order.run, trainer, learned, counts),
        **_of_kohya(order.run, trainer, learned, counts),
        "ss_steps": "" if steps is None else str(steps),
    }
    if mode == "full":
        said |= _further(order, record, learned)
    return {key: value for key, value in said.items() if value}


@cache
def _items(training: Path) -> list[RosterItem]:
    """Return the items of a training, which are read once and not for each saved step."""
    return items_of(training) or []


def frequencies(items: Iterable[RosterItem], *, full: bool) -> dict[str, Counter[str]]:
    """Return dataset, as kohya names its folder, -> tag -> number of items whose texts have it.

    Unless `full`, datasets have numbers instead of names. Tags that fewer than three items have,
    complete captions and names of files are left out.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    captions: set[str] = set()
    for name, item in _in_folders(items, full=full):
        counts[name].update({tag for text in item.texts for tag in _tags(text)})
        captions |= {text.strip().lower() for text in item.texts}
        stem = PurePath(item.stem).name.lower()
        captions |= {stem, stem.replace("_", " ")}
    if full:
        return counts
    total = sum(counts.values(), Counter[str]())
    told = {tag for tag, count in total.items() if count >= _COMMON} - captions
    return {
        name: Counter({tag: count for tag, count in own.items() if tag in told})
        for name, own in counts.items()
    }


def _tags(text: str) -> set[str]:
    """Return the parts of a caption between commas, in small letters as kohya counts them."""
    return {tag for part in text.split(",") if (tag := part.strip().lower())}


def _in_folders(items: Iterable[RosterItem], *, full: bool) -> Iterable[tuple[str, RosterItem]]:
    numbers: dict[str, int] = {}
    for item in items:
        number = numbers.setdefault(item.dataset, len(numbers) + 1)
        yield f"{item.repeats}_{item.dataset if full else f'dataset{number}'}", item


def _modelspec(
    run: str, trainer: Any, items: Sequence[RosterItem], counts: Mapping[str, Counter[str]]
) -> dict[str, str]:
    common = sum(counts.values(), Counter[str]()).most_common()
    ranked = sorted(common, key=lambda pair: (-pair[1], pair[0]))[:_TAGS]
    largest = _largest(items)
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.title": trainer.title or run,
        "modelspec.author": trainer.author,
        "modelspec.license": trainer.license,
        "modelspec.trigger_phrase": trainer.trigger,
        "modelspec.usage_hint": f"Use the words: {trainer.trigger}" if trainer.trigger else "",
        "modelspec.tags": ", ".join(tag for tag, _ in ranked),
        "modelspec.resolution": "{}x{}".format(*largest) if largest else "",
    }


def _largest(items: Iterable[RosterItem]) -> tuple[int, int] | None:
    """Return the largest resolution of the items; None if their names tell none."""
    names = {name for item in items for name in item.resolutions}
    sizes = [(size.width, size.height) for name in names if (size := resolution_of(name))]
    return max(sizes, key=lambda size: (size[0] * size[1], size), default=None)


def _of_kohya(
    run: str, trainer: Any, items: Sequence[RosterItem], counts: Mapping[str, Counter[str]]
) -> dict[str, str]:
    folders = Counter(name for name, _ in _in_folders(items, full=trainer.metadata == "full"))
    dirs = {
        name: {"n_repeats": int(name.partition("_")[0]), "img_count": count}
        for name, count in folders.items()
    }
    tags = {name: dict(sorted(own.items())) for name, own in counts.items() if own}
    reg = sum(item.repeats for item in items if item.is_reg)
    largest = _largest(items)
    said = {
        "ss_output_name": run,
        "ss_dataset_dirs": json.dumps(dirs, ensure_ascii=False),
        "ss_tag_frequency": json.dumps(tags, ensure_ascii=False) if tags else "",
        "ss_num_train_images": str(sum(item.repeats for item in items) - reg),
        "ss_num_reg_images": str(reg),
        "ss_resolution": str(largest) if largest else "",
    }
    is_lora = getattr(trainer, "adapter", "lora") == "lora"
    for name, keys in _SETTINGS.items():
        values = (getattr(trainer, key, None) for key in keys)
        value = next((value for value in values if value is not None), None)
        if value is not None and (is_lora or not name.startswith("network_")):
            said[f"ss_{name}"] = str(float(value) if name == "network_alpha" else value)
    return said


def _further(order: RunOrder, record: Record, items: Iterable[RosterItem]) -> dict[str, str]:
    """Return what only `full` tells: captions and names of files, the date, and a thumbnail."""
    captions = {f"{item.dataset}/{item.stem}": item.texts for item in items}
    files = RunFiles(order)
    drawn = (*files.samples.glob("*.png"), *files.work.glob("sample/*.png"))
    newest = max(drawn, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    began = datetime.fromtimestamp(int(record.began), UTC)
    return {
        "latentmake.captions": json.dumps(captions, ensure_ascii=False),
        "latentmake.settings": json.dumps(record.values.get("settings", {}), ensure_ascii=False),
        "modelspec.date": began.isoformat().removesuffix("+00:00"),
        "modelspec.thumbnail": _thumbnail(newest) if newest else "",
        "ss_training_started_at": str(record.began),
    }


def _thumbnail(path: Path) -> str:
    """Return a small copy of a picture as a data URI; "" if it is damaged."""
    if (image := drawn_picture(path)) is None:
        return ""
    image.thumbnail((_SIDE, _SIDE))
    return embedded(image.convert("RGB"), "webp", quality=75)


@cache
def base_of(place: str | None) -> dict[str, str]:
    """Return the name and hashes of the file of a base model, as kohya's scripts write them.

    A folder with one file of weights has the hash of that file. Other folders, and models of the
    hub, have none.
    """
    path = Path(place or "")
    files = [path] if path.is_file() else [*path.glob("*.safetensors")] if place else []
    if len(files) != 1:
        return {}
    with files[0].open("rb") as file:
        file.seek(0x100000)
        short = digest.of_bytes(file.read(0x10000))[:8]  # A1111's old hash of a model
    hashes = {
        "ss_sd_model_hash": short,
        "ss_new_sd_model_hash": digest.of_file(files[0], quiet=True),
    }
    return hashes if path.is_dir() else {"ss_sd_model_name": path.name, **hashes}


def of_architecture(name: str, *, lora: bool, prediction: str | None = None) -> dict[str, str]:
    """Return modelspec's architecture and implementation for a base model.

    Args:
        name: kohya's `ss_base_model_version`, `wan2.1` or `wan2.2`.
        lora: whether the weights are a LoRA.
        prediction: prediction of the network, if the architecture has several.
    """
    architecture, implementation = _ARCHITECTURES[name]
    told = {"epsilon": "epsilon", "v_prediction": "v"}.get(prediction or "", "")
    return {
        "modelspec.architecture": f"{architecture}/lora" if lora else architecture,
        "modelspec.implementation": implementation,
        **({"modelspec.prediction_type": told} if told else {}),
    }


_ARCHITECTURES = {
    "sd_v1": ("stable-diffusion-v1", "diffusers"),
    "sd_v2": ("stable-diffusion-v2-512", "diffusers"),
    "sd_v1_v": ("stable-diffusion-v1", "diffusers"),
    "sd_v2_v": ("stable-diffusion-v2-768-v", "diffusers"),
    "sdxl_base_v1-0": (
        "stable-diffusion-xl-v1-base",
        "https://github.com/Stability-AI/generative-models",
    ),
    "wan2.1": ("wan2.1", "https://github.com/Wan-Video/Wan2.1"),
    "wan2.2": ("wan2.2", "https://github.com/Wan-Video/Wan2.2"),
}


def describe_copy(order: RunOrder, record: Record) -> str:
    """Write a copy of a launched trainer's LoRA with metadata beside it; return the copy's name.

    The trainer's own file is never changed. A complete network is not copied.
    """
    weights = RunFiles(order).weights
    copy = weights.with_suffix(_DESCRIBED)
    atomic.remove(copy)
    described = metadata_of(order, record)
    if described and weights.stat().st_size <= _LARGEST:
        places = [str(place) for place in order.networks()]
        described |= base_of(places[0]) if len(places) == 1 else {}
        own, full = read_head(weights).metadata, "latentmake.captions" in described
        model: Any = getattr(order, "model", None)
        if model.version.boundary is not None:  # musubi-tuner calls Wan 2.2 `wan2.1`
            keys = ("modelspec.architecture", "modelspec.implementation")
            own |= {key: str(own[key]).replace("an2.1", "an2.2") for key in keys if key in own}
        cachefile.describe_copy(weights, copy, for_copy(own, described, full=full))
    return copy.name


def for_copy(own: Mapping[str, Any], described: Mapping[str, str], *, full: bool) -> dict[str, str]:
    """Return the metadata for a copy of a launched trainer's file.

    Args:
        own: metadata of the trainer's file.
        described: metadata of Latentmake; they win where they say more.
        full: whether all of the trainer's metadata are kept.
    """
    kept = {key: str(value) for key, value in own.items() if full or key in SAFE}
    exact = {key: kept[key] for key in kept if key in SAFE}
    return {**kept, **described, **exact}

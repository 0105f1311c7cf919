"""Folder that sd-scripts trains on, here or published: images beside caches, metadata, TOML.

It knows no folder for caches, so that a folder of links is made, `{dataset}_{resolution}/` each,
with a `metadata.json` of captions and sizes: where it has to guess a size, it takes that of another
image whose name begins alike. An item with several texts is several images there.

sd-scripts knows no regularisation images beside a `metadata.json`. A run that has some names the
images of each block, with captions and sizes, in a `metadata_cache.json`, by the absolute paths of
the machine that trains; and datasets of the same buckets are one block of the TOML, within which
sd-scripts balances them.

Items that are held out lie in a folder `held_out` below that of their block, under names of equal
length, each with its caption in a file: with `validation_split = 1.0` sd-scripts computes their
loss, and shuffles them apart from the captions of a `metadata_cache.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from latentmake import digest
from latentmake.config.fields import resolution_name
from latentmake.data.contents import caption_of, read_text
from latentmake.errors import CacheError, SourceError
from latentmake.files.sync import Changes, sync
from latentmake.layouts.layout import SIZED, SdScripts
from latentmake.training.external.publish import Files, block_name
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.rows import Row, rows_of

METADATA = "metadata.json"
CAPTION = ".txt"  # of an item that is held out
_HELD_OUT = "held_out"
_LISTED = "listed"
Blocks = Callable[[str, tuple[int, int]], str]
_LISTING = "metadata_cache.json"  # `DreamBoothDataset.IMAGE_INFO_CACHE_FILE`


def deploy(order: SdScriptsOrder) -> Changes:
    """Bring a training's folder with its `{run}.toml` up to date; only changes are linked anew."""
    folder = Path(order.output, order.toml).parent
    place = folder.absolute()
    files, directory = deployed(order), lambda name: (place / name).as_posix()
    files |= listings(order, files, directory)
    files[f"{order.run}.toml"] = dataset_toml(order, directory).encode()
    return sync(folder, files, link=True)


def deployed(order: SdScriptsOrder, *, caches: bool = True, named: Blocks = block_name) -> Files:
    """Return the folder's files: path below it, with forward slashes -> file or content.

    Args:
        order: the run.
        caches: whether caches lie beside the images; else sd-scripts makes them there.
        named: gives the folder of a dataset at a resolution.

    Raises:
        TrainingError: the manifest is missing or damaged.
        SourceError: a caption cannot be read, or two items would have one name.
        CacheError: an image or a cache file is not where the manifest says.
    """
    layout, files = SdScripts(order.architecture), Files()
    blocks = (named(name, size) for name in order.datasets for size in order.resolutions)
    metadata: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    for row in rows_of(Path(order.manifest)):
        texts, suffix = _texts(order, row), PurePosixPath(row.source).suffix
        for resolution in order.resolutions:
            block, part = named(row.dataset, resolution), resolution_name(*resolution)
            (latents,) = row.latents_at(part)
            sized = SIZED.fullmatch(latents.removesuffix(layout.latents_ending))
            assert sized is not None
            found = row.texts_at(part) or [""] * len(texts)  # of each text, its embedding if any
            size = [int(sized[2]), int(sized[3])]
            for number, (text, cache) in enumerate(zip(texts, found, strict=False)):
                stem = f"{row.stem}.v{number}" if number else row.stem
                if row.validation:
                    stem = f"{_HELD_OUT}/{digest.of_value(row.stem)[:16]}"
                    suffix = ".png"  # sd-scripts looks for few endings
                lie = {f"{stem}{suffix}": row.source}
                if caches:
                    lie[f"{stem}_{sized[2]}x{sized[3]}{layout.latents_ending}"] = latents
                if caches and cache:
                    lie[f"{stem}{layout.text_ending}"] = cache
                _add(files, {f"{block}/{name}": Path(path) for name, path in lie.items()})
                if not row.validation:
                    metadata[block][f"{stem}{suffix}"] = {"caption": text, "image_size": size}
                    continue
                if text:
                    files[f"{block}/{stem}{CAPTION}"] = f"{text}\n".encode()
                break  # of several texts the first
    for block, entries in metadata.items():
        listed = json.dumps(entries, indent=1, sort_keys=True)
        files[f"{block}/{METADATA}"] = f"{listed}\n".encode()
    return files


def is_regularised(order: SdScriptsOrder) -> bool:
    """Whether a run has regularisation images."""
    return any(each.is_reg for each in order.datasets.values())


def listings(
    order: SdScriptsOrder, files: Files, directory: Callable[[str], str], folder: str = _LISTED
) -> Files:
    """Return the files that name the images of each block, of a run with regularisation images.

    Args:
        order: the run.
        files: those of `deployed`.
        directory: gives the place of a path below the folder, as the machine that trains names it.
        folder: of these files, below the folder.
    """
    found: Files = {}
    for name, content in files.items() if is_regularised(order) else ():
        block, _, base = name.rpartition("/")
        if base == METADATA and isinstance(content, bytes):
            listed = {
                directory(f"{block}/{image}"): {
                    "caption": entry["caption"],
                    "resolution": entry["image_size"],
                }
                for image, entry in json.loads(content).items()
            }
            text = json.dumps(listed, indent=1, ensure_ascii=False)
            found[f"{folder}/{block}/{_LISTING}"] = f"{text}\n".encode()
    return found


def _texts(order: SdScriptsOrder, row: Row) -> list[str]:
    """Return an item's texts, each in one line: of several sd-scripts would take the first."""
    texts = row.texts
    if texts is None:
        settings = order.datasets[row.dataset]
        known = row.caption and caption_of(read_text(row.caption), row.caption, settings)
        texts = [known or ""]
    return [" ".join(text.splitlines()) for text in texts]


def _add(files: Files, further: Mapping[str, Path]) -> None:
    for name, path in further.items():
        if name in files:
            fault = f"would be deployed as {name}, as another is"
            raise SourceError(fault, where=path, hint="rename one of them")
        if not path.is_file():
            raise CacheError("is not there", where=path, hint="run the same command again")
    files |= further


# -- the dataset TOML -----------------------------------------------------------------------------


def dataset_toml(
    order: SdScriptsOrder,
    directory: Callable[[str], str],
    folder: str = _LISTED,
    named: Blocks = block_name,
) -> str:
    """Return the TOML of a run: a `[[datasets]]` block for each dataset and resolution.

    With regularisation images, datasets of the same buckets are subsets of one block. `directory`
    and `folder` are those of `listings`, `named` is that of `deployed`.
    """
    sections: list[dict[str, Any]] = []
    groups: dict[str, list[str]] = {}
    regularised = is_regularised(order)
    for name in order.datasets:
        alike = json.dumps(buckets_of(order, name)) if regularised else name
        groups.setdefault(alike, []).append(name)
    for names in groups.values():
        for resolution in order.resolutions:
            size = {"resolution": list(resolution), "batch_size": order.trainer.train_batch_size}
            subsets = []
            for name in names:
                dataset, block = order.datasets[name], named(name, resolution)
                masked = {"alpha_mask": True} if dataset.alpha_mask else {}  # no key of older ones
                place = directory(f"{folder}/{block}" if regularised else block)
                listed: dict[str, Any] = {"metadata_file": f"{place}/{METADATA}"}
                if regularised:
                    listed = {"cache_info": True, "is_reg": dataset.is_reg}
                repeated = {"num_repeats": dataset.num_repeats, "flip_aug": dataset.flip_aug}
                subsets.append({"image_dir": place, **listed, **repeated, **masked})
            sections.append({**size, **buckets_of(order, names[0]), "subsets": subsets})
    sections += _held_out_sections(order, directory, named)
    return tomli_w.dumps({"general": {"shuffle_caption": False}, "datasets": sections})


def _held_out_sections(
    order: SdScriptsOrder, directory: Callable[[str], str], named: Blocks
) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a TOML for items that are held out; one that has none is passed over."""
    names = [name for name, each in order.datasets.items() if not each.is_reg]
    for name in names if order.validation else ():
        masked = {"alpha_mask": True} if order.datasets[name].alpha_mask else {}
        for resolution in order.resolutions:
            place = directory(f"{named(name, resolution)}/{_HELD_OUT}")
            yield {
                "resolution": list(resolution),
                "batch_size": order.trainer.train_batch_size,
                **buckets_of(order, name),
                "validation_split": 1.0,
                "subsets": [{"image_dir": place, "caption_extension": CAPTION, **masked}],
            }


def buckets_of(order: SdScriptsOrder, name: str) -> dict[str, Any]:
    """Return the keys of a block that say how images are brought to size."""
    return order.datasets[name].sdscripts_buckets(order.model.spec)

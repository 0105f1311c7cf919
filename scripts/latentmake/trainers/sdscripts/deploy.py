"""Folder that sd-scripts trains on, here or published: images beside caches, metadata, TOML.

sd-scripts has no key for a folder of caches: it looks for caches beside the images. So each block,
which is a dataset at one resolution, gets a folder `{dataset}_{resolution}/` of links, and a
`metadata.json` with captions and sizes. Without the sizes, sd-scripts would guess, and could take
the size of another image whose name begins alike. An item with several texts is several images
there.

sd-scripts does not support regularisation images together with a `metadata.json`. In a run that has
some, a `metadata_cache.json` names the images of each block by absolute paths on the machine that
trains, with captions and sizes. Datasets with the same buckets share one block of the TOML, because
sd-scripts balances images within a block.

Held-out items lie in a folder `held_out` below the folder of their block. Their names have equal
length, and each has its caption in a file. With `validation_split = 1.0` sd-scripts computes their
loss. A `metadata_cache.json` would not do, because sd-scripts shuffles the images of a validation
apart from the captions in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from latentmake.base import digest
from latentmake.base.errors import CacheError, SourceError, UserError
from latentmake.base.sync import Changes, sync
from latentmake.config.fields import resolution_name
from latentmake.data.contents import caption_of, read_text
from latentmake.layouts.layout import SIZED, SdScripts
from latentmake.runs.findings import Finding, image_findings, of_faults
from latentmake.runs.rows import Row, rows_of
from latentmake.trainers.launched.publish import Files, block_name
from latentmake.trainers.sdscripts.order import SdScriptsOrder

METADATA = "metadata.json"
CAPTION = ".txt"  # ending of a held-out item's caption file
_HELD_OUT = "held_out"
LISTED = "listed"  # folder of the lists of images
Blocks = Callable[[str, tuple[int, int]], str]
Directory = Callable[[str], str]
"""Function that returns the path of a name below the folder, on the machine that trains."""
_LISTING = "metadata_cache.json"  # `DreamBoothDataset.IMAGE_INFO_CACHE_FILE`


def deploy(order: SdScriptsOrder) -> Changes:
    """Bring a training's folder and its `{run}.toml` up to date; link only changed files."""
    folder = Path(order.output, order.toml).parent
    place = folder.absolute()

    def directory(name: str) -> str:
        return (place / name).as_posix()

    files = deployed(order, listings={LISTED: directory})
    files[f"{order.run}.toml"] = dataset_toml(order, directory).encode()
    return sync(folder, files, link=True)


def deployed(
    order: SdScriptsOrder,
    *,
    caches: bool = True,
    named: Blocks = block_name,
    listings: Mapping[str, Directory] | None = None,
) -> Files:
    """Return the folder's files: path below it, with forward slashes -> file or content.

    Args:
        order: order of the run.
        caches: whether to put caches beside the images; without them sd-scripts makes its own.
        named: function that returns the folder of a dataset at a resolution.
        listings: folders, below this one, for the lists of images that a run with regularisation
            images needs -> function of the machine that reads the list.

    Raises:
        TrainingError: the manifest is missing or damaged.
        SourceError: a caption cannot be read, or two items would get the same name.
        CacheError: an image or a cache file of the manifest is missing.
    """
    layout, files = SdScripts(order.strategies.name), Files()
    blocks = (named(name, size) for name in order.datasets for size in order.resolutions)
    metadata: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    for row in rows_of(Path(order.manifest)):
        texts, suffix = _texts(order, row), PurePosixPath(row.source).suffix
        for resolution in order.resolutions:
            block, part = named(row.dataset, resolution), resolution_name(*resolution)
            (latents,) = row.latents_at(part)
            sized = SIZED.fullmatch(latents.removesuffix(layout.latents_ending))
            assert sized is not None
            embeddings = row.texts_at(part) or [""] * len(texts)  # "": the text has no cache
            size = [int(sized[2]), int(sized[3])]
            for number, (text, cache) in enumerate(zip(texts, embeddings, strict=False)):
                stem = f"{row.stem}.v{number}" if number else row.stem
                if row.validation:
                    stem = f"{_HELD_OUT}/{digest.of_value(row.stem)[:16]}"
                    suffix = ".png"  # sd-scripts looks for few endings
                links = {f"{stem}{suffix}": row.source}
                if caches:
                    links[f"{stem}_{sized[2]}x{sized[3]}{layout.latents_ending}"] = latents
                if caches and cache:
                    links[f"{stem}{layout.text_ending}"] = cache
                _add(files, {f"{block}/{name}": Path(path) for name, path in links.items()})
                if not row.validation:
                    metadata[block][f"{stem}{suffix}"] = {"caption": text, "image_size": size}
                    continue
                if text:
                    files[f"{block}/{stem}{CAPTION}"] = f"{text}\n".encode()
                break  # validation uses only the first of several texts
    listed_for = listings if listings and is_regularised(order) else {}
    for block, entries in metadata.items():
        text = json.dumps(entries, indent=1, sort_keys=True)
        files[f"{block}/{METADATA}"] = f"{text}\n".encode()
        for folder, directory in listed_for.items():
            listed = {
                directory(f"{block}/{image}"): {
                    "caption": entry["caption"],
                    "resolution": entry["image_size"],
                }
                for image, entry in sorted(entries.items())
            }
            text = json.dumps(listed, indent=1, ensure_ascii=False)
            files[f"{folder}/{block}/{_LISTING}"] = f"{text}\n".encode()
    return files


def is_regularised(order: SdScriptsOrder) -> bool:
    """Whether a run has regularisation images."""
    return any(dataset.is_reg for dataset in order.datasets.values())


def _texts(order: SdScriptsOrder, row: Row) -> list[str]:
    """Return an item's texts, each in one line, because sd-scripts reads only the first line."""
    texts = row.texts
    if texts is None:
        settings = order.datasets[row.dataset]
        caption = row.caption and caption_of(read_text(row.caption), row.caption, settings)
        texts = [caption or ""]
    return [" ".join(text.splitlines()) for text in texts]


def _add(files: Files, further: Mapping[str, Path]) -> None:
    for name, path in further.items():
        if name in files:
            fault = f"would be deployed as {name}, as another is"
            raise SourceError(fault, where=path, hint="rename one of them")
        if not path.is_file():
            raise CacheError("is not there", where=path, hint="run the same command again")
    files |= further


def data_findings(order: SdScriptsOrder) -> Iterator[Finding]:
    """Check that the images and caches of a training exist and can be read."""
    what = "images and caches"
    try:
        rows = [*rows_of(Path(order.manifest))]
        files = deployed(order)
    except UserError as error:
        yield Finding(what, "failed", str(error))
        return
    sound = f"{len(rows)} items, {len(files)} files"
    yield of_faults(what, [] if rows else ["no item is left to train on"], sound)
    masked = {row.source for row in rows if order.datasets[row.dataset].alpha_mask}
    yield from image_findings((row.source for row in rows), masked)


# -- the dataset TOML -----------------------------------------------------------------------------


def dataset_toml(
    order: SdScriptsOrder,
    directory: Directory,
    folder: str = LISTED,
    named: Blocks = block_name,
) -> str:
    """Return the TOML of a run: a `[[datasets]]` block for each dataset and resolution.

    With regularisation images, datasets with the same buckets are subsets of one block. `folder`
    has the lists of images; see `deployed` for `named`.
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
                # Older versions of sd-scripts do not have this key.
                masked = {"alpha_mask": True} if dataset.alpha_mask else {}
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
    order: SdScriptsOrder, directory: Directory, named: Blocks
) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a TOML for held-out items; sd-scripts skips a block without images."""
    names = [name for name, dataset in order.datasets.items() if not dataset.is_reg]
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
    """Return the keys of a block that decide how images are resized."""
    return order.datasets[name].sdscripts_buckets(order.model.spec)

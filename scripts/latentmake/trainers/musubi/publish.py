"""Publication of a run of musubi-tuner: flat folders, and calls of musubi-tuner's scripts."""

from __future__ import annotations

import contextlib
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from latentmake.base.errors import ConfigError, SourceError
from latentmake.data.contents import decode_text, encoded
from latentmake.models.inspection import ModelFile
from latentmake.runs.findings import Finding
from latentmake.runs.rows import Row, rows_of
from latentmake.trainers.launched.order import Resume, located
from latentmake.trainers.launched.publish import Call, Files, Kind, Names, Publication
from latentmake.trainers.musubi import checks, command, deploy
from latentmake.trainers.musubi.order import MusubiOrder

_KINDS: tuple[Kind, Kind] = ("latents", "text")
_NUMBER = re.compile(r"_\d+$")
_UNLISTED = (".tif", ".tiff", ".gif")  # Pillow knows such images by their content, not their name
_NOTED = ("--skip_existing", "--keep_cache")  # the settings of caches have always named them


class MusubiPublication(Publication[MusubiOrder]):
    """Published folder of a run of musubi-tuner."""

    cache_ending = "_cache"

    def __init__(self, order: MusubiOrder) -> None:
        """Begin the publication of a run; raises ConfigError if it cannot be published."""
        # musubi-tuner finds an image by its caption's name without the last ending only.
        datasets = {
            name: dataset.model_copy(update={"caption_extension": _last(dataset.caption_extension)})
            for name, dataset in order.datasets.items()
        }
        order = order.model_copy(update={"datasets": datasets})
        super().__init__(order)
        _refuse(order)
        self.attentions = [name for name in order.scripts.attentions if name in order.attentions]
        if order.trainer.attention == "auto" and order.publish.attention is None:
            preferred = [name for name in command.PREFERRED if name in self.attentions]
            self.modules = {name: command.MODULES[name] for name in preferred}

    def models(self) -> Iterator[ModelFile]:
        return checks.model_files(self.order.model)

    def settings_findings(self, models: Sequence[ModelFile]) -> Iterator[Finding]:
        yield checks.precision(self.order, models)
        yield from checks.samples(self.order)

    def members(self) -> Files:
        order, files = self.order, Files()
        for row in rows_of(Path(order.manifest)):
            dataset = order.datasets[row.dataset]
            if dataset.is_list and (row.control_files or row.layers):
                raise _of_list(row.dataset)
            # Only caches of a list of videos are published: the scripts would cut other clips.
            sources = [] if "path" in dataset.own_clips else [row.source, *row.layers]
            controls = row.control_files if sources else []
            for resolution in order.resolutions:
                name = self.block(row.dataset, resolution)
                files |= {f"{name}/{_name(row, path)}": Path(path) for path in sources}
                files |= {f"{name}_control/{_name(row, path)}": Path(path) for path in controls}
                files[f"{name}/{Path(row.stem).name}{dataset.caption_extension}"] = _caption(row)
                if order.publish.caches:
                    caches = deploy.names_of(order, row, resolution)
                    files |= {f"{name}_cache/{base}": path for base, path in caches}
        return files

    def dataset(self, names: Names, batch_size: int | None = None) -> str:
        def folders(name: str, size: deploy.Size) -> tuple[str, str, str]:
            block = names.below(self.block(name, size))
            return block, f"{block}_cache", f"{block}_control"

        return deploy.dataset_toml(self.order, folders, batch_size=batch_size)

    def tomls(self, names: Names) -> dict[str, str]:
        tomls, batch_size = super().tomls(names), self.order.publish.batch_size
        if batch_size and not self.order.publish.caches:
            tomls[_caching_toml(names)] = self.dataset(names, batch_size)
        return tomls

    def calls(self, names: Names) -> list[Call]:
        order, calls = self.order, list[Call]()
        # `--batch_size` can only split the batches of the TOML, so caching gets its own TOML.
        toml = _caching_toml(names) if order.publish.batch_size else names.places.toml
        model = located(order, names.of).model
        for kind in () if order.publish.caches else _KINDS:
            further = {
                "--batch_size": order.publish.batch_size,
                "--num_workers": order.publish.num_workers,
                "--skip_existing": True,
            }
            arguments = command.caching_arguments(
                model, kind, toml, lambda weights: names.of(str(weights.path)), further
            )
            calls.append((order.scripts.caching(kind).name, arguments))
        training = command.training_arguments(order, names.places, self.attention, Resume())
        return [*calls, (order.scripts.training.name, training)]

    def settings(self, dataset: str, size: tuple[int, int]) -> dict[Kind, list[Any]]:
        model, latents, text = self.order.model, list[Any](), list[Any]()
        if model.spec.encodes:
            clip = None if model.clip is None else model.clip.path
            latents = [model.vae.path, model.vae_dtype or model.dtype, model.task, clip]
            text = [model.text[0].path, model.fp8_t5]
        else:
            latents, text = (
                command.caching_arguments(
                    model, kind, "", lambda weights: str(weights.path), dict.fromkeys(_NOTED, True)
                )
                for kind in _KINDS
            )
        shapes = deploy.shapes(self.order.datasets[dataset])
        return {"latents": [*latents, size, shapes], "text": text}

    def edited(
        self, base: str, old: Path, new: Path | bytes | None
    ) -> Iterator[tuple[str, Sequence[Kind]]]:
        endings = {dataset.caption_extension for dataset in self.order.datasets.values()}
        if ending := max(filter(base.endswith, endings), key=len, default=""):
            if _text(old) != _text(new):
                yield base.removesuffix(ending), ["text"]
            return
        stem = str(PurePosixPath(base).with_suffix(""))
        made: list[Kind] = ["latents"]
        if self.order.scripts.text.reads_controls:  # captions are encoded together with images
            made.append("text")
        for owner in {stem, _NUMBER.sub("", stem)}:  # `a_1` may be a control or layer of `a`
            yield owner, made


def _name(row: Row, path: str) -> str:
    """Return the published name of one of an item's files: the item's stem and the file's end.

    The end is the rest of the file's name after the stem of the source: `.png`, `_1.png`. It gets
    an ending that musubi-tuner looks for: it finds neither `a.tif` nor `a.Png`.
    """
    own, ending = Path(row.source).stem, Path(path).suffix
    end = Path(path).name.removeprefix(own).removesuffix(ending)
    if ending.lower() in _UNLISTED:
        ending = ".png"
    elif not ending.isupper():
        ending = ending.lower()
    return f"{Path(row.stem).name}{end}{ending}"


def _last(ending: str) -> str:
    """Return the last part of an ending: `.txt` of `.cap.txt`."""
    return PurePosixPath(f"a{ending}").suffix or ending


def _caching_toml(names: Names) -> str:
    return f"{names.places.toml.removesuffix('.toml')}_caching.toml"


def _refuse(order: MusubiOrder) -> None:
    """Refuse datasets and weights that musubi-tuner's own scripts cannot read."""
    by_script = not order.publish.caches
    needs_controls = order.model.version.controls[0] > 0 and not order.model.spec.encodes
    faults: dict[str, str] = {}
    for name, dataset in order.datasets.items():
        if dataset.is_list and (dataset.multiple_target or needs_controls):
            raise _of_list(name)
        if by_script and dataset.own_clips:
            faults[f"datasets.{name}.{dataset.own_clips[0]}"] = "cut other clips of a folder"
        if by_script and dataset.text_variants > 1:
            faults[f"datasets.{name}.captions.variants"] = "encode one text of an item"
    faults |= checks.unreadable(order) if by_script else {}
    for where, fault in faults.items():
        hint = "set `publish.caches: true`, so that caches are published"
        raise ConfigError(f"musubi-tuner's own scripts {fault}", where=where, hint=hint)


def _of_list(dataset: str) -> ConfigError:
    what = "a published folder tells control images and layers by their names, not by a list"
    hint = "put them into folders, and name these in place of the list"
    return ConfigError(what, where=f"datasets.{dataset}.path", hint=hint)


def _text(caption: Path | bytes | None) -> str | None:
    """Return the text of a caption as musubi-tuner reads it; None if it cannot be read."""
    with contextlib.suppress(OSError, SourceError):
        data = caption.read_bytes() if isinstance(caption, Path) else caption
        return None if data is None else encoded(decode_text(data, ""))
    return None


def _caption(row: Row) -> Path | bytes:
    """Return the file of an item's caption, or the content to write instead of it."""
    if row.texts is not None:
        return f"{row.texts[0]}\n".encode()
    if row.caption is None:
        return b""
    with contextlib.suppress(OSError), Path(row.caption).open("rb") as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:  # musubi-tuner would take it for text
            return file.read()
    return Path(row.caption)

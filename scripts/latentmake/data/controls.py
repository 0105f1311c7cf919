"""Control images and layers: which of a folder, or of a list's columns, belong to which item.

musubi-tuner gives them to the items whose names they continue: `cat_0.png` and `cat_1.png` belong
to `cat.png`. Source: its `ImageDirectoryDatasource` (dataset/datasources.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from posixpath import splitext

from latentmake.config.checks import control_counts
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.data.folders import Names, in_order
from latentmake.data.item import CONTROL, IMAGE_EXTENSIONS, NO_FILE, File, Item, Scan, missing_file
from latentmake.data.lists import columns_of
from latentmake.errors import SourceError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.geometry.buckets import Size, control_size, refuse_odd
from latentmake.geometry.clips import Media
from latentmake.index.memo import SourceStat
from latentmake.layouts.layout import Layout

ControlsOf = Callable[[Item], Sequence[File]]
"""Returns the controls of an item; a SourceError says that they are missing or too many."""


def controls_of(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    control: Scan | None,
    items: Iterable[Item],
    model: Model | None,
) -> ControlsOf:
    """Return what finds the controls of the items of a dataset.

    Args:
        layout: of the caches.
        settings: the dataset's section of the configuration.
        scan: its listing.
        control: that of its folder of controls, if any.
        items: of the dataset.
        model: whose architecture says how many controls an item has; needed where the layout's
            controls are numbered.
    """
    extensions = VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS
    beside = _files(control, extensions) if control is not None else {}
    there: dict[str, list[File]] = {}
    if not layout.numbered_controls:  # one of the same name
        for path, file in beside.items():
            there.setdefault(splitext(path)[0], [file])
        return lambda item: () if control is None else _named(there, item, scan, control, "")
    assert model is not None
    least, most = control_counts(model, settings)
    if most == 0:
        return lambda item: ()
    stats = {} if scan.items is None else {path: SourceStat(*stat) for path, *stat in scan.entries}
    prefix = f"{scan.root}/"
    layers = {path.removeprefix(prefix) for item in items for path in item.layers}
    names = Names(_files(scan, IMAGE_EXTENSIONS).keys() - layers)  # of faulty items too
    for path, file in beside.items():
        if (owner := names.owner(path, "._")) is not None:
            there.setdefault(owner, []).append(file)

    def find(item: Item) -> Sequence[File]:
        place = "its dataset" if scan.items is None else "its row"
        found = _listed(item, scan, stats)
        if not found and control is not None:
            found, place = _named(there, item, scan, control, "_0.png"), control.root
            found = in_order(_beside(item, scan), found, "control")
        if len(found) < least or (most is not None and len(found) > most):
            count = f"{least} or more" if most is None else f"{least} to {most}"
            count = f"{least}" if least == most else count
            one = "" if len(found) == 1 else "s"
            what = (
                f"has {len(found)} control image{one} in {place}, and {model.title} takes {count}"
            )
            hint = "add or remove control images, or remove the item"
            raise SourceError(what, hint=hint)
        return found

    return find


def sizes_of(
    files: Sequence[File],
    item: Item,
    settings: Dataset,
    model: Model | None,
    measure: Callable[[Sequence[File]], Mapping[str, Media | SourceError]],
) -> tuple[Size, ...]:
    """Return the sizes of an item's controls, where what is done to them depends on these.

    Raises:
        SourceError: one cannot be read, or has a size that the model cannot take.
    """
    keeps, most = settings.no_resize_control, settings.control_resolution
    if model is None or settings.video or not files or not (keeps or most):
        return ()
    sizes: list[Size] = []
    step, scripts = model.spec.side, model.spec.scripts
    area = most.width * most.height if most else None
    cut = 7 if scripts and scripts.latents.files else 0  # pixels of a side that a VAE leaves out
    measured = measure(files)
    for _, path, _ in files:
        try:
            if isinstance(media := measured[path], SourceError):
                raise media
            sizes.append(Size(media.width, media.height))
            refuse_odd(control_size(sizes[-1], area, step, keeps=keeps), step, cut)
        except SourceError as error:
            what = f"has a control {path}, which {error.what}"
            raise SourceError(what, hint=error.hint) from None
    return tuple(sizes)


def _beside(item: Item, scan: Scan) -> str:
    """Return the path of an item's file below the dataset's folder, without its ending."""
    return splitext(item.image.removeprefix(f"{scan.root}/"))[0]


def _files(scan: Scan, extensions: Iterable[str]) -> dict[str, File]:
    """Return the files of a listing with one of some endings as controls, by their paths below."""
    return {
        path: File(CONTROL, f"{scan.root}/{path}", SourceStat(*stat))
        for path, *stat in sorted(scan.entries)
        if stat[0] >= 0 and splitext(path)[1].lower() in extensions
    }


def _named(
    there: dict[str, list[File]], item: Item, scan: Scan, control: Scan, ending: str
) -> Sequence[File]:
    """Return the files that belong to an item by its name; a SourceError says that none does."""
    name = _beside(item, scan)
    if name not in there:
        hint = f"put {control.root}/{name}{ending} there, or remove the item"
        raise SourceError(f"has no control in {control.root}", hint=hint)
    return there[name]


def _listed(item: Item, scan: Scan, stats: dict[str, SourceStat]) -> Sequence[File]:
    """Return the controls that an item's row names."""
    try:
        paths = columns_of(item.row or {}, scan.root, "control_path")
        for path in paths:
            if stats[path] == NO_FILE:
                raise ValueError(f"has a control {path}, which {missing_file(path)}")
    except ValueError as error:
        raise SourceError(str(error), hint="correct the row") from None
    return [File(CONTROL, path, stats[path]) for path in paths]

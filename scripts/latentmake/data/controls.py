"""Control images of items: which of a folder, or of a list's columns, belong to which item.

musubi-tuner gives them to the items whose names they continue: `cat_0.png` and `cat_1.png` belong
to `cat.png`. Source: its `ImageDirectoryDatasource` (dataset/datasources.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from posixpath import splitext

from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.root import control_counts
from latentmake.data.folders import broken_links, in_order, owner
from latentmake.data.item import (
    CONTROL,
    IMAGE_EXTENSIONS,
    NO_FILE,
    Fault,
    File,
    Item,
    Scan,
    missing_file,
)
from latentmake.data.lists import columns_of
from latentmake.digest import SourceStat
from latentmake.errors import SourceError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.geometry.buckets import Size, control_size, refuse_odd
from latentmake.geometry.clips import Media
from latentmake.layouts.layout import Layout

ControlsOf = Callable[[Item], Sequence[File]]
"""Returns the controls of an item; a SourceError says that they are missing or too many."""


def controls_of(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    control: Scan,
    items: Iterable[Item],
    model: Model,
) -> ControlsOf:
    """Return what finds the controls of the items of a dataset.

    Args:
        layout: of the caches; says whether an item has several controls or the one of its name.
        settings: the dataset's section of the configuration.
        scan: its listing.
        control: that of its folder of controls; empty without one.
        items: of the dataset.
        model: says how many controls an item has, where these are numbered.
    """
    counts = control_counts(model, settings) if layout.numbered_controls else None
    if counts == (0, 0) or (counts is None and not control.root):
        return lambda item: ()
    stats = {} if scan.items is None else {path: SourceStat(*stat) for path, *stat in scan.entries}
    prefix, there = f"{scan.root}/", dict[str, list[File]]()
    images = (path for path, *_ in scan.entries if _is(IMAGE_EXTENSIONS, path))
    layers = {_stem(path, prefix) for item in items for path in item.layers}
    stems = {_stem(path, prefix) for path in images} - layers
    for path, *stat in sorted(control.entries):
        if _is(_endings(settings), path):
            # The names of faulty items count too.
            name = _stem(path) if counts is None else owner(path, stems, "._")
            if name is not None:
                file = File(CONTROL, f"{control.root}/{path}", SourceStat(*stat))
                there.setdefault(name, []).append(file)

    def find(item: Item) -> Sequence[File]:
        place = "its dataset" if scan.items is None else "its row"
        found = [] if counts is None else _listed(item, scan.root, stats)
        if not found and control.root:
            name, place = _stem(item.image, prefix), control.root
            if name not in there:
                ending = "" if counts is None else "_0.png"
                hint = f"put {control.root}/{name}{ending} there, or remove the item"
                raise SourceError(f"has no control in {control.root}", hint=hint)
            found = there[name][:1] if counts is None else in_order(name, there[name], "control")
        if counts is not None:
            least, most = counts
            if len(found) < least or (most is not None and len(found) > most):
                count = f"{least} or more" if most is None else f"{least} to {most}"
                count = f"{least}" if least == most else count
                what = f"has {len(found)} control image{'s' * (len(found) != 1)} in {place}"
                hint = "add or remove control images, or remove the item"
                raise SourceError(f"{what}, and {model.title} takes {count}", hint=hint)
        for _, path, stat in found:
            if stat == NO_FILE:
                what = f"has a control {path}, which {missing_file(path)}"
                raise SourceError(what, hint="repair or remove it, or correct the row")
        return found

    return find


def lost_controls(settings: Dataset, control: Scan) -> Iterator[Fault]:
    """Yield the faults of a folder of controls that belong to no item: links in place of folders.

    An item that takes any number of controls would be made without those behind the link.
    """
    others = (entry for entry in control.entries if not _is(_endings(settings), entry[0]))
    return broken_links(control.root, others, flat=settings.flat)


def _endings(settings: Dataset) -> Collection[str]:
    return VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS


def _is(extensions: Iterable[str], path: str) -> bool:
    return splitext(path)[1].lower() in extensions


def _stem(path: str, prefix: str = "") -> str:
    return splitext(path.removeprefix(prefix))[0]


def _listed(item: Item, root: str, stats: Mapping[str, SourceStat]) -> list[File]:
    try:
        paths = columns_of(item.row or {}, root, "control_path")
    except ValueError as error:
        raise SourceError(str(error), hint="correct the row") from None
    return [File(CONTROL, path, stats[path]) for path in paths]


def sizes_of(
    files: Sequence[File],
    settings: Dataset,
    model: Model,
    measure: Callable[[Sequence[File]], Mapping[str, Media | SourceError]],
) -> tuple[Size, ...]:
    """Return the sizes of an item's controls, where what is done to them depends on these.

    Raises:
        SourceError: one cannot be read, or has a size that the model cannot take.
    """
    keeps, most = settings.no_resize_control, settings.control_resolution
    if settings.video or not files or not (keeps or most):
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

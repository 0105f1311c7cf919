"""Match control images in a folder, or in the columns of a list, with the items they belong to.

Names decide, as in musubi-tuner: `cat_0.png` and `cat_1.png` belong to `cat.png`. Source: its
`ImageDirectoryDatasource` (dataset/datasources.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from posixpath import splitext

from latentmake.base.digest import SourceStat
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.root import control_counts
from latentmake.data.folders import broken_links, in_order, owner
from latentmake.data.item import CONTROL, NO_FILE, Fault, File, Item, Scan, missing_file
from latentmake.data.lists import columns_of
from latentmake.formats.endings import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from latentmake.layouts.layout import Layout


def controls_of(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    control: Scan,
    items: Iterable[Item],
    model: Model,
) -> Callable[[Item], Sequence[File]]:
    """Return a function that finds the controls of an item; it raises SourceError.

    Args:
        layout: layout of the caches. It decides whether an item has several numbered controls or
            one control with the item's own name.
        settings: the dataset's section of the configuration.
        scan: listing of the dataset.
        control: listing of its `control_directory`; empty without one.
        items: items of the dataset.
        model: model whose architecture limits the number of numbered controls.
    """
    counts = control_counts(model, settings) if layout.numbered_controls else None
    if counts == (0, 0) or (counts is None and not control.root):
        return lambda item: ()
    stats = {} if scan.items is None else {path: SourceStat(*stat) for path, *stat in scan.entries}
    by_name = _by_name(settings, scan, control, items, is_numbered=counts is not None)

    def find(item: Item) -> Sequence[File]:
        place = "its dataset" if scan.items is None else "its row"
        controls = list[File]()
        if counts is not None and item.row:
            try:
                paths = columns_of(item.row, scan.root, "control_path")
            except ValueError as error:
                raise SourceError(str(error), hint="correct the row") from None
            controls = [File(CONTROL, path, stats[path]) for path in paths]
        if not controls and control.root:
            name, place = _stem(item.image, f"{scan.root}/"), control.root
            if name not in by_name:
                ending = "" if counts is None else "_0.png"
                hint = f"put {control.root}/{name}{ending} there, or remove the item"
                raise SourceError(f"has no control in {control.root}", hint=hint)
            controls = by_name[name]
            if settings.video:  # musubi-tuner prefers a file of the same name and ending
                ending = splitext(item.image)[1]
                controls = sorted(controls, key=lambda file: not file.path.endswith(ending))
            controls = controls[:1] if counts is None else in_order(name, controls, "control")
        if counts is not None:
            _refuse_number(len(controls), counts, place, model)
        for _, path, stat in controls:
            if stat == NO_FILE:
                what = f"has a control {path}, which {missing_file(path)}"
                raise SourceError(what, hint="repair or remove it, or correct the row")
        return controls

    return find


def _by_name(
    settings: Dataset, scan: Scan, control: Scan, items: Iterable[Item], *, is_numbered: bool
) -> dict[str, list[File]]:
    """Return stem of an image or video -> its files in `control_directory`, sorted by path."""
    prefix, by_name = f"{scan.root}/", dict[str, list[File]]()
    images = (path for path, *_ in scan.entries if _has_ending(IMAGE_EXTENSIONS, path))
    layers = {_stem(path, prefix) for item in items for path in item.layers}
    stems = {_stem(path, prefix) for path in images} - layers
    for path, *stat in sorted(control.entries):
        if _has_ending(_endings(settings), path):
            # `stems` has faulty items too: `cat_2_0.png` must not go to `cat` if `cat_2` is faulty.
            name = owner(path, stems, "._") if is_numbered else _stem(path)
            if name is not None:
                file = File(CONTROL, f"{control.root}/{path}", SourceStat(*stat))
                by_name.setdefault(name, []).append(file)
    return by_name


def _refuse_number(number: int, counts: tuple[int, int | None], place: str, model: Model) -> None:
    """Raise SourceError if an item has fewer or more controls than the model takes."""
    least, most = counts
    if number < least or (most is not None and number > most):
        count = f"{least} or more" if most is None else f"{least} to {most}"
        count = f"{least}" if least == most else count
        noun = "control image" if number == 1 else "control images"
        hint = "add or remove control images, or remove the item"
        what = f"has {number} {noun} in {place}, and {model.title} takes {count}"
        raise SourceError(what, hint=hint)


def lost_controls(settings: Dataset, control: Scan) -> Iterator[Fault]:
    """Yield a fault for each broken link in the folder of controls.

    The link may stand for a folder of controls. An item that takes any number of controls would be
    encoded without them.
    """
    others = (entry for entry in control.entries if not _has_ending(_endings(settings), entry[0]))
    return broken_links(control.root, others, flat=settings.flat)


def _endings(settings: Dataset) -> Collection[str]:
    return VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS


def _has_ending(extensions: Iterable[str], path: str) -> bool:
    return splitext(path)[1].lower() in extensions


def _stem(path: str, prefix: str = "") -> str:
    return splitext(path.removeprefix(prefix))[0]

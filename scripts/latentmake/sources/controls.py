"""Control images and videos: which of a folder, or of a list's columns, belong to which item."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from posixpath import splitext

from latentmake.config.checks import control_counts
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.errors import SourceError
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.index.memo import SourceStat
from latentmake.layouts import Layout
from latentmake.sources.item import CONTROL, IMAGE_EXTENSIONS, File, Item, Scan
from latentmake.sources.numbered import Names, in_order
from latentmake.sources.rows import columns_of

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
    if not layout.numbered_controls:
        return _named_alike(settings, scan, control)
    assert model is not None
    least, most = control_counts(model, settings)
    if most == 0:
        return lambda item: ()
    return _Numbered(settings, scan, control, items, (least, most), model.title)


def _beside(item: Item, scan: Scan) -> str:
    """Return the path of an item's file below the dataset's folder, without its ending."""
    return splitext(item.image.removeprefix(f"{scan.root}/"))[0]


def _files(control: Scan, extensions: Collection[str]) -> Iterable[tuple[str, SourceStat]]:
    """Yield path below the folder and stat of each file with one of some endings, by path."""
    for path, *stat in sorted(control.entries):
        if stat[0] >= 0 and splitext(path)[1].lower() in extensions:
            yield path, SourceStat(*stat)


# -- one control of the same name -----------------------------------------------------------------


def _named_alike(settings: Dataset, scan: Scan, control: Scan | None) -> ControlsOf:
    if control is None:
        return lambda item: ()
    there: dict[str, File] = {}
    for path, stat in _files(control, VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS):
        there.setdefault(splitext(path)[0], File(CONTROL, f"{control.root}/{path}", stat))

    def find(item: Item) -> Sequence[File]:
        name = _beside(item, scan)
        if name not in there:
            raise _missing(item, control, name)
        return (there[name],)

    return find


def _missing(item: Item, control: Scan, name: str) -> SourceError:
    what = f"has no control in {control.root}"
    hint = f"put {control.root}/{name} there, or remove the item"
    return SourceError(what, where=item.image, hint=hint)


# -- several controls, by numbers -----------------------------------------------------------------


class _Numbered:
    def __init__(
        self,
        settings: Dataset,
        scan: Scan,
        control: Scan | None,
        items: Iterable[Item],
        counts: tuple[int, int | None],
        title: str,
    ) -> None:
        self._scan = scan
        self._control = control
        self._counts = counts
        self._title = title
        self._stats: dict[str, SourceStat] = {}
        self._found: dict[str, list[tuple[str, SourceStat]]] = {}
        if scan.rows is not None:
            self._stats = {path: SourceStat(*stat) for path, *stat in scan.entries}
        if control is not None:
            self._find(control, _image_names(scan, items))

    def _find(self, control: Scan, names: Names) -> None:
        for path, stat in _files(control, IMAGE_EXTENSIONS):
            owner = names.owner(path, "._")
            if owner is not None:
                self._found.setdefault(owner, []).append((f"{control.root}/{path}", stat))

    def __call__(self, item: Item) -> Sequence[File]:
        (least, most), listed = self._counts, _listed(item, self._scan)
        if listed or self._control is None:
            found: Sequence[tuple[str, SourceStat]] = [(x, self._stat(x, item)) for x in listed]
            place = "its row" if self._scan.rows is not None else "its dataset"
        else:
            name = _beside(item, self._scan)
            files = self._found.get(name, ())
            if not files:
                raise _missing(item, self._control, f"{name}_0.png")
            try:
                found = in_order(name.rpartition("/")[2], files, "control")
            except SourceError as error:
                raise SourceError(error.what, where=item.image, hint=error.hint) from None
            place = self._control.root
        if len(found) < least or (most is not None and len(found) > most):
            count = f"{least}" if least == most else f"{least} or more" if most is None else ""
            count = count or f"{least} to {most}"
            one = "" if len(found) == 1 else "s"
            raise SourceError(
                f"has {len(found)} control image{one} in {place}, and {self._title} takes {count}",
                where=item.image,
                hint="add or remove control images, or remove the item",
            )
        return [File(CONTROL, *each) for each in found]

    def _stat(self, path: str, item: Item) -> SourceStat:
        stat = self._stats[path]
        if stat.size < 0:
            what = f"has a control {path}, which does not exist or is no file that can be read"
            raise SourceError(what, where=item.image, hint="correct the row, or take it out")
        return stat


def _image_names(scan: Scan, items: Iterable[Item]) -> Names:
    """Return the names of all images but layers, those of faulty items too."""
    layers = {path for item in items for path in item.layers}
    if scan.rows is not None:
        paths = [row.path.removeprefix(f"{scan.root}/") for row in scan.rows]
        return Names(paths)
    return Names(
        path for path, _ in _files(scan, IMAGE_EXTENSIONS) if f"{scan.root}/{path}" not in layers
    )


def _listed(item: Item, scan: Scan) -> list[str]:
    """Return the paths of the controls that an item's row names."""
    try:
        return columns_of(item.row or {}, scan.root, "control_path")
    except ValueError as error:
        raise SourceError(str(error), where=item.where, hint="correct the row") from None

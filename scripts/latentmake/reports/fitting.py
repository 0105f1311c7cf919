"""Lines about pictures that a plan enlarges, or cuts by more than half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from latentmake.errors import SourceError
from latentmake.files.workspace import is_remote
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media
from latentmake.index.memo import SourceStat
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import Plan
from latentmake.plan.state import PartState

_ENLARGED = 1.01  # times: less is the rounding of sides
_LOOKED_AT = 1000  # pictures of a dataset whose headers are read: that takes a while on a disk


def fitting_lines(facts: Facts, plan: Plan) -> Iterator[str]:
    """Yield a line for each dataset and resolution with such pictures, of those to be encoded.

    Sizes come from the headers of images, each read once, of some of a large dataset; images on S3
    are left out where no name of a cache file contains their size.
    """
    parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
    for part, state in parts.items():
        kind, _, resolution = parsed(part.name)
        if kind == "text" or resolution is None or not state.stale:
            continue
        settings, layout = facts.config.datasets[part.dataset], facts.layout(part.model)
        if not layout.external and settings.exif_rotation and len(set(resolution)) > 1:
            continue  # EXIF may turn an image, and its header's size does not tell
        sizes = Counter(_sizes(facts, part.dataset, state))
        enlarged, cut, most = 0, 0, 0.0
        for size, count in sizes.items():
            try:
                resized, _, _, target = layout.place(size, resolution, settings)
            except SourceError:  # a faulty item, said elsewhere
                continue
            scale = max(resized.width / size.width, resized.height / size.height)
            enlarged += count * (scale > _ENLARGED)
            most = max(most, scale)
            cut += count * (2 * target.width * target.height < resized.width * resized.height)
        what = [f"{_are(enlarged)} enlarged (up to {most:.3g} times)"] * (enlarged > 0)
        what += [f"{_are(cut)} cut by more than half"] * (cut > 0)
        if what:
            number = sizes.total()
            kind = ("video" if settings.video else "picture") + "s" * (number != 1)
            yield f"{part.dataset} at {part.name}: of {number} {kind}, {', '.join(what)}"


def _sizes(facts: Facts, dataset: str, state: PartState) -> Iterator[Size]:
    """Yield the size of each item to be encoded, where it is known."""
    unknown: dict[str, SourceStat] = {}
    for item in {stale.item.stem: stale.item for stale in state.stale}.values():
        if item.media is not None:
            yield Size(item.media.width, item.media.height)
        elif item.files and not is_remote(item.files[0].path):
            unknown[item.files[0].path] = item.files[0].stat
    step = -(-len(unknown) // _LOOKED_AT) or 1
    if some := dict(islice(unknown.items(), 0, None, step)):
        from latentmake.data.probe import probed

        found = probed(facts.scan(dataset).roots, some, facts.memo, video=False)
        yield from (Size(x.width, x.height) for x in found.values() if isinstance(x, Media))


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"

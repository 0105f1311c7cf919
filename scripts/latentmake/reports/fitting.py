"""Lines about pictures that a plan enlarges, or cuts by more than half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size
from latentmake.layouts import size_of
from latentmake.plan.facts import Facts
from latentmake.plan.parts import Plan

__all__ = ["fitting_lines"]

_ENLARGED = 1.01  # times: less is the rounding of sides


def fitting_lines(facts: Facts, plan: Plan) -> Iterator[str]:
    """Yield a line for each dataset and resolution with such pictures, of those to be encoded.

    Sizes are known where cache names contain them: layouts of musubi-tuner and sd-scripts.
    """
    parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
    for part, state in parts.items():
        resolution = size_of(part.name)
        medias = {stale.source.stem: stale.source.media for stale in state.stale}
        if resolution is None or not all(medias.values()):
            continue
        settings, layout = facts.config.datasets[part.dataset], facts.layout(part.model)
        sizes = Counter(Size(media.width, media.height) for media in medias.values() if media)
        enlarged, cut, most = 0, 0, 0.0
        for size, count in sizes.items():
            try:
                resized, _, _, target = layout.placement(resolution, size, settings)
            except SourceError:  # a faulty item, said elsewhere
                continue
            scale = max(resized.width / size.width, resized.height / size.height)
            enlarged += count * (scale > _ENLARGED)
            most = max(most, scale)
            cut += count * (2 * target.width * target.height < resized.width * resized.height)
        what = [f"{_are(enlarged)} enlarged (up to {most:.3g} times)"] * (enlarged > 0)
        what += [f"{_are(cut)} cut by more than half"] * (cut > 0)
        if what:
            kind = "videos" if settings.video else "pictures"
            yield f"{part.dataset} at {part.name}: of {len(medias)} {kind}, {', '.join(what)}"


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"

"""Keys of an item's targets, from the bytes of its source that are there now."""

from __future__ import annotations

from latentmake.caches.inputs import SourceBytes
from latentmake.caches.pixels.plain import upright_size
from latentmake.caches.reading import Reading, digest_source, read_others, read_source
from latentmake.files import cachefile
from latentmake.geometry.buckets import Size
from latentmake.plan.orders import Order
from latentmake.plan.target import Target, joined, placing_of, view_of


def identified(
    order: Order, recipe: str, reading: Reading
) -> tuple[dict[Target, str], SourceBytes]:
    """Read an item's source; return the keys of its targets, and the bytes.

    Of videos there are no bytes. The reading gets the digest of the source, and its receipt what
    was read: of an image whose targets are not named by its size, that too.

    Args:
        order: of the targets.
        recipe: digest of their recipe.
        reading: of the item.

    Raises:
        OSError: the source cannot be read.
        SourceError: it is damaged.
    """
    item, data, alone = reading.item, b"", order.kind == "latents" and order.dataset_settings.video
    contents: list[str] = []
    if item.source is None:
        data = (item.text or "").encode()
    elif alone:
        contents = [digest_source(item.source, reading.sources)]
    else:
        data, content = read_source(item.source, reading.sources)
        contents = [content]
    controls, of_controls = read_others(item.controls, reading.sources, digests_alone=alone)
    layers, of_layers = read_others(item.layers, reading.sources, digests_alone=alone)
    reading.content = joined(item, [*contents, *of_controls, *of_layers])
    source = SourceBytes(item, data, reading.content, controls, layers)
    return _keys(order, recipe, reading, data), source


def _keys(order: Order, recipe: str, reading: Reading, data: bytes) -> dict[Target, str]:
    item, size, settings = reading.item, Size(0, 0), order.dataset_settings
    if item.media is not None:
        size = Size(item.media.width, item.media.height)
    elif order.kind == "latents" and item.source is not None:
        size = upright_size(data, item.source, settings)
        reading.sources[item.source] += [*size, settings.exif_rotation]
    keys: dict[Target, str] = {}
    for target in reading.work.targets:
        own = size if target.size is not None else Size(0, 0)
        view = view_of(order.layout, settings, item, target, own)
        keys[target] = cachefile.target_key(reading.content, recipe, view)
        if placing := placing_of(order.layout, settings, item, target, own, view):
            reading.placing[keys[target]] = placing
    return keys

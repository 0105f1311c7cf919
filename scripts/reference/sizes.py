"""Table of the guide about disk space: bytes of caches, from the formulas that plans use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from latentmake.base.machine import human
from latentmake.config.models import Model
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of
from latentmake.models.cache_sizes import Tensors, file_bytes, latents_tensors, text_tensors

from reference.tables import table

__all__ = ["page"]

_BEGIN, _END = "<!-- sizes: generated -->\n", "<!-- end of sizes -->\n"
_CLIP = {"model_type": "clip_text_model", "max_position_embeddings": 77}
_CONFIGS: Mapping[str, dict[str, Any]] = {
    "vae4": {"block_out_channels": [128, 256, 512, 512], "latent_channels": 4},
    "vae16": {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16},
    "clip-l": {**_CLIP, "hidden_size": 768, "projection_dim": 768},
    "clip-g": {**_CLIP, "hidden_size": 1280, "projection_dim": 1280},
    "t5": {"model_type": "t5", "d_model": 4096},
}
_SD = {"vae": "vae4", "text": ["clip-l"], "architecture": "sd1"}
_SDXL = {"vae": "vae4", "text": ["clip-l", "clip-g"], "architecture": "sdxl"}
_FLUX = {"vae": "vae16", "text": ["clip-l", "t5"], "architecture": "flux", "layout": "sdscripts"}
_WAN = {"vae": "vae16", "text": ["t5"], "task": "t2v-1.3B"}
_T5 = {"vae": "vae4", "text": ["t5"]}
_LATENTS = (
    ("SD 1.x, 512 x 512", _SD, Size(512, 512), 1),
    ("SDXL, 1024 x 1024", _SDXL, Size(1024, 1024), 1),
    ("SD 3 or Flux for sd-scripts, 1024 x 1024", _FLUX, Size(1024, 1024), 1),
    ("Wan, 832 x 480", _WAN, Size(832, 480), 1),
    ("Wan, 81 frames of 832 x 480", _WAN, Size(832, 480), 81),
)
_TEXTS = (
    ("SD 1.x", _SD, (77,)),
    ("SDXL", _SDXL, (77, 77)),
    ("Flux for sd-scripts", _FLUX, (77, 512)),
    ("Wan, 128 tokens", _WAN, (128,)),
    ("T5-XXL, 128 tokens", _T5, (128,)),
)


def page(path: Path) -> str:
    """Return the guide with the table of today."""
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    return f"{before}{_BEGIN}\n{_table()}\n\n{_END}{rest.partition(_END)[2]}"


def _table() -> str:
    with TemporaryDirectory() as folder:
        for name, config in _CONFIGS.items():
            place = Path(folder, name)
            place.mkdir()
            (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        rows = [*_rows(folder)]
    return table(["cache", "tensors", "16 bits", "32 bits"], rows)


def _rows(folder: str) -> Iterator[list[str]]:
    for name, values, size, frames in _LATENTS:
        several = [
            (model, latents_tensors(model, size, frames)) for model in _models(values, folder)
        ]
        yield _row(f"latents of {name}", several)
    for name, values, tokens in _TEXTS:
        yield _row(
            f"text of {name}",
            [(model, text_tensors(model, tokens)) for model in _models(values, folder)],
        )


def _models(values: Mapping[str, Any], folder: str) -> Iterator[Model]:
    """Yield a model that stores 16 bits, and one that stores 32."""
    place = {"vae": f"{folder}/{values['vae']}"}
    texts = [f"{folder}/{name}" for name in values["text"]]
    for dtype in ("bfloat16", "float32"):
        kept = {} if "task" in values else {"dtype": dtype}
        given = {"vae_dtype": dtype} if "task" in values else {}
        yield Model.model_validate({**values, **place, "text": texts, **kept, **given})


def _row(name: str, several: list[tuple[Model, Tensors]]) -> list[str]:
    sizes, shapes = [], ""
    for model, tensors in several:
        sizes.append(human(file_bytes(layout_of(model.layout_name), tensors, {})))
        largest = sorted(tensors.values(), key=lambda tensor: -len(tensor[1]))
        shapes = ", ".join(" x ".join(map(str, shape)) for _, shape in largest if len(shape) > 1)
    return [name, shapes, *sizes]

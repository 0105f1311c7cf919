"""Model architectures as rows of facts, so that other modules never compare names of models.

The rows are in `sdscripts.yaml` and `musubi.yaml`. An `Architecture` holds all differences between
models; layouts, recipes, launches, checks and publication read it.

Sources: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py, strategy_flux.py and
flux_models.py, `verify_bucket_reso_steps` in its training scripts; musubi-tuner's wan/configs,
*_cache_*.py and *_train*.py, dataset/architectures.py, dataset/bucket.py and dataset/cache_io.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml
from pydantic import TypeAdapter

from latentmake.config.makers import Maker, Recognition, Scripts, Strategies


class ClipOutput(NamedTuple):
    """Tensors of a CLIP's output that a cache keeps.

    Attributes:
        layer: layer of the hidden states, counted from the last (1); None: the last layer, after
            the final normalisation.
        normalised: whether the hidden states of `layer` get the final normalisation too.
        pooled: vector of the caption. `own`: the network's own, projected if it has a projection.
            `bare`: the same without projection. `end`: state of the first EOS in the last layer,
            projected. None: no vector.
        projects: whether the network must have a projection.
        padding: token that sd-scripts pads captions with; None: the end of text.
    """

    layer: int | None
    normalised: bool
    pooled: Literal["own", "bare", "end"] | None
    projects: bool = False
    padding: int | None = None


class Architecture(NamedTuple):
    """Facts about one model architecture."""

    name: str  # "" if the model has no `architecture`
    text_encoders: tuple[str, ...] = ()  # kinds of the text encoders, in order
    clips: tuple[ClipOutput, ...] = ()  # outputs to keep of the CLIPs among them
    picks_layer: bool = False  # whether `clip_skip` chooses the layer of CLIP
    masks_clips: bool = False  # whether padding may be hidden from the CLIPs
    chunks_captions: bool = False  # whether CLIP takes captions in chunks of 75 tokens
    caches_text: bool = True  # whether sd-scripts reads embeddings from caches
    single_file: bool = False  # whether sd-scripts reads the network from one file only
    scale: tuple[float, float] | None = None  # shift and factor of latents; None: unscaled
    sized_arrays: bool = False  # whether array names contain the size of the latents
    side: int = 8  # sides of resolutions are multiples of this, in pixels
    bucket_steps: int = 64  # sd-scripts' default for `bucket_reso_steps`
    bucket_divisor: int = 64  # `bucket_reso_steps` must be a multiple of this
    original_files: bool = False  # whether encoders may be files without a configuration
    video: bool = False  # whether its VAE encodes videos, in tiles with `vae_cache_cpu`
    cleans_captions: bool = False  # whether HTML and repeated space are removed (umT5)
    checkpoints: bool = False  # whether one file may hold VAE, text encoders and UNet
    trainer: str | None = None  # kind of Latentmake's own trainer for it
    usual: bool = False  # whether an imported dataset file is for it, if nothing says which
    channels: int = 4  # channels of its latents
    prediction: str | None = None  # prediction of its networks; None if they differ
    # A network takes (latents - shift_factor) * scaling_factor; None: unknown.
    scaling_factor: float | None = None
    shift_factor: float = 0.0
    maker: Maker = Maker()
    encodes: bool = True  # whether Latentmake has encoders for it

    @property
    def scripts(self) -> Scripts:
        """Facts for musubi-tuner; raises KeyError if it does not train the architecture."""
        return MUSUBI[self.name]

    @property
    def strategies(self) -> Strategies:
        """Facts for sd-scripts; raises KeyError if it does not train the architecture."""
        return SDSCRIPTS[self.name]

    @property
    def init(self) -> Recognition:
        """Facts for `latentmake init`."""
        init = self.maker.init
        return init._replace(network=init.network or self.maker.pattern)

    @property
    def pairs(self) -> bool:
        """Whether a model may have two networks, for high and low noise."""
        return any(version.boundary for version in self.maker.versions.values())


TEXT_ENCODERS = {
    **{"CLIP-L": ("CLIP text encoder", 768), "OpenCLIP-H": ("CLIP text encoder", 1024)},
    **{"CLIP-G": ("CLIP text encoder", 1280), "T5": ("T5", 32128), "umT5": ("T5", 256384)},
}
"""Name in `text_encoders` -> kind in `models.headers`, and published size.

The size is the width of a CLIP, or the vocabulary of a T5.
"""
GENERIC = Architecture("", checkpoints=True)
"""Facts for a model without `architecture`: caches keep the last layer of each text encoder."""

# The C version is much faster, but some installations of PyYAML lack it.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _rows(file: str) -> dict[str, dict[str, Any]]:
    """Return name -> row of a YAML file.

    A row inherits the values of the row that it is `like`. Names that begin with `_` are only for
    inheritance, and not returned.
    """
    text = Path(__file__).with_name(file).read_text("utf-8")
    written = yaml.load(text, _SafeLoader)  # noqa: S506 -- a safe loader

    def values(name: str) -> dict[str, Any]:
        row = dict(written[name])
        like = row.pop("like", None)
        return _merged(row, values(like)) if like else row

    return {name: values(name) for name in written if name[0] != "_"}


def _merged(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values over those of a base, also in mappings below them."""
    result = {**base, **values}
    for key in values.keys() & base.keys():
        if isinstance(values[key], dict) and isinstance(base[key], dict):
            result[key] = _merged(values[key], base[key])
    return result


def _scripts(name: str, row: dict[str, Any]) -> Scripts:
    """Return a row of musubi-tuner, with its default `header` and the names of its scripts."""
    named: dict[str, Any] = {"header": name}
    if program := row.pop("program", None):
        named |= {part: {"name": f"{program}_{ending}.py"} for part, ending in _ENDINGS.items()}
    return Scripts.model_validate(_merged(row, named))


_of_facts = TypeAdapter(Architecture).validate_python
_ENDINGS = {
    "latents": "cache_latents",
    "text": "cache_text_encoder_outputs",
    "training": "train_network",
}
MUSUBI = {name: _scripts(name, row) for name, row in _rows("musubi.yaml").items()}
"""Architectures that musubi-tuner trains. Its scripts make the caches; for Wan, Latentmake can."""
SDSCRIPTS = {name: Strategies.model_validate(row) for name, row in _rows("sdscripts.yaml").items()}
"""Architectures that sd-scripts trains."""


_MAKERS: Mapping[str, Maker] = {**SDSCRIPTS, **MUSUBI}
ROWS = {
    name: _of_facts({"name": name, **row.facts})._replace(maker=row, encodes=row.encodes)
    for name, row in _MAKERS.items()
}
"""Name -> facts, for all architectures."""
ARCHITECTURES = dict(ROWS)
WAN = ARCHITECTURES.pop("wan")  # its models have only a `task`
"""Facts for Wan; `ARCHITECTURES` has those that the configuration names."""


if TYPE_CHECKING:
    ArchitectureName = str
else:  # pydantic refuses any other name
    ArchitectureName = Literal[tuple(ARCHITECTURES)]

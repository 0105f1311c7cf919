"""Page about architectures, made from the tables for musubi-tuner and sd-scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from latentmake.config.architectures import MUSUBI, SDSCRIPTS, WAN
from latentmake.config.makers import (
    Architecture,
    Encoder,
    File,
    Scripts,
    Setting,
    Strategies,
)

from reference.tables import table
from reference.types import short

__all__ = ["page"]

_SHOWN = 4  # most tasks of one architecture that are listed
_DESCRIBED = {"learning_rate", "network_dim", "network_alpha", "gradient_checkpointing", "seed"}
_TEXT = """# Architectures

Facts about the architectures that musubi-tuner and sd-scripts train: weights, tasks, sizes and
training defaults. Set the first column as `architecture` of a [model](models.md#architecture).
For the trainer `sd`, SDXL needs `architecture: sdxl`; Stable Diffusion 1.x and 2.x need none.

## Architectures of musubi-tuner

A Wan model has a `task` and no `architecture`. [The page on musubi-tuner](../trainers/musubi.md)
says where the weights come from.

{musubi}

- `weights`: keys of the model. Some tasks need those in brackets, in addition to the
  [network](models.md#dit) to train.
- `sides`: sides of resolutions and buckets are multiples of this, in pixels.
- `suffix`: end of the names of cache files, `{{stem}}_{{W}}x{{H}}_{{suffix}}.safetensors` and
  `{{stem}}_{{suffix}}_te.safetensors`.

## Training defaults of musubi-tuner

The trainer [`musubi`](trainer-musubi.md) uses the settings that musubi-tuner's guide recommends
for the architecture, with `gradient_checkpointing: true` and `seed: 42`. Optimizers that need
another package, settings that depend on the GPU's memory, and the number of epochs are left to
you.

{musubi_defaults}

- A key of `trainer` takes precedence, and so does a flag in `arguments`. `seed` or
  `gradient_checkpointing` together with its own flag is refused.
- Most guides name no alpha; the scripts then use 1. For `krea2` and `kandinsky5` the alpha is
  your `network_dim`.
- The guide of Ideogram 4 names no rate, rank or seed; those of HunyuanVideo are used.
- The plan names the defaults that a training uses. A release with other defaults does not train
  again.

## Architectures of sd-scripts

[The page on sd-scripts](../trainers/sdscripts.md) says where the weights come from. `lumina`,
`hunyuan_image` and `anima` set `layout: sdscripts` themselves; add it for the others.

{sd_scripts}

- `text`: text encoders in the order of the key `text`; where sd-scripts encodes, the flags to
  which it passes them.
- `sides`: sides of resolutions are multiples of this, in pixels.
- `bucket steps`: default of [`bucket_reso_steps`](datasets.md#bucket_reso_steps), in pixels; in
  brackets, the number that it must be a multiple of for a training.
- `caches`: ends of the names of cache files. Captions of `sd1` and `sd2` are not cached.

| architecture | `latents_arguments` | `text_arguments` |
|---|---|---|
{options}

## Training defaults of sd-scripts

The trainer [`sdscripts`](trainer-sdscripts.md) uses the settings that sd-scripts' guide
recommends for the architecture, with `gradient_checkpointing: true`; the seed is 0.

{sd_scripts_defaults}

- A key of `trainer` takes precedence, and so does a flag in `arguments`.
- With a `network_dim` of yours, the alpha is half of it for `sdxl`, all of it for `lumina`, and 1
  for the others.
- `fine_tune` and `sdxl_train` train the complete network with a learning rate of 1e-5 and without
  gradient checkpointing.
"""


def page() -> str:
    """Return the Markdown of the page."""
    return _TEXT.format(
        musubi=table(
            (
                "architecture",
                "name",
                "`task`",
                "weights",
                "items",
                "sides",
                "suffix",
                "training script",
            ),
            map(_musubi_row, MUSUBI.values()),
        ),
        musubi_defaults=_defaults(MUSUBI.values()),
        sd_scripts=table(
            ("architecture", "name", "text", "sides", "bucket steps", "caches", "training scripts"),
            map(_sd_scripts_row, SDSCRIPTS.values()),
        ),
        options="\n".join(
            f"| `{row.name}` | {_flags(row.latents)} | {_flags(row.text)} |"
            for row in SDSCRIPTS.values()
            if row.latents
        ),
        sd_scripts_defaults=_defaults(SDSCRIPTS.values()),
    )


def _musubi_row(scripts: Scripts) -> list[str]:
    return [
        "none" if scripts is WAN else f"`{scripts.name}`",
        scripts.title,
        _tasks(scripts),
        ", ".join(_weights((*scripts.latents.files, *scripts.text.files))) or "none",
        ", ".join(_items(scripts)),
        str(scripts.side),
        f"`{scripts.suffix}`",
        f"`{scripts.training.name}`",
    ]


def _sd_scripts_row(strategies: Strategies) -> list[str]:
    encoders = [file for file in strategies.files if file.key.startswith("text")]
    flags = [f"`{file.flag}`" for file in sorted(encoders, key=lambda file: file.key)]
    endings = filter(None, (strategies.latents_ending, strategies.text_ending))
    return [
        f"`{strategies.name}`",
        strategies.title,
        ", ".join(strategies.text_encoders or flags),
        str(strategies.side),
        f"{strategies.bucket_steps} ({strategies.divisor or strategies.bucket_divisor})",
        ", ".join(f"`{ending}`" for ending in endings),
        ", ".join(f"`{name}`" for name in strategies.training_scripts),
    ]


def _tasks(scripts: Scripts) -> str:
    names = [f"`{name}`" for name in scripts.versions if name]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN + 1 else ""
    return ", ".join(names[:_SHOWN] if more else names) + more or "none"


def _weights(files: Iterable[File]) -> Iterator[str]:
    keys: dict[str, bool] = {}
    for file in files:
        keys[file.key] = file.required or keys.get(file.key, False)
    texts = [key for key in keys if key.startswith("text")]
    for key, required in keys.items():
        if key != "text" and key in texts:
            continue
        word = f"{len(texts)} of `text`" if key == "text" and len(texts) > 1 else f"`{key}`"
        yield word if required else f"({word})"


def _items(scripts: Scripts) -> Iterator[str]:
    versions = scripts.versions.values()
    if any(version.images for version in versions):
        yield "images"
    if any(version.videos for version in versions):
        yield "videos"
    least = min(version.controls[0] for version in versions)
    most = [version.controls[1] for version in versions]
    if None in most:
        yield "(control images)" if least == 0 else "1 control image or more"
    elif max(filter(None, most), default=0):
        yield "1 control image" if least else "(1 control image)"
    if scripts.layers:
        yield "layers"


def _flags(encoder: Encoder | None) -> str:
    return ", ".join(f"`{flag}`" for flag in encoder.options) if encoder else ""


def _defaults(rows: Iterable[Architecture]) -> str:
    return table(
        ("architecture", "learning rate", "rank", "alpha", "further"),
        ([f"`{row.name}`", *_default_row(row.settings)] for row in rows),
    )


def _default_row(settings: Mapping[str, Setting]) -> list[str]:
    rank, alpha = settings["network_dim"], settings.get("network_alpha")
    further = [
        f"`{key}: {value}`" if key[0] != "-" else f"`{key} {_value(value)}`"
        for key, value in settings.items()
        if key not in _DESCRIBED and value is not None
    ]
    return [short(settings["learning_rate"]), str(rank), f"{alpha or rank:g}", ", ".join(further)]


def _value(value: Setting) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)

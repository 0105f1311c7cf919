"""Page about predictions, noise schedules and scales of latents, made from the architectures."""

from __future__ import annotations

import json
from collections.abc import Iterator

from latentmake.config.architectures import ARCHITECTURES, MUSUBI, WAN
from latentmake.config.makers import Architecture, Setting
from latentmake.models import parameterization

from reference.tables import table

__all__ = ["page"]

BETAS = json.loads((parameterization.SCHEDULE / parameterization.SCHEDULE_FILE).read_text())
"""Noise schedule of Stable Diffusion."""
_TEXT = """# Predictions, noise schedules and the scale of latents

`latentmake check` shows what a network predicts, by which noise schedule, and at which scale it
takes its latents, each with the file that says so:

| checked | verdict | note |
|---|---|---|
| prediction | ok | v_prediction (noob.safetensors: tensor v_pred), scaled_linear betas {betas} |
| latents | ok | factor 0.13025, shift 0 (noob.safetensors) |

Training, samples, publications and caches ask the same module, `models/parameterization.py`. Your
keys win over the files. If files disagree or say nothing, the plan names the key to set. The plan
refuses a pair that cannot be trained: epsilon with zero terminal SNR, a noise schedule without
betas (EDM, VE), a VAE with `latents_mean` and `latents_std`.

## Models of diffusion

{diffusion}

- One file tells its prediction by the tensors `v_pred` and `ztsnr`, or by its metadata: {metadata}.
- `sd` uses the keys [`prediction_type`](../reference/trainer-sd.md#prediction_type) and
  [`zero_terminal_snr`](../reference/trainer-sd.md#zero_terminal_snr). `sdscripts` uses
  [`v_parameterization`](../reference/trainer-sdscripts.md#v_parameterization) and
  [`zero_terminal_snr`](../reference/trainer-sdscripts.md#zero_terminal_snr), and passes the flags
  of these names.
- The scale of `layout: plain` is that of the VAE's `config.json`. A VAE without one has the scale
  of its architecture in these tables; [`scaling_factor`](../reference/models.md#scaling_factor)
  sets it. Without an `architecture`, a VAE of four channels has that of `sd1`, and any other VAE
  needs the key.

## Models of flow matching

The script of the trainer decides what these predict. The keys of the trainer set the schedule.

{flow}
"""


def page() -> str:
    """Return the Markdown of the page."""
    metadata = ", ".join(f"`{name}`" for name in parameterization.METADATA)
    head = ("architecture", "trainer", "files", "predicts", "schedule", "scale of latents")
    return _TEXT.format(
        betas=f"{BETAS['beta_start']} to {BETAS['beta_end']}",
        metadata=metadata,
        diffusion=table(head, _diffusion()),
        flow=table(
            ("architecture", "trainer", "predicts", "schedule", "scale of latents, and its file"),
            _flow(),
        ),
    )


def _diffusion() -> Iterator[list[str]]:
    stable = "`{beta_schedule}`, {beta_start} to {beta_end}".format(**BETAS)
    own, config = "`scheduler/scheduler_config.json`", "`vae/config.json`"
    for row in ARCHITECTURES.values():
        if not row.checkpoints:
            continue
        words = [
            f"the file; else {row.prediction or f'`{key}`, which is asked for'}"
            for key in ("prediction_type", "v_parameterization")
        ]
        name, scale = f"`{row.name}`", ": ".join(reversed(row.scale))
        rows = (
            ("`sd`", "folder", f"{own}: `prediction_type`", own, f"{config}: `scaling_factor`"),
            ("`sd`", "one file", words[0], f"{own} beside it; else {stable}", _scale(row)),
            ("`sd`", "a VAE of one file", "as above", "as above", _scale(row)),
            ("`sdscripts`", "folder", f"{own}: `prediction_type`", stable, scale),
            ("`sdscripts`", "one file", words[1], stable, scale),
        )
        yield from ([name, *cells] for cells in rows)


def _scale(row: Architecture) -> str:
    return f"{row.scaling_factor}, of the architecture"


def _flow() -> Iterator[list[str]]:
    for row in (WAN, *ARCHITECTURES.values()):
        if row.name in MUSUBI:
            name = row.scripts.training.name
            yield _flow_row(row, "musubi", name.removesuffix(".py"))
        elif not row.checkpoints:
            yield _flow_row(row, "sdscripts", row.strategies.training_scripts[0])
    scale = "its `config.json`; else those of Wan 2.1, as in diffusers' AutoencoderKLWan"
    yield [
        "none",
        "`wan`",
        "flow matching: `trainers/wan/recipe.py`",
        "`flow_shift`",
        scale,
    ]


def _flow_row(row: Architecture, kind: str, script: str) -> list[str]:
    text, file = row.scale
    settings = {key.removeprefix("--"): value for key, value in row.settings.items()}
    sampling = [
        f"`{key}: {_number(settings[key])}`"
        for key in ("timestep_sampling", "discrete_flow_shift")
        if settings.get(key) is not None
    ]
    return [
        "none" if row is WAN else f"`{row.name}`",
        f"`{kind}`",
        f"{row.predicts}: `{script}.py`",
        ", ".join(sampling) or "the script's own",
        f"{text}: `{file}`",
    ]


def _number(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Sample pictures as latents: what the network in hand makes of the prompts.

DDIM (Song et al. 2021, https://arxiv.org/abs/2010.02502), or Euler's steps where the network has
learnt flow matching, with classifier-free guidance (Ho and
Salimans 2022, https://arxiv.org/abs/2207.12598), the same noise at every step of the training, so
that the rows of the grid differ by the training alone. The pictures are decoded afterwards, by a
process of its own (`latentmake.trainers.samples`): this one never loads the VAE.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from safetensors import SafetensorError, safe_open

from latentmake import cachefile
from latentmake.trainers.data import pad
from latentmake.trainers.objective import Network, NoiseSchedule
from latentmake.trainers.order import Wanted
from latentmake.trainers.schedule import generator

__all__ = ["Row", "Sampler", "clear_rows", "read_rows", "write_row"]

_Ddim: Any = DDIMScheduler  # diffusers has no types
_Euler: Any = FlowMatchEulerDiscreteScheduler
_NAME = re.compile(r"step-(\d{6,})\.safetensors")


class Row(NamedTuple):
    """The sample pictures after some step.

    Attributes:
        latents: [prompts, channels, height, width], unscaled: what the VAE decodes.
    """

    step: int
    latents: torch.Tensor


class Sampler:
    """Draws a row of sample pictures.

    Args:
        schedule: the noise schedule of the training.
        prompts: an embedding [tokens, width] for each picture.
        negative: embedding that guidance leads away from; None for no guidance.
        shape: channels, height and width of a picture's latents.
        steps: denoising steps.
        guidance: scale of the guidance; 1 is none.
        seed: of the noise each picture begins with.
        batch: most pictures drawn at once.
    """

    def __init__(
        self,
        schedule: NoiseSchedule,
        prompts: list[torch.Tensor],
        negative: torch.Tensor | None,
        *,
        shape: tuple[int, int, int],
        steps: int,
        guidance: float,
        seed: int,
        batch: int = 1,
    ) -> None:
        self._config = schedule.config
        self._flow = isinstance(schedule, FlowMatchEulerDiscreteScheduler)
        self._prompts = prompts
        self._negative = negative if guidance > 1 else None
        self._shape = shape
        self._steps = min(steps, int(schedule.config.num_train_timesteps))
        self._guidance = guidance
        self._seed = seed
        self._batch = batch

    @torch.no_grad()
    def draw(self, network: Network, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return scaled latents [prompts, channels, height, width], float32, on the CPU."""
        parts = [
            self._pictures(network, start, device, dtype)
            for start in range(0, len(self._prompts), self._batch)
        ]
        return torch.cat(parts)

    def _pictures(
        self, network: Network, start: int, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        schedule = (_Euler if self._flow else _Ddim).from_config(self._config)
        schedule.set_timesteps(self._steps)
        prompts = self._prompts[start : start + self._batch]
        negatives = [] if self._negative is None else [self._negative] * len(prompts)
        texts, mask = pad([*prompts, *negatives])
        texts = texts.to(device, dtype)
        mask = None if mask is None else mask.to(device)
        noise = torch.stack(
            [
                torch.randn(self._shape, generator=generator(self._seed, "sample", index))
                for index in range(start, start + len(prompts))
            ]
        )
        latents: torch.Tensor = noise.to(device)  # of standard deviation 1 for both schedules
        for timestep in schedule.timesteps:
            inputs = torch.cat([latents, latents]) if negatives else latents
            (predicted,) = network(
                inputs.to(dtype),
                timestep.to(device).expand(len(inputs)),
                texts,
                encoder_attention_mask=mask,
                return_dict=False,
            )
            predicted = predicted.float()
            if negatives:
                with_text, without = predicted.chunk(2)
                predicted = without + self._guidance * (with_text - without)
            latents = schedule.step(predicted, timestep, latents, return_dict=False)[0]
        return latents.float().cpu()


def write_row(
    folder: Path, row: Row, wanted: Wanted, *, scaling_factor: float, shift_factor: float
) -> None:
    """Write a row, marked with the training it belongs to.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    metadata = {
        "scaling_factor": str(scaling_factor),
        "shift_factor": str(shift_factor),
        "wanted": wanted.model_dump_json(),
    }
    data = cachefile.serialize({"latents": row.latents}, metadata)
    cachefile.write(folder / f"step-{row.step:06d}.safetensors", data)


def _rows(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for path, match in matches if match)


def read_rows(folder: Path, wanted: Wanted) -> list[Row]:
    """Return the rows of this very training, in the order of their steps."""
    rows = []
    for step, path in _rows(folder):
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("wanted") == wanted.model_dump_json():
                    rows.append(Row(step, file.get_tensor("latents")))
        except (OSError, SafetensorError):
            continue
    return rows


def clear_rows(folder: Path, wanted: Wanted | None = None) -> None:
    """Remove the rows of earlier trainings; with None, of this one too."""
    ours = set() if wanted is None else {row.step for row in read_rows(folder, wanted)}
    for step, path in _rows(folder):
        if step not in ours:
            path.unlink(missing_ok=True)

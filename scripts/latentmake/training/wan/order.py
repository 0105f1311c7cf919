"""Order of a training by `wan`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import JsonValue

from latentmake import digest
from latentmake.config.models import Model
from latentmake.config.trainers import WanTrainer
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.wan.dit import lora_names

_BOUNDARY = {"t2v": 0.875, "i2v": 0.9}  # Wan 2.2's, wan/configs of its release


class WanOrder(TrainingOrder):
    """Order of the trainer `wan`.

    Attributes:
        dit: path of the network; of Wan 2.2 that for low noise. None where it is not trained.
        dit_high_noise: Wan 2.2's network for high noise.
        task: of the model, as musubi-tuner names it.
        image_to_video: whether mask and latents of the first frame are inputs.
        needs_clip: whether the output of the CLIP image encoder is one.
        flow_shift: shift of the timesteps.
        boundary: share of the timesteps where the network for high noise begins; None where there
            is one network for all.
    """

    picture_suffix: ClassVar[str] = ".mp4"
    kind: Literal["wan"] = "wan"
    dit: str | None
    dit_high_noise: str | None = None
    task: str
    image_to_video: bool = False
    needs_clip: bool = False
    flow_shift: float
    boundary: float | None = None
    trainer: WanTrainer

    @property
    def results(self) -> list[str]:
        """Paths of the LoRA of each network, in diffusers' names, below `output`."""
        trained = ((self.dit, False), (self.dit_high_noise, True))
        return [lora_names(high_noise=high).diffusers for path, high in trained if path is not None]

    def described(self) -> dict[str, JsonValue]:
        """Return the places of networks and VAE."""
        return {
            "dit": self.dit,
            "dit_high_noise": self.dit_high_noise,
            "vae": self.vae.path or self.vae.hub,
        }

    def settings_digest(self, **gone: str) -> str:
        """Return the digest of all settings that shape the weights.

        Shift and boundary count as they are used: their defaults depend on resolutions and task.
        """
        plain = self.trainer.model_copy(update={"flow_shift": None, "timestep_boundary": None})
        rest = TrainingOrder.settings_digest(self.model_copy(update={"trainer": plain}), **gone)
        return digest.of_value([rest, self.flow_shift, self.boundary])

    def settings(self) -> dict[str, object]:
        """Return all settings that shape the weights, by name."""
        used = {"flow_shift": self.flow_shift, "timestep_boundary": self.boundary}
        return super().settings() | used

    def picture_keys(self) -> list[str]:
        """Return a digest for each prompt's clip; another rate makes other files."""
        fps = self.trainer.samples.fps
        return [digest.of_value([key, fps]) for key in super().picture_keys()]

    def pictures_digest(self) -> str:
        """Return the digest of all that shapes the files of sample clips besides the weights."""
        return digest.of_value([super().pictures_digest(), self.trainer.samples.fps])

    def _shown(self) -> list[object]:
        """Return the settings that shape each sample clip, besides weights and prompt."""
        samples = self.trainer.samples
        return [*super()._shown(), samples.frames, self.flow_shift]


def boundary_of(trainer: WanTrainer, model: Model) -> float | None:
    """Return the share of the timesteps from which Wan 2.2's network for high noise is used.

    Returns:
        None for a model with one network.
    """
    if model.version.boundary is None:
        return None
    if trainer.timestep_boundary is not None:
        return trainer.timestep_boundary / 1000
    return _BOUNDARY["i2v" if model.image_to_video else "t2v"]

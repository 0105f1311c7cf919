"""Order of a training by the training loop: digests, checks of settings, index of its pictures.

This module imports neither torch nor Pillow, because the planner, the launcher and the comparison
of runs import it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue

from latentmake.base import digest
from latentmake.base.state_file import JsonFile
from latentmake.config.fields import shaping
from latentmake.config.models import Model
from latentmake.config.trainers import LoopTrainer
from latentmake.plan.product import Parts
from latentmake.runs.order import (
    Record,
    RunFiles,
    RunOrder,
    last_place,
    parts_in,
)

if TYPE_CHECKING:
    from latentmake.trainers.init_lora import Place

Order = TypeVar("Order", bound="TrainingOrder")

_LENGTHS = {"steps", "epochs", "max_steps"}

STEPS = 1000
"""Steps of a training that sets neither `steps` nor `epochs`."""
CAPTIONS = 4
"""Number of items whose captions are prompts of pictures and clips if a run sets no prompts."""


class Prompt(BaseModel):
    """A prompt of a sample picture or clip, and the cache file of its embedding (`text`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str
    text: str


class ClipSettings(JsonFile):
    """Settings that shape each clip or picture besides weights, prompt and seed.

    Attributes:
        frames: number of frames; None for a picture, like all settings that only clips have.
        guidance_scale: scale of the guidance; 1 turns it off.
        negative_prompt: negative prompt; "" without guidance.
        timestep_boundary: share of the timesteps from which on Wan 2.2's network for high noise is
            used; None if there is only one network.
        image: digest of the first frame, for image-to-video.
    """

    frames: int | None = None
    width: int
    height: int
    fps: int | None = None
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float | None = None
    scheduler: Literal["unipc", "euler"] | None = None
    negative_prompt: str = ""
    timestep_boundary: float | None = None
    image: str | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width."""
        return self.frames or 1, self.height, self.width

    @property
    def suffix(self) -> str:
        """End of the names of the files."""
        return ".png" if self.frames is None else ".mp4"

    def values(self) -> dict[str, str | int | float]:
        """Return the settings that are set, by name."""
        return self.model_dump(exclude_none=True)


class TrainingOrder(RunOrder):
    """Order of a training by the training loop. Each trainer has a subclass with its `kind`.

    Attributes:
        weights: digest of the network's files, and of a LoRA that the training begins from.
        model: model with networks, and with the VAE that decodes the sample pictures.
        prompts: prompts of the sample pictures; may be empty.
        captions: number of the manifest's first captions that are prompts, too. The planner does
            not know these captions, because jobs may skip items.
        negative: cache file of the negative prompt's embedding; None without guidance.
        sample_size: width and height of the sample pictures, in pixels.
        trainer: settings of the trainer.
        validates: steps between two losses of the held-out items; None for no such losses.
    """

    weights: str
    model: Model
    prompts: list[Prompt]
    captions: int = 0
    negative: str | None
    sample_size: tuple[int, int]
    trainer: LoopTrainer
    validates: int | None = None

    @property
    def init_files(self) -> list[Path]:
        """Paths of the LoRAs that the networks begin from, in the order of `results`.

        The list is empty if the training begins with a new LoRA.
        """
        if self.trainer.init_lora is None:
            return []
        place = last_place(Path(self.trainer.init_lora))
        if not place.is_dir():
            return [place]
        return [last_place(place / name) for name in self.results]

    def begun(
        self,
        file_digest: Callable[[Path], str],
        layers: Iterable[Collection[str] | None],
        places: Sequence[Place],
    ) -> Self:
        """Return the order with the digest of the LoRA that the training begins from, if any.

        Args:
            file_digest: returns the digest of a file.
            layers: names of the layers that get a LoRA, for each network; None if unknown.
            places: functions that name layers in LoRA files, see `tensor_names`.

        Raises:
            TrainingError: the LoRA does not fit.
        """
        if not (files := self.init_files):
            return self
        from latentmake.trainers.init_lora import misfit, tensor_names

        try:
            if len(files) != len(self.results):
                raise ValueError(f"two networks need a folder with {' and '.join(self.results)}")
            for file, names in zip(files, layers, strict=True):
                if names is not None:
                    tensor_names(file, names, self.trainer.rank, places)
            digests = [file_digest(file) for file in files]
        except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise misfit(error, files[0], f"runs.{self.run}.trainer") from None
        return self.model_copy(update={"weights": digest.of_value([self.weights, *digests])})

    @property
    def from_hub(self) -> bool:
        """Whether weights may have to be downloaded."""
        return any(weights.hub for weights in (self.model.vae, self.model.unet) if weights)

    @property
    def trains_lora(self) -> bool:
        """Whether the training's result is a LoRA."""
        return getattr(self.trainer, "adapter", "lora") == "lora"

    @abstractmethod
    def described(self) -> dict[str, JsonValue]:
        """Return the places of the networks by name, for the index of samples."""

    @abstractmethod
    def objective(self) -> dict[str, JsonValue]:
        """Return the settings that shape the loss of an untrained network, by name."""

    def loss_digest(self) -> str:
        """Return the digest of the network and of all settings that shape its loss."""
        how = [*self.objective().values()]
        return digest.of_value([self.weights, how, self.trainer.mixed_precision])

    @property
    def length(self) -> float:
        """Epochs of the training if the settings give epochs, else its steps."""
        return self.trainer.epochs or self.trainer.steps or STEPS

    def with_settings(self, **settings: object) -> Self:
        """Return a copy of the order with other values of these settings."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update=settings)})

    def course_digest(self) -> str:
        """Return the digest of all settings that shape the weights, except the length.

        The unit of the length (steps or epochs) is part of the digest.
        """
        unit = "steps" if self.trainer.epochs is None else "epochs"
        keys = _LENGTHS & type(self.trainer).model_fields.keys()
        return digest.of_value([self.with_settings(**dict.fromkeys(keys)).settings_digest(), unit])

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the weights.

        A key with its first default is left out. A release that adds keys, or changes a default,
        therefore does not train anything again.
        """
        fields, former = type(self.trainer).model_fields, self.trainer.former_defaults
        settings = {
            key: value
            for key, value in shaping(self.trainer, "weights").items()
            if value != former.get(key, fields[key].default)
        }
        return digest.of_value([settings])

    def settings(self) -> dict[str, object]:
        """Return all settings that shape the weights, by name."""
        return shaping(self.trainer, "weights")

    def chosen(self) -> Iterable[str]:
        """Return the names of the trainer's settings that are not at their defaults."""
        return shaping(self.trainer, "weights", defaults=False)

    def like(self, last: Record, data: str) -> Self:
        """With `auto`, return the order with the precision that the last training chose."""
        if last.parts == self.wanted(data) or self.trainer.mixed_precision != "auto":
            return self
        return self.with_settings(mixed_precision=last.mixed_precision or "auto")

    def networks(self) -> Iterable[object]:
        """Return the places of the networks, of a noise schedule, and of a LoRA to begin from."""
        # The VAE does not shape the weights: the LoRA, which does, takes its place.
        places = {**self.described(), "vae": self.trainer.init_lora}
        return filter(None, places.values())

    def sample_settings(self) -> ClipSettings:
        """Return the settings of the sample pictures."""
        samples, (width, height) = self.trainer.samples, self.sample_size
        return ClipSettings(
            width=width,
            height=height,
            num_inference_steps=samples.num_inference_steps,
            guidance_scale=samples.guidance_scale,
        )


def goes_on(order: TrainingOrder, want: Parts | None) -> bool:
    """Whether a training begins from the weights of the last result, see `on_change`.

    A forced training does not. If the last result has the parts `want`, the training is a forced
    one that is tried again, and does not either.
    """
    files = RunFiles(order).finished
    last = parts_in(files.record) if order.trainer.on_change == "continue" else None
    same = last is not None and last.get("network") == order.weights and last != want
    return same and not order.forced and all(path.is_file() for path in files.results)


def lora_layers(targets: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """Return the layers with these names; as in peft, a target may be the last parts of a name."""
    layers = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    ends = tuple(f".{target}" for target in targets)
    return [layer for layer in layers if f".{layer}".endswith(ends)]


def sample_steps(order: TrainingOrder, steps: int) -> frozenset[int]:
    """Return the steps after which a training draws sample pictures, from 0 to the last."""
    every = order.trainer.samples.every
    if not order.prompts:
        return frozenset()
    if every is None:
        return frozenset(steps * quarter // 4 for quarter in range(5))
    return frozenset([*range(0, steps, every), steps])

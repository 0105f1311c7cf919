"""Order of a training by one of our trainers: digests, checks of settings, index of its pictures.

No torch and no Pillow here: the planner, the launcher and the comparison of runs import it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, StringConstraints, model_validator

from latentmake import digest
from latentmake.config.fields import shaping
from latentmake.config.models import Model
from latentmake.config.trainers import LoopTrainer
from latentmake.training.order import (
    JsonFile,
    Origin,
    RunFiles,
    RunOrder,
    Wanted,
    last_place,
    lock_of,
)

if TYPE_CHECKING:
    from latentmake.training.init_lora import Place

Order = TypeVar("Order", bound="TrainingOrder")

_LENGTHS = {"steps", "epochs", "max_steps"}
_STEPS = 1000  # where neither `steps` nor `epochs` is set
_GONE = ({"attention": "flash"}, {"attention": "xformers"})


CAPTIONS = 4
"""Items whose captions are the prompts of pictures and clips where a run names none."""


class Prompt(BaseModel):
    """A prompt of the sample pictures, and the cache file of its embedding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str
    text: str


class ClipSettings(JsonFile):
    """Settings that shape each clip or picture besides weights, prompt and seed.

    Attributes:
        frames: None of a picture, as are all that only clips have.
        guidance_scale: 1 is none.
        negative_prompt: "" without guidance.
        timestep_boundary: share of the timesteps from which on Wan 2.2's network for high noise is
            used; None of one network.
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

    def values(self) -> dict[str, str | int | float]:
        """Return those that are set, by name."""
        return self.model_dump(exclude_none=True)


class TrainingOrder(RunOrder):
    """Everything that a trainer of ours needs to know; a subclass has its `kind`.

    Attributes:
        version: of the trainer; raised when, given the same, it would train other weights, or a
            default changes.
        picture_suffix: end of the names of decoded samples.
        weights: digest of the network's files, and of a LoRA that it begins from.
        model: networks, and the VAE that decodes the sample pictures.
        prompts: of the sample pictures; may be empty.
        captions: number of the manifest's first captions that are drawn too. The planner cannot
            know them: items may be skipped before.
        negative: embedding that guidance leads away from; None without guidance.
        sample_size: width and height of the sample pictures, in pixels.
        validates: steps between two losses of the held-out items; None for none.
    """

    version: ClassVar[int] = 1
    picture_suffix: ClassVar[str] = ".png"
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
        """Paths of the LoRAs that its networks begin from, as `results`; none of a new LoRA."""
        if self.trainer.init_lora is None:
            return []
        place = last_place(Path(self.trainer.init_lora))
        return [last_place(place / x) for x in self.results] if place.is_dir() else [place]

    def begun(
        self,
        file_digest: Callable[[Path], str],
        layers: Iterable[Collection[str] | None],
        places: Sequence[Place],
    ) -> Self:
        """Return the order with the digest of the LoRA that it begins from, if there is one.

        `layers` are those that get a LoRA, of each network; None where they are not known.

        Raises:
            TrainingError: the LoRA does not fit.
        """
        if not (files := self.init_files):
            return self
        from latentmake.training.init_lora import misfit, tensor_names

        try:
            if len(files) != len(self.results):
                raise ValueError(f"two networks need a folder with {' and '.join(self.results)}")
            for file, names in zip(files, layers, strict=True):
                if names is not None:
                    tensor_names(file, names, self.trainer.rank, places)
            found = [file_digest(file) for file in files]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise misfit(error, files[0], f"runs.{self.run}.trainer") from None
        return self.model_copy(update={"weights": digest.of_value([self.weights, *found])})

    @property
    def from_hub(self) -> bool:
        """Whether weights may have to be downloaded."""
        return bool(self.model.vae.hub)

    @property
    def trains_lora(self) -> bool:
        """Whether its result is a LoRA."""
        return getattr(self.trainer, "adapter", "lora") == "lora"

    @abstractmethod
    def described(self) -> dict[str, JsonValue]:
        """Return the places of the networks, for the index of samples."""

    @abstractmethod
    def objective(self) -> dict[str, JsonValue]:
        """Return the settings that shape the loss of a network before its training, by name."""

    def loss_digest(self) -> str:
        """Return the digest of the network, and of all settings that shape its loss."""
        how = [*self.objective().values()]
        return digest.of_value([self.weights, how, self.trainer.mixed_precision])

    @property
    def length(self) -> float:
        """Epochs of the training if the settings count by them, else its steps."""
        return self.trainer.epochs or self.trainer.steps or _STEPS

    def with_settings(self, **settings: object) -> Self:
        """Return the order of a training that differs by these settings only."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update=settings)})

    def course_digest(self) -> str:
        """Return the digest of all settings that shape the weights, except those of the length.

        Trainings that count in steps differ from those that count in epochs.
        """
        unit = "steps" if self.trainer.epochs is None else "epochs"
        keys = _LENGTHS & type(self.trainer).model_fields.keys()
        return digest.of_value([self.with_settings(**dict.fromkeys(keys)).settings_digest(), unit])

    def settings_digest(self, **gone: str) -> str:
        """Return the digest of all settings that shape the weights.

        A key with its first default is left out: a release that adds keys, or changes a default,
        trains nothing again.

        `gone` are keys that trainers no longer have, and their values, as some trainings had them.
        """
        fields, former = type(self.trainer).model_fields, self.trainer.former_defaults
        settings = {
            key: value
            for key, value in shaping(self.trainer, "weights").items()
            if value != former.get(key, fields[key].default)
        }
        return digest.of_value([settings | gone])

    def settings(self) -> dict[str, object]:
        """Return all settings that shape the weights, by name."""
        return shaping(self.trainer, "weights")

    def chosen(self) -> Iterable[str]:
        """Return the names of the trainer's settings that are no defaults."""
        return shaping(self.trainer, "weights", defaults=False)

    def networks(self) -> Iterable[object]:
        """Return the places of the networks, of a noise schedule, and of a LoRA to begin from."""
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


def wanted(order: TrainingOrder, data: str | None = None) -> Wanted:
    """Return the digests that the trained weights of this order must have come from.

    Weights that were trained with a key that is gone stay trained. `data` is the digest of its
    caches; None for that of its lock as it is now, see `lock_of`.
    """
    settings, resumed = order.settings_digest(), ""
    same = [settings, *(order.settings_digest(**gone) for gone in _GONE)]
    files = RunFiles(order)
    records = (Origin.read(each.record) for each in (files, *files.before()))
    if record := next((x for x in records if x and x.wanted.settings in same), None):
        settings, resumed = record.wanted.settings, record.wanted.resumed
    return Wanted(
        data=lock_of(order.lock).data if data is None else data,
        settings=settings,
        weights=order.weights,
        resumed=resumed,
        version=order.version,
    )


def goes_on(order: TrainingOrder, want: Wanted | None) -> bool:
    """Whether a training begins from the weights of the last one, see `on_change`; no forced one.

    One from what the last one came from, `want`, is forced, or goes on after it was.
    """
    files = RunFiles(order).finished
    last = Origin.read(files.record) if order.trainer.on_change == "continue" else None
    same = last is not None and last.wanted.weights == order.weights and last.wanted != want
    return same and not order.forced and all(path.is_file() for path in files.results)


def sample_steps(order: TrainingOrder, steps: int) -> frozenset[int]:
    """Return the steps after which a training draws sample pictures: first, last, in between."""
    every = order.trainer.samples.every
    if not order.prompts:
        return frozenset()
    if every is None:
        return frozenset(steps * quarter // 4 for quarter in range(5))
    return frozenset([*range(0, steps, every), steps])


INDEX = "index.json"
"""Index of the sample pictures, in their folder."""

_Name = Annotated[str, StringConstraints(pattern=r"^step-\d{6,}_\d{2,}\.(png|mp4)$")]


class PictureIndex(JsonFile, extra="ignore"):  # earlier releases write more
    """Index of the sample pictures of one training; written anew after those of each step.

    Attributes:
        run: name of the run.
        wanted: digests of the training.
        seed: of the noise.
        steps: after which they were drawn, ascending.
        files: names of the pictures, a row a step and one a prompt; None of one that
            was NaN or infinite, or that memory did not suffice for.
        settings: that shaped the training, by name.
    """

    run: str
    wanted: Wanted
    prompts: list[str]
    seed: int
    steps: list[int]
    files: list[list[_Name | None]]
    settings: dict[str, JsonValue]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if [len(self.prompts)] * len(self.steps) != [*map(len, self.files)]:
            raise ValueError("it has not a picture of each step and prompt")
        return self

    @property
    def shown(self) -> object:
        """What shapes each of its pictures besides the weights."""
        trainer = self.settings.get("trainer")
        samples = trainer.get("samples") if isinstance(trainer, dict) else None
        return samples, self.settings.get("sample_size")

    @classmethod
    def of(
        cls, order: TrainingOrder, want: Wanted, rows: Mapping[int, Sequence[str | None]]
    ) -> PictureIndex:
        """Return the index of a training's pictures, whose names `rows` has for each step."""
        return cls(
            run=order.run,
            wanted=want,
            prompts=[prompt.prompt for prompt in order.prompts] if rows else [],
            seed=order.trainer.samples.seed,
            steps=sorted(rows),
            files=[list(rows[step]) for step in sorted(rows)],
            settings={
                **order.described(),
                "weights": want.weights,
                "data": want.data,
                "trainer": order.trainer.model_dump(mode="json"),
                "sample_size": [*order.sample_size],
            },
        )


def picture_name(step: int, prompt: int, suffix: str = ".png") -> str:
    """Return the name of the picture of a prompt, by its number from 0, after some step."""
    return f"step-{step:06d}_{prompt:02d}{suffix}"


def read_index(folder: Path) -> PictureIndex | None:
    """Return the index of a folder of sample pictures; None where there is none that fits."""
    return PictureIndex.read(folder / INDEX)

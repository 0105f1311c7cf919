"""Order of a run of a launched trainer, digests of its settings, and parts of command lines.

The trainer runs in its own folder, so paths in its command line must not be relative to the
project.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field

from latentmake.base.errors import ModelError
from latentmake.base.paths import is_windows
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer, flags_of
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.makers import Setting
from latentmake.config.models import Model
from latentmake.config.root import Config, Validation
from latentmake.data.memo import Memo
from latentmake.plan.product import Difference
from latentmake.runs.order import RunFiles, RunOrder, run_values
from latentmake.trainers.launched.installation import Installation

_EPOCHS = 10  # default of sd-scripts if neither epochs nor steps are set


class Resume(NamedTuple):
    """State from which a training is resumed, and its progress.

    Attributes:
        state: folder of the state; None if the training starts from the beginning.
        done: epochs trained before the state was saved.
        counted: whether the state itself records how many epochs or steps are done.
        steps: optimizer steps per epoch; 0 if the state does not record steps.
    """

    state: Path | None = None
    done: int = 0
    counted: bool = False
    steps: int = 0


class Places(NamedTuple):
    """Paths of a training, as they are named on the machine that trains.

    Attributes:
        of: function that returns the name of a path on that machine.
        toml: path of the dataset TOML.
        output: folder of the trained weights.
        logs: folder of TensorBoard's files.
        prompts: file with the prompts of samples.
        here: whether this machine trains.
    """

    of: Callable[[str], str]
    toml: str
    output: str
    logs: str
    prompts: str
    here: bool = False


class ExternalOrder(RunOrder):
    """Order of a run of a launched trainer; each program has a subclass.

    Attributes:
        name: name of the program.
        section: section of the configuration that names the program's folder.
        memory_hint: advice for a training that runs out of GPU memory.
        toml_name: pattern of `toml`.
        datasets: dataset -> its section of the configuration, in the run's order.
        resolutions: (width, height) in pixels, in the run's order.
        program: the section's values; None if the configuration has none.
        trained: whether the run has a trainer; a run without one is only published.
        trainer: section of the trainer, with the defaults of the architecture's guide.
        defaults: the guide's defaults: keys, and further flags of the training script.
        validation: settings of the held-out items; None if the run holds out none.
    """

    version: ClassVar[int] = 2  # in 1 the defaults of keys were not the guide's
    name: ClassVar[str]
    section: ClassVar[str]
    memory_hint: ClassVar[str]
    toml_name: ClassVar[str]
    datasets: dict[str, Dataset]
    resolutions: list[tuple[int, int]]
    model_name: str
    model: Model
    program: ExternalProgram | None
    trained: bool = True
    trainer: MusubiTrainer | SdScriptsTrainer
    defaults: dict[str, Setting] = Field({})
    publish: Publish
    validation: Validation | None = None

    @classmethod
    def of_run(cls, config: Config, name: str) -> Self:
        """Return the order of a run; without a `trainer` it serves only a publication."""
        run, model = config.runs[name], config.models[config.runs[name].model]
        trainer = run.trainer or MusubiTrainer(kind="musubi")
        assert isinstance(trainer, MusubiTrainer | SdScriptsTrainer)
        order = cls(
            **run_values(name),
            keep=config.history.keep,
            program=getattr(config, cls.section),
            **with_defaults(trainer, cls.recommended(model, trainer)),
            datasets={dataset: config.datasets[dataset] for dataset in run.datasets},
            resolutions=[(size.width, size.height) for size in run.resolutions],
            model_name=run.model,
            model=model,
            trained=run.trainer is not None,
            publish=config.publish,
            validation=run.validation,
        )
        return order.settled(f"runs.{name}.trainer")

    def settled(self, where: str) -> Self:
        """Return the order with the keys that follow from its network's files.

        `where` is the trainer's section of the configuration. Raises ModelError.
        """
        return self

    @staticmethod
    @abstractmethod
    def recommended(model: Model, trainer: Any) -> Mapping[str, Setting]:
        """Return the keys and flags that the guide of a model's architecture recommends."""

    @abstractmethod
    def find(self, memory: Memo | None = None) -> Installation:
        """Find the program; raises TrainingError."""

    @abstractmethod
    def weights_digest(self, file_digest: Callable[[Path], str]) -> str:
        """Return the digest of the networks that are trained; raises OSError."""

    def with_weights(self, file_digest: Callable[[Path], str]) -> Self:
        """Return the order with the digest of its networks; raises ModelError."""
        try:
            return self.model_copy(update={"weights": self.weights_digest(file_digest)})
        except OSError as error:
            what, hint = f"this network cannot be read ({error.strerror})", "correct its path"
            raise ModelError(what, where=str(error.filename), hint=hint) from None

    @property
    def lora_module(self) -> str:
        """Python module of the program that creates the LoRA of the architecture."""
        return self.model.spec.network

    @property
    def beginning(self) -> str:
        """Prefix that some tensor of a result must have; "" if any names are right."""
        return ""

    @property
    def network(self) -> dict[str, Setting]:
        """Flags of the training script that choose the network to train."""
        return {
            "--network_module": self.trainer.network_module or self.lora_module,
            "--network_args": self.trainer.network_args or None,
            "--network_dim": self.trainer.network_dim,
            "--network_alpha": self.trainer.network_alpha or self.trainer.network_dim,
        }

    @property
    def epochs(self) -> int | None:
        """Epochs of the training; None if a number of steps ends it."""
        if self.trainer.max_train_steps is not None:
            return None
        epochs = self.trainer.max_train_epochs
        return _EPOCHS if epochs is None else epochs

    @abstractmethod
    def can_resume(self, resume: Resume) -> bool:
        """Whether a training resumed from a state takes exactly the remaining steps."""

    def left(self, resume: Resume) -> Self:
        """Return an order of the remaining epochs only, if the program counts from one again."""
        if resume.state is None or resume.counted:
            return self
        left = {"max_train_epochs": max(0, (self.epochs or 0) - resume.done)}
        return self.model_copy(update={"trainer": self.trainer.model_copy(update=left)})

    @property
    def folder(self) -> str:
        """Name of the run's folder, which the orders of parts of the run share."""
        return Path(self.output).name

    @property
    def toml(self) -> str:
        """Path of the dataset TOML, below the run's folder."""
        return self.toml_name.format(run=self.run)

    @property
    def places(self) -> Places:
        """Absolute paths of a training on this machine."""
        files = RunFiles(self)
        below = (files.output / self.toml, files.work, files.logs, files.prompts)
        toml, output, logs, prompts = map(absolute, below)
        return Places(absolute, toml, output, logs, prompts, here=True)

    @property
    def counts(self) -> bool:
        """Whether the program's states always record how many epochs or steps are done."""
        return False

    @property
    def packages(self) -> set[str]:
        """Packages that the settings need, besides the script's imports."""
        return {"bitsandbytes"} if self.trainer.optimizer_type.lower().endswith("8bit") else set()

    @property
    def results(self) -> list[str]:
        """Name of the file of trained weights: a LoRA, or a complete network."""
        return [f"{self.run}.safetensors"]

    def networks(self) -> Iterable[object]:
        """Return the paths of the networks that are trained."""
        return filter(None, (self.model.dit, self.model.dit_high_noise, self.model.checkpoint))

    @property
    def flags(self) -> dict[str, Setting]:
        """Flags and values that the guide adds to the training script's command line."""
        return {key: value for key, value in self.defaults.items() if key.startswith("--")}

    def reasons(self, lock: str | None, unread: str = "") -> list[Difference]:
        """Return why the run must be trained; `unread` is why its network cannot be read, or ""."""
        return [Difference(unread)] if unread else super().reasons(lock)

    def described(self) -> str:
        """Return a line of the plan about the guide's defaults; "" if the user sets them all."""
        named = {key.removeprefix("--"): value for key, value in self.defaults.items()}
        words = [" ".join(command_line({key: named[key]})) for key in named]
        settings = ", ".join(filter(None, words))
        if not settings:
            return ""
        return f"training of {self.run}: by the guide of {self.model.title}: {settings}"


def with_defaults(
    trainer: MusubiTrainer | SdScriptsTrainer, recommended: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return the fields `trainer` and `defaults` of an order.

    Args:
        trainer: section of the configuration; keys and arguments that the user set win.
        recommended: keys and flags of the architecture's guide.
    """
    given = {*flags_of(trainer.arguments), *(f"--{key}" for key in trainer.model_fields_set)}
    if not trainer.optimizer_type.lower().startswith("adamw"):
        given.add("--optimizer_args")  # the guides' values are arguments of AdamW
    if trainer.max_train_steps is not None:
        given.add("--max_train_epochs")
    defaults = {
        key: value
        for key, value in recommended.items()
        if f"--{key.removeprefix('--')}" not in given
    }
    alpha, rank = defaults.get("network_alpha"), recommended.get("network_dim")
    # The guide's alpha belongs to the guide's rank: with another rank it is scaled alike.
    if isinstance(alpha, float) and alpha > 1 and isinstance(rank, int):
        own = rank if "network_dim" in defaults else trainer.network_dim
        defaults["network_alpha"] = alpha * own / rank
    keys = {key: value for key, value in defaults.items() if not key.startswith("--")}
    return {"trainer": trainer.model_copy(update=keys), "defaults": defaults}


# LR schedulers that do not depend on the number of steps, so a resumed training may end anywhere.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "adafactor"})
_Order = TypeVar("_Order", bound=ExternalOrder)


def command_line(options: Mapping[str, Setting]) -> list[str]:
    """Return the arguments for some flags with their values.

    True adds a flag without a value; None and False omit it; a list adds all its values. A number
    becomes the shortest text that reads as the same number.
    """
    arguments: list[str] = []
    for flag, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(flag)
        if isinstance(value, list):
            arguments += value
        elif isinstance(value, str):
            arguments.append(value)
        elif value is not True:
            arguments.append(str(int(value)) if value == int(value) else repr(value))
    return arguments


def sampling(order: ExternalOrder, prompts: str) -> dict[str, Setting]:
    """Return the options of a training script for samples; `prompts` is the prompt file's path."""
    samples = order.trainer.samples
    if not samples.prompts:
        return {}
    return {
        "--sample_prompts": prompts,
        "--sample_at_first": True,
        "--sample_every_n_steps": samples.every,
        "--sample_every_n_epochs": 1 if samples.every is None else None,
    }


def prompt_lines(order: ExternalOrder) -> str:
    """Return the text of a run's prompt file; an option in a prompt wins over the settings."""
    samples, size = order.trainer.samples, order.resolutions[0]
    if samples.resolution is not None:
        size = samples.resolution.width, samples.resolution.height
    options = {
        "w": size[0],
        "h": size[1],
        "f": getattr(samples, "frames", None),
        "d": samples.seed,
        "s": samples.num_inference_steps,
        "l": samples.guidance_scale,
        "n": " ".join(samples.negative_prompt.split()) or None,
    }
    lines = []
    for prompt in (" ".join(text.split()) for text in samples.prompts):
        lower = prompt.lower()  # the programs read options in any case
        given = {key: value for key, value in options.items() if f" --{key} " not in lower}
        words = [f"--{key} {value}" for key, value in given.items() if value is not None]
        indent = " " if prompt.startswith("#") else ""  # without it, the line would be a comment
        lines.append(f"{indent}{' '.join([prompt, *words])}\n")
    return "".join(lines)


def absolute(path: Path | str) -> str:
    """Return an absolute path, without resolving links."""
    return os.path.abspath(path)  # noqa: PTH100


def with_paths(arguments: Sequence[str], named: Callable[[str], str] = str) -> list[str]:
    """Return arguments with their paths made absolute and passed through `named`.

    `named` gives the name of a path on the machine that trains. A value is a path if it has a
    slash, an ending or a `~`, and exists relative to the working directory. An absolute path counts
    even if it does not exist, because it may lie on another machine. In `--flag=value` and
    `key=value` only the value is looked at.
    """
    return [_with_path(argument, named) for argument in arguments]


def _with_path(argument: str, named: Callable[[str], str]) -> str:
    key, equals, value = argument.partition("=")
    # os.path, since Path.exists raises an error if a name is too long.
    if not equals or os.path.exists(argument):  # noqa: PTH110
        key, equals, value = "", "", argument
    path = os.path.expanduser(value)  # noqa: PTH111 -- Path would drop "./"
    like_path = path != value or os.sep in value or bool(Path(value).suffix)
    if like_path and not value.startswith("-") and os.path.exists(path):  # noqa: PTH110
        return f"{key}{equals}{named(absolute(path))}"
    is_drive = is_windows(value) and len(value) > len("C:")
    return f"{key}{equals}{named(value)}" if value.startswith("/") or is_drive else argument


def located(order: _Order, named: Callable[[str], str] = str) -> _Order:
    """Return an order with the paths in the user's own arguments resolved; see `with_paths`."""
    trainer = order.trainer
    own = {key: with_paths(getattr(trainer, key), named) for key in ("arguments", "network_args")}
    trainer = trainer.model_copy(update=own)
    keys = ("latents_arguments", "text_arguments")
    own = {key: with_paths(getattr(order.model, key), named) for key in keys}
    model = order.model.model_copy(update=own)
    return order.model_copy(update={"trainer": trainer, "model": model})


def depends_on_length(arguments: Sequence[str], schedule: str = "constant") -> bool:
    """Whether the learning rate depends on the total number of steps.

    A resumed training may have another total. `schedule` is the LR scheduler that applies unless
    the user's own arguments name one.
    """
    given = flags_of(arguments)
    if given.get("--lr_scheduler_type"):
        return False  # a scheduler class keeps its own numbers in the state
    if "." in given.get("--lr_warmup_steps", "") + given.get("--lr_decay_steps", ""):
        return True  # fractions of the total
    return given.get("--lr_scheduler", schedule).partition(":")[0] not in _ENDLESS

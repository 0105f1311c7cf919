"""Order of a run of a launched trainer; digests of its settings, and what its command lines share.

The trainer runs in a folder of its own, where a path relative to the project means nothing.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field

from latentmake.config.architectures import Setting
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer, flags_of
from latentmake.config.machines import Publish
from latentmake.config.models import Model
from latentmake.config.root import Config, Validation
from latentmake.errors import ModelError
from latentmake.files.workspace import is_windows
from latentmake.index.memo import Memo
from latentmake.plan.state import Difference
from latentmake.training.external.installation import Installation
from latentmake.training.order import LaunchedRecord, RunFiles, RunOrder, Wanted, run_values

_VERSION = 2  # of trainings with the defaults of their guides

# Keys whose defaults were those of their fields before each architecture had its own.
_RENEWED = frozenset(
    ("gradient_checkpointing", "learning_rate", "network_alpha", "network_dim", "seed")
)


class Resume(NamedTuple):
    """Where a training is resumed.

    Attributes:
        state: folder of the state; None at the beginning.
        done: epochs that stand behind it.
        counted: whether the state itself says how far it came.
        steps: optimizer steps of an epoch, where a state tells; else 0.
    """

    state: Path | None = None
    done: int = 0
    counted: bool = False
    steps: int = 0


class Places(NamedTuple):
    """Paths of a training, as the machine that trains names them.

    Attributes:
        of: returns the name of a path there.
        toml: the dataset TOML.
        output: folder of the trained weights.
        logs: folder of TensorBoard's files.
        prompts: file of the prompts of samples.
        here: whether that is this machine.
    """

    of: Callable[[str], str]
    toml: str
    output: str
    logs: str
    prompts: str
    here: bool = False


class ExternalOrder(RunOrder):
    """Order of a run of a launched trainer; a subclass says what differs of one program.

    Attributes:
        name: of the program.
        section: of the configuration, which names its folder; a field of the order, too.
        memory_hint: what to try when GPU memory runs out.
        datasets: name -> its section of the configuration, in the run's order.
        resolutions: (width, height) in pixels, in the run's order.
        trained: whether the run has a trainer; without one it is published alone.
        trainer: its section, with the defaults of the architecture's guide.
        defaults: those defaults: keys, and further flags of the training script.
        weights: digest of the networks that are trained; "" where nobody has asked.
        validation: items that the manifest holds out, where it holds out any.
    """

    name: ClassVar[str]
    section: ClassVar[str]
    memory_hint: ClassVar[str]
    datasets: dict[str, Dataset]
    resolutions: list[tuple[int, int]]
    model_name: str
    model: Model
    trained: bool = True
    trainer: MusubiTrainer | SdScriptsTrainer
    defaults: dict[str, Setting] = Field({})
    weights: str = ""
    publish: Publish
    validation: Validation | None = None

    @classmethod
    def of_run(cls, config: Config, name: str) -> Self:
        """Return the order of a run; of one without `trainer` that of a publication alone."""
        run, model = config.runs[name], config.models[config.runs[name].model]
        trainer = run.trainer or MusubiTrainer(kind="musubi")
        assert isinstance(trainer, MusubiTrainer | SdScriptsTrainer)
        order = cls(
            **run_values(name),
            **{cls.section: getattr(config, cls.section)},
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
        """Return the order with the keys that the files of its network tell; raises ModelError.

        `where` is the trainer's section of the configuration.
        """
        return self

    @staticmethod
    @abstractmethod
    def recommended(model: Model, trainer: Any) -> Mapping[str, Setting]:
        """Return the keys and flags of the guide of a model's architecture."""

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
    @abstractmethod
    def lora_module(self) -> str:
        """Module of the program that makes the architecture's LoRA."""

    @property
    def beginning(self) -> str:
        """Beginning of the names of a result's tensors; "" where it has others."""
        return ""

    @property
    def network(self) -> dict[str, Setting]:
        """Flags of the training script that say which network is trained."""
        return {
            "--network_module": self.trainer.network_module or self.lora_module,
            "--network_args": self.trainer.network_args or None,
            "--network_dim": self.trainer.network_dim,
            "--network_alpha": self.trainer.network_alpha or self.trainer.network_dim,
        }

    @property
    @abstractmethod
    def epochs(self) -> int | None:
        """Epochs of the training; None where steps end it."""

    @abstractmethod
    def can_resume(self, resume: Resume) -> bool:
        """Whether a training resumed from a state takes just the steps that are left."""

    def left(self, resume: Resume) -> Self:
        """Return the order of the epochs that are left, where a program counts from one again."""
        if resume.state is None or resume.counted:
            return self
        left = {"max_train_epochs": max(0, (self.epochs or 0) - resume.done)}
        return self.model_copy(update={"trainer": self.trainer.model_copy(update=left)})

    @property
    @abstractmethod
    def toml(self) -> str:
        """Path of the dataset TOML, below the run's folder."""

    @property
    def places(self) -> Places:
        """Paths of a training on this machine; all are absolute."""
        files = RunFiles(self)
        below = (files.output / self.toml, files.work, files.logs, files.prompts)
        toml, output, logs, prompts = map(absolute, below)
        return Places(absolute, toml, output, logs, prompts, here=True)

    @property
    def counts(self) -> bool:
        """Whether its states are known to say how far they came."""
        return False

    @property
    def packages(self) -> set[str]:
        """The packages that the settings need besides those that the script imports."""
        return {"bitsandbytes"} if self.trainer.optimizer_type.lower().endswith("8bit") else set()

    @property
    def results(self) -> list[str]:
        """Name of the trained weights: a LoRA, or a complete network."""
        return [f"{self.run}.safetensors"]

    def networks(self) -> Iterable[object]:
        """Return the places of the networks."""
        return filter(None, (self.model.dit, self.model.dit_high_noise, self.model.checkpoint))

    @property
    def flags(self) -> dict[str, Setting]:
        """Flags of the training script that the guide decides, with their values."""
        return {key: value for key, value in self.defaults.items() if key.startswith("--")}

    def earlier(self) -> Self:
        """Return the order with the defaults of releases that had each key's own."""
        fields = type(self.trainer).model_fields
        old = {key: fields[key].default for key in _RENEWED & self.defaults.keys()}
        trainer = self.trainer.model_copy(update=old)
        return self.model_copy(update={"trainer": trainer, "defaults": {}})

    def described(self) -> str:
        """Return a line for the plan about the defaults; "" where the user sets all of them."""
        named = {key.removeprefix("--"): value for key, value in self.defaults.items()}
        words = [" ".join(command_line({key: named[key]})) for key in named]
        known = ", ".join(filter(None, words))
        return known and f"training of {self.run}: by the guide of {self.model.title}: {known}"


def with_defaults(
    trainer: MusubiTrainer | SdScriptsTrainer, recommended: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return the fields of a run's order that hold its trainer's settings.

    Args:
        trainer: the section as the user wrote it; its keys and arguments win.
        recommended: keys and flags of the architecture's guide.
    """
    given = {*flags_of(trainer.arguments), *(f"--{key}" for key in trainer.model_fields_set)}
    if not trainer.optimizer_type.lower().startswith("adamw"):
        given.add("--optimizer_args")  # those of the guides are AdamW's
    if trainer.max_train_steps is not None:
        given.add("--max_train_epochs")
    found = {
        key: value
        for key, value in recommended.items()
        if f"--{key.removeprefix('--')}" not in given
    }
    alpha, rank = found.get("network_alpha"), recommended.get("network_dim")
    if isinstance(alpha, float) and alpha > 1 and isinstance(rank, int):  # a share of its rank
        own = rank if "network_dim" in found else trainer.network_dim
        found["network_alpha"] = alpha * own / rank
    keys = {key: value for key, value in found.items() if not key.startswith("--")}
    return {"trainer": trainer.model_copy(update=keys), "defaults": found}


def wanted(order: ExternalOrder, data: str, record: LaunchedRecord | None = None) -> Wanted:
    """Return the digests that the result of an order must have come from.

    Args:
        order: the run.
        data: digest of its caches.
        record: of the result that is there; it stays, if a release trained it with other defaults.
    """
    settings = order.settings_digest()
    want = Wanted(data=data, settings=settings, weights=order.weights, version=_VERSION)
    known = {"settings": order.earlier().settings_digest(), "version": 1}
    earlier = want.model_copy(update=known)
    return earlier if record is not None and record.wanted == earlier else want


def former(order: ExternalOrder, data: str) -> Wanted | None:
    """Return what a previous result of a run came from, if it is the result of its order."""
    if RunFiles(order).is_forced(wanted(order, data)):
        return None
    for files in RunFiles(order).before():
        want = wanted(order, data, LaunchedRecord.read(files.record))
        if files.came_from(want):
            return want
    return None


def reasons(order: ExternalOrder, lock: str | None, unread: str = "") -> list[Difference]:
    """Return why a run's result is not that of its order.

    `lock` is the digest of its caches; None where these are to be made, a reason of its own.
    `unread` is why its network cannot be read.
    """
    if unread:
        return [Difference(unread)]
    files = RunFiles(order)
    last = files.finished
    record = LaunchedRecord.read(last.record)
    was = None if record is None else record.wanted
    want = wanted(order, lock or (was.data if was else ""), record)
    if was != want:
        return order.basis(want).differences(last.output, was)
    return [] if lock is None else files.missing()


# Learning-rate schedules that know no end: they go on rightly whatever number of steps is left.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "adafactor"})
_Order = TypeVar("_Order", bound=ExternalOrder)


def command_line(options: Mapping[str, Setting]) -> list[str]:
    """Return the arguments for some flags with their values.

    True gives the flag alone, None and False give nothing, a list each of its values; numbers have
    the shortest text that reads as the same number.
    """
    found: list[str] = []
    for flag, value in options.items():
        if value is None or value is False:
            continue
        found.append(flag)
        if isinstance(value, list):
            found += value
        elif isinstance(value, str):
            found.append(value)
        elif value is not True:
            found.append(str(int(value)) if value == int(value) else repr(value))
    return found


def sampling(order: ExternalOrder, prompts: str) -> dict[str, Setting]:
    """Return the options of a training script for samples; `prompts` is the path of their file."""
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
    """Return the file of a run's sample prompts; options that a prompt itself has stay its own."""
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
        "n": samples.negative_prompt or None,
    }
    lines = []
    for prompt in (" ".join(each.split()) for each in samples.prompts):
        given = {key: value for key, value in options.items() if f" --{key} " not in prompt}
        words = [f"--{key} {value}" for key, value in given.items() if value is not None]
        lines.append(f"{' '.join([prompt, *words])}\n")
    return "".join(lines)


def absolute(path: Path | str) -> str:
    """Return an absolute path; links stay."""
    return os.path.abspath(path)  # noqa: PTH100


def with_paths(arguments: Sequence[str], named: Callable[[str], str] = str) -> list[str]:
    """Return arguments with each path in them made absolute, and `named` as another system does.

    A value is a path if it has a slash, an ending or a `~` and exists, seen from the working
    directory. An absolute path may lie on another machine. In `--flag=value` and `key=value` the
    part behind counts.
    """
    return [_with_path(each, named) for each in arguments]


def _with_path(argument: str, named: Callable[[str], str]) -> str:
    key, equals, value = argument.partition("=")
    if not equals or os.path.exists(argument):  # noqa: PTH110 -- nor is one that is too long
        key, equals, value = "", "", argument
    path = os.path.expanduser(value)  # noqa: PTH111 -- Path would drop "./"
    looks = path != value or os.sep in value or bool(Path(value).suffix)
    if looks and not value.startswith("-") and os.path.exists(path):  # noqa: PTH110
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
    """Whether the learning rate depends on the number of steps, which differs after a resume.

    `schedule` is the one that is set besides the user's own arguments.
    """
    given = flags_of(arguments)
    if given.get("--lr_scheduler_type"):
        return False  # its own numbers are part of the state
    if "." in given.get("--lr_warmup_steps", "") + given.get("--lr_decay_steps", ""):
        return True  # shares of all steps
    return given.get("--lr_scheduler", schedule).partition(":")[0] not in _ENDLESS

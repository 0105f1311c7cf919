"""Train state: network, optimizer, LR scheduler, EMA; and the checkpoints that hold it."""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from latentmake import digest
from latentmake.config.trainers import LoopTrainer
from latentmake.errors import TrainingError, first_line, is_out_of_memory
from latentmake.files import atomic
from latentmake.training.loop.checkpoint import (
    PROGRESS,
    Checkpoint,
    Progress,
    find,
    folders,
    resumable,
)
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.loop.recipe import Network, Recipe
from latentmake.training.order import RunFiles, Wanted

State: TypeAlias = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""The trained weights by name, and the state of optimizer, learning rate, EMA and scaler."""

_WEIGHTS = "weights.safetensors"
_STATE = "state.pt"
Result = TypeVar("Result")


def trained_state(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights by the name of their parameter, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


class Learner:
    """A network in training.

    Attributes:
        denoiser: the network itself, as its recipe made it.
        network: the same, as accelerate wraps it.
        parameters: those that are trained.
        optimizer: as accelerate wraps it.
    """

    def __init__(self, recipe: Recipe, denoiser: Network, accelerator: Any, *, steps: int) -> None:
        recipe.place(denoiser, accelerator.device)
        self.denoiser = denoiser.train()
        self.parameters = [each for each in denoiser.parameters() if each.requires_grad]
        self._queries_and_keys = [
            each
            for name, each in denoiser.named_parameters()
            if each.requires_grad and any(part in f".{name}" for part in (".to_q.", ".to_k."))
        ]
        self._settings = settings = recipe.order.trainer
        self._accelerator = accelerator
        optimizer = make_optimizer(self.parameters, settings)
        self._rates = LambdaLR(optimizer, lambda step: rate_of(step, settings, steps))
        self.network, self.optimizer = accelerator.prepare(
            denoiser, optimizer, device_placement=[False, True]
        )
        self._average: Any = None  # diffusers has no types
        if settings.ema_decay is not None:
            self._average = EMAModel(self.parameters, decay=settings.ema_decay, foreach=True)

    def described(self) -> str:
        """Return a line about the number of trained parameters."""
        trained = sum(each.numel() for each in self.parameters)
        total = sum(each.numel() for each in self.denoiser.parameters())
        return f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})"

    @property
    def rate(self) -> float:
        """The learning rate of the step to come."""
        (group,) = self.optimizer.param_groups
        return float(group["lr"]) * float(group.get("d", 1.0))  # Prodigy's, D-Adaptation's estimate

    def clip(self) -> dict[str, torch.Tensor]:
        """Clip this step's gradients; return scalars of them before, on a device.

        `gradient_norm` is their norm. `qk_grads_av` is ai-training's: the sum over all trained
        weights of queries and keys of their mean absolute gradient. It falls to 0 where attention
        learns nothing.
        """
        self._accelerator.unscale_gradients()
        gradients = [each.grad for each in self._queries_and_keys if each.grad is not None]
        found: dict[str, torch.Tensor] = {}
        if gradients:  # one kernel for all of them, not one a layer
            sums = torch._foreach_norm(gradients, 1, dtype=torch.float32)
            means = torch._foreach_div(sums, [float(each.numel()) for each in gradients])
            found["qk_grads_av"] = torch.stack(means).sum()
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters, self._settings.max_grad_norm or math.inf
        )
        return {"gradient_norm": norm.float(), **found}

    def step(self) -> None:
        """Make a step by the gradients, and forget them.

        With fp16 the scaler skips a step whose gradients overflow: learning rate and EMA wait.
        """
        # accelerate's wrapper is there for the scaler; it looks for installed packages each time.
        plain = self._accelerator.scaler is None
        optimizer = self.optimizer.optimizer if plain else self.optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not plain and self.optimizer.step_was_skipped:
            return
        self._rates.step()
        if self._average is not None:
            self._average.step(self.parameters)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the EMA, where there is one, in the place of the weights."""
        if self._average is None:
            yield
            return
        self._average.store(self.parameters)
        self._average.copy_to(self.parameters)
        try:
            yield
        finally:
            self._average.restore(self.parameters)

    def alone(self, work: Callable[[], Result]) -> Result:
        """Call `work` with the network outside of the training, in the main process alone."""
        self.denoiser.eval()
        try:
            with torch.no_grad(), self.averaged(), self._accelerator.autocast():
                return work()
        finally:
            self.denoiser.train()

    def state(self) -> State:
        """Return the content of a checkpoint."""
        scaler = self._accelerator.scaler
        return trained_state(self.denoiser), {
            "optimizer": self.optimizer.state_dict(),
            "learning_rate": self._rates.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def restore(self, state: State, where: Path) -> None:
        """Resume from the state in a checkpoint folder, of this training or a shorter one.

        Raises:
            TrainingError: it is of another network or optimizer.
        """
        weights, rest = state
        scaler = self._accelerator.scaler
        try:
            named = self.denoiser.named_parameters()
            trained = {name for name, each in named if each.requires_grad}
            for name in sorted(trained ^ weights.keys()):
                raise ValueError(f"only one of the two trains {name}")
            self.denoiser.load_state_dict(weights, strict=False)  # which holds no frozen weights
            self.optimizer.load_state_dict(rest["optimizer"])
            self._rates.load_state_dict(rest["learning_rate"])
            # The rate of a shorter training has fallen further.
            (group,), (peak,) = self.optimizer.param_groups, self._rates.base_lrs
            group["lr"] = peak * self._rates.lr_lambdas[0](self._rates.last_epoch)
            if self._average is not None:
                self._average.load_state_dict(rest["average"])
                self._average.to(self._accelerator.device)
            if scaler is not None and rest["scaler"] is not None:
                scaler.load_state_dict(rest["scaler"])
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            what = f"this checkpoint belongs to another network or optimizer ({first_line(error)})"
            hint = "delete it and run the same command again"
            raise TrainingError(what, where=where, hint=hint) from None


def _class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer's class; only its own library is imported."""
    if name == "adamw":
        return torch.optim.AdamW
    found: Callable[..., torch.optim.Optimizer]
    if name == "adamw8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            what = "adamw8bit needs bitsandbytes, which is not installed"
            hint = "pip install bitsandbytes, or choose another optimizer"
            raise TrainingError(what, where="trainer.optimizer", hint=hint) from None
        found = AdamW8bit
    else:
        import pytorch_optimizer

        names = {"lion": "Lion", "prodigy": "Prodigy", "dadaptation": "DAdaptAdam"}
        found = getattr(pytorch_optimizer, names[name])
    return found


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], settings: LoopTrainer
) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, over some parameters.

    Raises:
        TrainingError: its library is not installed, or it has no such argument.
    """
    make = _class_of(settings.optimizer)
    arguments: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings.optimizer_arguments.items()
    }
    # Some take any keyword and pass over what they do not know.
    known = [
        name
        for name, each in inspect.signature(make).parameters.items()
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in ("params", "lr")
    ]
    for key in arguments:
        if key not in known:
            what = f"{settings.optimizer} has no argument `{key}`"
            hint = f"it has {', '.join(known)}"
            raise TrainingError(what, where="trainer.optimizer_arguments", hint=hint)
    given: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "dadaptation":
        given["weight_decouple"] = True  # as the others have it
    try:
        return make(list(parameters), **given | arguments)
    except (ValueError, TypeError) as error:
        what = f"{settings.optimizer} cannot be made with these arguments ({error})"
        hint = "correct or leave them out"
        raise TrainingError(what, where="trainer.optimizer_arguments", hint=hint) from None


def rate_of(step: int, settings: LoopTrainer, steps: int) -> float:
    """Return the learning rate of a step (from 0) as a share of its peak.

    Linear warm-up over `lr_warmup_steps` (`constant` has none), then constant, or down to
    `lr_min_ratio` in a line or in half a cosine. diffusers' schedules are the same, but those that
    fall in a line have no least rate and differ in the last bits.
    """
    kind, warmup, least = settings.lr_scheduler, settings.lr_warmup_steps, settings.lr_min_ratio
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    if kind == "constant_with_warmup":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    share = 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return least + (1 - least) * share


def newest(
    order: TrainingOrder, wanted: Wanted, steps: int, say: Callable[[str], None]
) -> tuple[Checkpoint, State] | None:
    """Return the newest undamaged checkpoint that a training can resume from, and its state.

    On more devices the same epochs have fewer steps. `say` takes a line about each damaged one.
    """
    for _, folder in folders(RunFiles(order).checkpoints):
        if Progress.read(folder / PROGRESS) is None:
            say(f"{folder} is damaged and skipped")
    for found in resumable(order, wanted):
        if found.progress.wanted != wanted and found.progress.step > steps:
            continue
        state = load(found)
        if state is not None:
            return found, state
        say(f"{found.folder} is damaged and skipped")
    return None


def load(checkpoint: Checkpoint) -> State | None:
    """Return the state of a training, or None if the files are damaged."""
    try:
        for name, known in checkpoint.progress.files.items():
            if digest.of_file(checkpoint.folder / name) != known:
                return None
        weights = load_file(checkpoint.folder / _WEIGHTS)
        file = checkpoint.folder / _STATE
        return weights, torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a file that is no archive raises nearly anything
        if isinstance(error, MemoryError) or is_out_of_memory(str(error)):
            raise
        return None


def save(checkpoints: Path, progress: Progress, state: State) -> None:
    """Write a checkpoint; one of another training at the same step is replaced.

    Its progress gets the digests of the files.
    """
    with atomic.replacing_folder(checkpoints / f"step-{progress.step:06d}") as new:
        save_file(state[0], new / _WEIGHTS)
        with (new / _STATE).open("wb") as file:  # so that a full disk is an OSError
            torch.save(state[1], file)
        digests = {name: digest.of_file(new / name, quiet=True) for name in (_WEIGHTS, _STATE)}
        progress.model_copy(update={"files": digests}).write(new / PROGRESS)


def prune(checkpoints: Path, wanted: Wanted, keep: int, *, others: bool = False) -> None:
    """Remove all but the `keep` newest checkpoints of this training, and those of others if so."""
    ours = [each.folder for each in find(checkpoints, wanted)]
    removed = ours[keep:]
    if others:
        removed += [folder for _, folder in folders(checkpoints) if folder not in ours]
        removed += checkpoints.glob(f".*{atomic.TEMPORARY_SUFFIX}")
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)

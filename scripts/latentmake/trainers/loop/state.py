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

from latentmake.base import atomic, digest
from latentmake.base.errors import TrainingError, first_line, is_out_of_memory
from latentmake.config.trainers import LoopTrainer
from latentmake.plan.product import Parts
from latentmake.runs.order import PROGRESS
from latentmake.trainers.loop.checkpoint import Progress, find, folders
from latentmake.trainers.loop.recipe import Network, Recipe

State: TypeAlias = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Trained weights by name, and the state of optimizer, LR scheduler, EMA and scaler."""

_WEIGHTS = "weights.safetensors"
_STATE = "state.pt"
Result = TypeVar("Result")


def trained_state(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights on the CPU, by the names of their parameters."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


class Learner:
    """A network in training.

    Attributes:
        denoiser: network as its recipe made it.
        network: the same network, wrapped by accelerate.
        parameters: trained parameters.
        optimizer: optimizer, wrapped by accelerate.
    """

    def __init__(self, recipe: Recipe, denoiser: Network, accelerator: Any, *, steps: int) -> None:
        recipe.place(denoiser, accelerator.device)
        self.denoiser = denoiser.train()
        self.parameters = [value for value in denoiser.parameters() if value.requires_grad]
        self._queries_and_keys = [
            value
            for name, value in denoiser.named_parameters()
            if value.requires_grad and any(part in f".{name}" for part in (".to_q.", ".to_k."))
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
        trained = sum(parameter.numel() for parameter in self.parameters)
        total = sum(parameter.numel() for parameter in self.denoiser.parameters())
        return f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})"

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        (group,) = self.optimizer.param_groups
        # Prodigy and D-Adaptation multiply the learning rate by their estimate `d`.
        return float(group["lr"]) * float(group.get("d", 1.0))

    def clip(self) -> dict[str, torch.Tensor]:
        """Clip this step's gradients, and return scalars of the gradients before clipping.

        The scalars stay on the device. `gradient_norm` is the norm of all gradients. `qk_grads_av`
        is defined as in ai-training: the sum, over all trained weights of queries and keys, of the
        mean absolute gradient. It falls to 0 if attention learns nothing.
        """
        self._accelerator.unscale_gradients()
        gradients = [value.grad for value in self._queries_and_keys if value.grad is not None]
        scalars: dict[str, torch.Tensor] = {}
        if gradients:  # `_foreach` functions start one kernel instead of one for each layer
            sums = torch._foreach_norm(gradients, 1, dtype=torch.float32)
            means = torch._foreach_div(sums, [float(gradient.numel()) for gradient in gradients])
            scalars["qk_grads_av"] = torch.stack(means).sum()
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters, self._settings.max_grad_norm or math.inf
        )
        return {"gradient_norm": norm.float(), **scalars}

    def step(self) -> None:
        """Make an optimizer step, and clear the gradients.

        With fp16, the scaler skips a step whose gradients overflow. Such a step does not advance
        learning rate and EMA either.
        """
        # Without a scaler, accelerate's wrapper does nothing useful, but looks for installed
        # packages in each step.
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
        """Replace the weights by their EMA within the context, if there is an EMA."""
        if self._average is None:
            yield
            return
        self._average.store(self.parameters)
        self._average.copy_to(self.parameters)
        try:
            yield
        finally:
            self._average.restore(self.parameters)

    def outside_training(self, work: Callable[[], Result]) -> Result:
        """Call `work` with the network in evaluation mode, with EMA and autocast.

        Only the main process calls this.
        """
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
        """Resume from the state of a checkpoint, of this training or of a shorter one.

        `where` is the folder of the checkpoint.

        Raises:
            TrainingError: the checkpoint belongs to another network or optimizer.
        """
        weights, rest = state
        scaler = self._accelerator.scaler
        try:
            named = self.denoiser.named_parameters()
            trained = {name for name, parameter in named if parameter.requires_grad}
            for name in sorted(trained ^ weights.keys()):
                raise ValueError(f"only one of the two trains {name}")
            self.denoiser.load_state_dict(weights, strict=False)  # without the frozen weights
            self.optimizer.load_state_dict(rest["optimizer"])
            self._rates.load_state_dict(rest["learning_rate"])
            # The learning rate of a shorter training has fallen further: compute it anew.
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


def _class_of(name: str) -> Any:
    """Return the class of an optimizer; only the library that has it is imported."""
    if name == "adamw":
        return torch.optim.AdamW
    if name == "adamw8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            what = "adamw8bit needs bitsandbytes, which is not installed"
            hint = "pip install bitsandbytes, or choose another optimizer"
            raise TrainingError(what, where="trainer.optimizer", hint=hint) from None
        return AdamW8bit
    import pytorch_optimizer

    names = {"lion": "Lion", "prodigy": "Prodigy", "dadaptation": "DAdaptAdam"}
    return getattr(pytorch_optimizer, names[name])


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], settings: LoopTrainer
) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, for some parameters.

    Raises:
        TrainingError: the optimizer's library is not installed, or its arguments do not fit.
    """
    make: Callable[..., torch.optim.Optimizer] = _class_of(settings.optimizer)
    arguments: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings.optimizer_arguments.items()
    }
    # Some optimizers take any keyword and ignore unknown ones, so the names are checked here.
    accepted = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and name not in ("params", "lr")
    ]
    for key in arguments:
        if key not in accepted:
            what = f"{settings.optimizer} has no argument `{key}`"
            hint = f"it has {', '.join(accepted)}"
            raise TrainingError(what, where="trainer.optimizer_arguments", hint=hint)
    given: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "dadaptation":
        given["weight_decouple"] = True  # like the other optimizers
    try:
        return make(list(parameters), **given | arguments)
    except (ValueError, TypeError) as error:
        what = f"{settings.optimizer} cannot be made with these arguments ({error})"
        hint = "correct or leave them out"
        raise TrainingError(what, where="trainer.optimizer_arguments", hint=hint) from None


def rate_of(step: int, settings: LoopTrainer, steps: int) -> float:
    """Return the learning rate of a step (from 0) as a share of its peak.

    The rate rises linearly over `lr_warmup_steps` (not with `constant`). Then it stays constant, or
    falls to `lr_min_ratio` linearly or as half a cosine. diffusers has the same schedules, but its
    linear ones have no minimum and differ in the last bits.
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


def load(folder: Path, progress: Progress) -> State | None:
    """Return the state in a checkpoint, or None if its files are damaged."""
    try:
        for name, recorded in progress.files.items():
            if digest.of_file(folder / name) != recorded:
                return None
        weights = load_file(folder / _WEIGHTS)
        return weights, torch.load(folder / _STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a damaged file may raise nearly any error
        if isinstance(error, MemoryError) or is_out_of_memory(str(error)):
            raise
        return None


def save(checkpoints: Path, progress: Progress, state: State) -> None:
    """Write a checkpoint, which replaces another training's checkpoint of the same step.

    The digests of its files are added to the progress.
    """
    with atomic.replacing_folder(checkpoints / f"step-{progress.step:06d}") as new:
        save_file(state[0], new / _WEIGHTS)
        # Given an open file instead of a path, torch raises an OSError if the disk is full.
        with (new / _STATE).open("wb") as file:
            torch.save(state[1], file)
        digests = {name: digest.of_file(new / name, quiet=True) for name in (_WEIGHTS, _STATE)}
        progress.model_copy(update={"files": digests}).write(new / PROGRESS)


def prune(checkpoints: Path, wanted: Parts, keep: int, *, others: bool = False) -> None:
    """Remove all checkpoints of a training except the `keep` newest.

    With `others`, checkpoints of other trainings and incomplete ones are removed too.
    """
    ours = [folder for folder, _ in find(checkpoints, wanted)]
    removed = ours[keep:]
    if others:
        removed += [folder for _, folder in folders(checkpoints) if folder not in ours]
        removed += checkpoints.glob(f".*{atomic.TEMPORARY_SUFFIX}")
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)

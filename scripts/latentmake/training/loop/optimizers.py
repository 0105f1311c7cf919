"""Optimizers and LR schedules, by the names of the configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from latentmake.config.trainers import LoopTrainer
from latentmake.errors import TrainingError


def _class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer's class; only its own library is imported."""
    if name == "adamw":
        return torch.optim.AdamW
    found: Callable[..., torch.optim.Optimizer]
    if name == "adamw8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise TrainingError(
                "adamw8bit needs bitsandbytes, which is not installed",
                where="trainer.optimizer",
                hint="pip install bitsandbytes, or choose another optimizer",
            ) from None
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
            raise TrainingError(
                f"{settings.optimizer} has no argument `{key}`",
                where="trainer.optimizer_arguments",
                hint=f"it has {', '.join(known)}",
            )
    given: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "dadaptation":
        given["weight_decouple"] = True  # as the others have it
    try:
        return make(list(parameters), **given | arguments)
    except (ValueError, TypeError) as error:
        raise TrainingError(
            f"{settings.optimizer} cannot be made with these arguments ({error})",
            where="trainer.optimizer_arguments",
            hint="correct or leave them out",
        ) from None


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


def make_rates(optimizer: torch.optim.Optimizer, settings: LoopTrainer, steps: int) -> LambdaLR:
    """Return the LR schedule over a training of so many steps."""
    return LambdaLR(optimizer, lambda step: rate_of(step, settings, steps))


class Hyperparameters:
    """Settings of an optimizer and its LR schedule, kept when an older state is loaded.

    A loaded state brings the settings that it was trained with, beside moments and estimates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: LambdaLR) -> None:
        arguments = inspect.signature(type(optimizer)).parameters.keys() - {"params", "lr"}
        self._rates = rates
        self._peaks = list(rates.base_lrs)
        self._groups = [
            {key: value for key, value in group.items() if key in arguments}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """Put them in force again; the schedule continues from the step that was loaded."""
        rates = self._rates
        rates.base_lrs = list(self._peaks)
        for group, own, peak, share in zip(
            rates.optimizer.param_groups, self._groups, self._peaks, rates.lr_lambdas, strict=True
        ):
            group.update(own, initial_lr=peak, lr=peak * share(rates.last_epoch))


def effective_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate in use; Prodigy and D-Adaptation multiply it by their estimate."""
    group: dict[str, Any] = optimizer.param_groups[0]
    return float(group["lr"]) * float(group.get("d", 1.0))

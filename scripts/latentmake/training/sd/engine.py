"""How gradients become a step of the optimiser: as accelerate does it, or DeepSpeed's ZeRO.

Under ZeRO 1 and 2 (https://arxiv.org/abs/1910.02054) each process keeps the optimiser's state of a
part of the weights, and from stage 2 on the gradients of that part alone. The weights are whole in
every process and stay float32; where a network computes in bfloat16, autocast does it, as without
DeepSpeed. So both kinds of a step lead to the same weights, and write the same checkpoints: these
can be read without DeepSpeed and by another number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from latentmake.config import SdTrainer
from latentmake.training.sd.accelerator import uses_deepspeed
from latentmake.training.sd.scalars import query_key_gradients

__all__ = ["Engine", "Plain", "Zero", "make_engine"]


class Plain:
    """Steps on one device, or on several that all have the whole optimiser.

    Args:
        accelerator: accelerate's.
        denoiser: the network.
        optimizer: over the parameters.
        parameters: those that are trained.
        queries_and_keys: those of them that attention's queries and keys come from.
        settings: of the trainer.

    Attributes:
        network: the denoiser, as accelerate wraps it.
        optimizer: the optimiser, as accelerate wraps it.
        collective: whether `optimizer_state` has to be called in all processes at once.
    """

    collective = False

    def __init__(
        self,
        accelerator: Any,
        denoiser: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Sequence[torch.nn.Parameter],
        queries_and_keys: Sequence[torch.nn.Parameter],
        settings: SdTrainer,
    ) -> None:
        self._accelerator = accelerator
        self._parameters = parameters
        self._queries_and_keys = queries_and_keys
        self._settings = settings
        self.network, self.optimizer = accelerator.prepare(denoiser, optimizer)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the network computes in its number format."""
        context: AbstractContextManager[None] = self._accelerator.autocast()
        return context

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one batch of a step; the last one brings gradients together."""
        if last:
            return nullcontext()
        context: AbstractContextManager[None] = self._accelerator.no_sync(self.network)
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradients to those of this step; processes' are averaged."""
        self._accelerator.backward(loss)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip this step's gradients.

        Returns:
            Their norm before, and what `query_key_gradients` says of them; scalars on a device.
        """
        self._accelerator.unscale_gradients()
        queries = query_key_gradients(self._queries_and_keys)
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, self._settings.max_grad_norm or math.inf
        )
        return norm.float(), queries

    def step(self) -> None:
        """Change the weights by the gradients that are there, and forget these."""
        # accelerate's wrapper is there for the scaler; it looks for installed packages each time.
        plain = self._accelerator.scaler is None
        optimizer = self.optimizer.optimizer if plain else self.optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimiser's state, as torch has it."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what `optimizer_state` returned; the weights have been put back before.

        Raises:
            ValueError: it is of another optimiser.
        """
        self.optimizer.load_state_dict(state)


class Zero(Plain):
    """Steps by DeepSpeed's engine, ZeRO stage 1 or 2; what it is made of is as in `Plain`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.collective = self._accelerator.num_processes > 1
        self._zero = self.network.optimizer  # DeepSpeed's, which has ours in it

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the network computes in its number format."""
        lower = self._settings.mixed_precision == "bf16"
        context: AbstractContextManager[None] = torch.autocast(
            self._accelerator.device.type, torch.bfloat16, enabled=lower
        )
        return context

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one batch of a step; the last one brings gradients together."""
        self.network.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradients to those of this step; processes' are averaged."""
        self.network.backward(loss, scale_wrt_gas=False)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip this step's gradients, and make the step unless one of them is no number.

        Returns:
            Their norm before, and what `query_key_gradients` says of them; scalars on a device.
        """
        from deepspeed.utils import safe_get_full_grad

        device = self._accelerator.device
        queries = torch.zeros((), device=device)
        for each in self._queries_and_keys:
            queries += safe_get_full_grad(each).abs().mean(dtype=torch.float32)
        self.network.step()
        norm = torch.as_tensor(self.network.get_global_grad_norm(), device=device)
        return norm.float(), queries

    def step(self) -> None:
        """Do nothing: DeepSpeed clips where it steps, and `gradients` has done both."""

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimiser's state as torch has it without ZeRO.

        All processes give their parts; what is returned in others than the main one is empty.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        (flat,) = self._zero.single_partition_of_fp32_groups  # this process's part of all weights
        held = self._zero.optimizer.state[flat]
        state: dict[int, dict[str, Any]] = {}
        for index, each in enumerate(self._parameters):
            for key, value in held.items():
                whole = value
                if _is_like(value, flat):
                    whole = safe_get_full_optimizer_state(each, key)
                if self._accelerator.is_main_process:
                    state.setdefault(index, {})[key] = whole.cpu() if whole is not value else value
        (group,) = self._zero.optimizer.state_dict()["param_groups"]
        return {
            "state": state,
            "param_groups": [{**group, "params": list(range(len(self._parameters)))}],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what `optimizer_state` returned; the weights have been put back before.

        Raises:
            ValueError: it is of another optimiser.
        """
        from deepspeed.utils import safe_set_full_optimizer_state

        self._zero.refresh_fp32_params()
        (flat,) = self._zero.single_partition_of_fp32_groups
        (group,) = state["param_groups"]
        if len(group["params"]) != len(self._parameters):
            raise ValueError("its optimiser has another number of parameters")
        first = state["state"].get(0, {})
        parted = {
            key: torch.zeros_like(flat) if _is_like(value, self._parameters[0]) else value
            for key, value in first.items()
        }
        self._zero.optimizer.load_state_dict(
            {"state": {0: parted} if parted else {}, "param_groups": [{**group, "params": [0]}]}
        )
        # DeepSpeed's weights know their part of the state from the first step on, or from here.
        self._zero._hp_optimizer_states_linked = False
        if not parted:
            return
        self._zero._lazy_init_hp_params_optimizer_state()
        for index, each in enumerate(self._parameters):
            for key, value in state["state"].get(index, {}).items():
                if _is_like(value, each):
                    safe_set_full_optimizer_state(each, value.to(flat.device), key)


def _is_like(value: object, weights: torch.Tensor) -> bool:
    """Whether this is a state with a number for each weight, not a count of steps."""
    return isinstance(value, torch.Tensor) and value.shape == weights.shape


Engine = Plain | Zero


def make_engine(accelerator: Any, *arguments: Any, **named: Any) -> Engine:
    """Return what makes the steps under this accelerator; see `Plain` for the arguments."""
    kind = Zero if uses_deepspeed(accelerator) else Plain
    return kind(accelerator, *arguments, **named)

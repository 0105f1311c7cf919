"""Checks of the trainer's settings, while planning and before a training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml

from latentmake.config.trainers import LoopTrainer
from latentmake.errors import TrainingError, first_line
from latentmake.training.checks import Finding, of_faults
from latentmake.training.loop.order import CHECKPOINT_WEIGHTS

_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")


def check_settings(trainer: LoopTrainer, *, here: bool = True) -> Iterator[Finding]:
    """Check files that the settings need, and packages if it is trained in this environment."""
    lacks = here and trainer.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None
    faults = ["bitsandbytes is not installed, which these settings need"] if lacks else []
    yield of_faults("environment", faults, "has what these settings need")
    if trainer.accelerate_config is not None:
        try:
            check_accelerate(Path(trainer.accelerate_config), trainer.kind)
        except TrainingError as error:
            yield Finding("accelerate_config", "failed", str(error))
    begun = trainer.resume_from_checkpoint
    if begun is not None and not Path(begun, CHECKPOINT_WEIGHTS).is_file():
        note = f"{begun} is no checkpoint: name a folder such as runs/NAME/checkpoints/step-000500"
        yield Finding("resume_from_checkpoint", "failed", note)


def check_accelerate(config: Path, kind: str) -> None:
    """Check a configuration file of `accelerate launch`, for a kind of trainer.

    Raises:
        TrainingError: it cannot be read, or shards the model or the optimizer.
    """
    try:
        load = json.loads if config.suffix == ".json" else yaml.safe_load  # as accelerate does
        content = load(config.read_bytes())
    except (OSError, ValueError, LookupError, AttributeError, yaml.YAMLError) as error:
        raise TrainingError(
            f"this configuration of accelerate cannot be read ({first_line(error)})",
            where=config,
            hint="correct the trainer's `accelerate_config`, or make it by `accelerate config "
            f"--config_file {config}`",
        ) from None
    if isinstance(content, dict):
        refuse_sharded(str(content.get("distributed_type") or "NO"), kind, str(config))


def refuse_sharded(how: str, kind: str, where: str = "trainer.accelerate_config") -> None:
    """Refuse a `distributed_type` of accelerate that shards the model or the optimizer.

    Args:
        how: the `distributed_type`.
        kind: of the trainer.
        where: it is set.

    Raises:
        TrainingError: it is DeepSpeed's ZeRO, FSDP or the like.
    """
    if how not in _REPLICATED:
        raise TrainingError(
            f"the {kind} trainer does not train under {how}",
            where=where,
            hint="choose one device or multi-GPU in `accelerate config`, without DeepSpeed or FSDP",
        )

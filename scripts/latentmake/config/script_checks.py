"""Checks of the trainer `musubi` against its model's row: what the training script would refuse.

Sources: `handle_model_specific_args` and `main` of musubi-tuner's *_train_network.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from latentmake.config.models import Model
from latentmake.config.scripts import Rule, Scripts
from latentmake.config.trainers import MusubiTrainer
from latentmake.errors import ConfigError

_FP8 = ("fp8_base", "fp8_scaled")


def check_training(name: str, trainer: MusubiTrainer, model: Model) -> None:
    """Refuse settings that the architecture's training script would refuse, or ignore.

    Raises:
        ConfigError: the first mistake.
    """
    scripts, where = model.spec.scripts, f"runs.{name}.trainer"
    assert scripts is not None
    if trainer.timestep_boundary and not model.has_two_networks:
        what = f"{model.task or model.title} has one network, and no boundary between two"
        raise ConfigError(what, where=f"{where}.timestep_boundary", hint="leave it out")
    if trainer.mixed_precision not in scripts.precisions:
        known = " or ".join(scripts.precisions)
        what = f"{scripts.title} is not trained in {trainer.mixed_precision}"
        raise ConfigError(what, where=f"{where}.mixed_precision", hint=f"use {known}")
    if scripts.batch is not None and trainer.batch_size > scripts.batch:
        what = f"{scripts.title} is trained on at most {scripts.batch} item at a time"
        hint = f"use {scripts.batch}, and `gradient_accumulation_steps`"
        raise ConfigError(what, where=f"{where}.batch_size", hint=hint)
    _check_attention(trainer, scripts, where)
    _check_fp8(trainer, scripts, where)
    for rule in scripts.rules:
        if fault := _fault(rule, trainer.arguments, scripts.title):
            what, hint = fault
            raise ConfigError(what, where=f"{where}.arguments", hint=hint)


def _check_attention(trainer: MusubiTrainer, scripts: Scripts, where: str) -> None:
    chosen = trainer.attention
    name = "sdpa" if chosen == "auto" else chosen  # which every machine has
    if name not in scripts.attentions:
        known = ", ".join(scripts.attentions)
        what = f"{scripts.title} is not trained with {name}"
        raise ConfigError(what, where=f"{where}.attention", hint=f"use one of auto, {known}")
    most = scripts.attentions[name]
    if most is not None and trainer.batch_size > most and not trainer.splits_attention:
        beyond = f"batches of more than {most}" if most else "any batch"
        what = f"{scripts.title} needs --split_attn for {beyond} with {name}"
        raise ConfigError(what, where=f"{where}.arguments", hint="add --split_attn")


def _check_fp8(trainer: MusubiTrainer, scripts: Scripts, where: str) -> None:
    asked = tuple(key for key in _FP8 if getattr(trainer, key))
    if not asked or asked in scripts.fp8:
        return
    for known in scripts.fp8:
        if more := [key for key in known if key not in asked]:
            what = f"{scripts.title} takes {' and '.join(known)} together alone"
            hint = f"set `{more[0]}: true` too"
            raise ConfigError(what, where=f"{where}.{asked[0]}", hint=hint)
    what = f"the training script of {scripts.title} does not take it"
    raise ConfigError(what, where=f"{where}.{asked[-1]}", hint="leave it out")


def _fault(rule: Rule, arguments: Sequence[str], title: str) -> tuple[str, str] | None:
    """Return what is wrong with a flag among arguments, and the hint."""
    given = _values(arguments)
    if rule.flag not in given:
        return None
    value = given[rule.flag]
    if rule.values is not None and value not in rule.values:
        if not rule.values:
            return f"{title} refuses {rule.flag}", "leave it out"
        known = " or ".join(rule.values)
        return f"{title} refuses {rule.flag} {value}", f"use {known}, or leave it out"
    if rule.most is not None and value.isdecimal() and int(value) > rule.most:
        return f"{title} refuses {rule.flag} {value}", f"use {rule.most} or less"
    if missing := [each for each in rule.needs if each not in given]:
        return f"{title} needs {' and '.join(missing)} beside {rule.flag}", "add it"
    if beside := [each for each in rule.without if each in given]:
        return f"{title} refuses {rule.flag} beside {beside[0]}", "leave out one of them"
    return None


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the flags among arguments with what stands behind each; "" where nothing does."""
    found: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            found[flag] = value if equals else following
    return found

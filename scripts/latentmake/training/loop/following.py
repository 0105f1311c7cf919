"""Plan and launch of what follows a training: its clips or pictures, and its evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from latentmake.errors import TrainingError
from latentmake.plan.facts import Facts
from latentmake.plan.orders import prompt_path
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference
from latentmake.training.loop.clips import (
    FOLDER,
    ClipSettings,
    EvaluationOrder,
    GenerationOrder,
    clip_reasons,
    evaluation_folder,
    result_reasons,
)
from latentmake.training.loop.order import CAPTIONS, Prompt, TrainingOrder
from latentmake.training.order import read_order
from latentmake.training.process import RUN, run_child

ClipSettingsOf = Callable[[Facts, TrainingOrder, str], tuple[str, dict[str, Any]]]
"""See `LoopBackend.clip_settings`."""


def plan_following(
    facts: Facts, plan: RunPlan, word: str, clip_settings: ClipSettingsOf
) -> tuple[Path, list[Difference]]:
    """Write the order of clips or of an evaluation; see `Backend.plan_following`."""
    training, file_digest = plan.trainer, facts.memo.digest_of_file
    assert isinstance(training, TrainingOrder)
    order = order_for(facts, training, word, *clip_settings(facts, training, word))
    if not facts.asks:
        order.write(order.path)
    if waits := plan.awaited(order.texts()):
        return order.path, waits
    if isinstance(order, EvaluationOrder):
        return order.path, result_reasons(order, training, file_digest)
    return order.path, clip_reasons(order, file_digest)


def follow(path: Path, word: str, *, log: Path, threads: int) -> Path:
    """Bring clips or the results of an evaluation up to date; return their folder."""
    order = order_of(path, word)
    folder = Path(order.output)
    if word == "evaluate" or clip_reasons(order):
        run_child(
            [sys.executable, *RUN, str(path), word],
            run=order.run,
            folder=folder,
            threads=threads,
            log=log,
            online=order.online,
        )
    return folder


def order_of(path: Path, word: str) -> GenerationOrder:
    """Read the order of clips or of an evaluation; raises TrainingError."""
    return read_order(path, GenerationOrder if word == "generate" else EvaluationOrder)


def order_for(
    facts: Facts, training: TrainingOrder, word: str, weights: str, more: Mapping[str, Any]
) -> GenerationOrder:
    """Return the order of a run's clips, or with `evaluate` of its evaluation.

    See `LoopBackend.clip_settings` for the digest of the networks and `more` settings.
    """
    config, name, folder = facts.config, training.run, Path(training.output)
    run = config.runs[name]
    settings = config.generation(run)
    size = settings.resolution or run.resolutions[0]
    guided = settings.guidance_scale > 1
    text = partial(prompt_path, config, run.model)
    values: dict[str, Any] = {
        "kind": training.kind,
        "run": name,
        "training": str(training.path),
        "online": training.from_hub,
        "output": str(folder / FOLDER),
        "adapters": [str(folder / each) for each in training.results],
        "manifest": training.manifest,
        "model": config.models[run.model],
        "weights": weights,
        "prompts": [Prompt(prompt=each, text=text(each)) for each in settings.prompts],
        "captions": 0 if settings.prompts else CAPTIONS,
        "negative": text(settings.negative_prompt) if guided else None,
        "seeds": [settings.seed + number for number in range(settings.count)],
        "settings": ClipSettings(
            width=size.width,
            height=size.height,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            negative_prompt=settings.negative_prompt if guided else "",
            **more,
        ),
        "base": settings.base,
        "asked": config.prompt is not None,
        "planned": training.planned,
    }
    if word == "evaluate":
        assert run.validation is not None
        values |= {"prompts": [], "captions": 0, "output": str(evaluation_folder(name))}
        clips, resolution = run.validation.clips, run.resolutions[0].name
        return EvaluationOrder(**values, clips=clips, resolution=resolution)
    values |= {"image": settings.image, "strength": settings.lora_strength}
    if (lora := settings.lora) is not None:
        is_file = lora.endswith(".safetensors")
        if is_file and len(training.results) > 1:
            what, hint = (
                f"{lora} is one file",
                f"name a folder with {' and '.join(training.results)}",
            )
            raise TrainingError(what, where=f"runs.{name}.generate.lora", hint=hint)
        files = [lora] if is_file else [f"{lora}/{each}" for each in training.results]
        values |= {"lora": lora, "adapters": files}
    return GenerationOrder(**values)

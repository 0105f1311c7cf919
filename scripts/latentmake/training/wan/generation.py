"""Plan and launch of the clips of a Wan run; no torch here."""

from __future__ import annotations

import time
from pathlib import Path

from latentmake import digest
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.config.trainers import WanTrainer
from latentmake.errors import ConfigError, ModelError
from latentmake.files import atomic
from latentmake.models.recipe import FileDigest, make, weights_digest
from latentmake.plan.facts import Facts
from latentmake.plan.lock import run_folder
from latentmake.plan.orders import run_order
from latentmake.plan.reasons import Difference
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.target import generation_prompts, prompt_path
from latentmake.training.child import run_module
from latentmake.training.generation import (
    CAPTIONS,
    FOLDER,
    ClipPrompt,
    GenerationOrder,
    adapter_digest,
    captions_of,
    clip_reasons,
)
from latentmake.training.order import read_order
from latentmake.training.wan.dit import dit_digest
from latentmake.training.wan.lora_names import lora_names
from latentmake.training.wan.plan import boundary_of

_FRAMES = 81


def plan_generation(facts: Facts, plan: RunPlan) -> tuple[Path, list[Difference]]:
    """Write the order of a run's clips; see `Backend.plan_generation`."""
    config = facts.config
    run = config.runs[plan.name]
    _refuse_conditions(config.models[run.model], plan.name, config.generation(run).image)
    order = generation_order(facts, plan.name, run)
    path = run_order(plan.name, "generate", order.planned)
    if not facts.asks:
        atomic.write(path, order.model_dump_json().encode())
    if waits := plan.awaited(generation_prompts(config, run)):
        return path, waits
    known = captions_of(order)
    return path, clip_reasons(known, adapter_digest(known, facts.memo.digest_of_file))


def _refuse_conditions(model: Model, run: str, image: str | None) -> None:
    """Refuse networks that draw from more than text and a first frame."""
    task = str(model.task)
    if task.startswith("flf2v") or task.endswith("-FC"):
        raise ConfigError(
            f"{task} draws from further pictures, which generate_{run} cannot give it",
            where=f"runs.{run}.model",
            hint="generate with musubi-tuner, which takes the LoRA",
        )
    if model.image_to_video and image is None:
        raise ConfigError(
            f"{task} draws from a picture",
            where=f"runs.{run}.generate.image",
            hint="name the file of the clips' first frame",
        )


def _image(facts: Facts, run: str, path: str | None) -> tuple[str, str] | None:
    """Return a picture and its digest."""
    if path is None:
        return None
    try:
        return path, facts.memo.digest_of_file(Path(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror})",
            where=f"runs.{run}.generate.image",
            hint="check that the file exists and is readable",
        ) from None


def generation_order(facts: Facts, name: str, run: Run) -> GenerationOrder:
    """Return the order of a run's clips."""
    config, folder = facts.config, run_folder(name)
    model, settings, trainer = config.models[run.model], config.generation(run), run.trainer
    assert isinstance(trainer, WanTrainer)
    size = settings.resolution or run.resolutions[0]
    guided = settings.guidance_scale > 1
    return GenerationOrder(
        kind=trainer.kind,
        run=name,
        output=str(folder / FOLDER),
        adapters=[
            str(folder / lora_names(high_noise=high).diffusers)
            for high, path in ((False, model.dit), (True, model.dit_high_noise))
            if path is not None
        ],
        manifest=str(folder / "manifest.jsonl"),
        model=model,
        weights=_weights(facts, run.model),
        prompts=[
            ClipPrompt(prompt=text, text=prompt_path(config, run.model, text))
            for text in settings.prompts
        ],
        captions=0 if settings.prompts else CAPTIONS,
        negative_prompt=settings.negative_prompt if guided else "",
        negative=prompt_path(config, run.model, settings.negative_prompt) if guided else None,
        seeds=[settings.seed + number for number in range(settings.videos)],
        frames=settings.frames or _longest(config, run),
        width=size.width,
        height=size.height,
        fps=settings.fps,
        steps=settings.num_inference_steps,
        guidance=settings.guidance_scale,
        shift=settings.flow_shift or trainer.shift([size]),
        scheduler=settings.scheduler,
        boundary=boundary_of(trainer, model) or 0.0,
        image=_image(facts, name, settings.image),
        base=settings.base,
        asked=config.prompt is not None,
        planned=time.time_ns(),
    )


def _longest(config: Config, run: Run) -> int:
    """Return the frames of the longest clips that a run trains on; Wan's own of images alone."""
    lengths = [0]
    for name in run.datasets:
        dataset = config.datasets[name]
        if dataset.frame_extraction == "full":
            lengths.append((dataset.max_frames - 1) // 4 * 4 + 1)
        else:
            lengths += dataset.target_frames or []
    return max(lengths) if max(lengths) > 1 else _FRAMES


def _weights(facts: Facts, name: str) -> str:
    """Return `made_of` a model by the memo."""
    model = facts.config.models[name]
    try:
        return made_of(model, facts.memo.digest_of_file)
    except ModelError as error:
        what = f"{error.where}: {error.what}"
        raise ModelError(what, where=f"models.{name}", hint=error.hint) from None


def made_of(model: Model, file_digest: FileDigest = digest.of_file) -> str:
    """Return the digest of networks and encoders; raises ModelError."""
    encoders = [
        weights_digest(each, file_digest, original=True)
        for each in (model.vae, model.clip)
        if each is not None
    ]
    text = make("text", None, model, file_digest)
    return digest.of_value([dit_digest(model, file_digest), *encoders, text])


def launch(order_path: Path, *, log: Path, threads: int) -> None:
    """Bring the clips of an order up to date, in a process of its own; see `Backend.generate`."""
    order = captions_of(read_order(order_path, GenerationOrder))
    if not clip_reasons(order, adapter_digest(order)):
        return
    run_module(
        "latentmake.training.wan.generate",
        order,
        run=order.run,
        folder=Path(order.output),
        log=log,
        threads=threads,
        online=bool(order.model.vae.hub),
    )

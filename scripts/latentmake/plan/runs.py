"""The end of a run's plan: whether its manifest and lock still fit, and whether it is trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake import digest, layouts
from latentmake.config import Run, SdScriptsTrainer, SdTrainer
from latentmake.errors import ModelError
from latentmake.files import atomic
from latentmake.models import recipe
from latentmake.models.checks import schedule_of
from latentmake.plan import manifest
from latentmake.plan.orders import run_order, unfinished
from latentmake.plan.parts import (
    PROMPTS,
    Part,
    RunPlan,
    kind_of,
    part_names,
    parts_of,
    prompt_path,
    read_lock,
    run_folder,
)
from latentmake.training.checks import own, refuse_failed
from latentmake.training.external.musubi.plan import finish_wan
from latentmake.training.external.sdscripts.plan import finish_sdscripts
from latentmake.training.order import Prompt, TextSchedule, TrainingOrder
from latentmake.training.result import Layout, checkpoint_digest, read_record, wanted_of
from latentmake.training.sample_images import are_drawn

if TYPE_CHECKING:
    from latentmake.plan.planner import Planner

__all__ = ["finish", "manifest_items"]

_FOUR = 4  # captions drawn where a run names no prompts


def finish(
    planner: Planner, plan: RunPlan, run: Run, *, force: bool = False, train: bool = True
) -> None:
    """Decide whether a run's manifest and trainer have something to do, and write their orders.

    Args:
        planner: what is known of datasets and models.
        plan: of the run; gets faults and orders.
        run: its section of the configuration.
        force: write the orders in any case.
        train: whether a training is asked for, so that what it lacks is named before anything else.

    Raises:
        ModelError: files of the network to be trained are missing.
        StorageError: the disk is full or cannot be written.
    """
    plan.faults = {
        name: found for name in run.datasets if (found := planner.faults(name, run.model))
    }
    aside = _set_aside(planner, plan, run)
    repeats = {name: planner.config.datasets[name].num_repeats for name in run.datasets}
    parts = {part: state for part, state in plan.parts.items() if part.dataset != PROMPTS}
    wanted = {part for part in parts_of(planner.config, run) if part.dataset != PROMPTS}
    digests = {f"{part.dataset}/{part.name}": parts[part].keys for part in wanted}
    said = {name: _captions(planner, run, name) for name in run.datasets}
    digests |= {
        f"{name}/{manifest.CAPTIONS}": manifest.keys_digest(found.items())
        for name, found in said.items()
        if found
    }
    complete = {name: keys for name, keys in digests.items() if keys is not None}
    lock = read_lock(plan.name)
    folder = run_folder(plan.name)
    fresh = (
        len(complete) == len(digests)
        and lock.digest == manifest.lock_digest(complete, repeats)
        and _stems(lock.aside) == _stems(aside)
        and lock.images == {name: plan.images[name] for name in run.datasets}
        and lock.manifest == _digest_of(planner, folder / "manifest.jsonl")
        and not any(state.orphans for state in plan.parts.values())
        and not any(fault for name in aside for fault in aside[name] if not _skips(planner, name))
    )
    if force or not fresh:
        plan.manifest_order = _manifest_order(planner, plan, run, repeats, aside, said)
    settled = lock.digest if fresh and not force else None
    if isinstance(run.trainer, SdTrainer):
        _finish_training(planner, plan, run, run.trainer, settled)
        if train and plan.training_order is not None:
            refuse_failed(own(run.trainer, here=planner.runs_jobs))
    elif isinstance(run.trainer, SdScriptsTrainer):
        finish_sdscripts(planner, plan, run.trainer, settled, train=train)
    elif planner.config.models[run.model].layout == "musubi":
        finish_wan(planner, plan, run, settled, train=train)


def _skips(planner: Planner, dataset: str) -> bool:
    return planner.config.datasets[dataset].on_error == "skip"


def _set_aside(planner: Planner, plan: RunPlan, run: Run) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for name in run.datasets:
        noted = list(planner.aside(name))
        for fault in plan.faults.get(name, []):
            noted.append({"stem": fault.stem, "path": fault.path, "digest": "", "line": fault.line})
        if noted:
            found[name] = noted
    return found


def _captions(planner: Planner, run: Run, name: str) -> dict[str, str]:
    """Return stem -> digest of an item's text, where its trainer encodes that itself.

    sd-scripts does so with Stable Diffusion 1.x and 2.x: no cache tells that a caption changed.
    """
    if any(kind_of(part) == "text" for part in part_names(planner.config, run, name)):
        return {}
    without = {fault["stem"] for fault in planner.aside(name)}
    found: dict[str, str] = {}
    for item in planner.items(name, run.model)[0]:
        if item.stem in without:
            continue
        texts = planner.texts(name, item.stem)
        if texts is not None:
            found[item.stem] = digest.of_value(texts)
        else:
            found[item.stem] = _digest_of(planner, Path(item.caption)) if item.caption else ""
    return found


def _manifest_order(
    planner: Planner,
    plan: RunPlan,
    run: Run,
    repeats: dict[str, int],
    aside: dict[str, list[dict[str, str]]],
    said: Mapping[str, Mapping[str, str]],
) -> Path:
    model = planner.config.models[run.model]
    known = {part: state.known for part, state in plan.parts.items()}
    return manifest.ManifestOrder(
        run=plan.name,
        model=run.model,
        repeats=repeats,
        skip=[name for name in run.datasets if _skips(planner, name)],
        items=list(manifest_items(planner, run, known, said)),
        faults=aside,
        orphans=sorted(
            [path for state in plan.parts.values() for path in state.orphans] + unfinished()
        ),
        planned=time.time_ns(),
        layout=model.layout_name,
        replaced=[
            stale.found.partition("@")[0]
            for state in plan.parts.values()
            for stale in state.stale
            if stale.found is not None
        ],
    ).write()


def manifest_items(
    planner: Planner,
    run: Run,
    known: Mapping[Part, Mapping[str, str]],
    said: Mapping[str, Mapping[str, str]],
) -> Iterator[manifest.ManifestItem]:
    """Yield the items of a run with the names of their caches.

    Args:
        planner: what is known of datasets and models.
        run: its section of the configuration.
        known: part -> path of a cache file -> its key.
        said: dataset -> stem -> digest of its text, where no cache is made of that.
    """
    layout = layouts.of(planner.config.models[run.model].layout_name)
    for name in run.datasets:
        settings = planner.config.datasets[name]
        parts = [
            (
                part,
                layout.folder(name, run.model, part),
                known.get(Part(name, run.model, part), {}),
            )
            for part in part_names(planner.config, run, name)
        ]
        for item in planner.items(name, run.model)[0]:
            targets = {
                part: [
                    (named.path, keys.get(named.path))
                    for named in layout.named(folder, part, item.stem, item.media, settings)
                ]
                for part, folder, keys in parts
            }
            yield manifest.ManifestItem(
                name,
                item.stem,
                item.image,
                targets,
                item.caption,
                item.control,
                planner.texts(name, item.stem),
                said.get(name, {}).get(item.stem),
            )


def _finish_training(
    planner: Planner, plan: RunPlan, run: Run, trainer: SdTrainer, lock: str | None
) -> None:
    model, folder = planner.config.models[run.model], run_folder(plan.name)
    assert model.unet is not None
    scheduler = schedule_of(model.unet, model.scheduler)
    pending = any(planner.is_pending(path) for path in (model.unet.path, scheduler))
    try:
        weights = (
            ""
            if pending
            else recipe.training_digest(
                model.unet,
                scheduler,
                planner.memo.digest_of_file,
                text_projection=model.text_projection,
            )
        )
    except ModelError as error:
        raise ModelError(
            f"{error.where}: {error.what}", where=f"models.{run.model}.unet", mend=error.mend
        ) from None
    samples, size = trainer.samples, trainer.samples.resolution or run.resolutions[0]
    guided = samples.guidance_scale > 1
    order = TrainingOrder(
        run=plan.name,
        manifest=str(folder / "manifest.jsonl"),
        lock=str(folder / "dataset.lock"),
        output=str(folder),
        unet=model.unet,
        weights=weights,
        resumed=_resumed(planner, trainer, folder),
        text_projection=model.text_projection,
        scheduler=scheduler,
        vae=model.vae,
        prompts=[
            Prompt(prompt=text, text=prompt_path(run.model, text)) for text in samples.prompts
        ],
        captions=0 if samples.prompts else _FOUR,
        negative=prompt_path(run.model, samples.negative_prompt) if guided else None,
        sample_size=(size.width, size.height),
        trainer=trainer,
        texts=_text_schedules(planner, run),
        planned=time.time_ns(),
    )
    wanted = wanted_of(order, data=lock or "", weights=weights)
    stale_prompts = any(plan.parts[part].stale for part in plan.parts if part.dataset == PROMPTS)
    layout = Layout(order)
    record = read_record(layout.record)
    if (
        lock
        and weights
        and not stale_prompts
        and record is not None
        and record.wanted == wanted
        and layout.weights.is_file()
        and (folder / "trained.json").is_file()
        and are_drawn(order, wanted)
    ):
        return
    path = run_order(plan.name, "train", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    plan.training_order = path


def _resumed(planner: Planner, trainer: SdTrainer, folder: Path) -> str:
    """Return the digest of the checkpoint that a training begins with.

    One that is gone, because its own run was trained again, makes no weights stale that came of it.
    """
    if trainer.resume_from_checkpoint is None:
        return ""
    place = Path(trainer.resume_from_checkpoint)
    record = read_record(folder / "training.json")
    known = record.wanted.resumed if record else ""
    return checkpoint_digest(place, planner.memo.digest_of_file) or known or "none"


def _text_schedules(planner: Planner, run: Run) -> dict[str, TextSchedule]:
    """Return how the variants of each dataset's texts depend on the step, where they do."""
    found = {}
    for name in run.datasets:
        making = planner.config.datasets[name].captions
        if making and (making.token_warmup_step or making.caption_dropout_every_n_epochs):
            found[name] = TextSchedule(
                token_warmup_step=making.token_warmup_step,
                caption_dropout_every_n_epochs=making.caption_dropout_every_n_epochs,
            )
    return found


def _digest_of(planner: Planner, path: Path) -> str:
    try:
        return planner.memo.digest_of_file(path)
    except OSError:
        return "missing"


def _stems(aside: Mapping[str, list[dict[str, str]]]) -> set[tuple[str, str]]:
    return {(name, fault["stem"]) for name, faults in aside.items() for fault in faults}

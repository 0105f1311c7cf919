"""Clips of a Wan run: order, keys, index, plan and launch; no torch here.

A clip's key is a digest of all that shapes it. The index beside the clips has the key of each, so
the planner knows which clips are there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from latentmake import digest
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.config.trainers import WanTrainer
from latentmake.errors import ConfigError, ModelError, TrainingError
from latentmake.files import atomic
from latentmake.models.recipe import make, weights_digest
from latentmake.plan.facts import Facts
from latentmake.plan.lock import run_folder
from latentmake.plan.manifest import rows_of
from latentmake.plan.orders import run_order
from latentmake.plan.reasons import Difference, short, value_differences
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.target import generation_prompts, prompt_path
from latentmake.training.json_file import JsonFile
from latentmake.training.loop.order import Prompt
from latentmake.training.order import caption_in
from latentmake.training.wan.dit import dit_digest
from latentmake.training.wan.lora_names import lora_names
from latentmake.training.wan.plan import boundary_of

FOLDER = "generated"
"""Folder of the clips below that of their run."""

INDEX = "index.json"

_VERSION = 1  # raised when the same order would give other clips
_NAME = r"^[a-z0-9-]+_seed-\d+_(base|adapter)\.mp4$"
_WORDS = 40  # characters of a prompt in a file's name
_CAPTIONS = 4  # items whose captions are the prompts where a run names none
_FRAMES = 81  # where a run trains on images


class GenerationOrder(BaseModel):
    """Order of a run's clips; paths are relative to the working directory.

    Attributes:
        output: folder of the clips.
        adapters: files of the LoRA: of Wan 2.2's two networks, that for low noise first.
        manifest: of the run, for its captions.
        model: networks, VAE.
        weights: digest of networks, VAE and text encoder.
        captions: number of the manifest's first captions that are prompts too.
        negative: cache file of the negative prompt's embedding; None without guidance.
        boundary: share of the timesteps from which on Wan 2.2's network for high noise is used; 0
            of one network.
        image: first frame of the clips, for image-to-video; with its digest.
        base: whether each clip is also made without the LoRA.
        asked: whether the prompts come from the command line.
        planned: time, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    run: str
    output: str
    adapters: list[str]
    manifest: str
    model: Model
    weights: str
    prompts: list[Prompt]
    captions: int
    negative_prompt: str
    negative: str | None
    seeds: list[int]
    frames: int
    width: int
    height: int
    fps: int
    steps: int
    guidance: float
    shift: float
    scheduler: Literal["unipc", "euler"]
    boundary: float = 0.0
    image: tuple[str, str] | None = None
    base: bool
    asked: bool = False
    planned: int = 0

    def settings(self) -> dict[str, str | int | float]:
        """Return what shapes each clip besides weights, prompt and seed."""
        return {
            "frames": self.frames,
            "width": self.width,
            "height": self.height,
            "fps": self.fps,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "flow_shift": self.shift,
            "scheduler": self.scheduler,
            "negative_prompt": self.negative_prompt if self.guidance > 1 else "",
            **({"timestep_boundary": self.boundary} if self.boundary else {}),
            **({"image": self.image[1]} if self.image else {}),
        }

    def key(self, prompt: str, seed: int, adapter: str) -> str:
        """Return the key of a clip; `adapter` is the digest of the LoRA, "" for none."""
        return digest.of_value([_VERSION, self.weights, adapter, prompt, seed, self.settings()])


class Clip(BaseModel):
    """A clip in the index.

    Attributes:
        file: name of the MP4.
        key: see `GenerationOrder.key`.
        adapter: digest of the LoRA; "" for a clip without it.
        asked: whether its prompt came from the command line.
        size: bytes of the file; 0 of a clip that is still to be drawn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: Annotated[str, StringConstraints(pattern=_NAME)]
    key: str
    prompt: str
    seed: int
    adapter: str
    asked: bool
    size: int


class GenerationIndex(JsonFile):
    """Index of the clips of a run; written after each of them.

    Attributes:
        weights: digest of networks, VAE and text encoder.
        settings: of all clips, see `GenerationOrder.settings`.
    """

    run: str
    weights: str
    settings: dict[str, str | int | float]
    clips: list[Clip]


def clip_name(prompt: str, seed: int, *, adapter: bool) -> str:
    """Return the name of a clip: some words and the digest of its prompt, seed, with what made."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:_WORDS].strip("-")
    number = digest.of_bytes(prompt.encode())[:8]
    made = "adapter" if adapter else "base"
    return f"{f'{words}-{number}' if words else number}_seed-{seed}_{made}.mp4"


def adapter_digest(
    order: GenerationOrder, file_digest: Callable[[Path], str] = digest.of_file
) -> str:
    """Return the digest of an order's LoRA.

    Raises:
        TrainingError: a file of it is missing, or cannot be read.
    """
    try:
        return digest.of_value([file_digest(Path(path)) for path in order.adapters])
    except OSError as error:
        raise TrainingError(
            f"the trained LoRA cannot be read ({error.strerror})",
            where=str(error.filename),
            hint="make it readable, or delete it and give the same command, which trains it again",
        ) from None


def wishes(order: GenerationOrder, adapter: str) -> Iterator[Clip]:
    """Yield the clips of an order whose prompts are all known, that without the LoRA first."""
    for prompt in (each.prompt for each in order.prompts):
        for seed in order.seeds:
            for used in ("", adapter) if order.base else (adapter,):
                yield Clip(
                    file=clip_name(prompt, seed, adapter=bool(used)),
                    key=order.key(prompt, seed, used),
                    prompt=prompt,
                    seed=seed,
                    adapter=used,
                    asked=order.asked,
                    size=0,
                )


def kept(order: GenerationOrder, index: GenerationIndex | None, adapter: str) -> list[Clip]:
    """Return the clips that are there and are what they would be today, those in order first.

    They include clips of prompts of earlier command lines and, if the order's prompt comes from the
    command line, those of the configuration.
    """
    places = {clip.key: number for number, clip in enumerate(wishes(order, adapter))}
    found = []
    for clip in index.clips if index else ():
        other = (clip.asked or order.asked) and (order.base or clip.adapter)
        same = clip.seed in order.seeds and clip.adapter in ("", adapter)
        wanted = clip.key in places or (other and same)
        if wanted and clip.key == order.key(clip.prompt, clip.seed, clip.adapter):
            try:
                if Path(order.output, clip.file).stat().st_size == clip.size:
                    found.append(clip)
            except OSError:
                pass  # it is drawn again
    return sorted(found, key=lambda clip: places.get(clip.key, len(places)))


def clip_reasons(order: GenerationOrder, adapter: str) -> list[Difference]:
    """Return why the clips there are not those of an order with known prompts."""
    index = GenerationIndex.read(Path(order.output) / INDEX)
    if index is None:
        return [Difference("no clip has been drawn yet")]
    there = kept(order, index, adapter)
    wanted = {clip.key for clip in wishes(order, adapter)}
    missing, gone = len(wanted - {clip.key for clip in there}), len(index.clips) - len(there)
    if not missing and not gone:
        return []
    loras = {clip.adapter for clip in index.clips} - {"", adapter}
    return [
        *value_differences({"networks": index.weights}, {"networks": order.weights}),
        *value_differences(index.settings, order.settings()),
        *(Difference("trained LoRA", short(lora), short(adapter)) for lora in sorted(loras)),
        Difference(f"clips to draw: {missing}, no longer up to date or asked for: {gone}"),
    ]


def captions_of(order: GenerationOrder) -> GenerationOrder:
    """Return an order with the captions of the manifest's first trained items among its prompts.

    Raises:
        TrainingError: the manifest is missing or damaged.
        CacheError: a cache file of text is missing or damaged.
    """
    if not order.captions:
        return order
    seen: set[tuple[str, str]] = set()
    texts: dict[str, str] = {}
    for row in rows_of(Path(order.manifest)):
        item = (row.dataset, row.stem)
        if item in seen or row.validation:
            continue
        seen.add(item)
        if caption := caption_in(row.first_text):
            texts.setdefault(caption, row.first_text)
        if len(seen) == order.captions:
            break
    if not texts:
        raise TrainingError(
            "none of the first captions has words to draw a clip from",
            where=f"run {order.run}",
            hint=f"set runs.{order.run}.generate.prompts",
        )
    prompts = [Prompt(prompt=caption, text=text) for caption, text in texts.items()]
    return order.model_copy(update={"prompts": [*order.prompts, *prompts], "captions": 0})


# -- plan ------------------------------------------------------------------------------------------


def plan_generation(facts: Facts, plan: RunPlan) -> tuple[Path, list[Difference]]:
    """Write the order of a run's clips; see `Backend.plan_following`."""
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
        weights=made_of(facts, run.model),
        prompts=[
            Prompt(prompt=text, text=prompt_path(config, run.model, text))
            for text in settings.prompts
        ],
        captions=0 if settings.prompts else _CAPTIONS,
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


def made_of(facts: Facts, name: str) -> str:
    """Return the digest of a model's networks and encoders; raises ModelError."""
    model, file_digest = facts.config.models[name], facts.memo.digest_of_file
    try:
        encoders = [
            weights_digest(each, file_digest, original=True)
            for each in (model.vae, model.clip)
            if each is not None
        ]
        text = make("text", None, model, file_digest)
        return digest.of_value([dit_digest(model, file_digest), *encoders, text])
    except ModelError as error:
        what = f"{error.where}: {error.what}"
        raise ModelError(what, where=f"models.{name}", hint=error.hint) from None

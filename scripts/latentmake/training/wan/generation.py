"""Clips of a Wan run: order, keys, index, plan and launch; no torch here.

A clip's key is a digest of all that shapes it. The index beside the clips has the key of each, so
the planner knows which clips are there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from latentmake import digest
from latentmake.config.models import Model
from latentmake.config.root import Config, Run
from latentmake.config.trainers import WanTrainer
from latentmake.errors import ConfigError, ModelError, TrainingError
from latentmake.files import atomic
from latentmake.models.recipe import make, weights_digest
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import rows_of, run_folder
from latentmake.plan.orders import run_order
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference, short, value_differences
from latentmake.plan.target import generation_prompts, prompt_path
from latentmake.training.loop.order import Prompt
from latentmake.training.order import JsonFile, caption_in
from latentmake.training.wan.dit import boundary_of, dit_digest, lora_names

FOLDER = "generated"
"""Folder of the clips below that of their run."""

INDEX = "index.json"

_VERSION = 1  # raised when the same order would give other clips
_NAME = r"^[a-z0-9-]+_seed-\d+_(base|adapter)\.mp4$"
_WORDS = 40  # characters of a prompt in a file's name
_CAPTIONS = 4  # items whose captions are the prompts where a run names none
_FRAMES = 81  # where a run trains on images


class ClipSettings(BaseModel):
    """Settings that shape each clip besides weights, prompt and seed; those of `generate`.

    Attributes:
        guidance_scale: 1 is none.
        negative_prompt: "" without guidance.
        timestep_boundary: share of the timesteps from which on Wan 2.2's network for high noise is
            used; None of one network.
        image: digest of the first frame, for image-to-video.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    frames: int
    width: int
    height: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float
    scheduler: Literal["unipc", "euler"] = "unipc"
    negative_prompt: str = ""
    timestep_boundary: float | None = None
    image: str | None = None

    def values(self) -> dict[str, str | int | float]:
        """Return those that are set, by name."""
        return self.model_dump(exclude_none=True)


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
        image: path of the first frame, for image-to-video.
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
    negative: str | None
    seeds: list[int]
    settings: ClipSettings
    image: str | None = None
    base: bool
    asked: bool = False
    planned: int = 0

    def key(self, prompt: str, seed: int, adapter: str, **size: int) -> str:
        """Return the key of a clip.

        Args:
            prompt: of the clip.
            seed: of its noise.
            adapter: digest of the LoRA; "" for none.
            size: frames, width and height, if they differ from the settings'.
        """
        shaped = self.settings.values() | size
        return digest.of_value([_VERSION, self.weights, adapter, prompt, seed, shaped])

    def write(self, facts: Facts, word: str) -> Path:
        """Write the order, unless somebody only asks; return its path."""
        path = run_order(self.run, word, self.planned)
        if not facts.asks:
            atomic.write(path, self.model_dump_json().encode())
        return path


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
        settings: of all clips, see `ClipSettings`.
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


def judged(
    order: GenerationOrder, clips: Iterable[Clip], adapter: str
) -> tuple[list[Clip], list[Clip]]:
    """Return the clips that are there and up to date, the order's first, and those to draw.

    The former include clips of prompts of earlier command lines and, if the order's prompt comes
    from the command line, those of the configuration.
    """
    wanted = {clip.key: clip for clip in wishes(order, adapter)}
    there = {}
    for clip in clips:
        other = (clip.asked or order.asked) and (order.base or clip.adapter)
        same = clip.seed in order.seeds and clip.adapter in ("", adapter)
        fits = clip.key == order.key(clip.prompt, clip.seed, clip.adapter)
        if fits and (clip.key in wanted or (other and same)):
            with suppress(OSError):  # a clip that is gone is drawn again
                if Path(order.output, clip.file).stat().st_size == clip.size:
                    there[clip.key] = clip
    good = [there[key] for key in dict.fromkeys((*wanted, *there)) if key in there]
    return good, [clip for key, clip in wanted.items() if key not in there]


def clip_reasons(order: GenerationOrder, adapter: str) -> list[Difference]:
    """Return why the clips there are not those of an order with known prompts."""
    index = GenerationIndex.read(Path(order.output) / INDEX)
    if index is None:
        return [Difference("no clip has been drawn yet")]
    good, missing = judged(order, index.clips, adapter)
    gone = len(index.clips) - len(good)
    if not missing and not gone:
        return []
    loras = {clip.adapter for clip in index.clips} - {"", adapter}
    return [
        *value_differences({"networks": index.weights}, {"networks": order.weights}),
        *value_differences(index.settings, order.settings.values()),
        *(Difference("trained LoRA", short(lora), short(adapter)) for lora in sorted(loras)),
        Difference(f"clips to draw: {len(missing)}, no longer up to date or asked for: {gone}"),
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
    _refuse_conditions(config.models[run.model], plan.name, image := config.generation(run).image)
    order = generation_order(facts, plan.name, run)
    if image is not None:
        try:
            seen = {"image": facts.memo.digest_of_file(Path(image))}
        except OSError as error:
            raise ConfigError(
                f"{image} cannot be read ({error.strerror})",
                where=f"runs.{plan.name}.generate.image",
                hint="check that the file exists and is readable",
            ) from None
        settings = order.settings.model_copy(update=seen)
        order = order.model_copy(update={"image": image, "settings": settings})
    path = order.write(facts, "generate")
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
        negative=prompt_path(config, run.model, settings.negative_prompt) if guided else None,
        seeds=[settings.seed + number for number in range(settings.videos)],
        settings=ClipSettings(
            frames=settings.frames or _longest(config, run),
            width=size.width,
            height=size.height,
            fps=settings.fps,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            flow_shift=settings.flow_shift or trainer.shift([size]),
            scheduler=settings.scheduler,
            negative_prompt=settings.negative_prompt if guided else "",
            timestep_boundary=boundary_of(trainer, model),
        ),
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

"""Orders, keys and records of the clips and losses that are made after a training.

A clip is an MP4 file, or for models of pictures a PNG file; settings of pictures have no `frames`.
A key is a digest of everything that shapes a clip or a loss. The records beside the clips have
their keys. By these, the planner knows which clips are up to date, and only others are drawn. This
module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from latentmake.base import digest
from latentmake.base.errors import TrainingError
from latentmake.base.state_file import JsonFile
from latentmake.config.models import Model
from latentmake.plan.facts import Facts
from latentmake.plan.orders import prompt_path, run_order
from latentmake.plan.product import Difference, Parts, Product, judge, short
from latentmake.runs.order import caption_in, last_place, lock_of
from latentmake.runs.results import (
    EVALUATED,
    FOLDER,
    INDEX,
    METRICS,
    Clip,
    EvaluatedClip,
    GenerationIndex,
    Kind,
    Metrics,
    evaluation_folder,
)
from latentmake.runs.rows import rows_of
from latentmake.trainers.loop.order import CAPTIONS, ClipSettings, Prompt, TrainingOrder

TIMESTEPS = 10
"""Number of timesteps of the losses, spread evenly over the distribution of the training."""
EVALUATION = 1
"""Version of evaluations, raised when the same order would give other results."""

_VERSION = 1  # version of clips, raised when the same order would give other clips
_WORDS = 40  # most characters of a prompt or a stem in a file's name
_SIZE = {"frames": 0, "width": 0, "height": 0}  # stands for the sizes, which items have themselves

FileDigest = Callable[[Path], str]


class GenerationOrder(JsonFile):
    """Order of a run's clips; paths are relative to the working directory.

    Attributes:
        training: path of the training's order.
        online: whether weights may have to be downloaded.
        output: folder of the clips.
        adapters: files of the trained weights (LoRA or network); for Wan 2.2's two networks, the
            one for low noise first.
        manifest: manifest of the run, which has the captions.
        model: model with networks and VAE.
        weights: digest of networks, VAE, text encoder and the kind of prediction.
        captions: number of the manifest's first captions that are used as prompts, too.
        negative: cache file of the negative prompt's embedding; None without guidance.
        image: path of the first frame, for image-to-video.
        lora: path of a LoRA that is used instead of the run's own.
        strength: factor of the LoRA's effect.
        base: whether each clip is also made without the LoRA.
        asked: whether the prompts come from the command line.
        planned: time of the plan in nanoseconds; because of it, Snakemake takes no two orders for
            the same file.
        forced: whether all clips are made again, even if they are up to date.
    """

    word: ClassVar[str] = "generate"
    kind: str
    run: str
    training: str = ""
    online: bool = False
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
    lora: str | None = None
    strength: float = 1.0
    base: bool
    asked: bool = False
    planned: int = 0
    forced: bool = False

    @property
    def path(self) -> Path:
        """Path of the order's file."""
        return run_order(self.run, self.word, self.planned)

    @property
    def files(self) -> list[Path]:
        """Present paths of the LoRA's files; a LoRA of another run may have been moved."""
        paths = map(Path, self.adapters)
        return [*paths] if self.lora is None else [last_place(path) for path in paths]

    @property
    def noun(self) -> str:
        """Word for a result of the order in messages: picture or clip."""
        return "picture" if self.settings.frames is None else "clip"

    def key(self, prompt: str, seed: int, adapter: str, **size: int) -> str:
        """Return the key of a clip.

        Args:
            prompt: prompt of the clip.
            seed: seed of the noise.
            adapter: digest of the LoRA; "" for none.
            size: frames, width and height, if they differ from those of the settings.
        """
        settings = self.settings.values() | size
        return digest.of_value([_VERSION, self.weights, adapter, prompt, seed, settings])

    def parts(self, adapter: str) -> Parts:
        """Return networks and settings of all clips, by name; `adapter` is the LoRA's digest."""
        lora = {} if self.lora is None else {"lora": self.lora}
        strength = {} if self.strength == 1 else {"lora_strength": self.strength}
        settings = self.settings.values() | lora | strength
        return {"networks": self.weights, **settings, "trained LoRA": adapter}

    def texts(self) -> list[str]:
        """Return the texts whose embeddings the order needs, besides captions of the run."""
        negative = [] if self.negative is None else [self.settings.negative_prompt]
        return [*(prompt.prompt for prompt in self.prompts), *negative]


class EvaluationOrder(GenerationOrder):
    """Order of an evaluation. Prompts and sizes of its clips come from held-out items.

    Attributes:
        output: folder of results and clips.
        clips: largest number of items with clips.
        resolution: name of the resolution of the clips.
    """

    word: ClassVar[str] = "evaluate"
    clips: int
    resolution: str

    def product(self, training: TrainingOrder, adapter: str) -> Product:
        """Return the results as a product; raises TrainingError.

        `adapter` is the digest of the LoRA.
        """
        made = [self.weights, self.settings.values() | _SIZE, self.seeds[0]]
        data = lock_of(training.lock).digest
        basis = [data, adapter, training.loss_digest()]
        parts = [EVALUATION, TIMESTEPS, *basis, self.clips, self.resolution, made]
        return Product(
            "it has not been evaluated yet",
            {EVALUATED: digest.of_value(parts)},
            {EVALUATED: self._named(training, data, adapter)},
        )

    def _named(self, training: TrainingOrder, data: str, adapter: str) -> dict[str, str]:
        """Return settings of the evaluation by name, as pages show them."""
        clips = self.settings.values()
        named = {
            f"steps of a {self.noun}": clips["num_inference_steps"],
            "guidance_scale": clips["guidance_scale"],
            "flow_shift of clips": clips.get("flow_shift"),
            **{f"{name} of losses": value for name, value in training.objective().items()},
            "scheduler": clips.get("scheduler"),
            "seed": self.seeds[0],
            "negative prompt": clips["negative_prompt"],
        }
        networks = ", ".join(map(str, training.networks()))
        shown = {name: str(value) for name, value in named.items() if value is not None}
        made = {"network": networks, "dataset": short(data), "adapter": adapter[:12]}
        return {**made, "items with clips": str(self.clips), "resolution": self.resolution, **shown}


def clip_name(prompt: str, seed: int, *, adapter: bool, suffix: str = ".mp4") -> str:
    """Return the name of a clip: words and digest of its prompt, seed, base or adapter."""
    words, number = _slug(prompt)[:_WORDS].strip("-"), digest.of_bytes(prompt.encode())[:8]
    made = "adapter" if adapter else "base"
    return f"{f'{words}-{number}' if words else number}_seed-{seed}_{made}{suffix}"


def evaluated_name(stem: str, key: str, kind: Kind, suffix: str) -> str:
    """Return the name of an evaluation's clip, from the item's stem and the clip's key."""
    return f"{_slug(stem)[-_WORDS:].strip('-')}-{key[:12]}_{kind}{suffix}".removeprefix("-")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


def fault_of(clip: EvaluatedClip, folder: str, file_digest: FileDigest = digest.of_file) -> str:
    """Return the fault of a clip's file in a folder; "" if it is unchanged."""
    path = Path(folder, clip.file)
    try:
        return "" if file_digest(path) == clip.digest else f"{path} is not as it was written"
    except OSError:
        return f"{path} is missing"


# -- state -----------------------------------------------------------------------------------------


def adapter_digest(order: GenerationOrder, file_digest: FileDigest = digest.of_file) -> str:
    """Return the digest of an order's LoRA; raises TrainingError."""
    try:
        files = [file_digest(path) for path in order.files]
        return digest.of_value(files if order.strength == 1 else [*files, order.strength])
    except OSError as error:
        hint = "delete it and give the same command, which trains it again"
        if order.lora is not None:
            hint = f"correct runs.{order.run}.generate.lora: a folder such as runs/NAME"
        what = f"the trained LoRA cannot be read ({error.strerror})"
        raise TrainingError(what, where=str(error.filename), hint=hint) from None


def requested_clips(order: GenerationOrder, adapter: str) -> Iterator[Clip]:
    """Yield the clips of an order; of each prompt and seed, the clip without LoRA first.

    `captions_of` must have added the captions to the order's prompts. `adapter` is the digest of
    the LoRA.
    """
    for prompt in (row.prompt for row in order.prompts):
        for seed in order.seeds:
            for used in ("", adapter) if order.base else (adapter,):
                file = clip_name(prompt, seed, adapter=bool(used), suffix=order.settings.suffix)
                made = {"prompt": prompt, "seed": seed, "adapter": used, "asked": order.asked}
                yield Clip(file=file, key=order.key(prompt, seed, used), **made, size=0)


def kept_and_missing(
    order: GenerationOrder, clips: Iterable[Clip], adapter: str
) -> tuple[list[Clip], list[Clip]]:
    """Return the clips that stay and the clips that must be drawn.

    The clips that stay are up to date. The order's own come first. Others were drawn for a prompt
    of an earlier command line, or, if the order's prompt is from the command line, for prompts of
    the configuration.
    """
    wanted = {clip.key: clip for clip in requested_clips(order, adapter)}
    there = {}
    for clip in clips:
        other = (clip.asked or order.asked) and (order.base or clip.adapter)
        same = clip.seed in order.seeds and clip.adapter in ("", adapter)
        fits = clip.key == order.key(clip.prompt, clip.seed, clip.adapter)
        if fits and (clip.key in wanted or (other and same)):
            with suppress(OSError):  # a clip that is gone is drawn again
                if Path(order.output, clip.file).stat().st_size == clip.size:
                    there[clip.key] = clip
    kept = [there[key] for key in dict.fromkeys((*wanted, *there)) if key in there]
    return kept, [clip for key, clip in wanted.items() if key not in there]


def clip_reasons(
    order: GenerationOrder, file_digest: FileDigest = digest.of_file
) -> list[Difference]:
    """Return the reasons to draw clips or remove old ones; raises UserError."""
    order, adapter = captions_of(order), adapter_digest(order, file_digest)
    index = GenerationIndex.read(Path(order.output) / INDEX)
    product = Product(f"no {order.noun} has been drawn yet", order.parts(adapter))
    if index is None:
        return judge(product, index)
    kept, missing = kept_and_missing(order, index.clips, adapter)
    gone = len(index.clips) - len(kept)
    if not missing and not gone:
        return []
    counts = f"{order.noun}s to draw: {len(missing)}, no longer up to date or asked for: {gone}"
    return [*judge(product, index), Difference(counts)]


def captions_of(order: GenerationOrder) -> GenerationOrder:
    """Return an order whose prompts include the captions of the first trained items.

    Raises:
        UserError: the manifest or a cache file cannot be read, or these captions are empty.
    """
    if not order.captions:
        return order
    rows = (row for row in rows_of(Path(order.manifest)) if row.learned)
    files: dict[tuple[str, str], str] = {}
    for row in rows:
        files.setdefault((row.dataset, row.stem), row.first_text)
        if len(files) == order.captions:
            break
    texts: dict[str, str] = {}
    for file in files.values():
        texts.setdefault(caption_in(file), file)
    prompts = [Prompt(prompt=caption, text=file) for caption, file in texts.items() if caption]
    if not prompts:
        what = "none of the first captions has words to draw from"
        hint = f"set runs.{order.run}.generate.prompts"
        raise TrainingError(what, where=f"run {order.run}", hint=hint)
    return order.model_copy(update={"prompts": [*order.prompts, *prompts], "captions": 0})


def result_reasons(
    order: EvaluationOrder, training: TrainingOrder, file_digest: FileDigest = digest.of_file
) -> list[Difference]:
    """Return the reasons to evaluate again, or none; raises TrainingError."""
    metrics = Metrics.read(Path(order.output) / METRICS)
    product = order.product(training, adapter_digest(order, file_digest))
    if (differences := judge(product, metrics)) or metrics is None:
        return differences
    faults = (fault_of(clip, order.output, file_digest) for clip in metrics.clips())
    if reasons := [Difference(fault) for fault in faults if fault][:1]:
        return reasons
    items = {(row.source, row.group) for row in rows_of(Path(order.manifest)) if row.validation}
    if items >= {(result.source, result.group) for result in metrics.results}:
        return []
    return [Difference("paths or labels of held-out items have changed")]


def following(
    facts: Facts, training: TrainingOrder, word: str, weights: str, more: Mapping[str, Any]
) -> GenerationOrder:
    """Return the order of a run's clips or of its evaluation.

    Args:
        facts: facts about the configuration.
        training: order of the training.
        word: `generate` or `evaluate`.
        weights: digest of all networks that draw.
        more: clip settings that only some trainers have.

    Raises:
        UserError: settings do not fit.
    """
    config, run_name, folder = facts.config, training.run, Path(training.output)
    run = config.runs[run_name]
    settings = config.generation(run)
    size = settings.resolution or run.resolutions[0]
    guided = settings.guidance_scale > 1
    text = partial(prompt_path, config, run.model)
    values: dict[str, Any] = {
        "kind": training.kind,
        "run": run_name,
        "training": str(training.path),
        "online": training.from_hub,
        "output": str(folder / FOLDER),
        "adapters": [str(folder / name) for name in training.results],
        "manifest": training.manifest,
        "model": config.models[run.model],
        "weights": weights,
        "prompts": [Prompt(prompt=prompt, text=text(prompt)) for prompt in settings.prompts],
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
        "forced": f"{word}_{run_name}" in facts.forced,
    }
    if word == "evaluate":
        assert run.validation is not None
        values |= {"prompts": [], "captions": 0, "output": str(evaluation_folder(run_name))}
        clips, resolution = run.validation.clips, run.resolutions[0].name
        return EvaluationOrder(**values, clips=clips, resolution=resolution)
    if settings.lora_strength != 1 and not training.trains_lora:
        what, hint = "it has no effect: the run trains no LoRA", "leave it out"
        raise TrainingError(what, where=f"runs.{run_name}.generate.lora_strength", hint=hint)
    values |= {"image": settings.image, "strength": settings.lora_strength}
    if (lora := settings.lora) is not None:
        is_file = lora.endswith(".safetensors")
        if is_file and len(training.results) > 1:
            what = f"{lora} is one file"
            hint = f"name a folder with {' and '.join(training.results)}"
            raise TrainingError(what, where=f"runs.{run_name}.generate.lora", hint=hint)
        files = [lora] if is_file else [f"{lora}/{name}" for name in training.results]
        values |= {"lora": lora, "adapters": files}
    return GenerationOrder(**values)

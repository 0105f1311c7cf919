"""Clips that a trained network generates: order, keys, index.

No torch here: the planner compares keys to see which clips are there. A clip's key is a digest of
all that shapes it; the index beside the clips has the key of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, StringConstraints

from latentmake import digest
from latentmake.config.models import Model
from latentmake.errors import TrainingError
from latentmake.plan.reasons import Difference, short, value_differences
from latentmake.training.json_file import JsonFile
from latentmake.training.order import caption_in, rows_of

FOLDER = "generated"
"""Folder of the clips below that of their run."""

INDEX = "index.json"
CAPTIONS = 4
"""Items whose captions are the prompts where a run names none."""

_VERSION = 1  # raised when the same order would give other clips
_NAME = r"^[a-z0-9-]+_seed-\d+_(base|adapter)\.mp4$"
_WORDS = 40  # characters of a prompt in a file's name

Digest = Callable[[Path], str]


class ClipPrompt(BaseModel):
    """A prompt, and the cache file of its embedding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str
    text: str


class GenerationOrder(BaseModel):
    """Order of a run's clips; paths are relative to the working directory.

    Attributes:
        kind: of the trainer.
        output: folder of the clips.
        adapters: files of the LoRA: of Wan 2.2's two networks, that for low noise first.
        manifest: of the run, for its captions.
        model: networks, VAE.
        weights: digest of networks, VAE and text encoder.
        prompts: of the clips.
        captions: number of the manifest's first captions that are prompts too.
        negative_prompt: "" without guidance.
        negative: cache file of its embedding; None without guidance.
        seeds: of each prompt's clips.
        boundary: share of the timesteps from which on Wan 2.2's network for high noise is used; 0
            of one network.
        image: first frame of the clips, for image-to-video; with its digest.
        base: whether each clip is also made without the LoRA.
        asked: whether the prompts are those of the command line, and not of the configuration.
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
    prompts: list[ClipPrompt]
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


_Name = Annotated[str, StringConstraints(pattern=_NAME)]


class Clip(BaseModel):
    """A clip in the index.

    Attributes:
        file: name of the MP4.
        key: see `GenerationOrder.key`.
        adapter: digest of the LoRA; "" for a clip without it.
        asked: whether its prompt came from the command line.
        size: bytes of the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: _Name
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


class Wish(NamedTuple):
    """A clip that an order asks for; `adapter` as in `Clip`, `text` is the prompt's embedding."""

    prompt: str
    text: str
    seed: int
    adapter: str
    key: str

    @property
    def file(self) -> str:
        """Name of its MP4."""
        return clip_name(self.prompt, self.seed, adapter=bool(self.adapter))


def clip_name(prompt: str, seed: int, *, adapter: bool) -> str:
    """Return the name of a clip: some words and the digest of its prompt, seed, with what made."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:_WORDS].strip("-")
    number = digest.of_bytes(prompt.encode())[:8]
    made = "adapter" if adapter else "base"
    return f"{f'{words}-{number}' if words else number}_seed-{seed}_{made}.mp4"


def adapter_digest(order: GenerationOrder, file_digest: Digest = digest.of_file) -> str:
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


def wishes(order: GenerationOrder, adapter: str) -> Iterator[Wish]:
    """Yield the clips of an order whose prompts are all known, those without the LoRA first."""
    for each in order.prompts:
        for seed in order.seeds:
            for used in ("", adapter) if order.base else (adapter,):
                key = order.key(each.prompt, seed, used)
                yield Wish(each.prompt, each.text, seed, used, key)


def kept(order: GenerationOrder, index: GenerationIndex | None, adapter: str) -> list[Clip]:
    """Return the clips that are there and are what they would be today, those in order first.

    Besides those that the order asks for these are clips of prompts of earlier command lines, and,
    where the order's prompt is one of the command line, those of the configuration.
    """
    if index is None:
        return []
    places = {wish.key: number for number, wish in enumerate(wishes(order, adapter))}
    found = []
    for clip in index.clips:
        other = (clip.asked or order.asked) and (order.base or clip.adapter)
        same = clip.seed in order.seeds and clip.adapter in ("", adapter)
        key = order.key(clip.prompt, clip.seed, clip.adapter)
        wanted = clip.key in places or (other and same)
        if clip.key == key and wanted and _is_whole(Path(order.output), clip):
            found.append(clip)
    return sorted(found, key=lambda clip: places.get(clip.key, len(places)))


def _is_whole(folder: Path, clip: Clip) -> bool:
    try:
        return (folder / clip.file).stat().st_size == clip.size
    except OSError:
        return False


def clip_reasons(order: GenerationOrder, adapter: str) -> list[Difference]:
    """Return why the clips there are not those of an order with known prompts."""
    index = GenerationIndex.read(Path(order.output) / INDEX)
    if index is None:
        return [Difference("no clip has been drawn yet")]
    there = kept(order, index, adapter)
    wanted = {wish.key for wish in wishes(order, adapter)}
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
    """Return an order with the manifest's first captions among its prompts.

    Raises:
        TrainingError: the manifest is missing or damaged.
        CacheError: a cache file of text is missing or damaged.
    """
    if not order.captions:
        return order
    texts: dict[str, str] = {}
    for text in islice(_texts(Path(order.manifest)), order.captions):
        if caption := caption_in(text):
            texts.setdefault(caption, text)
    prompts = [ClipPrompt(prompt=caption, text=text) for caption, text in texts.items()]
    if not prompts:
        raise TrainingError(
            "none of the first captions has words to draw a clip from",
            where=f"run {order.run}",
            hint=f"set runs.{order.run}.generate.prompts",
        )
    return order.model_copy(update={"prompts": [*order.prompts, *prompts], "captions": 0})


def _texts(manifest: Path) -> Iterator[str]:
    """Yield a cache file of each trained item's text, none twice."""
    seen = set()
    rows: Iterator[dict[str, Any]] = rows_of(manifest, dict)
    for row in rows:
        text = row["text"]
        path = text if isinstance(text, str) else next(iter(text.values()))
        same = (row["dataset"], row["stem"])
        if same not in seen and not row.get("validation"):
            seen.add(same)
            yield path

"""Clips of Wan's network with and without its LoRA.

Each is decoded as it is drawn: a killed process loses the clip in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import UserCpuOffloadHook
from numpy.typing import NDArray

from latentmake.caches.encoders.device import compute_dtype, pick_device, within_memory
from latentmake.caches.encoders.wan import load_clip_vision
from latentmake.caches.encoders.wan_vae import WanVae, load_wan_vae
from latentmake.caches.pixels.plain import decode
from latentmake.caches.pixels.scaling import cover
from latentmake.config.datasets import Dataset
from latentmake.errors import TrainingError
from latentmake.files.media import opened
from latentmake.files.video import write_mp4
from latentmake.geometry.buckets import Size
from latentmake.progress import Progress, say
from latentmake.training.loop.caches import WAN, read_text
from latentmake.training.wan.generation import (
    INDEX,
    Clip,
    GenerationIndex,
    GenerationOrder,
    adapter_digest,
    judged,
)
from latentmake.training.wan.network import Denoiser, Transformer, load_transformer, read_lora
from latentmake.training.wan.recipe import Condition, decode_clip, noise_of, sample_latents

_READING = Dataset(path=".")  # upright, transparency on white


def generate(order: GenerationOrder) -> None:
    """Bring the clips of an order, whose prompts are known, up to date.

    Clips that are out of date stay until all others are there.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    folder, adapter = Path(order.output), adapter_digest(order)
    index = GenerationIndex.read(folder / INDEX)
    clips = {clip.file: clip for clip in index.clips} if index else {}
    if missing := judged(order, clips.values(), adapter)[1]:
        for clip in _draw(order, missing):
            clips[clip.file] = clip
            _write_index(order, clips.values())
    good, _ = judged(order, clips.values(), adapter)
    _write_index(order, good)
    for file in clips.keys() - {clip.file for clip in good}:
        (folder / file).unlink(missing_ok=True)


def _write_index(order: GenerationOrder, clips: Iterable[Clip]) -> None:
    index = GenerationIndex(
        run=order.run, weights=order.weights, settings=order.settings.values(), clips=[*clips]
    )
    index.write(Path(order.output) / INDEX)


def _draw(order: GenerationOrder, missing: Sequence[Clip]) -> Iterator[Clip]:
    """Draw clips, and yield each when its file is there."""
    device = pick_device()
    dtype = compute_dtype(device, "bfloat16", lambda line: None)
    say(f"{order.run}: clips to draw: {len(missing)}, on {device.type}")
    settings, condition = order.settings, condition_of(order, device)
    hint = "lower generate.frames or generate.resolution, or end other programs"
    painter = Painter(order, device, dtype, hint)
    network = _load(order, dtype, lora=any(clip.adapter for clip in missing))
    painter.use(network)
    texts = {each.prompt: each.text for each in order.prompts}
    total = len(missing) * settings.num_inference_steps
    with Progress(total=total, unit="step", desc=f"clips of {order.run}") as progress:
        for clip in missing:
            each: Any
            for each in network.children():
                if getattr(each, "peft_config", None):
                    (each.enable_adapters if clip.adapter else each.disable_adapters)()
            text = read_text(texts[clip.prompt], WAN)["text"]
            where = f"run {order.run}: {clip.file}"
            noise = noise_of(clip.seed, settings.frames, settings.height, settings.width)
            latents = painter.draw(text, noise, condition, where, progress.update)
            path = Path(order.output, clip.file)
            painter.write(path, latents, where)
            yield clip.model_copy(update={"size": path.stat().st_size})


def _load(order: GenerationOrder, dtype: torch.dtype, *, lora: bool) -> Denoiser:
    model = order.model
    found: dict[str, Transformer | None] = {"dit": None, "dit_high_noise": None}
    for key in found:
        if path := getattr(model, key):
            network = load_transformer(path, dtype=dtype)
            if lora:
                high = key == "dit_high_noise"
                read_lora(network, Path(order.output).parent, high_noise=high)
            found[key] = network
    if model.version.boundary is not None and None in found.values():
        say(f"{order.run}: the model names one of Wan 2.2's two networks, which draws all steps")
    low, high_noise = found.values()
    boundary = order.settings.timestep_boundary or 0.0
    return Denoiser(low, high_noise, boundary).eval().requires_grad_(False)


def condition_of(order: GenerationOrder, device: torch.device) -> Condition | None:
    """Return the condition of an order's clips; None where it names no picture.

    The picture covers the clip and is cut around its centre. The encoders are loaded for it alone.

    Raises:
        SourceError: the picture is gone, damaged, or too narrow.
        ModelError: an encoder is missing or damaged.
    """
    if order.image is None:
        return None
    path, model, size = order.image, order.model, order.settings
    with opened(path) as file:
        data = file.read()
    first = cover(decode(data, path, _READING), Size(size.width, size.height), path=path)
    frame = torch.from_numpy(np.ascontiguousarray(first))[None]
    pixels = frame.new_zeros(1, size.frames, *frame.shape[1:])
    pixels[:, 0] = frame
    vae = load_wan_vae(model.vae, device, torch.float32, tiled=model.vae_cache_cpu)
    latents = vae.encode_first_frame(pixels, torch.float32)[0].cpu()
    del vae
    if model.clip is None:
        return Condition(latents)
    half = torch.float32 if device.type == "cpu" else torch.float16
    seen = load_clip_vision(model.clip, device, half).encode(frame)[0]
    return Condition(latents, seen.float().cpu())


class Painter:
    """Draws clips of an order's settings, decodes and writes them.

    `dtype` is that of the network's inputs, and `hint` tells what to do if memory does not suffice.
    """

    def __init__(
        self, order: GenerationOrder, device: torch.device, dtype: torch.dtype, hint: str
    ) -> None:
        self._order, self._device, self._dtype, self._hint = order, device, dtype, hint
        self._network: Denoiser | None = None
        self._vae: WanVae | None = None
        self._hooks: list[UserCpuOffloadHook] = []

    @cached_property
    def _negative(self) -> torch.Tensor | None:
        path = self._order.negative
        return None if path is None else read_text(path, WAN)["text"]

    def use(self, network: Denoiser) -> None:
        """Draw with this network, on the device from its first use until a clip is decoded."""
        self._network = network
        self._hooks = [cpu_offload_with_hook(each, self._device)[1] for each in network.children()]
        if len(self._hooks) > 1 and self._device.type == "cuda":
            size = sum(each.numel() * each.element_size() for each in network.parameters())
            torch.cuda.empty_cache()
            if 1.5 * size > torch.cuda.mem_get_info()[0]:  # each makes room for the other
                for hook, other in zip(self._hooks, reversed(self._hooks), strict=True):
                    hook.hook.prev_module_hook = other

    def draw(
        self,
        text: torch.Tensor,
        noise: torch.Tensor,
        condition: Condition | None,
        where: str,
        done: Callable[[], object],
    ) -> torch.Tensor:
        """Return the latents of a clip, drawn by the network in use; see `sample_latents`.

        Raises:
            TrainingError: memory does not suffice, or the clip is NaN or infinite.
        """
        assert self._network is not None
        latents = within_memory(
            sample_latents,
            self._network,
            text,
            self._negative,
            noise,
            self._order.settings,
            device=self._device,
            dtype=self._dtype,
            condition=condition,
            done=done,
        )
        if latents is None:
            what = "memory does not suffice to draw this clip"
            raise TrainingError(what, where=where, hint=self._hint)
        if not latents.isfinite().all():
            hint = "look at the training's loss; lower guidance_scale"
            raise TrainingError("this clip is NaN or infinite", where=where, hint=hint)
        return latents

    def write(self, path: Path, latents: torch.Tensor, where: str) -> NDArray[np.uint8]:
        """Write a clip as MP4; return its frames, [F, H, W, 3].

        Raises:
            TrainingError: memory does not suffice, even in tiles.
            StorageError: the disk is full.
        """
        for hook in self._hooks:
            hook.offload()
        model = self._order.model
        if self._vae is None:
            self._vae = load_wan_vae(model.vae, self._device, torch.float32, decoder=True)
            if model.vae_cache_cpu:
                self._vae.tile()
        frames = decode_clip(self._vae, latents)
        if frames is None:
            what = "memory does not suffice to decode this clip, even in tiles"
            raise TrainingError(what, where=where, hint=self._hint)
        write_mp4(path, frames, self._order.settings.fps)
        return frames

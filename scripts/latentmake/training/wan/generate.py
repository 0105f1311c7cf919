"""Clips of Wan's network with and without its LoRA.

`python -m latentmake.training.wan.generate ORDER` draws the clips that are missing, and decodes
them when all are drawn, so that networks and VAE are never in memory together. Latents that were
drawn wait in a folder for the VAE: a killed process loses the clip in hand.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from diffusers.utils import logging
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake import digest
from latentmake.caches.encoders.device import compute_dtype, pick_device, within_memory
from latentmake.caches.encoders.wan_vae import load_wan_vae
from latentmake.errors import TrainingError
from latentmake.files import atomic, cachefile
from latentmake.files.mp4 import write_mp4
from latentmake.progress import Progress
from latentmake.training.command import exit_status
from latentmake.training.generation import (
    INDEX,
    Clip,
    GenerationIndex,
    GenerationOrder,
    Wish,
    adapter_digest,
    kept,
    wishes,
)
from latentmake.training.loop.data.headers import read_text
from latentmake.training.loop.data.tensors import WAN
from latentmake.training.order import read_order
from latentmake.training.wan.first_frame import condition_of
from latentmake.training.wan.lora_files import read_lora
from latentmake.training.wan.network import Transformer, load_transformer
from latentmake.training.wan.sampling import (
    Networks,
    Sampling,
    decode_clip,
    latents_shape,
    noise_of,
    sample_latents,
)

_DRAWN = ".latents"  # folder of what is drawn and not decoded
_LATENTS = "latents"


def _say(text: str) -> None:
    Progress.write(text, file=sys.stderr)


def generate(order: GenerationOrder) -> None:
    """Bring the clips of an order, whose prompts are known, up to date.

    Clips that are out of date stay until all others are there.

    Raises:
        UserError: a file is damaged or gone, memory does not suffice, the disk is full.
    """
    folder = Path(order.output)
    adapter = adapter_digest(order)
    old = GenerationIndex.read(folder / INDEX)
    clips = kept(order, old, adapter)
    there = {clip.key for clip in clips}
    missing = [wish for wish in wishes(order, adapter) if wish.key not in there]
    drawn = folder / _DRAWN
    waiting = [wish for wish in missing if _read_latents(drawn, wish) is None]
    if waiting:
        _draw(order, waiting, drawn)
    if missing:
        for clip in _decode(order, missing, drawn):
            clips.append(clip)
            _write_index(order, [*clips, *_others(old, clips)])
    places = {wish.key: number for number, wish in enumerate(wishes(order, adapter))}
    clips.sort(key=lambda clip: places.get(clip.key, len(places)))
    _write_index(order, clips)
    for clip in _others(old, clips):
        (folder / clip.file).unlink(missing_ok=True)
    shutil.rmtree(drawn, ignore_errors=True)


def _others(old: GenerationIndex | None, clips: Sequence[Clip]) -> list[Clip]:
    """Return the clips of an index whose files are not those of others."""
    named = {clip.file for clip in clips}
    return [clip for clip in old.clips if clip.file not in named] if old else []


def _write_index(order: GenerationOrder, clips: Sequence[Clip]) -> None:
    index = GenerationIndex(
        run=order.run, weights=order.weights, settings=order.settings(), clips=[*clips]
    )
    index.write(Path(order.output) / INDEX)


# -- drawing --------------------------------------------------------------------------------------


def _draw(order: GenerationOrder, missing: Sequence[Wish], folder: Path) -> None:
    """Draw the latents of clips: those without the LoRA first, then those with it."""
    device = pick_device()
    dtype = compute_dtype(device, "bfloat16", lambda line: None)
    _say(f"{order.run}: clips to draw: {len(missing)}, on {device.type}")
    condition = condition_of(order, device)
    networks = _load(order, device, dtype, lora=any(wish.adapter for wish in missing))
    sampling = Sampling(order.steps, order.guidance, order.shift, order.scheduler)
    shape = latents_shape(order.frames, order.width, order.height)
    negative = None if order.negative is None else read_text(order.negative, WAN.text)
    with Progress(
        total=len(missing) * order.steps, unit="step", desc=f"clips of {order.run}", file=sys.stderr
    ) as progress:
        for wish in sorted(missing, key=lambda wish: bool(wish.adapter)):
            for network in networks.all:
                _switch(network, on=bool(wish.adapter))
            latents = within_memory(
                sample_latents,
                networks,
                read_text(wish.text, WAN.text),
                negative,
                noise_of(wish.seed, shape),
                sampling,
                device=device,
                dtype=dtype,
                condition=condition,
                enter=_Place(networks, device),
                done=progress.update,
            )
            if latents is None:
                raise TrainingError(
                    f"memory does not suffice for a clip of {order.frames} frames of "
                    f"{order.width} x {order.height}",
                    where=f"run {order.run}",
                    hint="lower generate.frames or generate.resolution, or end other programs",
                )
            if not latents.isfinite().all():
                raise TrainingError(
                    f"the clip of {wish.prompt[:60]!r} is NaN or infinite",
                    where=f"run {order.run}",
                    hint="look at the training's loss; lower guidance_scale",
                )
            data = cachefile.serialize({_LATENTS: latents}, {})
            atomic.write(_latents_file(folder, wish), data)
    del networks
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _load(
    order: GenerationOrder, device: torch.device, dtype: torch.dtype, *, lora: bool
) -> Networks:
    model, found = order.model, {}
    trained = Path(order.output).parent
    for high, path in ((False, model.dit), (True, model.dit_high_noise)):
        if path is None:
            continue
        key = "dit_high_noise" if high else "dit"
        network = load_transformer(path, dtype=dtype, where=f"models.*.{key}")
        if lora:
            read_lora(network, trained, high_noise=high)
        found[high] = network.eval().requires_grad_(False)
    networks = Networks(found.get(False), found.get(True), order.boundary)
    if model.version.boundary is not None and len(networks.all) == 1:
        _say(f"{order.run}: the model names one of Wan 2.2's two networks, which draws all steps")
    if len(networks.all) == 1 or device.type == "cpu":
        for network in networks.all:
            network.to(device)
    return networks


class _Place:
    """Keeps the network in use on the device, and of two the other one where there is room."""

    def __init__(self, networks: Networks, device: torch.device) -> None:
        self._networks, self._device = networks, device

    def __call__(self, network: Transformer) -> None:
        if network.device.type == self._device.type:
            return
        size = sum(each.numel() * each.element_size() for each in network.parameters())
        free = torch.cuda.mem_get_info()[0] if self._device.type == "cuda" else 0
        if free < 2 * size:
            for other in self._networks.all:
                if other is not network:
                    other.to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        network.to(self._device)


def _switch(network: Transformer, *, on: bool) -> None:
    if getattr(network, "peft_config", None):
        if on:
            network.enable_adapters()
        else:
            network.disable_adapters()


def _latents_file(folder: Path, wish: Wish) -> Path:
    return folder / f"{digest.of_value(wish.key)[:32]}.safetensors"


def _read_latents(folder: Path, wish: Wish) -> torch.Tensor | None:
    try:
        return load_file(_latents_file(folder, wish))[_LATENTS]
    except (OSError, SafetensorError, KeyError):
        return None


# -- decoding -------------------------------------------------------------------------------------


def _decode(order: GenerationOrder, wanted: Sequence[Wish], drawn: Path) -> Iterator[Clip]:
    """Decode latents to files, and yield each."""
    vae = load_wan_vae(order.model.vae, pick_device(), torch.float32, decoder=True)
    if order.model.vae_cache_cpu:
        vae.tile()
    with Progress(
        total=len(wanted), unit="clip", desc=f"files of {order.run}", file=sys.stderr
    ) as progress:
        for wish in wanted:
            latents = _read_latents(drawn, wish)
            assert latents is not None
            frames = decode_clip(vae, latents, _say)
            if frames is None:
                raise TrainingError(
                    f"memory does not suffice to decode {order.frames} frames of {order.width} x "
                    f"{order.height}, even in tiles",
                    where=f"run {order.run}",
                    hint="end other programs, or lower generate.frames",
                )
            path = Path(order.output, wish.file)
            write_mp4(path, frames, order.fps)
            yield Clip(
                file=wish.file,
                key=wish.key,
                prompt=wish.prompt,
                seed=wish.seed,
                adapter=wish.adapter,
                asked=order.asked,
                size=path.stat().st_size,
            )
            progress.update()


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.wan.generate ORDER`; return the exit status."""
    logging.set_verbosity_error()
    return exit_status(lambda: generate(read_order(Path(arguments[0]), GenerationOrder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Sample clips with Wan's networks: condition, steps and frames.

The noise depends only on seed and size, so that the networks with and without a LoRA begin with the
same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

from latentmake.config.datasets import Dataset
from latentmake.encode.encoders.device import compute_dtype
from latentmake.encode.encoders.wan import CHANNELS, WanVae, load_clip_vision, load_wan_vae
from latentmake.encode.pixels.plain import decode
from latentmake.encode.pixels.scaling import cover
from latentmake.formats.media import opened
from latentmake.geometry.buckets import Size
from latentmake.models.files import T5_LENGTH
from latentmake.trainers.loop.caches import WAN, Batch, read_text
from latentmake.trainers.loop.generation import GenerationOrder
from latentmake.trainers.loop.recipe import Painter

FIRST_FRAME = "latents_image"
CLIP = "clip"
"""Names of image-to-video's tensors in a batch. FIRST_FRAME holds the mask and the latents of the
first frame, [batch, 20, frames, height, width]. CLIP holds the hidden states of the CLIP image
encoder, [batch, tokens, width]."""

_Pipeline: Any = WanPipeline  # diffusers has no types
_UniPc: Any = UniPCMultistepScheduler
_Euler: Any = FlowMatchEulerDiscreteScheduler
_READING = Dataset(path=".")  # default settings: pictures upright, transparency on white


def padded(text: torch.Tensor) -> torch.Tensor:
    """Pad embeddings with zeros to [batch, 512, width], the length that Wan's network expects."""
    text = text[:, :T5_LENGTH]
    return torch.nn.functional.pad(text, (0, 0, 0, T5_LENGTH - text.shape[1]))


def condition_of(order: GenerationOrder, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of the picture that an order's clips begin with, named as in a batch.

    The picture is scaled to cover the clip, and cropped around its centre. The encoders are loaded
    only for this call. The result is {} for an order without a picture.

    Raises:
        SourceError: the picture is missing, damaged, or too narrow.
        ModelError: an encoder is missing or damaged.
    """
    if order.image is None:
        return {}
    path, model, size = order.image, order.model, order.settings
    with opened(path) as file:
        data = file.read()
    first = cover(decode(data, path, _READING), Size(size.width, size.height), path=path)
    frame = torch.from_numpy(np.ascontiguousarray(first))[None]
    pixels = frame.new_zeros(1, size.frames or 1, *frame.shape[1:])
    pixels[:, 0] = frame
    vae = load_wan_vae(model.vae, device, torch.float32, tiled=model.vae_cache_cpu)
    condition = {FIRST_FRAME: vae.encode_first_frame(pixels, torch.float32).cpu()}
    del vae  # its memory is free before the next encoder is loaded
    if model.clip is None:
        return condition
    seen = load_clip_vision(model.clip, device).encode(frame)
    return {**condition, CLIP: seen.float().cpu()}


class WanPainter(Painter):
    """Samples clips with Wan's networks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._condition: dict[str, torch.Tensor] = {}
        if self.order is not None:
            self._condition = condition_of(self.order, self.device)
            self.dtype = compute_dtype(self.device, "bfloat16", lambda line: None)

    def autocast(self) -> torch.autocast:
        """Return autocast for samples; disable it for clips after a training, as diffusers does."""
        disabled = torch.autocast(self.device.type, enabled=False)
        return super().autocast() if self.order is None else disabled

    def noise_seed(self, seed: int, prompt: str) -> int:
        """Return the seed unchanged, as diffusers uses it; ignore the prompt."""
        return seed

    def latents(
        self,
        text: str,
        seed: int,
        size: tuple[int, int, int],
        done: Callable[[], object],
        batch: Batch | None,
    ) -> torch.Tensor:
        """Sample the latents of a clip; see `Painter`."""
        files = [text] if self.negative is None else [text, self.negative]
        texts = [read_text(file, WAN)["text"] for file in files]
        condition = self._condition if batch is None else batch.more
        frames, height, width = size
        shape = CHANNELS, (frames - 1) // 4 + 1, height // 8, width // 8
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))  # as diffusers
        drawn = self.sample(texts, noise, condition, done)
        self.network.withdraw()  # make room for the VAE
        return drawn

    def sample(
        self,
        texts: Sequence[torch.Tensor],
        noise: torch.Tensor,
        condition: Mapping[str, torch.Tensor],
        done: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """Sample the normalised latents of one clip, [16, f, h, w], float32, on the CPU.

        Args:
            texts: embedding [T, D] of the prompt, and of the negative prompt if there is guidance.
            noise: noise [16, f, h, w] with a standard deviation of 1, on the CPU.
            condition: result of `condition_of`.
            done: function that is called after each step.
        """
        device, dtype, settings = self.device, self.dtype, self.settings

        def conditioned(_module: object, args: Any, inputs: dict[str, Any]) -> Any:
            tensors = {name: tensor.to(device, dtype) for name, tensor in condition.items()}
            hidden = torch.cat([inputs["hidden_states"], tensors[FIRST_FRAME]], dim=1)
            seen = {"encoder_hidden_states_image": tensors[CLIP]} if CLIP in tensors else {}
            return args, inputs | {"hidden_states": hidden} | seen

        def stepped(*_: object) -> dict[str, torch.Tensor]:
            done()
            return {}

        scheduler = _Euler(shift=settings.flow_shift)
        if settings.scheduler != "euler":
            flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
            scheduler = _UniPc(**flow, flow_shift=settings.flow_shift)
        embeds = [padded(text[None].to(device, dtype)) for text in texts]
        guided, denoiser = len(texts) > 1, self.network
        networks = [part for part in (denoiser.high, denoiser.low) if part is not None]
        denoiser.bring(networks[0])  # the pipeline computes on the device of this network
        two = {}
        if len(networks) > 1:
            two = {"transformer_2": networks[1], "boundary_ratio": denoiser.boundary}
        empty = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
        pipeline = _Pipeline(**empty, scheduler=scheduler, transformer=networks[0], **two)
        pipeline.set_progress_bar_config(disable=True)
        with ExitStack() as hooks:
            for part in networks:
                if condition:
                    hook = part.register_forward_pre_hook(conditioned, with_kwargs=True)
                    hooks.enter_context(hook)
                # Guidance and steps are computed in float32, for every dtype of the network.
                hook = part.register_forward_hook(lambda module, args, output: (output[0].float(),))
                hooks.enter_context(hook)
            latents = pipeline(
                prompt_embeds=embeds[0],
                negative_prompt_embeds=embeds[1] if guided else None,
                latents=noise[None],
                num_inference_steps=settings.num_inference_steps,
                guidance_scale=settings.guidance_scale if guided else 1.0,
                callback_on_step_end=stepped,
                output_type="latent",
            ).frames
        clip: torch.Tensor = latents[0].float().cpu()
        return clip

    def load_vae(self) -> WanVae:
        """Load the VAE as a decoder."""
        vae = load_wan_vae(self.recipe.order.model.vae, self.device, torch.float32, decoder=True)
        if self.order is not None and self.order.model.vae_cache_cpu:
            vae.tile()
        return vae

"""Floating-point operations of encoders and of a training step, for a guess at their time.

Counted by torch's FlopCounterMode on diffusers' AutoencoderKL (Stable Diffusion, 512 x 512),
AutoencoderKLWan (17 frames of 832 x 480) and WanTransformer3DModel; a smaller network of the kind
is taken to need as much less as its files are smaller.
"""

from __future__ import annotations

import math
from pathlib import Path

from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.files.cores import usable_cores
from latentmake.models.files import encoder_files
from latentmake.models.wan_shapes import DitShapes

_VAE_BYTES = {False: 334_615_452, True: 507_570_124}  # of an image's and Wan's VAE in float32
_PIXEL = {False: 4.26e6, True: 5.14e6}  # operations a pixel of a frame
_CONFIGURATION = ".json"
_GPU, _CORE = 1e14, 2e10  # operations a second
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of drivers of NVIDIA, AMD and WSL


def guessed_speed() -> float:
    """Return operations a second: 100 TFLOP/s with a GPU, else 20 GFLOP/s for each core."""
    if any(Path(device).exists() for device in _DEVICES):
        return _GPU
    return _CORE * usable_cores()


def latents_flops(model: Model) -> float | None:
    """Return the operations a pixel of a frame to encode latents; None where nobody knows."""
    size = _size(model, model.vae)
    video = model.spec.video
    if size is None:
        return None
    # Image-to-video encodes the first frame, with grey ones after it, too.
    return _PIXEL[video] * size / _VAE_BYTES[video] * (2 if model.image_to_video else 1)


def text_flops(model: Model) -> float | None:
    """Return the operations a token of a caption; None where nobody knows.

    Two a weight, of two bytes.
    """
    sizes = [_size(model, place) for place in model.text]
    known = [size for size in sizes if size is not None]
    return float(sum(known)) if len(known) == len(sizes) else None


def training_flops(
    dit: DitShapes,
    latent: tuple[int, int, int],
    *,
    batch: int,
    text_tokens: int,
    gradient_checkpointing: bool,
) -> float:
    """Return the operations of forward and backward pass of a step that trains a LoRA.

    The frozen weights have no gradients: their backward pass is as long as the forward pass, that
    of attention twice as long. Gradient checkpointing does the forward pass twice.
    """
    tokens = math.prod(size // step for size, step in zip(latent, dit.patch, strict=True))
    width, text = dit.dim, text_tokens
    layers = 2 * tokens * (6 * width**2 + 2 * width * dit.ffn_dim) + 4 * text * width**2
    attention = 4 * tokens**2 * width + 4 * tokens * text * width
    forward = 2 if gradient_checkpointing else 1
    return float(batch * dit.layers * ((forward + 1) * layers + (forward + 2) * attention))


def _size(model: Model, weights: Weights) -> int | None:
    """Return the bytes of a local network's files."""
    if weights.path is None:
        return None
    try:
        files = encoder_files(model, weights)
        return sum(path.stat().st_size for path in files if path.suffix != _CONFIGURATION)
    except (OSError, ModelError):
        return None

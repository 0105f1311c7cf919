"""Recipe of a training: network, loss, devices, random numbers, and the order of examples.

Every random choice of a training is drawn from (seed, purpose, epoch or step), never from a state
that would have to be carried from step to step.

Flow matching (Lipman et al. 2022, https://arxiv.org/abs/2210.02747) mixes noisy = (1 - s) x + s
noise, s a timestep's share of all, and its target is noise - x.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from accelerate.accelerator import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    is_bf16_available,
    parse_flag_from_env,
)
from numpy.typing import NDArray
from PIL import Image

from latentmake import digest
from latentmake.caches.encoders.device import pick_device, within_memory
from latentmake.config.trainers import LoopTrainer
from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.files.video import write_mp4
from latentmake.progress import say
from latentmake.training.loop.caches import Batch, Caches, CacheTensors, Stored, copied
from latentmake.training.loop.clips import GenerationOrder
from latentmake.training.loop.order import ClipSettings, Order, TrainingOrder

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The others wait while the first process draws samples, which may take hours: NCCL's own limit is
# ten minutes. `accelerate launch` ends all processes as soon as one dies.
_TIMEOUT = timedelta(days=7)
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")


def decided(order: Order) -> Order:
    """Return an order in this machine's precision if it says `auto`; raises DeviceError."""
    if order.trainer.mixed_precision != "auto":
        return order
    uses_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    device = "cpu" if uses_cpu else pick_device().type
    if device == "cpu":
        return order.with_settings(mixed_precision="no")
    # Emulated by older GPUs, it is slower than float32.
    cuda = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    has_it = cuda or (device != "cuda" and is_bf16_available())
    return order.with_settings(mixed_precision="bf16" if has_it else "fp16")


def make_accelerator(settings: LoopTrainer, *, several: bool = False) -> Any:
    """Return the Accelerator of this process, as `accelerate launch` has set it up.

    With `several`, a step may leave some trained weights without gradients.

    Raises:
        DeviceError: torch does not see this machine's GPU.
        TrainingError: the machine cannot compute in this precision, or accelerate shards the model.
    """
    if not parse_flag_from_env("ACCELERATE_USE_CPU"):
        pick_device()  # accelerate would train on the CPU and say nothing
    handlers: list[Any] = [InitProcessGroupKwargs(timeout=_TIMEOUT)]
    if several:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    try:
        accelerator: Any = Accelerator(
            mixed_precision=settings.mixed_precision, kwargs_handlers=handlers
        )
    except ValueError as error:
        what = f"this machine cannot compute in {settings.mixed_precision} ({error})"
        hint = f"set it to `{'fp16' if settings.mixed_precision == 'bf16' else 'no'}`"
        raise TrainingError(what, where="trainer.mixed_precision", hint=hint) from None
    if (how := accelerator.distributed_type.value) not in _REPLICATED:
        what = f"the {settings.kind} trainer does not train under {how}"
        hint = "choose one device or multi-GPU in `accelerate config`, without DeepSpeed or FSDP"
        raise TrainingError(what, where="trainer.accelerate_config", hint=hint)
    return accelerator


def set_up(settings: LoopTrainer) -> None:
    """Set torch's kernels, by the setting `deterministic`."""
    if settings.deterministic:
        # cuBLAS repeats itself only with a workspace of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reseed(seed: int, device: torch.device) -> None:
    """Set the generators of the CPU and of one device, and no others.

    `torch.manual_seed` asks for every kind of device there is, which takes as long as a layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that is as good as independent for different parts."""
    return int(digest.of_value(parts)[:16], 16) >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a random generator (on the CPU, the same on all machines) for these parts."""
    return torch.Generator().manual_seed(seed_of(*parts))


def epoch_batches(
    shapes: Sequence[tuple[int, ...]],
    repeats: Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
) -> list[list[int]]:
    """Return the batches of one epoch, as indices: one shape a batch, shuffled.

    An epoch, counted from 0, shows each example as often as it `repeats`. The last batch of a shape
    may be shorter.
    """
    random = generator(seed, "order", epoch)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (shape, count) in enumerate(zip(shapes, repeats, strict=True)):
        groups.setdefault(shape, []).extend([index] * count)
    batches: list[list[int]] = []
    for _, members in sorted(groups.items()):
        order = torch.randperm(len(members), generator=random).tolist()
        shuffled = [members[place] for place in order]
        batches += [
            shuffled[start : start + batch_size] for start in range(0, len(shuffled), batch_size)
        ]
    return [batches[place] for place in torch.randperm(len(batches), generator=random).tolist()]


class BatchOrder:
    """Batches of each process at each optimizer step.

    Epochs follow one another without a gap: micro-batch n of the training is batch n of the endless
    row of epochs. A step takes `accumulation * processes` of them in turn, so all processes always
    have work, and no batch is shown twice or left out. Of an example with `variants`, one of them
    is in the batch.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        repeats: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        accumulation: int = 1,
        processes: int = 1,
        variants: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._epoch = lru_cache(maxsize=2)(
            lambda epoch: epoch_batches(shapes, repeats, batch_size, seed, epoch)
        )
        self.batches_per_epoch = len(self._epoch(0))
        self.accumulation, self.processes = accumulation, processes
        self._seed, self._variants = seed, variants or {}

    def _batch(self, number: int) -> list[int]:
        epoch, place = divmod(number, self.batches_per_epoch)
        return self._epoch(epoch)[place]

    def epoch(self, step: int) -> float:
        """Return how many epochs have passed after `step` steps."""
        return step * self.accumulation * self.processes / self.batches_per_epoch

    def items(self, step: int) -> int:
        """Return how many examples all processes together see in step `step` (from 1)."""
        each = self.accumulation * self.processes
        return sum(len(self._batch(number)) for number in range((step - 1) * each, step * each))

    def batches(self, process: int, first: int, last: int) -> Iterator[list[int]]:
        """Yield the batches of one process for steps `first` to `last` (from 1, both included)."""
        for number in range((first - 1) * self.accumulation, last * self.accumulation):
            batch = self._batch(number * self.processes + process)
            step, part = divmod(number, self.accumulation)
            # One number for each example, whether it is used or not: no other's depends on it.
            random = generator(self._seed, "variant", step + 1, process, part)
            draws = torch.rand(len(batch), generator=random, dtype=torch.float64).tolist()
            several = [self._variants.get(index, [index]) for index in batch]
            yield [each[int(draw * len(each))] for each, draw in zip(several, draws, strict=True)]


_HELD_OUT = 4  # timesteps of a held-out item


class Losses(NamedTuple):
    """Mean squared error of each example, [batch], float32; and times its weights.

    These are the weight of its timestep and, of a regularisation image, `prior_loss_weight`.
    """

    raw: torch.Tensor
    weighted: torch.Tensor


Part = tuple[Batch, torch.Tensor, torch.Tensor]
"""A micro-batch, with its noise and timesteps [batch]."""


class Objective:
    """Noise, timesteps and losses of a training. A trainer has its own `draw`, `at` and `predict`.

    Attributes:
        timesteps: their number.
        draw: from the shape of a micro-batch and a generator on the CPU: noise of this shape, and a
            timestep for each example.
        at: the timesteps at some shares, in [0, 1), of the way into the noise.
        predict: from network, batch, noisy latents on the network's device, timesteps [batch]
            wherever they were drawn, and dtype of the network's inputs: its prediction, of the
            latents' shape.
    """

    timesteps: int = 1000
    draw: Callable[[torch.Size, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    at: Callable[[torch.Tensor], torch.Tensor]
    predict: Callable[[Any, Batch, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]

    def noisy(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return latents with the noise of their timesteps."""
        sigmas = (timesteps / self.timesteps).view(-1, *[1] * (latents.ndim - 1))
        return (1 - sigmas) * latents + sigmas * noise

    def target(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the network's target, of the latents' shape."""
        return noise - latents

    def in_turns(self, parts: Iterable[Part], step: int) -> Iterable[Part]:
        """Return the micro-batches of a step in the order in which they are computed."""
        return parts

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each timestep, [batch]; None where all have the same."""
        return None

    def losses(
        self,
        network: Any,
        batch: Batch,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Losses:
        """Return the loss of each example; the network's device and its inputs' dtype are given.

        `noise` has the latents' shape, `timesteps` [batch].
        """
        latents, noise = copied(batch.latents, device), copied(noise, device)
        there = copied(timesteps, device)
        noisy = self.noisy(latents, noise, there)
        predicted = self.predict(network, batch, noisy, timesteps, dtype)
        wanted = self.target(latents, noise, there)
        errors = torch.nn.functional.mse_loss(predicted.float(), wanted.float(), reduction="none")
        raw = errors.mean(dim=tuple(range(1, errors.ndim)))
        weighted = raw
        for weights in (self.weights(there), batch.weights):
            if weights is not None:
                weighted = weighted * copied(weights, device)
        return Losses(raw, weighted)


LossesOf = Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor]
"""From batch, noise and timesteps [batch] to the loss of each example."""


def probe_loss(
    losses: LossesOf, caches: Caches, *, objective: Objective, seed: int, size: int = 64
) -> float:
    """Return the mean loss over a fixed set of examples, noises and timesteps.

    The timesteps are spread evenly over the schedule, for the loss depends on them more than on
    the example. In a small dataset each example comes several times.

    `seed` fixes the set.
    """
    random = generator(seed, "probe")
    order = torch.randperm(len(caches), generator=random).tolist()
    shuffled = torch.randperm(size, generator=random)
    spread = spread_timesteps(objective, size)[shuffled]
    total = 0.0
    with torch.no_grad():
        for probe in range(size):
            batch = caches.batch([order[probe % len(order)]])
            noise = torch.randn(batch.latents.shape, generator=generator(seed, "probe", probe))
            total += float(losses(batch, noise, spread[probe : probe + 1]))
    return total / size


def item_losses(
    losses: LossesOf, caches: Caches, index: int, timesteps: torch.Tensor
) -> Iterator[float]:
    """Yield the loss of a held-out item at each of some timesteps.

    The noise follows from the key of the item's latents: it is the same for every network, and for
    whatever else is held out.
    """
    batch, key = caches.batch([index]), caches.examples[index].latents.key
    for number, timestep in enumerate(timesteps):
        random = generator("evaluation", key, number)
        noise = torch.randn(batch.latents.shape, generator=random)
        yield float(losses(batch, noise, timestep[None]))


def held_out_losses(losses: LossesOf, caches: Caches, objective: Objective) -> dict[str, float]:
    """Return the mean loss of held-out items, each at the same timesteps, as `validation_loss`.

    Behind it, as `validation_loss/NAME`, is that of each group, see `Row.group`.
    """
    timesteps = spread_timesteps(objective, _HELD_OUT)
    found: dict[str, list[float]] = {"validation_loss": []}
    for index, row in enumerate(caches.rows):
        values = [*item_losses(losses, caches, index, timesteps)]
        found["validation_loss"] += values
        if group := row.group:
            found.setdefault(f"validation_loss/{group}", []).extend(values)
    return {name: sum(values) / len(values) for name, values in found.items()}


def spread_timesteps(objective: Objective, count: int) -> torch.Tensor:
    """Return timesteps [count] in the middle of equal shares of the way into the noise."""
    return objective.at((torch.arange(count) + 0.5) / count)


Network: TypeAlias = Any  # a torch.nn.Module whose call is a matter of its recipe


class Painter:
    """Draws and writes clips or pictures: samples, and those that follow a training.

    A trainer has its own `latents` and `load_vae`.

    Args:
        recipe: of the training.
        settings: of all that it draws.
        negative: cache file of the negative prompt's embedding; None without guidance.
        stored: latents of an item, with the scale and the size of all.
        device: of the network.
        order: of the clips that follow a training; None of samples.

    Attributes:
        network: that draws.
        is_trained: whether it has learnt.
        objective: of its training.
        dtype: of the network's inputs.
        vae: None until it is needed.
        latents: draws the unscaled latents of a clip, float32, on the CPU, from the cache file of
            its text, the seed of its noise, and frames, height and width. The batch is that of an
            evaluated item; `done` is called after each step.
        load_vae: returns what has `decode(latents)`, which gives the frames [F, H, W, 3], and
            `tile()`, after which it decodes in tiles.
    """

    recipe: Any
    network: Network = None
    is_trained: bool = False
    vae: Any = None
    latents: Callable[..., torch.Tensor]
    load_vae: Callable[[], Any]

    def __init__(
        self,
        recipe: Recipe,
        settings: ClipSettings,
        negative: str | None,
        stored: Stored,
        device: torch.device,
        order: GenerationOrder | None = None,
    ) -> None:
        self.recipe, self.settings, self.negative, self.stored = recipe, settings, negative, stored
        self.device, self.order, self.objective = device, order, recipe.make_objective()
        self.dtype = DTYPES[recipe.order.trainer.mixed_precision]

    def noise_seed(self, seed: int, prompt: str) -> int:
        """Return the seed of the noise of a prompt."""
        return seed_of(seed, "sample", prompt, 0)

    def autocast(self) -> torch.autocast:
        """Return the context in which the network computes; float32 needs none."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def losses(self, *part: Any) -> torch.Tensor:
        """Return the loss of each example by the network; see `Part`."""
        device, dtype = self.device, self.dtype
        with self.autocast():
            return self.objective.losses(self.network, *part, device=device, dtype=dtype).raw

    def write(self, path: Path, latents: torch.Tensor) -> NDArray[np.uint8] | None:
        """Write a clip as MP4 or a picture as PNG; return its frames [F, H, W, 3].

        Returns:
            None where memory does not suffice to decode it, even in tiles.

        Raises:
            FloatingPointError: its latents or pixels are NaN or infinite; the message is a hint.
        """
        if not latents.isfinite().all():
            raise FloatingPointError(self._remedy())
        frames = within_memory(self._frames, latents)
        if frames is None and self.vae is not None:
            say("out of memory: decoding in tiles of 256 x 256 pixels")
            self.vae.tile()
            frames = within_memory(self._frames, latents)
        if frames is not None and path.suffix == ".mp4":
            write_mp4(path, frames, self.settings.fps or 1)
        elif frames is not None:
            with atomic.replacing(path) as temporary:
                Image.fromarray(frames[0]).save(temporary, "PNG")
        return frames

    def _remedy(self) -> str:
        if self.dtype == torch.float16:
            return "set the trainer's `mixed_precision` to `bf16` or `no`"
        if self.is_trained:
            return "lower `learning_rate`, or check that the network fits its noise schedule"
        return "check the weights of the network, and that it fits its noise schedule"

    def _frames(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        self.vae = self.vae or self.load_vae()
        frames: NDArray[np.uint8] = self.vae.decode(latents)
        return frames


class Recipe:
    """Network, objective, samples and written files of a training; a trainer has its own.

    Attributes:
        results: names of all files and folders that a training of this kind may leave in its
            output folder, of which one without the others belongs to an older training.
        probes: examples of the loss at the start and at the end.
        rate: scalar of the items trained on in a second.
        several: whether a step may leave some trained weights without gradients.
        tensors: what it reads of cache files.
        make_objective: returns noise, timesteps and loss; raises ModelError where they do not fit
            the network.
        make_network: returns the network as a training begins with it, the same each time, from
            `channels` of the latents, `text_width` of the captions' embeddings and the `dtype` of
            frozen weights; if `plain`, without a new LoRA. Raises UserError where network, caches
            and settings do not fit.
        clip_size: returns frames, height and width in pixels of an item, from its latents.
        painter: class of what draws samples and clips.
        write_copy: writes the trained weights into a folder of their own; one of that name is
            replaced.
        read_copy: puts back weights from files such as those of the order's `results`, those of a
            LoRA times a strength; raises TrainingError where they are missing or damaged, or of
            another network.
    """

    results: ClassVar[tuple[str, ...]]
    probes: ClassVar[int] = 64
    rate: ClassVar[str] = "images_per_second"
    several: bool = False
    order: TrainingOrder
    tensors: CacheTensors
    make_objective: Callable[[], Objective]
    make_network: Callable[..., Network]
    clip_size: Callable[[Stored], tuple[int, int, int]]
    painter: ClassVar[type[Painter]]
    write_copy: Callable[[Network, Path], None]
    read_copy: Callable[..., None]

    def __init__(self, order: Any) -> None:
        self.order = order

    def place(self, network: Network, device: torch.device, *, lend: bool = False) -> None:
        """Put a network on a device; one that is lent may make room for a VAE."""
        network.to(device)

"""Recipe of a training: network, loss, devices, random numbers, and the order of examples.

Every random choice follows from (seed, purpose, epoch or step). No random state has to be carried
from step to step, so a resumed training draws the same numbers.

Flow matching (Lipman et al. 2022, https://arxiv.org/abs/2210.02747) mixes latents with noise:
noisy = (1 - s) latents + s noise, where s is the timestep divided by the number of timesteps. The
network's target is noise - latents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

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

from latentmake.base import atomic, digest
from latentmake.base.errors import TrainingError
from latentmake.base.progress import say
from latentmake.config.trainers import LoopTrainer
from latentmake.encode.encoders.device import attempt, pick_device
from latentmake.formats.video import write_mp4
from latentmake.runs.order import Record
from latentmake.trainers.loop.caches import Batch, CacheFile, Caches, CacheTensors, copied
from latentmake.trainers.loop.generation import GenerationOrder
from latentmake.trainers.loop.order import ClipSettings, Order, TrainingOrder

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The other processes wait while the first one draws samples, which may take hours. NCCL's own limit
# of ten minutes would end them. If a process dies, `accelerate launch` ends the others at once.
_TIMEOUT = timedelta(days=7)
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")


def decided(order: Order) -> Order:
    """Return an order whose `mixed_precision: auto` is replaced by this machine's best precision.

    Raises:
        DeviceError: torch does not see this machine's GPU.
    """
    if order.trainer.mixed_precision != "auto":
        return order
    uses_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    device = "cpu" if uses_cpu else pick_device().type
    if device == "cpu":
        return order.with_settings(mixed_precision="no")
    # Older GPUs emulate bfloat16, which is slower than float32.
    cuda = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    has_it = cuda or (device != "cuda" and is_bf16_available())
    return order.with_settings(mixed_precision="bf16" if has_it else "fp16")


def make_accelerator(settings: LoopTrainer, *, several: bool = False) -> Any:
    """Return the Accelerator of this process, as `accelerate launch` has set it up.

    With `several`, a step may leave some trained weights without gradients.

    Raises:
        DeviceError: torch does not see this machine's GPU.
        TrainingError: the machine cannot compute in this precision, or accelerate would shard the
            model.
    """
    if not parse_flag_from_env("ACCELERATE_USE_CPU"):
        pick_device()  # raises an error where accelerate would silently train on the CPU
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
    """Make torch use deterministic kernels, if the setting `deterministic` says so."""
    if settings.deterministic:
        # cuBLAS gives the same bits each time only with a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reseed(seed: int, device: torch.device) -> None:
    """Seed the random generators of the CPU and of one device only.

    `torch.manual_seed` looks for every kind of device, which takes as long as a layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits; different parts give practically independent seeds."""
    return int(digest.of_value(parts)[:16], 16) >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a random generator for these parts: on the CPU, so equal on all machines."""
    return torch.Generator().manual_seed(seed_of(*parts))


class BatchOrder:
    """Batches of each process in each optimizer step.

    The batches of all epochs form one endless sequence. Micro-batch n of the training is batch n of
    this sequence. A step takes the next `accumulation * processes` batches, so that all processes
    always have work, and no batch is shown twice or left out. If an example has `variants`, a batch
    shows one of them, chosen at random.

    Args:
        caches: examples, with the variants of their texts.
        settings: batch size, accumulation and seed of the training.
        processes: number of processes.
    """

    def __init__(self, caches: Caches, settings: LoopTrainer, processes: int = 1) -> None:
        self._examples, self._variants = caches.examples[: len(caches.rows)], caches.variants
        self._batch_size, self._seed = settings.train_batch_size, settings.seed
        self.accumulation, self.processes = settings.gradient_accumulation_steps, processes
        self._epoch = lru_cache(maxsize=2)(self.shuffled)
        self.batches_per_epoch = len(self._epoch(0))

    def shuffled(self, epoch: int) -> list[list[int]]:
        """Return the shuffled batches of an epoch (from 0), as indices of examples.

        All examples of a batch have one shape. The last batch of a shape may be shorter.
        """
        random = generator(self._seed, "order", epoch)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, example in enumerate(self._examples):
            groups.setdefault(example.latents.shape, []).extend([index] * example.repeats)
        batches: list[list[int]] = []
        size = self._batch_size
        for _, members in sorted(groups.items()):
            order = torch.randperm(len(members), generator=random).tolist()
            shuffled = [members[place] for place in order]
            batches += [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
        order = torch.randperm(len(batches), generator=random).tolist()
        return [batches[place] for place in order]

    def _batch(self, number: int) -> list[int]:
        epoch, place = divmod(number, self.batches_per_epoch)
        return self._epoch(epoch)[place]

    def epoch(self, step: int) -> float:
        """Return how many epochs have passed after `step` steps."""
        return step * self.accumulation * self.processes / self.batches_per_epoch

    def items(self, step: int) -> int:
        """Return how many examples all processes together see in step `step` (from 1)."""
        count = self.accumulation * self.processes
        return sum(len(self._batch(number)) for number in range((step - 1) * count, step * count))

    def batches(self, process: int, first: int, last: int) -> Iterator[list[int]]:
        """Yield the batches of one process for steps `first` to `last` (from 1, both included)."""
        for number in range((first - 1) * self.accumulation, last * self.accumulation):
            batch = self._batch(number * self.processes + process)
            step, part = divmod(number, self.accumulation)
            # A number is drawn for each example, even if it has one variant. So the choices of
            # other examples do not depend on it.
            random = generator(self._seed, "variant", step + 1, process, part)
            draws = torch.rand(len(batch), generator=random, dtype=torch.float64).tolist()
            groups = [self._variants.get(index, [index]) for index in batch]
            yield [group[int(draw * len(group))] for group, draw in zip(groups, draws, strict=True)]


_HELD_OUT = 4  # number of timesteps of a held-out item's loss


Part = tuple[Batch, torch.Tensor, torch.Tensor]
"""A micro-batch, its noise, and its timesteps [batch]."""


class Objective:
    """Noise, timesteps and targets of a training.

    Each trainer defines `draw`, `at` and `predict`.

    Attributes:
        timesteps: number of timesteps.
        draw: function from the shape of a micro-batch and a generator on the CPU to noise of this
            shape and a timestep for each example.
        at: function from shares in [0, 1) of the way into the noise to timesteps.
        predict: function that returns the network's prediction, of the latents' shape. Its
            arguments are the network, the batch, the noisy latents on the network's device in the
            dtype of its inputs, and the timesteps [batch] on the device where they were drawn.
    """

    timesteps: int = 1000
    draw: Callable[[torch.Size, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    at: Callable[[torch.Tensor], torch.Tensor]
    predict: Callable[[Any, Batch, torch.Tensor, torch.Tensor], torch.Tensor]

    def mixed(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents mixed with the noise of their timesteps, and the prediction's target."""
        sigmas = (timesteps / self.timesteps).view(-1, *[1] * (latents.ndim - 1))
        return (1 - sigmas) * latents + sigmas * noise, noise - latents

    def spread(self, count: int) -> torch.Tensor:
        """Return timesteps [count]: the middles of equal parts of the way into the noise."""
        return self.at((torch.arange(count) + 0.5) / count)

    def in_turns(self, parts: Iterable[Part], step: int) -> Iterable[Part]:
        """Return the micro-batches of a step in the order in which they are to be computed."""
        return parts

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return the weights of timesteps, [batch]; None if all are equal."""
        return None


Network: TypeAlias = Any  # a torch.nn.Module that only its recipe knows how to call


class Painter:
    """Draws and writes samples of a training, and clips or pictures after it.

    Each trainer defines `latents` and `load_vae`.

    Args:
        recipe: recipe of the training.
        settings: settings of all clips or pictures.
        negative: cache file of the negative prompt's embedding; None without guidance.
        stored: latents of any item; their scale and pixels per column hold for all items.
        device: device of the network.
        order: order of the clips after a training; None for samples.

    Attributes:
        network: network that draws.
        is_trained: whether the network has been trained.
        objective: objective of the network's training.
        dtype: dtype of the network's inputs.
        vae: VAE; None until it is needed.
        latents: function that returns the unscaled latents of a clip, float32, on the CPU. Its
            arguments are the cache file of the text, the seed of the noise, (frames, height,
            width), a function that is called after each step, and the batch of an evaluated item
            or None.
        load_vae: function that returns the VAE. It has the methods `decode(latents)`, which returns
            frames [F, H, W, 3], and `tile()`, after which it decodes in tiles.
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
        stored: CacheFile,
        device: torch.device,
        order: GenerationOrder | None = None,
    ) -> None:
        self.recipe, self.settings, self.negative, self.stored = recipe, settings, negative, stored
        self.device, self.order, self.objective = device, order, recipe.objective(recipe.order)
        self.dtype = DTYPES[recipe.order.trainer.mixed_precision]

    def noise_seed(self, seed: int, prompt: str) -> int:
        """Return the seed of the noise of a prompt."""
        return seed_of(seed, "sample", prompt, 0)

    def autocast(self) -> torch.autocast:
        """Return the context in which the network computes; for float32 it has no effect."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def losses(
        self, network: Network, batch: Batch, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the examples of a micro-batch, float32; see `Part`.

        Returns:
            Mean squared errors [batch]; and the same errors, multiplied by the weights of their
            timesteps and, for regularisation images, by `prior_loss_weight`.
        """
        objective, device = self.objective, self.device
        latents, noise = copied(batch.latents, device), copied(noise, device)
        there = copied(timesteps, device)
        with self.autocast():
            noisy, wanted = objective.mixed(latents, noise, there)
            predicted = objective.predict(network, batch, noisy.to(self.dtype), timesteps)
            wanted = wanted.float()
            errors = torch.nn.functional.mse_loss(predicted.float(), wanted, reduction="none")
            raw = errors.mean(dim=tuple(range(1, errors.ndim)))
            weighted = raw
            for weights in (objective.weights(there), batch.weights):
                if weights is not None:
                    weighted = weighted * copied(weights, device)
        return raw, weighted

    def probe_loss(self, caches: Caches) -> float:
        """Return the mean loss over a fixed set of examples, noises and timesteps.

        The timesteps are spread evenly over the schedule, because the loss depends more on them
        than on the example. The examples of a small dataset occur several times. The seed of the
        training fixes the set.
        """
        seed, size = self.recipe.order.trainer.seed, int(self.recipe.probes)
        random = generator(seed, "probe")
        order = torch.randperm(len(caches), generator=random).tolist()
        timesteps = self.objective.spread(size)[torch.randperm(size, generator=random)]
        total = 0.0
        for probe in range(size):
            batch = caches.batch([order[probe % len(order)]])
            noise = torch.randn(batch.latents.shape, generator=generator(seed, "probe", probe))
            raw, _ = self.losses(self.network, batch, noise, timesteps[probe : probe + 1])
            total += float(raw)
        return total / size

    def item_losses(
        self, caches: Caches, index: int, count: int, pause: Callable[[], object] = lambda: None
    ) -> Iterator[float]:
        """Yield the losses of a held-out item at `count` timesteps; call `pause` before each.

        The noise follows from the key of the item's latents. It is the same for every network, and
        does not depend on the other held-out items.
        """
        batch, key = caches.batch([index]), caches.examples[index].latents.key
        for number, timestep in enumerate(self.objective.spread(count)):
            pause()
            random = generator("evaluation", key, number)
            noise = torch.randn(batch.latents.shape, generator=random)
            raw, _ = self.losses(self.network, batch, noise, timestep[None])
            yield float(raw)

    def held_out_losses(self, caches: Caches, pause: Callable[[], object]) -> dict[str, float]:
        """Return the mean loss of all held-out items, as `validation_loss`.

        After it come the mean losses of the groups, as `validation_loss/NAME`, see `Row.group`. All
        items have the same timesteps. `pause` is called before each loss.
        """
        by_name: dict[str, list[float]] = {"validation_loss": []}
        for index, row in enumerate(caches.rows):
            values = [*self.item_losses(caches, index, _HELD_OUT, pause)]
            by_name["validation_loss"] += values
            if group := row.group:
                by_name.setdefault(f"validation_loss/{group}", []).extend(values)
        return {name: sum(values) / len(values) for name, values in by_name.items()}

    def write(self, path: Path, latents: torch.Tensor) -> NDArray[np.uint8] | None:
        """Write a clip as MP4 or a picture as PNG.

        Returns:
            Frames [F, H, W, 3]; None if memory does not suffice to decode them, even in tiles.

        Raises:
            FloatingPointError: latents or pixels are NaN or infinite; the message is a hint.
        """
        if not latents.isfinite().all():
            raise FloatingPointError(self._remedy())
        frames = attempt(self._frames, latents)[0]
        if frames is None and self.vae is not None:
            say("out of memory: decoding in tiles of 256 x 256 pixels")
            self.vae.tile()
            frames = attempt(self._frames, latents)[0]
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
    """Network, objective, samples and written files of a training. Each trainer has a subclass.

    Attributes:
        results: names of all files and folders of weights that a training of this kind may write
            into its output folder. If only some of them exist, they are from an older training.
        probes: number of losses in the mean at the start and at the end of the training.
        rate: name of the scalar for items per second.
        several: whether a step may leave some trained weights without gradients.
        order: order of the training.
        tensors: tensors that are read from cache files.
        objective: class of the objective, which is made from the order; raises ModelError if it
            does not fit the network.
        make_network: function that returns the network at the begin of the training, the same each
            time. Its arguments are `channels` of the latents, `text_width` of the captions'
            embeddings, the `dtype` of frozen weights, and `plain` for a network without a new LoRA.
            Raises UserError if network, caches and settings do not fit.
        clip_size: function from the latents of an item to its frames, height and width in pixels.
        painter: class of the painter.
        write_copy: function that writes the trained weights into a folder, which is replaced. Its
            further arguments are the record of the training and the number of steps, for headers.
        read_copy: function that loads weights from files like the order's `results`, with a
            strength for those of a LoRA. Raises TrainingError if the files are missing or damaged,
            or belong to another network.
    """

    results: ClassVar[tuple[str, ...]]
    probes: ClassVar[int] = 64
    rate: ClassVar[str] = "images_per_second"
    several: bool = False
    order: TrainingOrder
    tensors: CacheTensors
    objective: Callable[[Any], Objective]
    make_network: Callable[..., Network]
    clip_size: Callable[[CacheFile], tuple[int, int, int]]
    painter: ClassVar[type[Painter]]
    write_copy: Callable[[Network, Path, Record, int], None]
    read_copy: Callable[..., None]

    def __init__(self, order: Any) -> None:
        self.order = order

    def place(self, network: Network, device: torch.device, *, lend: bool = False) -> None:
        """Move a network to a device. If `lend`, it may leave the device to make room for a VAE."""
        network.to(device)

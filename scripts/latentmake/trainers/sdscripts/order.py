"""Order of a run of sd-scripts, command lines of its scripts, and search for its installation.

Paths in a command line are those of the machine that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from latentmake.base import digest
from latentmake.config.external_trainers import (
    PREDICTING,
    SdScriptsTrainer,
    TrainingScript,
    flags_of,
    shaping_settings,
)
from latentmake.config.fields import shaping
from latentmake.config.machines import ExternalProgram
from latentmake.config.makers import Setting, Strategies
from latentmake.config.models import Model
from latentmake.data.memo import Memo
from latentmake.models.cache_recipe import encoder_of
from latentmake.models.files import T5_LENGTH
from latentmake.models.parameterization import (
    EPSILON,
    VELOCITY,
    Given,
    Parameterization,
    of_checkpoint,
)
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.launched.order import (
    ExternalOrder,
    Places,
    Resume,
    absolute,
    command_line,
    depends_on_length,
    located,
    sampling,
)

_WEIGHTS = (".safetensors", ".bin", ".ckpt")


class SdScriptsOrder(ExternalOrder):
    """Order of a run of sd-scripts."""

    name = "sd-scripts"
    section = "sd_scripts"
    memory_hint = "try gradient_checkpointing, a smaller train_batch_size or a smaller resolution"
    toml_name = "sdscripts/{run}.toml"
    kind: Literal["sdscripts"] = "sdscripts"
    trainer: SdScriptsTrainer

    @staticmethod
    def recommended(model: Model, trainer: Any) -> Mapping[str, Setting]:
        row = model.spec.strategies
        return row.recommended(trainer.script or row.training_scripts[0])

    def settled(self, where: str) -> Self:
        if not self.trained or (network := self.parameterization(where)) is None:
            return self
        is_velocity = network.prediction == VELOCITY
        switches = zip(PREDICTING, (is_velocity, network.zero_terminal_snr), strict=True)
        given = flags_of(self.trainer.arguments)
        keys = {key: True for key, is_set in switches if is_set and f"--{key}" not in given}
        return self.model_copy(update={"trainer": self.trainer.model_copy(update=keys)})

    def described(self) -> str:
        lines = [super().described()]
        if keys := ", ".join(key for key in PREDICTING if getattr(self.trainer, key)):
            lines.append(f"training of {self.run}: by the files of the model or its keys: {keys}")
        return "; ".join(filter(None, lines))

    def parameterization(
        self, where: str = "trainer", *, keys: bool = True
    ) -> Parameterization | None:
        """Return the prediction type of the network; None for a model of flow matching.

        Args:
            where: section of the trainer in the configuration, for messages.
            keys: whether the user's keys and arguments count; otherwise only the files do.
        """
        given = Given(where=where, names=PREDICTING)
        if keys:
            flags = flags_of(self.trainer.arguments)
            velocity, zero = (
                True if f"--{key}" in flags else getattr(self.trainer, key) for key in PREDICTING
            )
            kind = None if velocity is None else VELOCITY if velocity else EPSILON
            given = given._replace(prediction_type=kind, zero_terminal_snr=zero)
        return of_checkpoint(self.model.checkpoint or "", self.model.spec, given)

    def find(self, memory: Memo | None = None) -> Installation:
        return find(self.script, self.program, memory)

    def weights_digest(self, file_digest: Callable[[Path], str]) -> str:
        files = [path := Path(self.model.checkpoint or "")]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in _WEIGHTS)
        return digest.of_value([*map(file_digest, files)])

    @property
    def counts(self) -> bool:
        return self.script.endswith("_network")

    def can_resume(self, resume: Resume) -> bool:
        """Whether a training resumed from a state takes exactly the remaining steps.

        Scripts for a LoRA record their progress in a state, and count epochs on from the step of
        `--initial_step`. But they train the last epoch to its end, even if fewer steps are asked
        for. Scripts for a complete network count epochs from one again, and cannot end at once, so
        an epoch must be left.
        """
        trainer, epochs = self.trainer, self.epochs
        if resume.counted:
            steps = trainer.max_train_steps or (epochs or 0) * resume.steps
            return 0 < resume.steps * resume.done < steps and steps % resume.steps == 0
        endless = not depends_on_length(trainer.arguments, trainer.lr_scheduler)
        return epochs is not None and resume.done < epochs and endless

    @property
    def packages(self) -> set[str]:
        needs = super().packages | ({"xformers"} if self.trainer.attention == "xformers" else set())
        return needs | ({"deepspeed"} if self.trainer.deepspeed else set())

    @property
    def strategies(self) -> Strategies:
        """Scripts, encoders and flags of sd-scripts for the architecture."""
        return self.model.spec.strategies

    @property
    def script(self) -> TrainingScript:
        """Training script, without its ending."""
        return self.trainer.script or self.strategies.training_scripts[0]

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""
        trainer, model = shaping_settings(self.trainer, self.lora_module), self.model
        del trainer["script"]  # `self.script` below has the default of the architecture, too
        # Earlier releases did not have these keys: their defaults must not change the digest.
        for key in PREDICTING:
            if not trainer[key]:
                del trainer[key]
        if self.trainer.prior_loss_weight == 1:
            del trainer["prior_loss_weight"]
        own = [trainer, self.script, self.strategies.name, model.clip_skip, model.max_token_length]
        further = [*model.latents_arguments, *model.text_arguments]
        return digest.of_value([*own, *([further] if further else []), *sorted(self.flags.items())])

    def settings(self) -> dict[str, object]:
        """Return all settings that shape the trained weights, by name."""
        keys = ("clip_skip", "max_token_length", "latents_arguments", "text_arguments")
        model = {
            "architecture": self.strategies.name,
            **{key: getattr(self.model, key) for key in keys},
        }
        return {**shaping(self.trainer, "weights"), "script": self.script, **model, **self.flags}


def find(script: str, settings: ExternalProgram | None, memory: Memo | None = None) -> Installation:
    """Find a training script of sd-scripts by its name without ending; raises TrainingError."""
    name = f"{script}.py"
    needed = f"an sd-scripts that has {name}"
    return Installation.locate(SdScriptsOrder.section, settings, name, needed, memory)


def program_digest(
    settings: ExternalProgram, model: Model, kind: str, memory: Memo | None = None
) -> str:
    """Return the digest of sd-scripts' sources that encode `latents` or `text` of a model.

    Raises:
        TrainingError: sd-scripts or one of the sources is missing.
    """
    encoder = encoder_of(model, kind)
    installation = find(model.spec.strategies.training_scripts[0], settings, memory)
    contents = []
    for module in encoder.modules:
        name = f"{module.replace('.', '/')}.py"
        installation.script(name)
        _, _, content = installation.sources_of(name)
        contents.append(content)
    folders = [installation.folder / name for name in encoder.folders]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    beside = [installation.memory.digest_of_file(file) for file in files]
    return digest.of_value([*contents, *beside])


def encoder_places(order: SdScriptsOrder) -> dict[str, str]:
    """Return flag -> path of the weights that a script gets besides its network.

    Some scripts load them even if caches exist. Flags in the user's own arguments are left out.
    """
    given = flags_of(order.trainer.arguments)
    places = {file.flag: order.model.weights(file.key) for file in order.strategies.files}
    return {
        flag: place.path
        for flag, place in places.items()
        if place is not None and place.path is not None and flag not in given
    }


def caching_arguments(order: SdScriptsOrder, named: Callable[[str], str] = str) -> list[str]:
    """Return the arguments with which the training script makes the caches itself.

    Flags in the user's own arguments are left out. `named` gives the name of a path on the machine
    that trains. A VAE whose architecture has another flag for it is in `encoder_places`.
    """
    model, size, strategies = order.model, order.publish.batch_size, order.strategies
    vae = model.vae.hub if model.vae.path is None else named(model.vae.path)
    options = {
        "--vae": None if "vae" in (file.key for file in strategies.files) else vae,
        "--no_half_vae": (model.vae_dtype or model.dtype) == "float32",
        "--vae_batch_size": size,
        "--text_encoder_batch_size": size if strategies.batches_text else None,
    }
    given = flags_of(order.trainer.arguments)
    return command_line({flag: value for flag, value in options.items() if flag not in given})


def training_arguments(
    order: SdScriptsOrder, places: Places, attention: str, resume: Resume
) -> list[str]:
    """Return the arguments of a training script.

    Args:
        order: order of the run.
        places: paths on the machine that trains.
        attention: attention to train with.
        resume: state to resume from.
    """
    order = located(order.left(resume), places.of)
    trainer = order.trainer
    saves = trainer.save_every_n_epochs is not None
    makes_caches = not (places.here or order.publish.caches)
    encoders: dict[str, Setting] = {
        flag: places.of(path)
        for flag, path in encoder_places(order).items()
        if flag in order.strategies.folders
        or Path(path).is_file()
        or not (places.here or Path(path).exists())
    }
    arguments = command_line(
        {
            "--pretrained_model_name_or_path": places.of(order.model.checkpoint or ""),
            **encoders,
            "--dataset_config": places.toml,
            "--cache_latents": True,
            "--cache_latents_to_disk": True,
        }
    )
    arguments += order.model.latents_arguments
    arguments += caching_arguments(order, places.of) if makes_caches else []
    arguments += command_line(
        {
            **_text(order),
            **_network(order),
            "--learning_rate": trainer.learning_rate,
            "--optimizer_type": trainer.optimizer_type,
            "--lr_scheduler": trainer.lr_scheduler,
            "--gradient_accumulation_steps": trainer.gradient_accumulation_steps,
            "--max_data_loader_n_workers": trainer.max_data_loader_n_workers,
            "--mixed_precision": trainer.mixed_precision,
            "--seed": trainer.seed,
            "--prior_loss_weight": trainer.prior_loss_weight
            if trainer.prior_loss_weight != 1
            else None,
            f"--{attention}": True,
            "--max_train_steps": trainer.max_train_steps,
            "--max_train_epochs": order.epochs,
            "--gradient_checkpointing": trainer.gradient_checkpointing,
            "--torch_compile": trainer.torch_compile,
            "--dynamo_backend": (trainer.dynamo_backend or "inductor")
            if trainer.torch_compile
            else None,
            "--deepspeed": trainer.deepspeed,
            "--zero_stage": trainer.zero_stage if trainer.deepspeed else None,
            "--save_every_n_epochs": trainer.save_every_n_epochs,
            "--save_state": saves,
            # The state of a complete network takes tens of gigabytes, so only the last is kept.
            "--save_last_n_epochs_state": 1 if saves else None,
            "--save_model_as": "safetensors",
            "--output_dir": places.output,
            "--output_name": order.run,
            "--logging_dir": places.logs if trainer.logging else None,
            "--resume": None if resume.state is None else absolute(resume.state),
            "--initial_step": resume.done * resume.steps if resume.counted else None,
            **sampling(order, places.prompts),
            **_validating(order),
            **order.flags,
        }
    )
    return [*arguments, *order.model.text_arguments, *trainer.arguments]


def _text(order: SdScriptsOrder) -> dict[str, str | float | bool | None]:
    model, spec = order.model, order.model.spec
    has_t5 = "T5" in spec.text_encoders
    options: dict[str, str | float | bool | None] = dict.fromkeys(order.strategies.switches, True)
    given = flags_of(order.trainer.arguments)
    options |= {f"--{key}": getattr(order.trainer, key) for key in PREDICTING}
    options = {flag: value for flag, value in options.items() if flag not in given}
    if spec.chunks_captions and model.max_token_length != 75:
        options["--max_token_length"] = model.max_token_length
    if not spec.caches_text:  # sd-scripts encodes captions during the training
        return options | {"--clip_skip": model.clip_skip}
    return options | {
        "--cache_text_encoder_outputs": True,
        "--cache_text_encoder_outputs_to_disk": True,
        "--t5xxl_max_token_length": model.text[-1].max_length or T5_LENGTH if has_t5 else None,
        "--apply_lg_attn_mask": model.apply_lg_attn_mask,
        "--apply_t5_attn_mask": model.apply_t5_attn_mask,
    }


def _validating(order: SdScriptsOrder) -> dict[str, Setting]:
    """Return the options for the loss of held-out items.

    It is computed after each epoch, or, with `every`, after so many steps and once at the end.
    """
    if order.validation is None:
        return {}
    every, last = order.validation.every, order.epochs or order.trainer.max_train_steps
    return {
        "--validate_every_n_steps": every,
        "--validate_every_n_epochs": 1 if every is None else last,
    }


def _network(order: SdScriptsOrder) -> dict[str, Setting]:
    if order.script in order.strategies.complete:
        return {}
    unet_only = order.model.spec.caches_text or order.trainer.network_train_unet_only
    return {**order.network, "--network_train_unet_only": unet_only}

"""Determine a network's prediction, its noise schedule, and the scale of its latents.

Planning, training, samples, launched trainers and encoding all use this module, for every form of a
model: the folder of a pipeline, a UNet with its scheduler, a complete checkpoint. A key of the
configuration takes precedence over the files, and the files over the row of the architecture. If
files disagree or contain no answer, a ModelError names the key to set. This module does not import
torch.

Facts in files: diffusers' scheduler_config.json; the tensors `v_pred`, `ztsnr` and `edm_*`, as read
by ComfyUI's comfy/supported_models.py; the metadata of https://github.com/Stability-AI/ModelSpec,
and of sd-scripts' library/sai_model_spec.py and train_network.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.base.errors import ModelError
from latentmake.base.regular import read_text
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.makers import Architecture
from latentmake.config.models import Model
from latentmake.config.weights import Weights, place_of
from latentmake.models import headers
from latentmake.models.files import checkpoint_of, config_file, network_config

SCHEDULE_FILE = "scheduler_config.json"
SCHEDULE = Path(__file__).with_name("stable_diffusion")
"""Folder of Stable Diffusion's noise schedule, which complete checkpoints do not contain."""
FLOW, EPSILON, VELOCITY = "flow_matching", "epsilon", "v_prediction"
_KEYS = ("prediction_type", _ZERO := "zero_terminal_snr")
_BETAS = ("beta_start", "beta_end", "beta_schedule")
_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")  # DDIM can sample them
# Schedulers of diffusers that use DDPMScheduler's default betas if a configuration has none.
_FILL_IN = frozenset(
    f"{name}Scheduler"
    for name in (
        *("DDPM", "DDPMParallel", "DDIM", "DDIMParallel", "DDIMInverse", "PNDM", "LMSDiscrete"),
        *("EulerDiscrete", "EulerAncestralDiscrete", "DEISMultistep", "DPMSolverMultistep"),
        *("DPMSolverSinglestep", "UniPCMultistep", "SASolver"),
    )
)
_NO_KEY = "name another model: Latentmake has no such schedule"
_WORDS = {
    **dict.fromkeys(("epsilon", "eps"), EPSILON),
    **dict.fromkeys(("v", "v_prediction", "v-prediction", "v_pred", "velocity"), VELOCITY),
    **dict.fromkeys(("flow_matching", "flow_prediction", "rectified_flow"), FLOW),
}
_RELEASES = {"stable-diffusion-v2-768-v": VELOCITY, "stable-diffusion-v2-512": EPSILON}
METADATA: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "modelspec.prediction_type": ("prediction_type", _WORDS),
    "modelspec.predict_key": ("prediction_type", _WORDS),
    "modelspec.architecture": ("prediction_type", _RELEASES),
    "ss_v_parameterization": ("prediction_type", {"true": VELOCITY, "false": EPSILON}),
    "ss_zero_terminal_snr": (_ZERO, {"true": True}),
}
"""Key of a file's metadata -> key of the fact, and values in lower case -> value of the fact."""


class Fact(NamedTuple):
    """A fact about a network, with the file or key that it comes from."""

    key: str
    value: Any
    source: str


class Parameterization(NamedTuple):
    """The prediction of a network, and its noise schedule.

    Attributes:
        prediction: `epsilon`, `v_prediction` or `flow_matching`.
        zero_terminal_snr: whether the last timestep is noise only.
        schedule: diffusers' configuration of the schedule, including the two values above.
        told: values of the trainer's keys that differ from the schedule's own file.
        sources: origins of the two values, by key.
        against: fact in the files that contradicts the user's keys; "" if there is none.
    """

    prediction: str
    zero_terminal_snr: bool
    schedule: dict[str, Any]
    told: dict[str, Any]
    sources: dict[str, str]
    against: str

    def __str__(self) -> str:
        first, last, name = (self.schedule.get(key) for key in _BETAS)
        words = [f"{self.prediction} ({self.sources['prediction_type']})"]
        if self.prediction != FLOW:
            words.append("trained betas" if name is None else f"{name} betas {first} to {last}")
        if self.zero_terminal_snr:
            words.append(f"zero terminal SNR ({self.sources[_ZERO]})")
        if self.against:
            words.append(f"but {self.against}")
        return ", ".join(words)


# -- facts in files -------------------------------------------------------------------------------


def schedule_of(unet: Weights, scheduler: str | None) -> str:
    """Return the folder of a model's noise schedule, by default the one beside the UNet.

    A checkpoint without such a folder uses Stable Diffusion's schedule. "" stands for the schedule
    in the UNet's repository on the hub.
    """
    if scheduler is not None or unet.path is None:
        return scheduler or ""
    beside = Path(unet.path).parent / "scheduler"
    return str(SCHEDULE if checkpoint_of(unet) and not beside.is_dir() else beside)


def flows(schedule: Mapping[str, Any]) -> bool:
    """Whether the configuration of a noise schedule describes flow matching."""
    return str(schedule.get("_class_name", "")).startswith("FlowMatch")


def _facts_of_file(path: Path) -> Iterator[Fact]:
    """Yield the facts in a file of weights; none if it cannot be read.

    Raises:
        ModelError: the noise schedule is one of EDM.
    """
    try:
        names, metadata = headers.contents_of(path)
    except ValueError:
        return  # the loader will report the error
    if edm := next((name for name in names if name.startswith("edm_")), None):
        what = f"its noise schedule is one of EDM (tensor `{edm}`), which cannot be trained"
        raise ModelError(what, where=path, hint=_NO_KEY)
    if "v_pred" in names:
        yield Fact("prediction_type", VELOCITY, f"{path}: tensor v_pred")
    if "ztsnr" in names:
        yield Fact(_ZERO, True, f"{path}: tensor ztsnr")
    for name, (key, values) in METADATA.items():
        word = str(metadata.get(name, "")).lower()
        if word in values:
            yield Fact(key, values[word], f"{path}: {name} {metadata[name]}")


def _facts_of_schedule(config: Mapping[str, Any], place: object) -> Iterator[Fact]:
    """Yield the facts that a scheduler's configuration contains; defaults do not count."""
    if flows(config):
        yield Fact("prediction_type", FLOW, f"{place}: {config['_class_name']}")
    elif "prediction_type" in config:
        word = config["prediction_type"]
        yield Fact("prediction_type", _WORDS.get(str(word), word), f"{place}: prediction_type")
    if (zero := _ends_in_noise(config)) or "rescale_betas_zero_snr" in config:
        yield Fact(_ZERO, zero, f"{place}: rescale_betas_zero_snr")


def _ends_in_noise(config: Mapping[str, Any]) -> bool:
    """Whether a configuration's betas leave only noise at the last timestep."""
    betas = config.get("trained_betas") or [config.get("beta_end", 0)]
    return bool(config.get("rescale_betas_zero_snr")) or max(betas) >= 1


def _read(file: Path) -> dict[str, Any]:
    """Read the configuration of a noise schedule; raises ModelError."""
    try:
        return _checked(dict(json.loads(read_text(file))), file)
    except (OSError, ValueError, TypeError, RecursionError):
        raise missing_schedule(file) from None


def missing_schedule(place: object) -> ModelError:
    """Return the error for a noise schedule that cannot be read."""
    hint = "set the model's `scheduler` to the folder of a diffusers scheduler"
    return ModelError("this noise schedule is missing or damaged", where=str(place), hint=hint)


_LARGEST = 10**9  # numbers of schedules are far smaller, and larger ones may be no floats


def _checked(config: dict[str, Any], place: object) -> dict[str, Any]:
    """Return a schedule that diffusers' DDPM, DDIM and flow schedulers support.

    Raises:
        ModelError: they do not support it.
    """
    kind, fault = str(config.get("_class_name", "DDPMScheduler")), ""
    betas, steps = config.get("trained_betas"), config.get("num_train_timesteps", 1000)
    numbers = [*(betas or (config[key] for key in _BETAS[:2] if key in config)), steps]
    usable = all(isinstance(value, int | float) and abs(value) < _LARGEST for value in numbers)
    if not usable or steps < 1:
        raise missing_schedule(place)
    if flows(config):
        if config.get("use_dynamic_shifting"):
            fault = "shifts by the size of each picture (`use_dynamic_shifting`)"
    elif kind not in _FILL_IN and betas is None and any(key not in config for key in _BETAS):
        fault = f"is one of {kind}, which has no betas"
    elif config.get("timestep_type") == "continuous" or config.get("sigma_max"):
        fault = "has continuous timesteps of its own sigmas, as EDM has"
    elif config.get("snr_shift_scale", 1) != 1:
        fault = "has a `snr_shift_scale`"
    elif betas is not None and len(betas) != steps:
        fault = f"has {len(betas)} `trained_betas` for {steps} timesteps"
    elif betas is None and config.get("beta_schedule", "linear") not in _BETA_SCHEDULES:
        fault = f"has the `beta_schedule` {config['beta_schedule']}"
    if fault:
        hint = f"the UNet must have been trained with {', '.join(_BETA_SCHEDULES)} or flow matching"
        what = f"this noise schedule {fault}: it cannot be trained with"
        raise ModelError(what, where=str(place), hint=hint)
    return config


# -- prediction and schedule ----------------------------------------------------------------------


class Given(NamedTuple):
    """The user's keys about a network.

    Attributes:
        prediction_type: value of the key; None if it is not set.
        zero_terminal_snr: value of the key; None if it is not set.
        where: section of the trainer, for messages.
        names: names of the two keys in this section.
    """

    prediction_type: str | None = None
    zero_terminal_snr: bool | None = None
    where: str = "trainer"
    names: tuple[str, str] = ("prediction_type", _ZERO)


def parameterization(
    unet: Weights,
    scheduler: str,
    row: Architecture,
    given: Given,
    config: Mapping[str, Any] | None = None,
) -> Parameterization | None:
    """Return the prediction and the noise schedule of a UNet for the trainer `sd`.

    Args:
        unet: weights of the network.
        scheduler: result of `schedule_of`.
        row: architecture of the model.
        given: the user's keys.
        config: configuration of a schedule on the hub, once it has been downloaded.

    Returns:
        None if the schedule is on the hub and has not been downloaded yet.

    Raises:
        ModelError: the schedule is missing, damaged or not supported; files disagree or contain no
            answer; or prediction and schedule do not fit each other.
    """
    file, place = Path(unet.path or ""), Path(scheduler, SCHEDULE_FILE)
    if not scheduler:
        place = place_of(unet.hub or "", unet.revision or "", "scheduler", SCHEDULE_FILE)
        if config is None and not place.is_file():
            return None
    schedule = _read(place) if config is None else _checked(dict(config), place)
    facts = [*_facts_of_file(file)]
    if scheduler == str(SCHEDULE):  # the checkpoint has no schedule of its own
        checkpoint = checkpoint_of(unet)
        row = ARCHITECTURES[checkpoint.kind] if checkpoint and checkpoint.kind else row
        return _settled(file, row, facts, schedule, given, has_scheduler=False)
    facts += _facts_of_schedule(schedule, place)
    return _settled(place, row, facts, schedule, given)


def of_checkpoint(path: str, row: Architecture, given: Given) -> Parameterization | None:
    """Return prediction and noise schedule of a checkpoint that sd-scripts trains.

    sd-scripts supports only Stable Diffusion's noise schedule. The checkpoint is a file or the
    folder of a pipeline; it may be on another machine.

    Returns:
        None for an architecture of flow matching.

    Raises:
        ModelError: as for `parameterization`, or the schedule is not Stable Diffusion's.
    """
    if row.prediction == FLOW:
        return None
    place, stable = Path(path, "scheduler", SCHEDULE_FILE), _read(SCHEDULE / SCHEDULE_FILE)
    facts = [*_facts_of_file(Path(path))]
    if not place.parent.is_dir():
        return _settled(Path(path), row, facts, stable, given, has_scheduler=False)
    config = _read(place)
    facts += _facts_of_schedule(config, place)
    keys = (*_BETAS, "num_train_timesteps", "trained_betas")
    other = [key for key in keys if config.get(key, stable.get(key)) != stable.get(key)]
    if flows(config) or other:
        what = f"sd-scripts trains by Stable Diffusion's betas, and `{(other or keys)[0]}`"
        hint = "train this model with `kind: sd`"
        raise ModelError(f"{what} here is another", where=place, hint=hint)
    return _settled(place, row, facts, stable, given)


def _settled(
    place: Path,
    row: Architecture,
    facts: list[Fact],
    schedule: dict[str, Any],
    given: Given,
    *,
    has_scheduler: bool = True,
) -> Parameterization:
    """Choose the values: the user's keys, or else the facts in files, or else the default.

    A scheduler that names no prediction has diffusers' default. A checkpoint without a scheduler
    has the prediction of its architecture. `place` is the scheduler's configuration, or the
    checkpoint.

    Raises:
        ModelError: there is no answer, or the values do not fit each other.
    """
    own = FLOW if flows(schedule) else schedule.get("prediction_type", EPSILON)
    kind = _chosen("prediction_type", given, facts)
    zero = _chosen(_ZERO, given, facts) or Fact(_ZERO, False, "no file says so")
    if kind is None and has_scheduler:
        kind = Fact("prediction_type", EPSILON, f"{place}: diffusers' default")
    elif kind is None and row.prediction is not None:
        kind = Fact("prediction_type", row.prediction, f"architecture {row.name}")
    if kind is None:
        network = row.title or "its network"
        what = f"this key is missing: {place} does not say what {network} predicts"
        hint = "2.1 of 768 pixels predicts v, the base models of 512 pixels predict epsilon"
        raise ModelError(what, where=f"{given.where}.{given.names[0]}", hint=hint)
    _refuse_other(kind, flows(schedule), place, given)
    told = {} if kind.value == own else {kind.key: kind.value}
    if kind.value != FLOW:
        schedule = {**schedule, "prediction_type": kind.value}
        if zero.value != _ends_in_noise(schedule):
            told[_ZERO] = schedule["rescale_betas_zero_snr"] = zero.value
            if zero.value:  # sampling must begin at the last timestep
                schedule["timestep_spacing"] = "trailing"
    ends_in_noise = kind.value != FLOW and _ends_in_noise(schedule)
    if kind.value == EPSILON and ends_in_noise:
        what = "a network cannot predict epsilon with zero terminal SNR: the last timestep is noise"
        hint = f"set the trainer's `{given.names[0]}`, or its `{given.names[1]}: false`"
        raise ModelError(what, where=place, hint=hint)
    chosen = {fact.key: fact for fact in (kind, zero)}
    others = (fact for fact in facts if fact.value != chosen[fact.key].value)
    against = next((f"{fact.source} says {_word(fact)}" for fact in others), "")
    sources = {key: fact.source for key, fact in chosen.items()}
    return Parameterization(kind.value, ends_in_noise, schedule, told, sources, against)


def _chosen(key: str, given: Given, facts: list[Fact]) -> Fact | None:
    """Return the user's value of a key, or else the fact in files; None if neither says it.

    Raises:
        ModelError: the user's key is not set, and files disagree.
    """
    told, value = [fact for fact in facts if fact.key == key], getattr(given, key)
    name = given.names[_KEYS.index(key)]
    if value is not None:
        return Fact(key, value, f"`{name}`")
    if other := next((fact for fact in told if fact.value != told[0].value), None):
        what = f"{told[0].source} says {_word(told[0])}, and {other.source} {_word(other)}"
        raise ModelError(what, where=f"{given.where}.{name}", hint="set the right value here")
    return told[0] if told else None


def _refuse_other(kind: Fact, flow: bool, place: Path, given: Given) -> None:
    """Refuse a prediction that cannot be trained at all, or not with this kind of noise schedule.

    Raises:
        ModelError: it cannot be trained.
    """
    name = given.names[0]
    if flow and kind.value != FLOW:
        what = f"this noise schedule is one of flow matching, not one of `{kind.value}`"
        hint = f"leave out `{name}`, or set the model's `scheduler` to one of diffusion"
        raise ModelError(what, where=place, hint=hint)
    if kind.value not in (EPSILON, VELOCITY, FLOW):
        what = f"a network that predicts `{kind.value}` cannot be trained"
        hint = f"set the trainer's `{name}` to {EPSILON}, {VELOCITY} or {FLOW}"
        raise ModelError(what, where=place, hint=hint)


def _word(fact: Fact) -> str:
    """Return the value of a fact in words, for a message."""
    return str(fact.value) if fact.key == "prediction_type" else f"{fact.key} {fact.value}".lower()


# -- the scale of latents -------------------------------------------------------------------------

SCALE = ("scaling_factor", "shift_factor")
_STABLE = 0.18215  # diffusers' default of AutoencoderKL: Stable Diffusion 1.x and 2.x
_STABLE_CHANNELS = 4


def scale_of(model: Model, config: Mapping[str, Any] | None = None) -> tuple[float, float, str]:
    """Return the scale of the latents of a model's VAE, an AutoencoderKL, and its source.

    A network reads (latents - shift) * factor.

    Args:
        model: model with the VAE.
        config: configuration of a VAE on the hub; None to read the one on this disk, if any.

    Returns:
        Factor, shift, and the file or key that they come from.

    Raises:
        ModelError: no key, file or architecture gives the scale, or the VAE normalises latents by
            more than these two numbers.
    """
    vae, row, given = model.vae, model.spec, (model.scaling_factor, model.shift_factor)
    place: object = vae.path or vae.hub
    if config is None and vae.hub is None:
        config, place = network_config(vae), config_file(vae) or place
    config = config or {}
    factor, shift = _read_scale(config, place)
    if factor is not None:
        source = str(place)
    elif (
        row.scaling_factor is not None
        and vae.hub is None
        and not (row.checkpoints and _channels(vae, config) != _STABLE_CHANNELS)
    ):
        factor, shift, source = row.scaling_factor, row.shift_factor, f"architecture {row.name}"
    elif row.scaling_factor in (None, _STABLE) and _channels(vae, config) == _STABLE_CHANNELS:
        factor, shift = _STABLE, 0.0
        source = "Stable Diffusion 1.x's, which diffusers fills in"
    elif given[0] is None:
        what = "does not say the scaling factor of its latents"
        raise ModelError(what, where=str(place), hint="set the model's `scaling_factor`")
    else:
        factor, shift, source = given[0], 0.0, ""
    if given == (None, None):
        return factor, shift, source
    factor = factor if given[0] is None else given[0]
    shift = shift if given[1] is None else given[1]
    return factor, shift, "`scaling_factor`"


def scale_parts(model: Model) -> dict[str, object]:
    """Return the values of a recipe about the scale of latents.

    Only values that differ from diffusers' reading of the VAE's files are included: the digest of
    these files covers the others.
    """
    if model.vae.hub is not None:
        return {key: value for key in SCALE if (value := getattr(model, key)) is not None}
    factor, shift = _read_scale(network_config(model.vae) or {}, model.vae.path)
    read = (_STABLE if factor is None else factor, shift)
    now = scale_of(model)
    return {key: new for key, old, new in zip(SCALE, read, now, strict=False) if old != new}


def _read_scale(config: Mapping[str, Any], place: object) -> tuple[float | None, float]:
    """Return the factor (or None) and the shift in a VAE's configuration; raises ModelError."""
    factor, shift = (config.get(key) for key in SCALE)
    try:
        if any(config.get("latents_mean") or []) or {*(config.get("latents_std") or [1])} != {1}:
            what = "its latents are normalised by `latents_mean` and `latents_std`"
            raise ModelError(what, where=str(place), hint="name another VAE")
        return (float(factor or 1) if SCALE[0] in config else None), float(shift or 0)
    except (TypeError, ValueError):
        what, hint = f"its `{SCALE[0]}` or `{SCALE[1]}` is no number", "copy the VAE again"
        raise ModelError(what, where=str(place), hint=hint) from None


def _channels(vae: Weights, config: Mapping[str, Any]) -> int:
    """Return the channels of a VAE's latents; by default, Stable Diffusion's."""
    channels = config.get("latent_channels")
    if channels is None and (path := Path(vae.path or "")).is_file():
        try:
            sizes = headers.vae_of(headers.contents_of(path)[0])
        except ValueError:
            return _STABLE_CHANNELS  # the loader will report the error
        channels = sizes and sizes.channels
    return int(channels or _STABLE_CHANNELS)

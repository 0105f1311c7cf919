"""What a network predicts, by which schedule, and at which scale its latents lie is asked once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from latentmake.base.errors import ModelError
from latentmake.config.architectures import ARCHITECTURES, GENERIC
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.models import cache_recipe
from latentmake.models.parameterization import (
    SCHEDULE,
    Given,
    Parameterization,
    of_checkpoint,
    parameterization,
    scale_of,
    schedule_of,
)
from safetensors.numpy import save_file

SD = {
    "_class_name": "DDIMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}
TEXT = {
    "sd1": "cond_stage_model.transformer.a",
    "sd2": "cond_stage_model.model.a",
    "sdxl": "conditioner.embedders.0.transformer.a",
}


def write(folder: Path, kind: str, *tensors: str, **metadata: str) -> Path:
    """Write a checkpoint that is complete by its names."""
    names = (TEXT[kind], "model.diffusion_model.input_blocks.0.0.weight", *tensors)
    path = folder / "model.safetensors"
    known = {name.replace("__", "."): value for name, value in metadata.items()}
    save_file({name: np.zeros(1, np.float32) for name in names}, path, known or None)
    return path


def schedule(folder: Path, **values: Any) -> str:
    place = folder / "scheduler"
    place.mkdir(exist_ok=True)
    (place / "scheduler_config.json").write_text(json.dumps({**SD, **values}))
    return str(place)


def told(file: Path, scheduler: str = str(SCHEDULE), **keys: Any) -> Parameterization:
    unet = Weights(path=str(file), subfolder="unet")
    found = parameterization(unet, scheduler, GENERIC, Given(where="runs.r.trainer", **keys))
    assert found is not None
    return found


V = "v_prediction"
TENSOR = "a tensor of this name"
FILES: list[tuple[str, dict[str, str], str, bool]] = [
    ("sd1", {}, "epsilon", False),
    ("sdxl", {}, "epsilon", False),
    ("sdxl", {"v_pred": TENSOR}, V, False),
    ("sdxl", {"v_pred": TENSOR, "ztsnr": TENSOR}, V, True),
    ("sdxl", {"modelspec__prediction_type": "v"}, V, False),
    ("sdxl", {"modelspec__predict_key": "v"}, V, False),
    ("sd2", {"modelspec__architecture": "stable-diffusion-v2-768-v"}, V, False),
    ("sd2", {"modelspec__prediction_type": "epsilon"}, "epsilon", False),
    ("sdxl", dict.fromkeys(("ss_v_parameterization", "ss_zero_terminal_snr"), "True"), V, True),
]


@pytest.mark.parametrize(("kind", "told_by", "prediction", "zero"), FILES)
def test_a_file_that_says_what_it_predicts_is_believed_by_both_trainers(
    tmp_path: Path, kind: str, told_by: dict[str, str], prediction: str, zero: bool
) -> None:
    tensors = [name for name, value in told_by.items() if value is TENSOR]
    metadata = {name: value for name, value in told_by.items() if value is not TENSOR}
    file = write(tmp_path, kind, *tensors, **metadata)
    found, other = told(file), of_checkpoint(str(file), ARCHITECTURES[kind], Given())
    for each in (found, other):
        assert each is not None
        assert (each.prediction, each.zero_terminal_snr) == (prediction, zero)
        assert each.schedule["prediction_type"] == prediction
        assert bool(each.schedule.get("rescale_betas_zero_snr")) == zero
    # What the scheduler's own file says is no new setting of a training.
    keys = {"prediction_type": "v_prediction"} if prediction == "v_prediction" else {}
    assert found.told == keys | ({"zero_terminal_snr": True} if zero else {})


def test_files_that_disagree_or_say_nothing_ask_for_the_key(tmp_path: Path) -> None:
    row = ARCHITECTURES["sd2"]
    file = write(tmp_path, "sd2")
    with pytest.raises(ModelError, match=r"^runs\.r\.trainer\.prediction_type: this key is miss"):
        told(file)
    names = ("v_parameterization", "zero_terminal_snr")
    with pytest.raises(ModelError, match=r"^trainer\.v_parameterization: this key is missing"):
        of_checkpoint(str(file), row, Given(names=names))
    assert told(file, prediction_type="v_prediction").prediction == "v_prediction"
    file = write(tmp_path, "sdxl", "v_pred", modelspec__prediction_type="epsilon")
    with pytest.raises(ModelError, match=r"tensor v_pred says v_prediction, and .* epsilon"):
        told(file)
    scheduler = schedule(tmp_path, prediction_type="epsilon")
    file = write(tmp_path, "sdxl", "v_pred")
    with pytest.raises(ModelError, match=r"v_pred says v_prediction, and .*config.json: predi"):
        told(file, scheduler)
    found = told(file, scheduler, prediction_type="epsilon")
    assert found.prediction == "epsilon" and "v_pred says v_prediction" in str(found)
    assert not told(file, schedule(tmp_path, prediction_type="v_prediction")).told


SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({"rescale_betas_zero_snr": True}, "epsilon with zero terminal SNR"),
    ({"beta_end": 1.0}, "epsilon with zero terminal SNR"),
    ({"prediction_type": "sample"}, "predicts `sample` cannot be trained"),
    ({"trained_betas": [0.1, 0.2]}, "2 `trained_betas` for 1000 timesteps"),
    ({"trained_betas": [0.1] * 999 + [1.0]}, "epsilon with zero terminal SNR"),
    ({"beta_schedule": "exponential"}, "has the `beta_schedule` exponential"),
    ({"_class_name": "CogVideoXDDIMScheduler", "snr_shift_scale": 3.0}, "`snr_shift_scale`"),
    ({"timestep_type": "continuous", "sigma_max": 700.0}, "continuous timesteps"),
    ({"beta_start": "a"}, "missing or damaged"),
    ({"beta_end": 10**400}, "missing or damaged"),
]
WITHOUT_BETAS = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler", "ScoreSdeVeScheduler")


def test_the_schedule_of_a_network_in_the_working_folder_lies_in_it() -> None:
    assert schedule_of(Weights(path="."), None) == "scheduler"


@pytest.mark.parametrize(("values", "line"), SCHEDULES)
def test_a_schedule_of_another_kind_is_refused(
    tmp_path: Path, values: dict[str, Any], line: str
) -> None:
    unet = Weights(path=str(tmp_path / "unet"))
    with pytest.raises(ModelError, match=line) as error:
        parameterization(unet, schedule(tmp_path, **values), GENERIC, Given())
    assert "scheduler_config.json" in str(error.value)


def test_a_schedule_without_betas_is_not_filled_with_those_of_another(tmp_path: Path) -> None:
    unet = Weights(path=str(tmp_path / "unet"))
    for name in WITHOUT_BETAS:
        place = Path(schedule(tmp_path), "scheduler_config.json")
        place.write_text(json.dumps({"_class_name": name, "sigma_max": 80.0, "sigma_min": 0.002}))
        with pytest.raises(ModelError, match=f"is one of {name}, which has no betas"):
            parameterization(unet, str(place.parent), GENERIC, Given())
        with pytest.raises(ModelError, match=f"is one of {name}, which has no betas"):
            of_checkpoint(str(tmp_path), ARCHITECTURES["sdxl"], Given())
    for tensor in ("edm_vpred.sigma_max", "edm_mean"):
        with pytest.raises(ModelError, match=f"one of EDM .tensor `{tensor}`"):
            told(write(tmp_path, "sdxl", tensor))


def test_a_checkpoint_of_sd_scripts_has_no_betas_but_its_own(tmp_path: Path) -> None:
    row = ARCHITECTURES["sdxl"]
    schedule(tmp_path, prediction_type="v_prediction", rescale_betas_zero_snr=True)
    found = of_checkpoint(str(tmp_path), row, Given())
    assert found is not None
    assert (found.prediction, found.zero_terminal_snr) == ("v_prediction", True)
    for values in ({"beta_end": 0.02}, {"_class_name": "FlowMatchEulerDiscreteScheduler"}):
        schedule(tmp_path, **values)
        with pytest.raises(ModelError, match="sd-scripts trains by Stable Diffusion's betas"):
            of_checkpoint(str(tmp_path), row, Given())
    assert of_checkpoint(str(tmp_path), ARCHITECTURES["flux"], Given()) is None


def vae(folder: Path, channels: int = 4, **config: Any) -> dict[str, Any]:
    """Write a VAE of one file, or of a folder if it has a configuration."""
    shapes = {
        "encoder.conv_in.weight": (4, 3, 3, 3),
        "encoder.conv_out.weight": (2 * channels, 4, 3, 3),
        "decoder.conv_in.weight": (4, channels, 3, 3),
        "encoder.down_blocks.0.resnets.0.conv2.weight": (4, 4, 3, 3),
    }
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)
    (folder / "config.json").unlink(missing_ok=True)
    if config:
        known = {"_class_name": "AutoencoderKL", "latent_channels": channels, **config}
        (folder / "config.json").write_text(json.dumps(known))
    return {"vae": str(folder if config else path)}


def model_of(keys: dict[str, Any], architecture: str | None, **more: Any) -> Model:
    number = len(ARCHITECTURES[architecture].text_encoders) if architecture else 1
    values = {**keys, "text": ["t"] * number, "architecture": architecture, **more}
    return Model.model_validate(values)


def scale(*model: Any, **more: Any) -> tuple[float, float]:
    return scale_of(model_of(*model, **more))[:2]


SCALES = {
    "sd1": (0.18215, 0.0),
    "sdxl": (0.13025, 0.0),
    "sd3": (1.5305, 0.0609),
    "flux": (0.3611, 0.1159),
}


@pytest.mark.parametrize("architecture", SCALES)
def test_a_vae_that_does_not_say_its_scale_has_that_of_the_architecture(
    tmp_path: Path, architecture: str
) -> None:
    channels, expected = 16 if architecture in ("sd3", "flux") else 4, SCALES[architecture]
    for keys in (vae(tmp_path, channels), vae(tmp_path, channels, sample_size=64)):
        assert scale(keys, architecture) == expected
    own = vae(tmp_path, channels, scaling_factor=0.5, shift_factor=None)
    assert scale(own, architecture) == (0.5, 0.0)
    assert scale(own, architecture, scaling_factor=2.0, shift_factor=0.1) == (2.0, 0.1)


def test_a_scale_that_nothing_tells_is_asked_for_and_means_are_refused(tmp_path: Path) -> None:
    assert scale(vae(tmp_path), None) == (0.18215, 0.0)
    keys = vae(tmp_path, 16)
    with pytest.raises(ModelError, match="scaling factor of its latents; set the model's `scal"):
        scale(keys, None)
    assert scale(keys, None, scaling_factor=0.3611, shift_factor=0.1159) == (0.3611, 0.1159)
    keys = vae(tmp_path, latents_mean=[0.1] * 4, latents_std=[2.0] * 4, scaling_factor=0.5)
    for architecture in ("sdxl", None):
        with pytest.raises(ModelError, match="normalised by `latents_mean` and `latents_std`"):
            scale(keys, architecture)
    with pytest.raises(ModelError, match="is no number"):
        scale(vae(tmp_path, scaling_factor="a"), None)


def test_only_caches_of_a_wrong_scale_have_another_recipe(tmp_path: Path) -> None:
    def made(*model: Any, **more: Any) -> dict[str, object]:
        return cache_recipe.make("latents", Dataset(path="a"), model_of(*model, **more))

    bare = vae(tmp_path)
    assert made(bare, "sdxl")["scaling_factor"] == 0.13025
    for architecture, more in (
        ("sd1", {}),
        ("sd2", {}),
        (None, {}),
        (None, {"scaling_factor": 0.18215}),
        ("sdxl", {"layout": "sdscripts"}),  # which scales by itself
    ):
        assert not {"scaling_factor", "shift_factor"} & made(bare, architecture, **more).keys()
    told_by_config = vae(tmp_path, scaling_factor=0.13025)
    for architecture in ("sdxl", "sd1", None):
        assert "scaling_factor" not in made(told_by_config, architecture)
    assert made(told_by_config, None, scaling_factor=0.5)["scaling_factor"] == 0.5


def test_zero_terminal_snr_is_no_setting_of_flow_matching(tmp_path: Path) -> None:
    found = told(write(tmp_path, "sdxl", "v_pred", "ztsnr"), prediction_type="flow_matching")
    assert found.told == {"prediction_type": "flow_matching"}
    assert not found.zero_terminal_snr

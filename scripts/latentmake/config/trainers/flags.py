"""Flags of external trainers that a key of the configuration decides: refused in `arguments`.

Given there as well, one of the two would have no effect, or caches and training would not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import get_args

from latentmake.config.trainers.base import Trainer

_STATES = "`save_every_n_epochs` saves states, and a killed training is resumed by itself"
_CACHES = "datasets and caches are named by latentmake"
_DATASET = "it is a key of the dataset"
_VARIED = "cached latents cannot be varied"
_RESULT = "results lie in runs/{run}, named by the run"
_BOTH = {
    "--dataset_config": _CACHES,
    "--config_file": "set its options here",
    "--output_dir": _RESULT,
    "--output_name": _RESULT,
    "--logging_dir": "set `logging`",
    "--network_module": "latentmake names the LoRA's module",
    **dict.fromkeys(("--resume", "--save_state", "--save_state_on_train_end"), _STATES),
}
MUSUBI: Mapping[str, str] = {
    **_BOTH,
    "--max_train_steps": "set `max_train_epochs`",
    "--sage_attn": "SageAttention has no backward pass",
    "--task": "set the model's `task`",
    "--model_version": "set the model's `architecture` and `task`",
    "--dit": "set the model's `dit`",
    "--dit_high_noise": "set the model's `dit_high_noise`",
}
"""Flag of musubi-tuner's training scripts that no key of its trainer is named for -> what to do
instead."""

SD_SCRIPTS: Mapping[str, str] = {
    **_BOTH,
    **dict.fromkeys(("--train_data_dir", "--in_json", "--dataset_class"), _CACHES),
    **dict.fromkeys(("--dataset_repeats", "--reg_data_dir", "--skip_cache_check"), _CACHES),
    **dict.fromkeys(("--color_aug", "--random_crop", "--face_crop_aug_range"), _VARIED),
    **dict.fromkeys(("--resolution", "--enable_bucket", "--min_bucket_reso"), _DATASET),
    **dict.fromkeys(("--max_bucket_reso", "--bucket_reso_steps", "--bucket_no_upscale"), _DATASET),
    **dict.fromkeys(("--flip_aug", "--alpha_mask", "--resize_interpolation"), _DATASET),
    "--skip_image_resolution": _DATASET,
    "--save_model_as": "results are .safetensors files",
    "--pretrained_model_name_or_path": "set the model's `checkpoint`",
    "--save_last_n_epochs_state": _STATES,
    **dict.fromkeys(("--initial_epoch", "--initial_step", "--skip_until_initial_step"), _STATES),
    "--v2": "set the model's `architecture: sd2`",
    "--clip_skip": "set the model's `clip_skip`",
    "--max_token_length": "set the model's `max_token_length`",
    "--t5xxl_max_token_length": "set the `max_length` of the model's T5",
    "--apply_lg_attn_mask": "set the model's `apply_lg_attn_mask`",
    "--apply_t5_attn_mask": "set the model's `apply_t5_attn_mask`",
}
"""Flag of sd-scripts' training scripts that no key of its trainer is named for -> likewise."""


def flags_of(arguments: Iterable[str]) -> list[str]:
    """Return the flags among arguments, without values."""
    return [each.partition("=")[0] for each in arguments if each.startswith("--")]


def decided_flags(trainer: type[Trainer], further: Mapping[str, str]) -> dict[str, str]:
    """Return flag -> what to do instead, for a trainer's keys and further flags."""
    fields = trainer.model_fields
    return {
        **{f"--{key}": f"set `{key}`" for key in fields},
        **{f"--{x}": f"set `attention: {x}`" for x in get_args(fields["attention"].annotation)},
        **further,
    }


def refuse_decided(
    trainer: type[Trainer],
    arguments: Iterable[str],
    further: Mapping[str, str],
    free: Collection[str] = (),
) -> None:
    """Refuse flags that the configuration decides.

    Args:
        trainer: type of the section.
        arguments: of the section.
        further: flags that no key is named for.
        free: flags whose keys are not set.

    Raises:
        ValueError: names the first one.
    """
    decided = decided_flags(trainer, further)
    for flag in flags_of(arguments):
        if flag in decided and flag not in free:
            raise ValueError(f"`arguments`: leave out {flag}: {decided[flag]}")

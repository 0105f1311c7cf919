"""Flags of external trainers that a key of the configuration decides: refused in `arguments`.

Given there as well, one of the two would have no effect, or caches and training would not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["MUSUBI", "SD_SCRIPTS", "flags_of", "refuse_ours"]

_STATES = "`save_every_n_epochs` saves states, and a killed training is resumed by itself"
_CACHES = "datasets and caches are named by latentmake"
_RESULT = "results lie in runs/{run}, named by the run"
_BOTH = {
    "--dataset_config": _CACHES,
    "--config_file": "set its options here",
    "--output_dir": _RESULT,
    "--output_name": _RESULT,
    "--logging_dir": "set `logging`",
    "--network_module": "latentmake names the LoRA's module",
    "--resume": _STATES,
    "--save_state": _STATES,
    "--save_state_on_train_end": _STATES,
    **{
        f"--{key}": f"set `{key}`"
        for key in (
            *("network_dim", "network_alpha", "learning_rate", "optimizer_type"),
            *("max_train_epochs", "gradient_accumulation_steps", "max_data_loader_n_workers"),
            *("mixed_precision", "save_every_n_epochs"),
        )
    },
}
MUSUBI: Mapping[str, str] = {
    **_BOTH,
    "--max_train_steps": "set `max_train_epochs`",
    "--task": "set the model's `task`",
    "--dit": "set the model's `dit`",
    "--dit_high_noise": "set the model's `dit_high_noise`",
    **{
        f"--{name}": f"set `attention: {name}`"
        for name in ("sdpa", "flash_attn", "flash3", "xformers", "sage_attn")
    },
    **{
        f"--{key}": f"set `{key}`"
        for key in (
            *("timestep_sampling", "discrete_flow_shift", "timestep_boundary"),
            *("fp8_base", "fp8_scaled"),
        )
    },
}
"""Flag of wan_train_network.py -> what to do instead."""

SD_SCRIPTS: Mapping[str, str] = {
    **_BOTH,
    **dict.fromkeys(
        ("--train_data_dir", "--in_json", "--dataset_class", "--dataset_repeats"), _CACHES
    ),
    **dict.fromkeys(("--reg_data_dir", "--skip_cache_check"), _CACHES),
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
    **{f"--{name}": f"set `attention: {name}`" for name in ("sdpa", "xformers", "mem_eff_attn")},
    **{
        f"--{key}": f"set `{key}`"
        for key in (
            *("max_train_steps", "train_batch_size", "lr_scheduler", "network_train_unet_only"),
            *("gradient_checkpointing", "torch_compile", "dynamo_backend", "deepspeed"),
            *("zero_stage", "seed"),
        )
    },
}
"""Flag of sd-scripts' training scripts -> what to do instead."""


def flags_of(arguments: Iterable[str]) -> list[str]:
    """Return the flags among arguments, without values."""
    return [each.partition("=")[0] for each in arguments if each.startswith("--")]


def refuse_ours(arguments: Iterable[str], ours: Mapping[str, str]) -> None:
    """Refuse flags that the configuration decides.

    Args:
        arguments: the user's own.
        ours: flag -> what to do instead.

    Raises:
        ValueError: names the first one.
    """
    for flag in flags_of(arguments):
        if flag in ours:
            raise ValueError(f"`arguments`: leave out {flag}: {ours[flag]}")

"""Flags of musubi-tuner's caching scripts that the configuration decides.

Given among a model's further arguments as well, one of the two would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from latentmake.config.scripts import Script

_MACHINE = "set it in `musubi_tuner`"
_CACHES = "latentmake decides what is encoded, and where it lies"
_DECIDED: Mapping[str, str] = {
    **dict.fromkeys(("--dataset_config", "--skip_existing", "--keep_cache"), _CACHES),
    **dict.fromkeys(("--batch_size", "--num_workers"), _MACHINE),
    "--device": "set CUDA_VISIBLE_DEVICES: each job gets a GPU of those",
    "--debug_mode": "it shows pictures and makes no caches",
}


def refuse_decided(
    key: str, arguments: Iterable[str], script: Script, version: Iterable[str], dtype: str
) -> None:
    """Refuse further arguments that other keys of the configuration decide.

    Args:
        key: of the arguments.
        arguments: as the user wrote them.
        script: that gets them.
        version: arguments of the model's `task`.
        dtype: the key of the script's dtype.

    Raises:
        ValueError: the first such flag.
    """
    decided = {
        **_DECIDED,
        **{file.flag: f"set the model's `{file.key.partition('.')[0]}`" for file in script.files},
        **{flag: f"set the model's `{name}`" for flag, name in script.switches},
        **{flag: "set the model's `task`" for flag in version if flag.startswith("--")},
    }
    if script.dtype_flag is not None:
        decided[script.dtype_flag] = f"set the model's `{dtype}`"
    for each in arguments:
        given = each.partition("=")[0]
        # argparse takes the beginning of a flag for it.
        for flag, instead in decided.items() if given.startswith("--") else ():
            if flag.startswith(given):
                raise ValueError(f"`{key}` has {given}: leave it out; {instead}")

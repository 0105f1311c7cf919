"""Command lines of external trainers, and the user's own arguments in them.

The trainer runs in a folder of its own, where a path relative to the project means nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from latentmake.config.rows import Setting
from latentmake.files.paths import is_windows
from latentmake.training.external.order import ExternalOrder

# Learning-rate schedules that know no end: they go on rightly whatever number of steps is left.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "adafactor"})
_Order = TypeVar("_Order", bound=ExternalOrder)

# Endings of files that trainers read.
_READ = (
    *(".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin"),
    *(".toml", ".json", ".yaml", ".yml", ".txt"),
)


def command_line(options: Mapping[str, Setting]) -> list[str]:
    """Return the arguments for some flags with their values.

    True gives the flag alone, None and False give nothing, a list each of its values; numbers have
    the shortest text that reads as the same number.
    """
    found: list[str] = []
    for flag, value in options.items():
        if value is None or value is False:
            continue
        found.append(flag)
        if isinstance(value, list):
            found += value
        elif isinstance(value, str):
            found.append(value)
        elif value is not True:
            found.append(str(int(value)) if value == int(value) else repr(value))
    return found


def accelerate_arguments(
    precision: str, *, processes: int | None = None, config: str | None = None
) -> list[str]:
    """Return the arguments between `accelerate launch` and the training script.

    Args:
        precision: number format in which it computes.
        processes: how many devices train together; None leaves it to accelerate.
        config: path of accelerate's configuration file, which then says all of it.
    """
    if config is not None:
        return ["--config_file", config]
    options: dict[str, str | float | bool | None] = {"--mixed_precision": precision}
    if processes is not None:
        options |= {"--num_processes": processes, "--num_machines": 1, "--dynamo_backend": "no"}
        options |= {"--multi_gpu": processes > 1}
    return command_line(options)


def absolute(path: Path | str) -> str:
    """Return an absolute path; links stay."""
    return os.path.abspath(path)  # noqa: PTH100


def with_paths(arguments: Sequence[str], named: Callable[[str], str] = str) -> list[str]:
    """Return arguments with each path in them made absolute, and `named` as another system does.

    A value is a path if it has a slash, an ending or a `~` and exists, seen from the working
    directory. An absolute path may lie on another machine. In `--flag=value` and `key=value` the
    part behind counts.
    """
    found = []
    for each in arguments:
        before, value = _split(each)
        place = _place(value) or (value if _is_absolute(value) else None)
        found.append(f"{before}{named(place)}" if place else each)
    return found


def located(order: _Order, named: Callable[[str], str] = str) -> _Order:
    """Return an order with the paths in the user's own arguments resolved; see `with_paths`."""
    further = with_paths(order.trainer.arguments, named)
    trainer = order.trainer.model_copy(update={"arguments": further})
    keys = ("latents_arguments", "text_arguments")
    own = {key: with_paths(getattr(order.model, key), named) for key in keys}
    model = order.model.model_copy(update=own)
    return order.model_copy(update={"trainer": trainer, "model": model})


def depends_on_length(arguments: Sequence[str], schedule: str = "constant") -> bool:
    """Whether the learning rate depends on the number of steps, which differs after a resume.

    `schedule` is the one that is set besides the user's own arguments.
    """
    values = [*arguments, ""]
    given = dict(_split(x) if "=" in x else (x + "=", values[i + 1])
                 for i, x in enumerate(arguments) if x.startswith("--"))  # fmt: skip
    if given.get("--lr_scheduler_type="):
        return False  # its own numbers are part of the state
    if "." in given.get("--lr_warmup_steps=", "") or "." in given.get("--lr_decay_steps=", ""):
        return True  # shares of all steps
    return given.get("--lr_scheduler=", schedule).partition(":")[0] not in _ENDLESS


def missing_files(arguments: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield values that look like files and are nowhere; the trainer runs in `folder`."""
    for each in arguments:
        value = _split(each)[1]
        named = value.endswith(_READ) and "://" not in value and " " not in value
        if named and _place(value) is None and not _exists(folder / value):
            yield value


def _split(argument: str) -> tuple[str, str]:
    """Return what stands up to an equals sign, and the value behind it."""
    key, equals, value = argument.partition("=")
    return (f"{key}=", value) if equals and not _exists(argument) else ("", argument)


def _exists(path: Path | str) -> bool:
    """Whether a path exists; one that is too long for the system does not."""
    return os.path.exists(path)  # noqa: PTH110


def _is_absolute(value: str) -> bool:
    """Whether a value is an absolute path; a letter with a colon alone is no drive here."""
    return value.startswith("/") or (is_windows(value) and len(value) > len("C:"))


def _place(value: str) -> str | None:
    """Return the absolute path that a value means; None if it is none."""
    path = os.path.expanduser(value)  # noqa: PTH111 -- Path would drop "./"
    looks = path != value or os.sep in value or bool(Path(value).suffix)
    if value.startswith("-") or not looks:
        return None
    return absolute(path) if _exists(path) else None

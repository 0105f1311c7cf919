"""Prompts of the configuration: a list, or the lines of a file."""

from __future__ import annotations

from typing import Any

from latentmake.config.fields import expanded
from latentmake.regular import read_regular


def with_prompt_file(values: Any) -> Any:
    """Put the lines of a section's `prompt_file` into its `prompts`, so that content decides.

    Raises:
        ValueError: there are both, or the file is unreadable or empty.
    """
    if not isinstance(values, dict) or not isinstance(values.get("prompt_file"), str):
        return values
    if values.get("prompts"):
        raise ValueError("has both `prompts` and `prompt_file`: leave one out")
    name = expanded(values["prompt_file"])
    try:
        lines = read_regular(name).decode("utf-8-sig").splitlines()
    except OSError as error:
        what = f"`prompt_file` {name} cannot be read ({error.strerror}): correct the path"
        raise ValueError(what) from None
    except UnicodeDecodeError as error:
        what = f"`prompt_file` {name} is not UTF-8 (byte {error.start + 1}): save it as UTF-8"
        raise ValueError(what) from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"`prompt_file` {name} holds no prompt: write one a line")
    return {**values, "prompts": prompts, "prompt_file": None}

"""Options of a command are no keys of a configuration."""

from __future__ import annotations

import pytest
from latentmake.config.command import Options, command_line
from latentmake.errors import ConfigError


def test_options_of_the_command_are_taken_out_of_the_configuration() -> None:
    words = ["confirm=true", "file=cache/a=b.safetensors", "prompt=x"]
    values = {"confirm": "true", "file": "cache/a=b.safetensors", "prompt": "x", "runs": {}}
    options, left = command_line(words, values)
    assert options == Options(confirm=True, file="cache/a=b.safetensors")
    assert left == {"prompt": "x", "runs": {}}


def test_a_file_confirms_nothing() -> None:
    options, left = command_line([], {"confirm": True})
    assert not options.confirm and left == {"confirm": True}


def test_a_value_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ConfigError, match="verbose: `maybe` is neither true nor false"):
        command_line(["verbose=maybe"], {})

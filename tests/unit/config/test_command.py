"""Options of a command are no keys of a configuration."""

from __future__ import annotations

import pytest
from latentmake.config.command import Options, command_line
from latentmake.errors import ConfigError


def test_options_of_the_command_are_taken_out_of_the_configuration() -> None:
    words = ["repair=true", "prompt=x=y"]
    values = {"repair": "true", "prompt": "x=y", "runs": {}}
    options, left = command_line(words, values)
    assert options == Options(repair=True)
    assert left == {"prompt": "x=y", "runs": {}}


def test_a_file_repairs_nothing() -> None:
    options, left = command_line([], {"repair": True})
    assert not options.repair and left == {"repair": True}


def test_a_value_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ConfigError, match="repair: `maybe` is neither true nor false"):
        command_line(["repair=maybe"], {})

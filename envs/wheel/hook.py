"""Build hook of hatchling for the two files of a wheel that its option `sources` cannot place."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FILES = {
    "Snakefile": "latentmake_workflow/Snakefile",
    "envs/wheel/latentmake.pth": "latentmake.pth",
}


class WheelHook(BuildHookInterface):  # type: ignore[misc]
    """Add the files to a wheel.

    An editable installation uses the files of the clone, so nothing is added to it.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files before a build; `version` is `standard` or `editable`."""
        if version == "standard":
            build_data["force_include"].update(_FILES)

"""Print the JSON schema of the configuration, for `config/schema.json`."""

from __future__ import annotations

import sys

from latentmake.config.schema import json_schema

__all__: list[str] = []

sys.stdout.write(json_schema())

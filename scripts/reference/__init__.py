"""Generated files of the project: the reference in docs/, the schema, the index of the examples.

`PYTHONPATH=scripts python -m reference` writes all of them. They are made from the schema of the
configuration, its docstrings, the table of architectures and the help of `latentmake`. In
`docs/guides/disk.md` only the table of sizes is generated, from the formulas of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reference import architectures, commands, examples, index, pages, parameterization, sizes
from reference.schema import json_schema

__all__ = ["ROOT", "files"]

ROOT = Path(__file__).resolve().parents[2]


def files() -> Mapping[str, str]:
    """Return path in the project -> content, for each generated file."""
    written = {
        "README.md": index.page(),
        "architectures.md": architectures.page(),
        "commands.md": commands.page(),
        **{page.file: pages.text(page) for page in pages.PAGES},
    }
    return {
        "config/schema.json": json_schema(),
        "docs/how-it-works/parameterization.md": parameterization.page(),
        "docs/guides/disk.md": sizes.page(ROOT / "docs/guides/disk.md"),
        "config/examples/README.md": examples.page(ROOT / "config/examples"),
        **{f"docs/reference/{name}": text for name, text in written.items()},
    }

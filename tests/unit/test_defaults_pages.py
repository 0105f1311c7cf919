"""The pages on musubi-tuner and sd-scripts say the defaults of each architecture's training.

`PYTHONPATH=scripts python tests/unit/test_defaults_pages.py` writes their tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from latentmake.config.musubi import MUSUBI
from latentmake.config.scripts import Setting
from latentmake.config.sdscripts import SDSCRIPTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEAD = "| architecture | learning rate | rank | alpha | further |"
ROWS: Mapping[str, Mapping[str, Mapping[str, Setting]]] = {
    "musubi.md": {name: row.settings for name, row in MUSUBI.items()},
    "sd-scripts.md": {name: row.settings for name, row in SDSCRIPTS.items()},
}
SAID = {"learning_rate", "network_dim", "network_alpha", "gradient_checkpointing", "seed"}


def table(rows: Mapping[str, Mapping[str, Setting]]) -> str:
    lines = [HEAD, re.sub(r"[^|]+", "---", HEAD)]
    for name, settings in rows.items():
        rank, alpha = settings["network_dim"], settings.get("network_alpha")
        further = [
            f"`{key}: {value}`" if key[0] != "-" else f"`{key} {_words(value)}`"
            for key, value in settings.items()
            if key not in SAID and value is not None
        ]
        cells = [f"`{name}`", f"{settings['learning_rate']:g}", str(rank), f"{alpha or rank:g}"]
        lines.append(f"| {' | '.join([*cells, ', '.join(further)])} |")
    return "\n".join(lines)


def _words(value: Setting) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("page", ROWS)
def test_a_page_has_the_defaults_of_each_row(page: str) -> None:
    text = (DOCS / page).read_text()
    assert table(ROWS[page]) in text, "PYTHONPATH=scripts python tests/unit/test_defaults_pages.py"


@pytest.mark.parametrize("page", ROWS)
def test_all_rows_save_memory_and_a_seed_is_the_same_in_all(page: str) -> None:
    """The pages say so in a sentence."""
    for settings in ROWS[page].values():
        assert settings["gradient_checkpointing"] is True
        assert settings.get("seed") == (42 if page == "musubi.md" else None)


if __name__ == "__main__":
    for name, found in ROWS.items():
        before = (DOCS / name).read_text()
        known = re.search(rf"{re.escape(HEAD)}\n(\|.*\n)+", before)
        assert known is not None
        (DOCS / name).write_text(before.replace(known[0], f"{table(found)}\n"))

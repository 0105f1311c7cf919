"""The page on musubi-tuner's architectures says what their rows say.

`PYTHONPATH=scripts python tests/unit/test_musubi_page.py` writes its table anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from latentmake.config import parse
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.scripts import Scripts

PAGE = Path(__file__).resolve().parents[2] / "docs/musubi.md"
HEAD = "| architecture | name | `task` | weights | items | sides | suffix | training script |"
SHOWN = 4
ROWS = [(each, each.scripts) for each in (WAN, *ARCHITECTURES.values()) if each.scripts]


def tasks(scripts: Scripts) -> str:
    names = [f"`{name}`" for name in scripts.versions if name]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN + 1 else ""
    return ", ".join(names[:SHOWN] if more else names) + more or "none"


def weights(scripts: Scripts) -> Iterator[str]:
    keys: dict[str, bool] = {}
    for file in (*scripts.latents.files, *scripts.text.files):
        keys[file.key] = file.required or keys.get(file.key, False)
    texts = [key for key in keys if key.startswith("text")]
    for key, required in keys.items():
        if key != "text" and key in texts:
            continue
        word = f"{len(texts)} of `text`" if key == "text" and len(texts) > 1 else f"`{key}`"
        yield word if required else f"({word})"


def items(scripts: Scripts) -> Iterator[str]:
    versions = scripts.versions.values()
    if any(each.images for each in versions):
        yield "images"
    if any(each.videos for each in versions):
        yield "videos"
    least = min(each.controls[0] for each in versions)
    most = [each.controls[1] for each in versions]
    if None in most:
        yield "controls" if least == 0 else "1 control or more"
    elif max(filter(None, most), default=0):
        yield "a control" if least else "(a control)"
    if scripts.layers:
        yield "layers"


def table() -> str:
    lines = [HEAD, re.sub(r"[^|]+", "---", HEAD)]
    for architecture, scripts in ROWS:
        name = "a `task` alone" if architecture is WAN else f"`{architecture.name}`"
        cells = [
            name,
            scripts.title,
            tasks(scripts),
            ", ".join(weights(scripts)) or "none",
            ", ".join(items(scripts)),
            str(architecture.side),
            f"`{scripts.suffix}`",
            f"`{scripts.training.name}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_has_the_facts_of_each_row() -> None:
    assert table() in PAGE.read_text(), "PYTHONPATH=scripts python tests/unit/test_musubi_page.py"


def test_each_architecture_has_a_paragraph() -> None:
    found = re.findall(r"^### (.+)$", PAGE.read_text().partition("## Architectures\n")[2], re.M)
    assert found == [scripts.title for _, scripts in ROWS]


def test_each_architecture_has_an_example() -> None:
    examples = PAGE.parents[1] / "config/examples"
    models = [
        model
        for path in examples.glob("*.yaml")
        for model in parse(yaml.safe_load(path.read_text(encoding="utf-8"))).models.values()
    ]
    assert {each.name for each, _ in ROWS} <= {model.spec.name for model in models}


if __name__ == "__main__":
    text = PAGE.read_text()
    known = re.search(rf"{re.escape(HEAD)}\n(\|.*\n)+", text)
    assert known is not None
    PAGE.write_text(text.replace(known[0], f"{table()}\n"))

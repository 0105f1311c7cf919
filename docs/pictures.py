"""Pictures of the README and docs: grid, edit and captions of samples, and pages in a browser.

    python docs/pictures.py

Builds the sample and a second run in the present folder, a clone of the project. Needs the packages
of `envs/requirements-dev.lock` and chromium.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml
from PIL import Image, ImageDraw, ImageFont, ImageOps

FOLDER = Path(__file__).parent
RUN, SECOND = "michael_gove", "michael_gove-rank2"
PAGE, REPORT = f"compare_{RUN}_vs_{SECOND}", f"report_{RUN}"
CAPTION = "a {} ring on a grey and white checked background, michael_gove style"
TILE, LINE = 192, 22  # pixels of a picture and of a line of text
SIZE, TALL = (1100, 700), (1240, 1300)  # pixels of the browser's window


def build(temporary: Path) -> None:
    """Train both runs, and write their comparison and a report."""
    values = yaml.safe_load(Path("config/config.yaml").read_text())
    values["runs"][SECOND] = copy.deepcopy(values["runs"][RUN])
    values["runs"][SECOND]["trainer"]["rank"] = 2
    config = temporary / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    targets = [f"train_{RUN}", f"train_{SECOND}"]
    snakemake = [sys.executable, "-m", "snakemake", "--cores", "all", *targets]
    subprocess.run([*snakemake, "--configfile", str(config)], check=True)
    for words in (["compare", RUN, SECOND], ["report", RUN]):
        command = [sys.executable, "-m", "latentmake", *words, "-c", str(config)]
        subprocess.run(command, check=True)


def draw_an_edit(temporary: Path) -> None:
    """Train before and after one caption was edited, and draw what the same prompt gives."""
    pictures, config = temporary / "pictures", temporary / "edit.yaml"
    shutil.copytree("data/michael_gove", pictures)
    values = yaml.safe_load(Path("config/config.yaml").read_text())
    values["datasets"] = {"edit": {"path": str(pictures)}}
    run = values["runs"].pop(RUN) | {"datasets": ["edit"]}
    run["trainer"]["samples"]["prompts"] = [CAPTION.format("red")]
    values["runs"] = {"edit": run}
    config.write_text(yaml.safe_dump(values))
    build = [sys.executable, "-m", "snakemake", "--cores", "all", "train_edit"]
    tiles = [Image.open(pictures / "blue_ring.webp", formats=["WEBP"])]
    for colour in ("blue", "red"):
        (pictures / "blue_ring.txt").write_text(CAPTION.format(colour))
        subprocess.run([*build, "--configfile", str(config)], check=True)
        sample = "runs/edit/samples/step-000300_00.png"
        tiles.append(Image.open(sample, formats=["PNG"]))
    lines = (
        ("a picture of the dataset", "its caption: a blue ring ..."),
        ("prompt: a red ring ...", "before the edit"),
        ("prompt: a red ring ...", "after the caption became a red ring ..."),
    )
    draw_tiles(tiles, lines).save(temporary / "edit.png")


def draw_captions(temporary: Path) -> None:
    """Make the captions of a sample, and draw some of them below their pictures."""
    command = [sys.executable, "-m", "snakemake", "--cores", "all", "captions_figures"]
    config = "config/examples/captions-sample.yaml"
    subprocess.run([*command, "--configfile", config], check=True)
    tiles, lines = list[Image.Image](), list[tuple[str, ...]]()
    for stem in ("red_moon", "pink_square", "orange_ring"):
        tiles.append(Image.open(f"data/figures/{stem}.png", formats=["PNG"]))
        made = json.loads(Path(f"cache/figures/captions/figures/{stem}.json").read_text())
        lines.append(tuple(textwrap.wrap(made["text"], 34)))
    draw_tiles(tiles, lines).save(temporary / "captioners.png")


def draw_tiles(tiles: Sequence[Image.Image], lines: Sequence[Sequence[str]]) -> Image.Image:
    """Return pictures side by side, each with two lines of text below it."""
    font = ImageFont.load_default(15)
    wide = TILE + 96
    drawn = Image.new("RGB", (wide * 3, TILE + 2 * LINE + 16), "white")
    draw = ImageDraw.Draw(drawn)
    for number, (tile, words) in enumerate(zip(tiles, lines, strict=True)):
        left = number * wide
        tile = ImageOps.fit(tile.convert("RGB"), (TILE, TILE), Image.Resampling.BICUBIC)
        drawn.paste(tile, (left + 8, 8))
        for row, text in enumerate(words):
            draw.text((left + 8, TILE + 12 + row * LINE), text, "black", font)
    return drawn


def photograph(name: str, target: Path, part: str, window: tuple[int, int] = SIZE) -> None:
    """Write what a browser shows of a page, at the `part` that its address names."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = ",".join(map(str, window))
    address = f"{Path('reports', name).resolve().as_uri()}.html#{part}"
    subprocess.run(
        [program, *options, f"--window-size={size}", f"--screenshot={target}", address],
        check=True,
        capture_output=True,
    )


def keep(picture: Path, target: Path, colours: int = 96) -> None:
    """Write a picture with a palette, for a third of the bytes."""
    image = Image.open(picture, formats=["PNG"]).convert("RGB")
    image.quantize(colours).save(target, optimize=True)


def main() -> None:
    """Write the pictures into docs."""
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        build(temporary)
        draw_an_edit(temporary)
        draw_captions(temporary)
        photograph(PAGE, temporary / "compare.png", "")
        photograph(REPORT, temporary / "report.png", "", TALL)
        keep(Path(f"runs/{RUN}/samples.png"), FOLDER / "samples.png")
        for page in temporary.glob("*.png"):
            keep(page, FOLDER / page.name, colours=64)


if __name__ == "__main__":
    main()

"""Pictures of the README: the sample's grid, and a comparison page in a browser.

    python docs/pictures.py

Builds the sample and a second run in the present folder, a clone of the project. Needs the packages
of `envs/requirements-dev.lock` and chromium.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from PIL import Image

FOLDER = Path(__file__).parent
RUN, SECOND = "michael_gove", "michael_gove-rank2"
PAGE = f"compare_{RUN}_vs_{SECOND}"
SIZE = (1100, 700)  # pixels of the browser's window


def build(temporary: Path) -> None:
    """Train both runs and write their comparison."""
    values = yaml.safe_load(Path("config/config.yaml").read_text())
    values["runs"][SECOND] = copy.deepcopy(values["runs"][RUN])
    values["runs"][SECOND]["trainer"]["rank"] = 2
    config = temporary / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    targets = [f"train_{RUN}", f"train_{SECOND}", PAGE]
    snakemake = [sys.executable, "-m", "snakemake", "--cores", "all", *targets]
    subprocess.run([*snakemake, "--configfile", str(config)], check=True)


def photograph(page: Path, target: Path) -> None:
    """Write what a browser shows of a page at its last step."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = ",".join(map(str, SIZE))
    address = f"{page.resolve().as_uri()}#prompt=4&step=500"
    subprocess.run(
        [program, *options, f"--window-size={size}", f"--screenshot={target}", address],
        check=True,
        capture_output=True,
    )


def keep(picture: Path, target: Path) -> None:
    """Write a picture with a palette, for a third of the bytes."""
    image = Image.open(picture).convert("RGB")
    image.quantize(256).save(target, optimize=True)


def main() -> None:
    """Write docs/samples.png and docs/compare.png."""
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        build(temporary)
        photograph(Path(f"reports/{PAGE}.html"), temporary / "page.png")
        keep(Path(f"runs/{RUN}/samples.png"), FOLDER / "samples.png")
        keep(temporary / "page.png", FOLDER / "compare.png")


if __name__ == "__main__":
    main()

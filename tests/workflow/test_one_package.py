"""A workflow is planned and carried out by one copy of the package: that of its Snakefile.

The Snakefile may be a module of the user's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

OTHER = 'raise RuntimeError("the package of the other clone")'
MODULE = """
configfile: "config/config.yaml"
module {name}:
    snakefile: "{clone}/Snakefile"
    config: config
use rule * from {name} as {name}_*
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another clone, which is the working folder; its package is on the path."""
    package = tmp_path / "other/scripts/latentmake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("session", "entry"):
        (package / f"{name}.py").write_text(OTHER)
    folder = tmp_path / "other"
    for name in ("profiles", "config"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def snakemake(folder: Path, snakefile: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "snakemake", "-s", str(snakefile), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder / "scripts")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return f"{done.stdout}{done.stderr}\nstatus {done.returncode}"


def test_the_clone_of_the_snakefile_plans_in_the_folder_of_another_clone(other: Path) -> None:
    output = snakemake(other, ROOT / "Snakefile", "-n", "caches_michael_gove")
    assert output.endswith("status 0") and "targets to make" in output, output


def test_a_module_makes_what_its_users_target_names(other: Path, tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(MODULE.format(name="lm", clone=ROOT))
    asked = ("-n", "-p", "lm_caches_michael_gove")
    output = snakemake(other, tmp_path / "Snakefile", *asked)
    rules = re.findall(r"^(?:local)?rule ([\w-]+?)(?:_[0-9a-f]{12})?:$", output, re.M)
    encoded = [f"lm_encode_{kind}_michael_gove_tiny-sd" for kind in ("latents", "text")]
    assert sorted({*rules} - {"lm_latents", "lm_text"}) == [
        "lm_caches_michael_gove",
        *encoded,
        "lm_manifest",
    ], output


def test_a_workflow_of_two_clones_is_refused_in_one_line(other: Path, tmp_path: Path) -> None:
    for name in ("Snakefile", "rules"):
        (other / name).symlink_to(ROOT / name)
    both = (MODULE.format(name=x, clone=y) for x, y in (("one", ROOT), ("two", other)))
    (tmp_path / "Snakefile").write_text("".join(both))
    output = snakemake(other, tmp_path / "Snakefile", "-n", "one_caches_michael_gove")
    line = next(x for x in output.splitlines() if x.startswith("error: "))
    assert f"{ROOT}/scripts and {other}/scripts: one workflow cannot use two" in line, output
    assert "Traceback" not in output and output.endswith("status 1")

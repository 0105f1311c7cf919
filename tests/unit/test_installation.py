"""`pip install -e .` makes the package importable, and an installed copy is complete."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "config",
    "data/michael_gove",
    "data/tiny-captioner",
    "data/tiny-sd",
    "envs",
    "profiles",
    "rules",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what builds and installing leave in the folder; its folders are links."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "Snakefile"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for name in (*PARTS, "scripts"):
        (folder / name).mkdir(parents=True)
        for path in (ROOT / name).iterdir():
            if not path.name.endswith(".egg-info"):
                (folder / name / path.name).symlink_to(path)
    return folder


def pip(*arguments: str) -> None:
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *arguments, *offline]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_importable_everywhere_and_torch_waits_for_the_datasets(
    source: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    # In place of the dependencies' installation: those of the environment of the tests.
    place = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", str(python), "install", "--editable", str(source))
    code = """
import sys
import latentmake
assert "torch" not in sys.modules
from latentmake import CachedClipDataset, ClipDataset, collate_fn
from torch.utils.data import Dataset
assert issubclass(CachedClipDataset, Dataset) and issubclass(ClipDataset, Dataset)
assert callable(collate_fn)
print(latentmake.__file__)
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry
assert LoggerPluginRegistry().is_installed("latentmake")
try:
    latentmake.CachedClipdataset
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [str(python), "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(source / "scripts/latentmake/__init__.py"),
        "module 'latentmake' has no attribute 'CachedClipdataset'",
    ]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", str(folder), str(source))
    (made,) = folder.glob("*.whl")
    return made


def test_a_wheel_holds_the_files_of_a_clone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {
            name.removeprefix("latentmake_workflow/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("latentmake_workflow/")
        }
        others = {name for name in archive.namelist() if not name.startswith("latentmake_workflow")}
    assert {name for name in others if not name.startswith("latentmake-")} == {"latentmake.pth"}
    git = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run([*git, "Snakefile", *PARTS, "scripts"], capture_output=True, text=True)
    left_out = ("envs/wheel/", "scripts/demo/", "scripts/dev", "scripts/reference/")
    names = {name for name in listed.stdout.splitlines() if not name.startswith(left_out)}
    assert found == {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file()}


def test_an_installed_tool_builds_a_project_anywhere(wheel: Path, tmp_path: Path) -> None:
    """By the wheel's own Snakefile and package, jobs too; a moved project has nothing to do."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, place = tmp_path / "venv/bin/python", tmp_path / "project"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    # After the wheel's own: that of the tests has a clone's package.
    (packages / "zz.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", str(python), "install", str(wheel))

    def run(*command: str, cwd: Path) -> str:
        done = subprocess.run(
            [str(python), "-m", *command], cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    told = run("latentmake", "demo", str(place), cwd=tmp_path)
    assert "latentmake build train_michael_gove" in told
    snakefile = run("latentmake", "--snakefile", cwd=place).strip()
    assert snakefile == str(packages / "latentmake_workflow/Snakefile")
    target = ("caches_michael_gove", "--snakefile", snakefile)
    assert "24 encoded" in run("snakemake", *target, cwd=place)
    place = place.rename(tmp_path / "moved")
    assert "Nothing to be done" in run("snakemake", *target, cwd=place)
    logs = "".join(path.read_text() for path in place.glob("logs/**/*.log"))
    assert str(ROOT) not in logs

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
PACKAGES = [*(ROOT / "scripts").glob("*latentmake")]  # the logger plugin is the other one


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what installing leaves in the folder; the packages themselves are links."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "scripts").mkdir()
    for package in PACKAGES:
        (folder / "scripts" / package.name).symlink_to(package)
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


def test_a_wheel_holds_every_file_of_the_packages(source: Path, tmp_path: Path) -> None:
    pip("wheel", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.startswith("latentmake-")}
    files = (path for package in PACKAGES for path in package.rglob("*") if path.is_file())
    assert found == {
        path.relative_to(ROOT / "scripts").as_posix()
        for path in files
        if path.parent.name != "__pycache__"
    }

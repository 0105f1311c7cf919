"""The repository agrees with itself: pins, dependencies, sizes, and what it says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import slow_tests
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "scripts/latentmake"
DEMO = ROOT / "scripts/demo"
PLUGIN = ROOT / "scripts/snakemake_logger_plugin_latentmake"
MODULES = sorted([*PACKAGE.rglob("*.py"), *DEMO.rglob("*.py"), *PLUGIN.rglob("*.py")])


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "envs" / name).read_text().splitlines()
    return dict(line.strip(" -").split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("name", ["encode.yaml", "train.yaml"])
def test_environments_pin_what_the_lock_pins(name: str) -> None:
    (listed,) = [
        each["pip"]
        for each in yaml.safe_load((ROOT / "envs" / name).read_text())["dependencies"]
        if isinstance(each, dict)
    ]
    assert listed
    lock = pins("requirements.lock")
    assert {each: each.partition("==")[2] for each in listed} == {
        each: lock[each.partition("==")[0]] for each in listed
    }


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("encode.yaml", ["trainers.exchange.cut_clips", "trainers.musubi.encode"]),
        ("train.yaml", ["pages.following", "trainers.run"]),
        ("train.yaml", ["trainers.wan.recipe", "encode.encoders.text", "encode.pixels.stored"]),
    ],
)
def test_an_environment_has_the_imports_of_its_jobs(name: str, modules: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    # Installed with accelerate, pydantic and torch.
    along = {"filelock", "fsspec", "psutil", "pydantic-core", "pyyaml"}
    missing = {each.replace("-", "_") for each in named - along - pins(name).keys()}
    code = f"""import sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
sys.modules.update(dict.fromkeys({sorted(missing)}))
import {", ".join(f"latentmake.{each}" for each in modules)}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_locks_agree() -> None:
    use, dev = pins("requirements.lock"), pins("requirements-dev.lock")
    assert use.items() <= dev.items()


def test_dependencies_are_those_imported_and_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    extras = project["optional-dependencies"]
    optional = {*extras["parquet"], *extras["adamw8bit"], *extras["captioners"]}
    modules = {
        "opencv-python-headless": "cv2",
        "pillow": "PIL",
        "pydantic-core": "pydantic_core",
        "pytorch-optimizer": "pytorch_optimizer",
        "pyyaml": "yaml",
        "snakemake-interface-executor-plugins": "snakemake_interface_executor_plugins",
        "snakemake-interface-logger-plugins": "snakemake_interface_logger_plugins",
        "tomli-w": "tomli_w",
    }
    imported = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    imported |= {"snakemake", "tensorboard"}  # the Snakefile's; what torch's own writer needs
    assert {modules.get(name, name) for name in named} <= imported
    foreign = imported - set(sys.stdlib_module_names) - {"latentmake", "demo"}
    assert foreign <= {modules.get(name, name) for name in named} | {"tensorboard"} | optional
    assert named <= set(pins("requirements.lock"))


def test_the_readme_has_two_commands_each_with_its_installation() -> None:
    """And what checks the project runs them, without their environment on the PATH."""
    text = (ROOT / "README.md").read_text()
    commands = re.findall(
        r"^    python3 -m venv \.venv && \.venv/bin/pip install -e \. -r (\S+) "
        r"&& (\.venv/bin/\S+)(.*)$",
        text,
        re.MULTILINE,
    )
    assert [(lock, program) for lock, program, _ in commands] == [
        ("envs/requirements.lock", ".venv/bin/snakemake"),
        ("envs/requirements-dev.lock", ".venv/bin/pytest"),
    ]
    assert text.count("-m venv") == 2
    checks = (ROOT / ".ci/run").read_text()
    for lock, program, arguments in commands:
        assert f'"$bin/{Path(program).name}"{arguments}' in checks
        assert (ROOT / lock).is_file()
    assert "activate" not in checks and "requirements-dev.lock" in checks


def test_the_snakefile_and_rules_stay_short() -> None:
    assert len((ROOT / "Snakefile").read_text().splitlines()) <= 60
    for path in (ROOT / "rules").glob("*.smk"):
        bodies = re.split(r"^\s*rule\b", path.read_text(), flags=re.MULTILINE)
        assert all(len(body.strip().splitlines()) <= 25 for body in bodies[1:]), path
    for path in (ROOT / "scripts").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 30, path


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import latentmake.session; "
        "import latentmake.encode.tokenizers, latentmake.trainers.sd.plan; "
        "import latentmake.trainers.wan.plan; "
        "slow = ('torch', 'numpy', 'PIL', 'transformers', 'av', 'fsspec', 's3fs', "
        "'matplotlib', 'tensorboard'); "
        "sys.exit(any(name in sys.modules for name in slow))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_launcher_imports_nothing_that_its_processes_need() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import latentmake.trainers.loop.launch; "
        "slow = ('torch', 'PIL', 'matplotlib', 'tensorboard'); "
        "sys.exit(any(name in sys.modules for name in slow))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", [*slow_tests.SLOW, *slow_tests.QUICK])
def test_the_lists_of_slow_and_quick_tests_name_some_that_are_there(name: str) -> None:
    place, _, function = name.partition("::")
    if (ROOT / place).is_dir():
        assert any((ROOT / place).glob("test_*.py"))
    else:
        function = function.partition("[")[0]
        assert re.search(rf"^(def )?{function}", (ROOT / place).read_text(), flags=re.MULTILINE)

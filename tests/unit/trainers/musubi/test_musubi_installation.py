"""What is known of a musubi-tuner folder comes from its sources and its environment alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.base.errors import TrainingError
from latentmake.config.architectures import WAN
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.data.memo import Memo
from latentmake.runs.findings import failed
from latentmake.trainers.launched.installation import (
    PROVEN,
    Installation,
    flags,
    network_finding,
)
from latentmake.trainers.musubi import order
from latentmake.trainers.musubi.backend import Musubi
from latentmake.trainers.musubi.order import program_digest
from musubi_world import install, make_run, stand_in
from publish_world import order_of


def find(folder: Path, venv: str | None = None) -> Installation:
    return order.find(ExternalProgram(path=os.fspath(folder), venv=venv), WAN.scripts)


@pytest.mark.parametrize("scripts", [".", "src/musubi_tuner"])
def test_scripts_are_found_in_the_folder_and_in_its_package(tmp_path: Path, scripts: str) -> None:
    tuner = find(stand_in(tmp_path, scripts=scripts))
    assert tuner.script("wan_train_network.py") == tmp_path / scripts / "wan_train_network.py"
    assert tuner.python == tmp_path / "venv/bin/python"
    assert not tuner.note
    with pytest.raises(TrainingError, match=r"no wan_cache_latents\.py"):
        tuner.script("wan_cache_latents.py")


def test_its_environment_is_the_named_one_else_its_own_else_ours(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, own_venv=False)
    tuner = find(folder)
    assert tuner.python == Path(sys.executable)
    assert "no `venv` or `.venv`" in tuner.note
    python = stand_in(tmp_path) / "venv/bin/python"
    (folder / "venv").rename(folder / "other")
    assert find(folder, venv="other").python == folder / "other/bin/python"
    assert find(folder, venv=os.fspath(folder / "other/bin/python")).python.parent.name == "bin"
    with pytest.raises(TrainingError, match="no Python"):
        find(folder, venv="nowhere")
    (folder / "other").rename(folder / "venv")
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(TrainingError, match=r"venv/bin/python.*cannot be used"):
        find(folder).lacking(["json"])


def test_flags_are_those_of_the_script_and_of_what_it_imports(tmp_path: Path) -> None:
    package = tmp_path / "src/musubi_tuner"
    (package / "training").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "training/parser.py").write_text(
        'def setup(parser):\n    parser.add_argument("--dataset_config")\n'
        '    parser.add_argument("-o", "--output_dir")\n'
    )
    (package / "other.py").write_text('parser.add_argument("--of_another_script")\n')
    (package / "wan_train_network.py").write_text(
        "from musubi_tuner.training import parser as common\n"
        'common.setup(parser)\nparser.add_argument("--task")\n'
    )
    tuner = find(tmp_path)
    assert tuner.sources_of()[0] == ["--dataset_config", "--output_dir", "--task", "-o"]
    given = ["--task", "--x", "--output_dir=--y", "--resume", "-1", "--resume"]
    assert flags(tuner, given).note.startswith("this musubi-tuner does not know --x --resume: ")


def test_a_program_is_known_by_the_sources_that_its_script_reaches(tmp_path: Path) -> None:
    folder = tmp_path / "tuner"
    package = folder / "src/musubi_tuner"
    (package / "wan").mkdir(parents=True)
    for name in ("__init__", "wan_cache_text_encoder_outputs", "wan_train_network", "unused"):
        (package / f"{name}.py").write_text("import torch\n")
    script = package / "wan_cache_latents.py"
    script.write_text("def main():\n    from musubi_tuner.wan.vae import VAE\n")
    (package / "wan/vae.py").write_text("import os, torch\n")
    memo = Memo(tmp_path / "memo.sqlite")

    def digests() -> list[str]:
        settings = ExternalProgram(path=os.fspath(folder))
        model = Model.model_validate({"task": "t2v-1.3B", "vae": "vae", "text": "text"})
        found = [program_digest(settings, model, kind) for kind in ("latents", "text")]
        assert found == [
            program_digest(settings, model, kind, memo) for kind in ("latents", "text")
        ]
        return found

    latents, text = digests()
    (package / "unused.py").write_text("x = 1\n")
    (package / "wan_train_network.py").write_text("x = 1\n")
    (package / "wan/new.py").touch()
    os.utime(script, (1, 1))
    assert digests() == [latents, text]
    folder = folder.rename(tmp_path / "moved")
    package = folder / "src/musubi_tuner"
    assert digests() == [latents, text]
    (package / "wan/vae.py").write_text("import os, torch  # edited\n")
    assert digests()[0] != latents
    assert digests()[1] == text


@pytest.mark.parametrize(
    "source",
    [
        "import sys\narguments = sys.argv",
        'parser.add_argument("--dataset_config")\nparser.add_argument(f"--{name}")',
        'parser.add_argument("--dataset_config")\nimport unreadable',
    ],
)
def test_flags_that_cannot_be_told_refuse_nothing(tmp_path: Path, source: str) -> None:
    (tmp_path / "wan_train_network.py").write_text(source)
    (tmp_path / "unreadable.py").write_text("this is no Python")
    assert find(tmp_path).sources_of()[0] is None
    assert flags(find(tmp_path), ["--x"]).verdict == "ok"


def test_needs_are_what_every_run_imports(tmp_path: Path) -> None:
    (tmp_path / "wan_train_network.py").write_text(
        "import os, torch.nn\nfrom helpers import tool\n"
        "try:\n    import triton\nexcept E:\n    pass\ndef later():\n    import bitsandbytes\n"
    )
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers/tool.py").write_text("from toml import load\nfrom . import more\n")
    tuner = find(tmp_path)
    assert tuner.sources_of()[1] == ["toml", "torch"]


def test_packages_and_modules_of_networks_are_found_in_its_environment_without_running_them(
    tmp_path: Path,
) -> None:
    folder = stand_in(tmp_path)
    install(folder, "loud", "raise SystemExit('was run')")
    (site,) = folder.glob("venv/lib/python*/site-packages")
    (site / "loud/kohya.py").write_text("def create_network(): ...\nraise SystemExit('was run')\n")
    tuner = find(folder)
    assert tuner.lacking(["torch", "loud", "json", "gone"]) == ["gone", "torch"]

    def said(module: str, *, here: bool = True) -> str:
        found = network_finding(tuner, module, here=here)
        return f"{found.verdict}: {found.note}"

    assert said("networks.loha") == f"ok: {folder}/networks/loha.py"
    assert said("loud.kohya") == f"ok: {site}/loud/kohya.py"
    assert said("networks.lohaa").endswith("has networks.lohaa: did you mean networks.loha?")
    assert said("networks.lohaa", here=False).startswith("failed: ")
    assert said("gone.kohya").endswith("has gone.kohya: correct it, or install it there")
    assert said("gone.kohya", here=False).startswith("ok: ")  # it may be there on its machine
    assert said("loud.gone").startswith("failed: neither musubi-tuner nor its environment")
    for other in ("loud", "json", "sys", "networks"):
        assert said(other).startswith(f"failed: {other} makes no network"), other
    (folder / "networks/mine.py").write_text("def create_network(): ...")
    assert said("networks.mine").startswith("ok: ")


# -- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "unknown", "expected"),
    [
        ([], (), "sdpa"),
        (["xformers"], (), "xformers"),
        (["xformers"], ("xformers",), "sdpa"),  # which its version does not know
        (["xformers", "flash_attn"], (), "flash_attn"),
        (["sageattention"], (), "sdpa"),  # which has no backward pass
    ],
)
def test_auto_takes_the_fastest_that_is_there(
    tmp_path: Path, installed: list[str], unknown: tuple[str, ...], expected: str
) -> None:
    folder = stand_in(tmp_path, without=unknown)
    for package in installed:
        install(folder, package)
    assert Musubi().attention(order_of(), find(folder)) == expected


# -- its commit -----------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *names, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository at the commit that is proven."""
    monkeypatch.chdir(tmp_path)
    folder = stand_in(tmp_path / "musubi-tuner")
    (folder / ".gitignore").write_text("venv\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    head = git(folder, "rev-parse", "HEAD")
    monkeypatch.setitem(PROVEN, "musubi_tuner", head[:7])
    return folder


def checked(folder: Path) -> tuple[str, str]:
    """Return verdict and note of the checklist's line, beside which nothing has failed."""
    findings = [*Musubi().preflight(make_run(Path.cwd(), tuner=folder))]
    assert not failed(findings)
    ((verdict, note),) = [each[1:] for each in findings if each.what == "commit"]
    return verdict, note


def test_another_commit_than_the_proven_one_is_a_warning(clone: Path) -> None:
    first, head = PROVEN["musubi_tuner"], git(clone, "rev-parse", "HEAD")
    assert checked(clone) == ("ok", f"commit {head[:12]} (proven)")
    script = clone / "wan_train_network.py"
    script.write_text(f"{script.read_text()}\n")
    verdict, note = checked(clone)
    assert (verdict, note.partition(" with ")[2]) == ("warning", "local changes (proven)")
    git(clone, "commit", "--quiet", "--all", "--message", "second")
    verdict, note = checked(clone)
    assert verdict == "warning" and note.endswith(f"(not proven; {first} is)")
    (clone / ".git").rename(clone / "no-git")
    verdict, note = checked(clone)
    assert verdict == "warning" and note.startswith("no git repository")


def test_planning_does_not_run_git(clone: Path) -> None:
    planned = make_run(Path.cwd(), tuner=clone)
    assert "commit" not in [each.what for each in Musubi().preflight(planned, quick=True)]

"""Real trainers: their sources, and a Python with what they import; else tests are skipped.

LATENTMAKE_MUSUBI, LATENTMAKE_SD_SCRIPTS and LATENTMAKE_AI_TRAINING name folders of sources, by
default those in ../shared/trainers; LATENTMAKE_TRAINERS_PYTHON names the Python, by default that of
the tests.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.config.machines import ExternalProgram
from latentmake.trainers.launched.installation import Installation
from made_once import made_once
from preloaded_trainers import make_venv
from real_models import WORLDS
from real_project import RealProject

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "musubi-tuner": "LATENTMAKE_MUSUBI",
    "sd-scripts": "LATENTMAKE_SD_SCRIPTS",
    "ai-training": "LATENTMAKE_AI_TRAINING",
}
Find = Callable[[str, str], Installation]
Make = Callable[[str], RealProject]
Weights = Callable[[str], Path]
"""Types of the fixtures `trainer`, `make_real` and `tiny_weights`."""
PYTHON = os.environ.get("LATENTMAKE_TRAINERS_PYTHON", sys.executable)

# Without CUDA these questions end a program; networks of real sizes take gigabytes. DIES_AFTER ends
# the program as SIGKILL would, as soon as a state of that name is written.
SITE = """
import os, sys
if any(each.endswith(".py") for each in sys.orig_argv):
    import torch
    torch.cuda.is_available = lambda: False
    torch.cuda.current_device = lambda: 0
    torch.cuda.empty_cache = lambda: None
    torch.cuda.mem_get_info = lambda *a: (0, 0)
    script = os.path.basename(next(each for each in sys.orig_argv if each.endswith(".py")))
    if script in ("wan_train_network.py", "tiny.py"):
        from musubi_tuner.wan.configs import WAN_CONFIGS
        small = dict(dim=24, ffn_dim=32, freq_dim=32, num_heads=2, num_layers=1)
        WAN_CONFIGS["t2v-1.3B"].update(small)
    if script == "train_network.py":
        import transformers  # whose version 5 has no longer a name that is imported, and not used
        processor = transformers.CLIPImageProcessor  # puts another module in its place
        sys.modules["transformers"].CLIPFeatureExtractor = processor
        from library import original_unet
        original_unet.BLOCK_OUT_CHANNELS = (32, 32, 32, 32)
        original_unet.TIMESTEP_INPUT_DIM, original_unet.TIME_EMBED_DIM = 32, 128
        original_unet.LAYERS_PER_BLOCK, original_unet.LAYERS_PER_BLOCK_UP = 1, 2
        original_unet.NORM_GROUPS = original_unet.TRANSFORMER_NORM_NUM_GROUPS = 8
    if os.environ.get("DIES_AFTER"):
        import accelerate
        save = accelerate.Accelerator.save_state
        def save_state(self, folder, **more):
            save(self, folder, **more)
            if os.path.basename(folder) == os.environ["DIES_AFTER"]:
                os._exit(9)
        accelerate.Accelerator.save_state = save_state
"""


# Writes a random network of the size that SITE gives Wan's.
WAN_DIT = """
import sys
import torch
from musubi_tuner.wan.configs import WAN_CONFIGS
from musubi_tuner.wan.modules.model import WanModel
from safetensors.torch import save_file
torch.manual_seed(0)
c = WAN_CONFIGS["t2v-1.3B"]
model = WanModel(model_type="t2v", model_version="2.1", dim=c.dim, ffn_dim=c.ffn_dim,
                 freq_dim=c.freq_dim, in_dim=16, out_dim=16, num_heads=c.num_heads,
                 num_layers=c.num_layers, text_len=512, attn_mode="torch", split_attn=False)
save_file({k: torch.randn_like(v) / 8 for k, v in model.state_dict().items()}, sys.argv[1])
"""


def write_wan_dit(tuner: Installation, file: str) -> None:
    """Write the weights of a tiny network by musubi-tuner's own class."""
    Path("tiny.py").write_text(WAN_DIT)
    subprocess.run([tuner.python, "tiny.py", file], env=tuner.environment(), check=True)


def sources(name: str) -> Path:
    """Return the folder of a trainer's sources; skip where there is none."""
    variable = FOLDERS[name]
    given = os.environ.get(variable)
    folder = Path(given) if given else ROOT.parent / "shared/trainers" / name
    if not folder.is_dir():
        pytest.skip(f"no sources of {name}: set {variable}")
    return folder.resolve()


def output_of(
    *command: object, cwd: Path | None = None, paths: Sequence[Path] = (), **variables: str
) -> str:
    """Run a command, with folders for PYTHONPATH and further variables; return what it printed."""
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def answer_of(*command: object, **options: Any) -> Any:
    """Run a command as `output_of` does; return the JSON in the last line that it printed."""
    return json.loads(output_of(*command, **options).splitlines()[-1])


def said_by(program: Installation, code: str, *arguments: object) -> str:
    """Run code in the folder and the environment of a trainer; return its last line."""
    command = [program.python, "-c", code, *arguments]
    return output_of(*command, cwd=program.folder, **program.environment()).splitlines()[-1]


def steps(state: Path) -> int:
    """Return how many steps an optimizer's state stands for."""
    content = torch.load(state / "optimizer.bin", weights_only=True)
    return int(next(iter(content["state"].values()))["step"])


@pytest.fixture(scope="session")
def forked_venv() -> Path:
    """An environment of the trainers for `musubi_tuner.venv`; see preloaded_trainers.py."""
    found = subprocess.run(
        [PYTHON, "-c", "import av, cv2, diffusers, einops, toml, torchvision, voluptuous"],
        capture_output=True,
        check=False,
    )
    lacks = re.search(rb"No module named '(\w+)'", found.stderr)
    if lacks is not None:
        pytest.skip(f"{PYTHON} lacks {lacks[1].decode()}: set LATENTMAKE_TRAINERS_PYTHON")
    return make_venv(PYTHON)


@pytest.fixture(scope="session")
def tiny_weights(forked_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Make the folder of a family's tiny weights, once; see `WEIGHTS` in tiny/__init__.py."""

    def write(name: str, folder: Path) -> None:
        packages = [sources("musubi-tuner") / "src", sources("sd-scripts")]
        script = Path(__file__).with_name("write_weights.py")
        output_of(forked_venv / "bin/python", script, name, folder, paths=packages)

    return lambda name: made_once(tmp_path_factory, f"tiny-{name}", functools.partial(write, name))


@pytest.fixture
def make_real(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_venv: Path,
    tiny_weights: Weights,
) -> Make:
    """Make the project of a world's name, in which the test then works."""

    def make(name: str) -> RealProject:
        world, tuner = WORLDS[name], sources("musubi-tuner")
        weights = tiny_weights(world.weights)
        made = RealProject(world, tmp_path / "work", weights, tuner, forked_venv)
        monkeypatch.chdir(made.project.folder)
        return made

    return make


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_venv: Path) -> Find:
    """Find a script of a real trainer, in an environment that has all that it imports."""

    def find(name: str, script: str) -> Installation:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE)
        folder = sources(name)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(folder)]))
        settings = ExternalProgram(path=os.fspath(folder), venv=os.fspath(forked_venv))
        found = Installation.locate(name.replace("-", "_"), settings, script, name)
        if missing := found.lacking({*found.sources_of()[1], "accelerate"}):
            pytest.skip(
                f"{PYTHON} lacks {', '.join(missing)} for {name}: set LATENTMAKE_TRAINERS_PYTHON"
            )
        return found

    return find

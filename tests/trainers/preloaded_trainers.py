"""A process that has imported what the trainers import, and forks for each of their scripts.

Importing torch, transformers and diffusers takes 8 s, encoding six tiny pictures one. `make_venv`
makes a folder that stands in for a trainer's virtual environment. Its `bin/python` lets a copy of
that process run scripts, accelerate's launcher, and code that begins with `# preloaded`; all else
the trainers' own Python does. Before a script runs, the modules in `tiny` shrink constants of its
networks, which would take gigabytes. Hugging Face's cache holds their tiny tokenizers.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(1, str(_TESTS / "workflow"))
    sys.path.insert(2, str(_TESTS / "trainers/tiny"))
    sys.path.insert(3, str(_TESTS / "worlds"))

import fork_server  # noqa: E402 -- the server's own path begins above

_PRELOAD = _TESTS / "workflow/preload"
_LAUNCHER = "accelerate.commands.launch"
_PYTHON = """#!{python} -ISB
import os, sys
arguments = sys.argv[1:]
script = arguments[:1] and arguments[0].endswith(".py")
code = arguments[:1] == ["-c"] and arguments[1].startswith("# preloaded")
if script or code or arguments[:2] == ["-m", "{launcher}"]:
    sys.path.insert(0, "{preload}")
    from hand_over import hand_over
    hand_over("{place}", arguments)
os.execv("{python}", ["{python}", *arguments])
"""


@functools.cache
def make_venv(python: str) -> Path:
    """Return the folder of that environment; its Python is started if need be."""
    place = fork_server.started("latentmake-trainers", python, __file__)
    return Path(place).parent / "venv"


def main(place: str, owner: int) -> None:
    """Import, write the folder, wait for scripts, and run one, in a copy of this process."""
    folder = Path(place).parent
    os.environ.update(HF_HOME=str(folder / "hub"), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import gc

    import torch
    import torchvision_operators

    _stand_in_for_cuda(torch)
    torchvision_operators.declare()
    import accelerate.commands.launch  # noqa: F401
    import av  # noqa: F401
    import cv2
    import diffusers  # noqa: F401
    import tiny
    import torchvision  # noqa: F401
    import transformers

    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    for name in tiny.TRANSFORMERS:
        getattr(transformers, name)  # imported when it is looked for
    tiny.write_hub(folder / "hub")
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    (folder / "venv/pyvenv.cfg").touch()
    python.write_text(
        _PYTHON.format(python=sys.executable, launcher=_LAUNCHER, preload=_PRELOAD, place=place)
    )
    launcher = python.with_name("accelerate")
    launcher.write_text(f'#!/bin/sh\nshift\nexec "{python}" -m {_LAUNCHER} "$@"\n')
    for program in (python, launcher):
        program.chmod(0o755)
    hub = os.environ["HF_HOME"]
    gc.collect()
    gc.freeze()  # no copy looks through what all of them have
    command = fork_server.served(place, owner)
    os.environ.update(HF_HOME=hub, HF_HUB_OFFLINE="1")
    # Some CPUs convolve float16 to interleaved channels, which HunyuanVideo's script cannot save.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    sys.executable = str(python)  # by which a launcher starts its script
    sys.orig_argv = [sys.executable, *command]

    def prepare(script: str) -> None:
        _run_sitecustomize()
        if Path(script).name == "driver.py":  # of ours, which runs a script or calls strategies
            script = json.loads(Path(command[1]).read_bytes()).get("script", "strategies")
        tiny.prepare(script)

    fork_server.leave(fork_server.done(command, prepare))


def _run_sitecustomize() -> None:
    """Run the first one on the path, as a Python that starts does."""
    for place in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        path = Path(place) / "sitecustomize.py"
        if place and path.is_file() and not path.with_name("hand_over.py").is_file():
            runpy.run_path(str(path))
            return


def _stand_in_for_cuda(torch) -> None:  # type: ignore[no-untyped-def]
    """Answer questions that end a program without CUDA."""
    torch.cuda.is_available = lambda: False
    torch.cuda.current_device = lambda: 0
    torch.cuda.empty_cache = lambda: None
    torch.cuda.mem_get_info = lambda *_: (0, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

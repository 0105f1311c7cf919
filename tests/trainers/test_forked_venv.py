"""A script that a copy of the process carries out behaves as one of a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import PYTHON

pytestmark = pytest.mark.real_trainer

SCRIPTS = {
    "talks": """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ["WORD"], sys.path[0], sys.stdin.read())
print("to stderr", file=sys.stderr)
""",
    "imports a neighbour": "import neighbour\nprint(neighbour.__file__)\n",
    "a number": "import sys\nsys.exit(7)\n",
    "a text": "import sys\nsys.exit('refused')\n",
    "an error": "raise ValueError('of its own')\n",
    "at once": "import os\nos._exit(9)\n",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "at its end": "import atexit\natexit.register(print, 'bye')\nprint('first')\n",
}
# Written past Python's buffers, which a handler may not enter twice.
WAITS = """
import os, signal, sys, time
if sys.argv[1] == "handled":
    def stop(number, frame):
        os.write(1, b"stopped by %d" % number)
        sys.exit(3)
    signal.signal(signal.SIGTERM, stop)
os.write(1, b"ready\\n")
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/neighbour.py").touch()
    return tmp_path / "scripts/script.py"


@pytest.mark.parametrize("name", SCRIPTS)
def test_status_output_folder_and_variables_are_those_of_a_call(
    name: str, script: Path, forked_venv: Path
) -> None:
    script.write_text(SCRIPTS[name])
    forked, real = (
        subprocess.run(
            [python, "scripts/script.py", "a", "b c"],
            cwd=script.parent.parent,
            env={"WORD": "wörd", "PATH": os.environ["PATH"], "PYTHONIOENCODING": "utf-8"},
            input="input",
            capture_output=True,
            text=True,
            check=False,
        )
        for python in (forked_venv / "bin/python", PYTHON)
    )
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mood", ["handled", "default"])
def test_signals_reach_the_script(
    mood: str, sent: signal.Signals, script: Path, forked_venv: Path
) -> None:
    script.write_text(WAITS)
    ends = []
    for python in (forked_venv / "bin/python", PYTHON):
        with subprocess.Popen(
            [python, script, mood], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            running.send_signal(sent)
            ends.append((running.wait(300), running.stdout.read()))
    assert ends[0] == ends[1]


def test_a_script_ends_with_whoever_called_it(script: Path, forked_venv: Path) -> None:
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(
        [forked_venv / "bin/python", script], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        job = os.pidfd_open(int(running.stdout.readline()))
        running.kill()
        # The pipe is the script's too: its end is that of the script.
        assert running.stdout.read() == ""
        os.close(job)

"""Child processes of a job, with live and logged output; all their descendants end with them.

The lock of a run is held until the last of these processes has ended, because two trainings must
not write the same checkpoints.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import latentmake
from latentmake.base import atomic, progress
from latentmake.base.errors import TrainingError, UserError
from latentmake.base.signals import signals_call
from latentmake.base.watchdog import Watchdog
from latentmake.encode import gpu

ERROR = "LATENTMAKE_ERROR"
"""Environment variable: path of a file to which a child writes its error instead of to stderr."""

_GRACE = 20.0  # seconds between a signal and SIGKILL, in which a training saves its state
_ENDS, _POLL = 10.0, 0.1  # seconds to wait for a training that is ending; between two checks
_TAIL = 1 << 16  # last bytes of the output, in which the error is searched
_CAPACITY = 1 << 16  # bytes that a pipe holds
# A launcher's error about a child that failed says less than the child's own error.
_LAUNCHERS = re.compile(r"CalledProcessError|ChildFailedError|SignalException")
_ERROR = re.compile(
    r"^(?:\[?rank\d+\]?:\s*)?"
    # argparse writes the program's name before the error.
    r"(?:\S+\.py: (?=error: ))?(error: .+|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)"
)


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's folder until its training has ended; raises TrainingError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = atomic.Lock(folder / ".training.lock", "training")
    until = time.monotonic() + _ENDS
    try:
        while not (free := lock.acquire()) and time.monotonic() < until:
            time.sleep(_POLL)  # the training of a killed build may still be saving its state
    except OSError as error:
        # Locks do not work here: train anyway, with a warning.
        say(f"warning: {lock.path}: {error.strerror}: begin no second training of this run")
        free = True
    if not free:
        what = f"another training of this run is running: {lock.holder()}"
        raise TrainingError(what, where=folder, hint="wait until it ends, or stop it")
    with closing(lock):
        yield


class Stopped(KeyboardInterrupt):
    """A signal told this process to stop.

    Attributes:
        number: number of the signal.
        said: message about the process that was stopped; "" for none.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number, self.said = number, ""

    def __str__(self) -> str:
        return self.said


def run_program(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, cwd: Path | None = None
) -> tuple[int, str]:
    """Run a command; show its output on stderr as it comes, and append it to a log.

    SIGINT, SIGTERM and SIGHUP are passed on to the command and all its descendants. From then on
    their output goes to the log only. Processes that still run after some seconds are killed.

    If this process ends in another way, also by SIGKILL, they are all killed at once. They hold the
    locks of this process until they have ended.

    Returns:
        The exit status (negative for a signal), and the end of the output.

    Raises:
        Stopped: this process got one of these signals.
        OSError: the log cannot be written, or the command cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tail, muted = bytearray(), threading.Event()
    held = atomic.inherited()
    number: int = signal.SIGTERM
    with log.open("ab", buffering=0) as file, signals_call(_stop), Watchdog(held) as watchdog:
        child = subprocess.Popen(
            command,
            env={**progress.environment(), **environment, **watchdog.environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=held,
            start_new_session=True,
        )
        assert child.stdout is not None
        reader = threading.Thread(target=_show, args=(child.stdout, file, tail, muted), daemon=True)
        try:
            reader.start()
            child.wait()
        except Stopped as error:
            number = error.number
            muted.set()
            raise
        finally:
            _end(child, number, watchdog)
            with suppress(RuntimeError):  # a signal came while it was started
                reader.join(_GRACE)
            child.stdout.close()
    return child.returncode, bytes(tail).decode("utf-8", "replace")


def _show(output: IO[bytes], log: IO[bytes], tail: bytearray, muted: threading.Event) -> None:
    """Copy a child's output to the log and to the terminal as it comes."""
    terminal = getattr(sys.stderr, "buffer", None)
    # `run_program` closes the pipe under us if a grandchild holds it open for too long.
    with suppress(OSError, ValueError):
        while data := os.read(output.fileno(), _CAPACITY):
            with suppress(OSError, ValueError):
                log.write(data)
            shown = None if muted.is_set() else terminal
            # A terminal that has gone away must not stop the training.
            with suppress(OSError, ValueError):
                if shown is not None:
                    shown.write(data)
                    shown.flush()
            tail += data
            del tail[:-_TAIL]


def _stop(number: int) -> None:
    raise Stopped(number)


def _end(child: subprocess.Popen[bytes], number: int, watchdog: Watchdog) -> None:
    """End a child and all its descendants: first by a signal, after some seconds by SIGKILL."""
    if child.poll() is None:
        deadline = time.monotonic() + _GRACE
        watchdog.signal(number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        # A launcher may end before its children, which are saving their state.
        watchdog.close(deadline - time.monotonic())
    with suppress(ProcessLookupError, PermissionError):
        # The watchdog does not find processes that have cleared their environment.
        os.killpg(child.pid, signal.SIGKILL)
    watchdog.close()
    child.wait()


def say_error(error: UserError) -> None:
    """Pass a user's mistake on to the process that started this one, or write it to stderr."""
    if not tell(str(error)):
        sys.stderr.write(f"error: {error}\n")


def tell(line: str) -> bool:
    """Pass a line about this process's end on to the process that started it.

    Returns:
        False if that is not possible.
    """
    if place := os.environ.get(ERROR):
        try:
            Path(place).write_text(line, encoding="utf-8")
        except OSError:  # the disk is full: the starting process finds the line in the output
            with suppress(OSError):
                os.truncate(place, 0)
        else:
            return True
    return False


def last_error(output: str, status: int) -> str:
    """Return the line of a failed command's output that best explains the failure."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", output)]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    ours = [line.removeprefix("error: ") for line in errors if line.startswith("error: ")]
    theirs = [line for line in errors if not _LAUNCHERS.search(line)]
    if ours:
        return ours[-1]
    if theirs:
        return theirs[-1][:500]
    killed = re.findall(r"(?:died with <Signals\.|Signal \d+ \()(SIG\w+)", output)
    name = killed[-1] if killed else signal.Signals(-status).name if status < 0 else ""
    if not name:
        return f"it ended with status {status}"
    return f"it was killed by {name}{' (too little memory?)' if name == 'SIGKILL' else ''}"


RUN = ("-m", "latentmake.trainers.run")
"""Arguments of Python before the path of an order and `train`, `generate` or `evaluate`."""


def accelerate_arguments(
    precision: str, *, processes: int, config: str | None = None, compiler: str = "no"
) -> list[str]:
    """Return the arguments between `accelerate launch` and the training script.

    Args:
        precision: precision of the training.
        processes: how many devices train together.
        config: path of accelerate's configuration file; if given, the other arguments are ignored.
        compiler: torch's backend that compiles the network.
    """
    if config is not None:
        return ["--config_file", config]
    options = ["--mixed_precision", precision, "--dynamo_backend", compiler]
    options += ["--num_processes", str(processes), "--num_machines", "1"]
    return [*options, "--multi_gpu"] if processes > 1 else options


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a child that computes with a number of CPU threads."""
    package = str(Path(latentmake.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    # Waking a thread takes longer than a layer of a small network. Threads therefore spin for
    # 0.1 ms before they sleep. OpenMP on macOS would spin for ever.
    spin = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "10000"}
    is_free = sys.platform == "linux" and "OMP_WAIT_POLICY" not in os.environ
    return {
        **(spin if is_free else {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, path] if path else [package]),
        "PYTHONSAFEPATH": "1",  # keeps out a package of the same name in the working folder
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_child(
    command: Sequence[str],
    *,
    run: str,
    folder: Path,
    threads: int,
    log: Path,
    online: bool,
    gpus: int = 1,
) -> None:
    """Run a command that reports its errors by `say_error`.

    Args:
        command: Python with `RUN`, perhaps behind a launcher.
        run: name of the run, for messages.
        folder: folder of a temporary file for the error.
        threads: CPU threads of the command.
        log: file that gets all output.
        online: whether the command may download weights.
        gpus: number of GPUs to lock, see `gpu.hold`.

    Raises:
        TrainingError: the command failed.
        Stopped: a signal ended it; the exception has the command's last line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**_environment(threads), **({} if online else {"HF_HUB_OFFLINE": "1"})}
    # All processes of a training write to one file, so that an error of all is shown once.
    with (
        gpu.hold(gpus, f"run {run}", partial(say, log)),
        tempfile.NamedTemporaryFile(dir=folder, prefix=".error-") as file,
    ):
        environment |= gpu.chosen()
        environment[ERROR] = str(Path(file.name).absolute())
        try:
            status, output = run_program(command, environment=environment, log=log)
        except Stopped as stopped:
            if line := _read(file.name):
                stopped.said = f"run {run}: {line}"
            raise
        error = _read(file.name)
    if status != 0:
        what, hint = f"run {run}: {error or last_error(output, status)}", f"all output: {log}"
        raise TrainingError(what, hint=hint)


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace").strip()


def say(log: Path, text: str) -> None:
    """Show a line to the user, and append it to a log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    # A full disk must not hide the message about it.
    with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{text}\n")

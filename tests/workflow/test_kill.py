"""A killed build leaves nothing half written under a target's name, and is not done again."""

from __future__ import annotations

import base64
import contextlib
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import world
from latentmake.base.atomic import TEMPORARY_SUFFIX
from latentmake.formats.cachefile import read_header
from project import NOTHING, ROOT, Counts, Project, kill_group, stopped, wait_until
from test_latentmake import ASKING

STEMS = [f"item{number}" for number in range(8)]
FINISHED = 3
CACHES = "cache/shapes/micro/16"

# What Snakemake gives a script, and a Ctrl-C in the middle of its imports.
_INTERRUPTED = """
import os, signal, sys, types
snakemake = types.SimpleNamespace(log=["job.log"], scriptdir=".")
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt(event, arguments):
    if event == "import" and arguments[0] == "latentmake.plan.orders":
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
"""


@pytest.fixture
def stopping(fresh: Callable[[], Project]) -> Project:
    """A project whose encoding job, of four orders, stops where some items are finished."""
    project = fresh()
    folder = project / "data/shapes"
    for path in folder.iterdir():
        path.unlink()
    for number, stem in enumerate(STEMS):
        world.draw(folder / f"{stem}.png", number)
        (folder / f"{stem}.txt").write_text(stem)
    project.configure(lambda config: config["runs"]["tiny"].update(resolutions=[16]))
    project.configure(lambda config: config.update(batch={"items": 2}))
    project.stop_in_script("encode.py", CACHES, FINISHED)
    return project


def sound(project: Project) -> list[str]:
    """Return the latents under their names; these and texts, if any, must be whole."""
    found = [name for name in project.cache_files() if not name.endswith(TEMPORARY_SUFFIX)]
    for name in found:
        read_header(project / name)
    return [name for name in found if name.startswith(CACHES)]


@contextmanager
def halted(project: Project) -> Iterator[None]:
    """Build all caches; the first job of it halts meanwhile."""
    project.stop_in_script("encode.py", "cache/shapes/micro/48", 0)
    running = project.start("caches_tiny")
    process = stopped(running)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
    assert running.wait(timeout=600) == 0, (project / "started.txt").read_text()


@contextmanager
def in_terminal(project: Project, target: str) -> Iterator[tuple[int, int]]:
    """Build a target in a terminal of its own; yield the process and the terminal."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(project.folder)
        os.execve(sys.executable, project.command(target), project.environment())
    try:
        yield process, terminal
    finally:
        os.close(terminal)


def read_until(terminal: int, pattern: str) -> str:
    """Return what is said in a terminal until it fits a pattern, or until the program ends."""
    said = b""
    with contextlib.suppress(OSError):  # Linux: who held the other end has ended
        while not re.search(pattern, said.decode(errors="replace")):
            if not (read := os.read(terminal, 1 << 16)):
                break
            said += read
    return said.decode(errors="replace")


def _finishes(project: Project, finished: int) -> None:
    """The same command encodes what is not finished, and leaves everything in order."""
    result = project.run("latents_tiny")
    assert result.encoded() == Counts(encoded=len(STEMS) - finished)
    assert len(sound(project)) == len(STEMS)
    project.run("caches_tiny")
    assert project.temporaries() == []
    project.assert_all_whole()


def test_a_killed_job_loses_at_most_the_item_in_hand(stopping: Project) -> None:
    running = stopping.start("latents_tiny")
    os.kill(stopped(running), signal.SIGKILL)
    assert running.wait(timeout=600) != 0
    finished = len(sound(stopping))
    assert FINISHED <= finished < len(STEMS)
    stopping.assert_all_whole()
    _finishes(stopping, finished)


def test_an_interrupted_build_goes_on_where_it_was(stopping: Project) -> None:
    running = stopping.start("latents_tiny")
    process = stopped(running)
    os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C does
    # The job gets it from Snakemake.
    wait_until(lambda: "stopping: jobs finish" in (stopping / "started.txt").read_text(), running)
    os.kill(process, signal.SIGCONT)
    assert running.wait(timeout=600) != 0
    said = (stopping / "started.txt").read_text()
    assert "Traceback" not in said, said
    finished = len(sound(stopping))
    assert FINISHED <= finished < len(STEMS)  # those in hand were finished
    assert stopping.temporaries() == []
    _finishes(stopping, finished)


def test_a_job_interrupted_while_it_imports_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        _INTERRUPTED + (ROOT / "scripts/encode.py").read_text(encoding="utf-8")
    )
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=False,
    )
    line = "interrupted: finished files are kept\n"
    assert (done.returncode, done.stderr, (tmp_path / "job.log").read_text()) == (130, line, line)


def test_killing_everything_at_once_costs_no_finished_item(stopping: Project) -> None:
    running = stopping.start("caches_tiny")
    stopped(running)
    kill_group(running)
    finished = len(sound(stopping))
    assert FINISHED <= finished < len(STEMS)
    stopping.assert_all_whole()
    # Of a build of another machine nobody can know here whether it lives.
    (machine,) = (stopping / ".snakemake/locks").glob("*.machine")
    machine = machine.rename(machine.with_name("elsewhere.machine"))
    locked = stopping.run("caches_tiny", check=False)
    assert locked.returncode != 0
    locked.one_line("--unlock")
    machine.rename(machine.with_name(f"{socket.gethostname()}.machine"))
    assert len(sound(stopping)) == finished
    _finishes(stopping, finished)


def test_no_training_outlives_its_build_and_the_same_command_goes_on(built: Project) -> None:
    trainer = {**world.training(), "steps": 1_000_000, "checkpointing_steps": 1}
    built.configure(lambda config: config["runs"]["tiny"].update(trainer=trainer))
    states = built / "runs/tiny/checkpoints"
    for number in (signal.SIGKILL, signal.SIGHUP, signal.SIGTERM):
        before = {*states.glob("step-*")}
        running = built.start("train_tiny")
        wait_until(lambda: {*states.glob("step-*")} - before, running)  # noqa: B023
        training = _working_in(built.folder)
        assert len(training) > 3
        running.send_signal(number)
        assert running.wait(timeout=600) != 0
        _, alive = psutil.wait_procs(training, timeout=60)
        assert not alive
        said = (built / "started.txt").read_text()
        assert "Traceback" not in said, said
        assert number == signal.SIGKILL or not [*states.glob(".*")]


def test_ctrl_c_in_a_terminal_saves_a_training_and_a_second_one_ends_it_at_once(
    built: Project,
) -> None:
    trainer = {**world.training(), "steps": 1_000_000, "checkpointing_steps": 1_000_000}
    built.configure(lambda config: config["runs"]["tiny"].update(trainer=trainer))
    with in_terminal(built, "train_tiny") as (process, terminal):
        said = read_until(terminal, r"[1-9]\d*/1000000 ")
        os.write(terminal, b"\x03")
        said += read_until(terminal, "(?!)")
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0
    assert "Traceback" not in said and "Error in rule" not in said, said
    (step,) = set(re.findall(r"stopped at step (\d+) of 1000000, state saved", said))
    states = (built / "runs/tiny/checkpoints").iterdir()
    assert [each.name for each in states] == [f"step-{int(step):06d}"]
    with in_terminal(built, "train_tiny") as (process, terminal):
        read_until(terminal, rf"resumed from step {step} [\s\S]*step/s")
        jobs = _working_in(built.folder)
        for job in jobs:
            if "latentmake.trainers.run" in job.cmdline():
                job.suspend()  # it cannot save its state
        os.write(terminal, b"\x03")
        read_until(terminal, "stopping: jobs finish")
        os.write(terminal, b"\x03")
        read_until(terminal, "(?!)")
        os.waitpid(process, 0)
        _, alive = psutil.wait_procs(jobs, timeout=60)
        assert not alive


def test_a_job_that_outlived_a_killed_snakemake_is_not_done_again(built: Project) -> None:
    """Snakemake records what a job has begun under the path of its output, in base64."""
    record = base64.urlsafe_b64encode(b"runs/tiny/manifest.jsonl").decode()
    (built / ".snakemake/incomplete" / record).write_text('{"external_jobid": null}')
    assert built.run("caches_tiny").idle


def _working_in(folder: Path) -> list[psutil.Process]:
    """Return the processes whose working folder this is."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.cwd() == str(folder):
                found.append(each)
    return found


def test_beside_a_build_other_commands_answer_or_are_refused_and_hurt_nothing(
    built: Project, tmp_path: Path
) -> None:
    def resolutions(*sizes: int) -> None:
        built.configure(lambda config: config["runs"]["tiny"].update(resolutions=list(sizes)))

    resolutions(16, 32, 48)
    before = built.snapshot()
    alone = built.copy(tmp_path / "alone")
    alone.run("caches_tiny")
    with halted(built):
        second = built.run("caches_tiny", check=False)
        for arguments in ASKING:
            assert built.ask(*arguments, check=False).returncode in (0, 1), arguments
        for refused in (("prune", "--yes"), ("verify", "--repair"), ("adopt", "tiny")):
            said = built.ask(*refused, check=False)
            assert said.returncode == 2, refused
            assert said.one_line("error: a build is running here (caches_tiny, process ")
        resolutions(16, 32, 48, 64)
        built.run("-n", "caches_tiny")
        resolutions(16, 32, 48)
    assert second.returncode != 0
    second.one_line("error: another build makes some of these files")
    assert all(row["latents"].keys() == {"16", "32", "48"} for row in built.manifest())
    added = built.latents(*world.CAPTIONS, resolutions=(48,))
    assert built.changed(before) == NOTHING._replace(added=added)
    assert _bytes(built) == _bytes(alone)


def test_what_a_build_keeps_no_other_command_takes_away(built: Project, tmp_path: Path) -> None:
    before = built.copy(tmp_path / "before")
    built.stop_in_script("encode.py", (CACHES, "cache/shapes/micro/text"), FINISHED)
    rules = built / "rules/caches.smk"  # of two jobs that are ready, latents come first
    first = '        priority: int("_latents_" in job.rule)\n        log:\n            job.log'
    rules.write_text(rules.read_text().replace("        log:\n            job.log", first))
    for number, stem in enumerate(world.CAPTIONS):
        world.draw(built / f"data/shapes/{stem}.png", number + 50)
        (built / f"data/shapes/{stem}.txt").write_text(f"{stem}, edited")
    running = built.start("caches_tiny")
    process = stopped(running)
    kept = built.store()
    assert len(kept) == 12 + 5  # what both jobs will replace
    built.run("caches_tiny", check=False).one_line("error: another build makes some of these files")
    other = "cache/shapes/micro/40/fox.latents.safetensors"
    built.run(other)
    (built / other).unlink()
    status = built.ask("status", "tiny").output
    assert f"a build runs: caches_tiny (process {running.pid})" in status
    finished = len(built.changed(before.snapshot()).content)
    made = re.findall(r"^  (\S+) of micro: (\d+) of (\d+) targets made$", status, re.MULTILINE)
    assert {kind: total for kind, _, total in made} == {"latents": "12", "text": "6"}
    assert FINISHED <= sum(int(number) for _, number, _ in made) == finished < 18
    assert {*kept} <= {*built.store()}
    (built / "stopped").unlink()
    os.kill(process, signal.SIGCONT)
    stopped(running, after=process)
    kill_group(running)  # in the other job
    assert "a build runs" not in built.ask("status", "tiny").output
    replaced = len(built.changed(before.snapshot()).content)
    assert replaced >= 12 + FINISHED
    for part in ("data", "scripts"):
        shutil.copytree(before / part, built / part, dirs_exist_ok=True)
    built.run("--unlock")
    again = built.run("caches_tiny").encoded()
    # Two captions were equal: of their files, if both were replaced, one is linked to the other.
    assert (again.encoded, again.spooled + again.linked) == (0, replaced)
    assert _bytes(built) == _bytes(before)


def _bytes(project: Project) -> dict[str, str]:
    return {name: content for name, (content, _) in project.snapshot().items()}


def test_what_a_killed_writer_left_behind_is_removed(built: Project) -> None:
    path = built / "cache/shapes/micro/16/.0123456789abcdef.99999999.1.latentmake-partial"
    path.write_bytes(b"half a file")
    built.run("caches_tiny")
    assert built.temporaries() == []

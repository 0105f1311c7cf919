"""Commands killed at random moments, and run again: same bytes, nothing left running, no human.

Of some projects, half of the pictures vanish before and come back after: a drive behind a link, the
rows of a list, the objects of a listing. No cache may be lost.

    python tests/bench/kills.py [--seed 0] [--kills 200] [--only 7 12] [--folder FOLDER]

Builds, trainings and publications of tiny projects are started as a user starts
them. Each ends by SIGINT, SIGTERM, SIGHUP or SIGKILL, sent to Snakemake alone or to all processes
as a terminal sends it, at a part of the time it takes or at a number of files that the seed draws.
The same command then has to succeed, and to leave the files that an undisturbed one leaves. Printed
is a line a kill; the folders of those that went wrong stay. A number with its seed is the same kind
of kill each time, at about the same moment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "workflow"), str(TESTS / "worlds")]

import dit_world  # noqa: E402
import fast_tuner  # noqa: E402
import preloaded  # noqa: E402
import psutil  # noqa: E402
import scripts_world  # noqa: E402
import sdscripts  # noqa: E402
import video_world  # noqa: E402
import wan  # noqa: E402
import wan_world  # noqa: E402
import world  # noqa: E402
from latentmake.base.atomic import TEMPORARY_SUFFIX  # noqa: E402
from latentmake.formats.cachefile import read_header  # noqa: E402
from latentmake.plan.store import KEPT  # noqa: E402
from project import Project  # noqa: E402
from tabulate import tabulate  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
ITEMS = 16
PATIENCE = 120  # seconds, after which a process counts as one that does not end

Content = dict[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind of command.

    Attributes:
        command: what is killed, and run again.
        folders: with the files that are compared; they tell the progress as well.
        make: makes the project that is copied for each kill.
        ignored: patterns of names of files that differ from one run to the next.
        hide: lets pictures vanish before the command.
        show: lets them come back.
        prepare: makes a copy of the project ready.
    """

    command: tuple[str, ...]
    folders: tuple[str, ...]
    make: Callable[[Path], Project]
    ignored: tuple[str, ...] = ()
    hide: Callable[[Project], object] | None = None
    show: Callable[[Project], object] = lambda project: None
    prepare: Callable[[Project], object] = lambda project: None


def _fresh(folder: Path) -> Project:
    project = Project.make(folder, world.config(), folder.parent / "micro")
    _draw_items(project, (40, 36))
    return project


def _draw_items(project: Project, size: tuple[int, int]) -> None:
    for number in range(ITEMS):
        world.draw(project / f"data/shapes/{number}.png", number, size)
        (project / f"data/shapes/{number}.txt").write_text(f"number {number}")


def _built(folder: Path) -> Project:
    project = _fresh(folder)
    project.run("caches_tiny")
    return project


def _to_train(folder: Path) -> Project:
    project = _built(folder)
    trainer = {**world.training(), "steps": 8, "checkpointing_steps": 2}
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
    return project


def _to_publish(folder: Path) -> Project:
    project = Project.make(folder, sdscripts.config(), folder.parent / "micro")
    sdscripts.make_dataset(project / "data/shapes")
    sdscripts.with_trainer(project)
    project.configure(lambda values: values.update(publish={"path": "out"}))
    project.run("caches_tiny")
    return project


def _with_clips(folder: Path) -> Project:
    """Two pictures and two films of six clips, for a tiny Wan model."""
    model = folder.parent / "models/wan"
    if not model.exists():
        wan_world.write_wan_vae(model)
        wan_world.write_umt5(model)
        dit_world.tiny_dit(num_layers=1).save_pretrained(model / "dit")
    values = wan.config(dit="models/wan/dit")
    films = {"path": "data/films", "target_frames": [5], "frame_extraction": "chunk"}
    values["datasets"]["films"] = films
    values["runs"]["tiny"] |= {"datasets": ["shapes", "films"], "resolutions": [[64, 48]]}
    project = Project.make(folder, values, model)
    (project / "data/films").mkdir(parents=True)
    for number, stem in enumerate(("ant", "bee")):
        world.draw(project / f"data/shapes/{stem}.png", number, (64, 48))
        (project / f"data/shapes/{stem}.txt").write_text(stem)
        video_world.write_video(project / f"data/films/{stem}.mp4", "libx264", 31)
        (project / f"data/films/{stem}.txt").write_text(f"a film of {stem}")
    return project


def _wan_to_train(folder: Path) -> Project:
    project = _with_clips(folder)
    project.run("caches_tiny")
    trainer = {"kind": "wan", "rank": 2, "epochs": 3, "max_steps": 8, "mixed_precision": "no"}
    trainer["checkpointing_epochs"] = 1
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
    return project


def _scripted(folder: Path) -> Project:
    """Pictures and captions that scripts of another program encode."""
    model = folder.parent / "models/scripted"
    fast_tuner.write_weights(
        model, vae="encoder.conv_in.weight", text="model.layers.0.mlp.up_proj.weight"
    )
    files = {"vae": "models/scripted/vae.safetensors", "text": "models/scripted/text.safetensors"}
    values = fast_tuner.config("z_image", **files)
    values["datasets"]["shapes"]["fit"] = "crop"
    values["runs"]["tiny"]["resolutions"] = [64]
    project = Project.make(folder, values, model)
    _draw_items(project, (80, 64))
    scripts_world.install(project / "musubi-tuner")
    return project


# -- pictures that vanish -------------------------------------------------------------------------

DRIVE = "data/shapes/drive"
BUCKET = "kills"


def _partly_hidden(folder: Path, path: str = "data/shapes") -> Project:
    """Make a project with all caches, half of whose pictures lie behind a link to a drive.

    The store keeps nothing, so that a cache that is removed is lost.
    """
    project = _fresh(folder)
    for number in range(ITEMS // 2, ITEMS):
        for ending in ("png", "txt"):
            source = project / f"data/shapes/{number}.{ending}"
            (project / "drive").mkdir(exist_ok=True)
            source.rename(project / f"drive/{source.name}")
    (project / DRIVE).symlink_to("../../drive")
    _write_list(project, ITEMS)
    settings = {"path": path, "on_error": "skip"}
    project.configure(lambda values: values["datasets"]["shapes"].update(settings))
    project.configure(lambda values: values.update(store={"keep": 0}))
    if path.startswith("s3:"):
        _upload(project)
    project.run("caches_tiny")
    return project


def _write_list(project: Project, number: int) -> None:
    names = [f"{each}.png" for each in range(ITEMS // 2)]
    names += [f"drive/{each}.png" for each in range(ITEMS // 2, ITEMS)]
    rows = "".join(f'{{"image_path": "{name}"}}\n' for name in names[:number])
    (project / "data/shapes/list.jsonl").write_text(rows)


def _bucket() -> Any:
    import boto3

    return boto3.resource("s3").Bucket(BUCKET)


def _upload(project: Project) -> None:
    """Give a project its own copy of the pictures at a URL."""
    prefix = f"{project.folder.name}/shapes"
    settings = {"path": f"s3://{BUCKET}/{prefix}"}
    project.configure(lambda values: values["datasets"]["shapes"].update(settings))
    for path in sorted((project / "data/shapes").glob("**/*.[pt]*")):
        _put(project, str(path.relative_to(project / "data/shapes")))
    _show_objects(project)


def _put(project: Project, name: str) -> None:
    data = (project / f"data/shapes/{name}").read_bytes()
    _bucket().put_object(Key=f"{project.folder.name}/shapes/{name}", Body=data)


def _show_objects(project: Project) -> None:
    for path in (project / "drive").iterdir():
        _put(project, f"drive/{path.name}")


def _hide_objects(project: Project) -> None:
    _bucket().objects.filter(Prefix=f"{project.folder.name}/shapes/drive/").delete()


def _rename(old: str, new: str) -> Callable[[Project], object]:
    return lambda project: (project / old).rename(project / new)


TRAIN = ("train_tiny", "--cores", "1")
_OF_TRAININGS = ("train*.json", "progress.json", "curves.png", "events.*", ".*")
KINDS = {
    "build": Kind(("caches_tiny",), ("cache",), _fresh),
    # A process that was forked keeps its threads, on which the last bit of a sum depends.
    "train": Kind(TRAIN, ("cache", "runs"), _to_train, _OF_TRAININGS),
    "publish": Kind(("publish_tiny",), ("out",), _to_publish, (".latentmake-published.json",)),
    "clips": Kind(("caches_tiny",), ("cache",), _with_clips),
    "scripted": Kind(("caches_tiny",), ("cache",), _scripted),
    "wan": Kind(TRAIN, ("cache", "runs"), _wan_to_train, _OF_TRAININGS),
    "link": Kind(
        ("caches_tiny",),
        ("cache",),
        _partly_hidden,
        hide=_rename("drive", "unplugged"),
        show=_rename("unplugged", "drive"),
    ),
    "list": Kind(
        ("caches_tiny",),
        ("cache",),
        lambda folder: _partly_hidden(folder, "data/shapes/list.jsonl"),
        hide=lambda project: _write_list(project, ITEMS // 2),
        show=lambda project: _write_list(project, ITEMS),
    ),
    "remote": Kind(
        ("caches_tiny",),
        ("cache",),
        lambda folder: _partly_hidden(folder, f"s3://{BUCKET}/{folder.name}/shapes"),
        hide=_hide_objects,
        show=_show_objects,
        prepare=_upload,
    ),
}


@dataclass
class Kill:
    """A kill, and what came of it."""

    number: int
    kind: str
    signal: signal.Signals
    everyone: bool
    part: float
    files: bool
    returns: bool = False  # whether what vanished is back when the command is killed
    moment: str = ""
    ended: str = ""
    traceback: bool = False
    faults: list[str] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: int, number: int) -> Kill:
        """Return a kill of a seed: each kind meets each signal."""
        dice = random.Random(f"{seed} {number}")
        kind = list(KINDS)[number % len(KINDS)]
        sent = SIGNALS[number // len(KINDS) % len(SIGNALS)]
        everyone = sent == signal.SIGINT or dice.random() < 0.5
        part, files, returns = dice.random(), dice.random() < 0.5, dice.random() < 0.5
        return cls(number, kind, sent, everyone, part, files, returns)

    def row(self) -> list[str]:
        who = "all" if self.everyone else "Snakemake"
        told = "; ".join(self.faults) or ("sound, with a traceback" if self.traceback else "sound")
        return [str(self.number), self.kind, self.signal.name, who, self.moment, self.ended, told]


class Harness:
    """Templates and undisturbed results of all kinds."""

    def __init__(self, folder: Path, kills: list[Kill]) -> None:
        self.folder = folder
        kinds = {kill.kind for kill in kills}
        # A process that finds its libraries imported takes less time than one that is killed.
        self.timed = {kill.kind for kill in kills if not kill.files or KINDS[kill.kind].hide}
        world.make_model(folder / "micro")
        self.wanted: dict[str, Content] = {}
        self.seconds: dict[str, float] = {}
        self.files: dict[str, tuple[int, int]] = {}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._undisturbed, [kind for kind in KINDS if kind in kinds]))

    def _undisturbed(self, name: str) -> None:
        kind = KINDS[name]
        kind.make(self.folder / name)
        project = self.copy(name, f"{name}-undisturbed")
        before, content = _number(project, kind), _content(project, kind)
        if kind.hide:
            kind.hide(project)
        project.preloads = name not in self.timed
        begun = time.monotonic()
        project.run(*_command(kind))
        self.seconds[name] = time.monotonic() - begun
        self.files[name] = before, _number(project, kind)
        self.wanted[name] = content if kind.hide else _content(project, kind)

    def copy(self, kind: str, name: str) -> Project:
        """Return a copy of a kind's project, ready for its command."""
        project = Project(self.folder / kind).copy(self.folder / name)
        KINDS[kind].prepare(project)
        return project

    def carry_out(self, kill: Kill) -> Kill:
        """Kill a command, run it again, and note all that is wrong."""
        kind = KINDS[kill.kind]
        project = self.copy(kill.kind, f"{kill.number}-{kill.kind}-{kill.signal.name}")
        if kind.hide:
            kind.hide(project)
            if kill.returns:
                project.run(*_command(kind))
                kind.show(project)
        running = project.start(*_command(kind))
        self._wait(kill, kind, project, running)
        ended = running.poll()
        if ended is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if kill.everyone else os.kill)(running.pid, kill.signal)
        try:
            status = running.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            kill.faults.append("does not end")
            os.killpg(running.pid, signal.SIGKILL)
            status = running.wait()
        kill.ended = f"{status}" if ended is None else "had ended"
        kill.faults += _left_running(project.folder)
        kill.traceback = "Traceback" in (project / "started.txt").read_text()
        kill.faults += _half_written(project, kill.signal == signal.SIGKILL)
        again = project.run(*_command(kind), check=False)
        if again.returncode:
            kill.faults.append(f"again: {_error(again.output)}")
        elif left := project.temporaries():
            kill.faults.append(f"left: {left[0].relative_to(project.folder)}")
        if kind.hide and not kill.returns:
            kill.faults += _differences(self.wanted[kill.kind], _with_kept(project, kind))
            kind.show(project)
            again = project.run(*_command(kind), check=False)
        if kind.hide and again.encoded().encoded:
            kill.faults.append(f"lost: {again.encoded().encoded} were encoded again")
        kill.faults += _differences(self.wanted[kill.kind], _content(project, kind))
        if not kill.faults:
            shutil.rmtree(project.folder)
        return kill

    def _wait(
        self, kill: Kill, kind: Kind, project: Project, running: subprocess.Popen[str]
    ) -> None:
        """Wait for a kill's moment, or until the command has ended."""
        first, last = self.files[kill.kind]
        begun, most = time.monotonic(), self.seconds[kill.kind]
        made = 1 + int(kill.part * (abs(last - first) - 1))
        if kill.files and last != first:
            kill.moment = f"{made} of {abs(last - first)} files"
            while running.poll() is None and abs(_number(project, kind) - first) < made:
                time.sleep(0.003)
        else:
            kill.moment = f"{kill.part * most:.1f} of {most:.1f} s"
            while running.poll() is None and time.monotonic() - begun < kill.part * most:
                time.sleep(0.01)


def _command(kind: Kind) -> list[str]:
    return [*kind.command, *([] if "--cores" in kind.command else ["--cores", "2"])]


def _files(project: Project, kind: Kind) -> Iterator[Path]:
    for folder in kind.folders:
        for place, _, names in os.walk(project / folder):
            yield from (Path(place, name) for name in names if TEMPORARY_SUFFIX not in name)


def _number(project: Project, kind: Kind) -> int:
    return sum(1 for _ in _files(project, kind))


def _content(project: Project, kind: Kind) -> Content:
    """Return path -> digest of the files that a command leaves, wherever their project lies."""
    place = bytes(project.folder)
    windows = place.replace(b"/", b"\\")  # as a script for Windows names it
    return {
        str(path.relative_to(project.folder)): hashlib.sha256(
            path.read_bytes().replace(place, b"").replace(windows, b"")
        ).hexdigest()
        for path in _files(project, kind)
        if not any(path.match(pattern) for pattern in kind.ignored)
    }


def _with_kept(project: Project, kind: Kind) -> Content:
    """Return the content of a project whose files that are kept apart have their own names."""
    return {name.replace(f"/{KEPT}", ""): x for name, x in _content(project, kind).items()}


def _differences(wanted: Content, found: Content) -> Iterator[str]:
    for word, names in (
        ("missing", wanted.keys() - found.keys()),
        ("too much", found.keys() - wanted.keys()),
        ("other bytes", {x for x in wanted.keys() & found.keys() if wanted[x] != found[x]}),
    ):
        if names:
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{word}: {min(names)}{rest}"


def _half_written(project: Project, killed: bool) -> Iterator[str]:
    """Yield the files that stand half written after a signal; `killed`: by SIGKILL."""
    for path in () if killed else (project / "runs").rglob(f"*{TEMPORARY_SUFFIX}"):
        yield f"partial: {path.relative_to(project.folder)}"
    for name in project.cache_files():
        if name.endswith(".safetensors"):
            try:
                read_header(project / name)
            except Exception as error:
                yield f"half written: {name}: {error}"


def _left_running(folder: Path) -> list[str]:
    """Wait until no process works in a folder; end those that stay, and return their commands."""
    until = time.monotonic() + PATIENCE / 4
    while found := list(_working_in(folder)):
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    told = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            told.append(f"left running: {' '.join(process.cmdline())[-60:]}")
            process.kill()
    return told


def _working_in(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and folder in (
                place := Path(process.cwd()),
                *place.parents,
            ):
                yield process


def _error(output: str) -> str:
    lines = [line for line in output.splitlines() if "rror" in line or "refused" in line]
    return (lines or output.strip().splitlines() or ["nothing was said"])[0][:200]


def main() -> None:
    """Kill, print a line for each, and fail if one of them went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of kills")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=2, help="projects at a time")
    parser.add_argument("--folder", type=Path, help="a new folder for the projects")
    chosen = parser.parse_args()
    for number in SIGNALS[:-1]:  # also where `nohup` or a script's background ignores them
        signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault(preloaded.OWNER, str(os.getpid()))
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="latentmake-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    kills = [Kill.drawn(chosen.seed, number) for number in chosen.only or range(chosen.kills)]
    kills = [kill for kill in kills if kill.kind in chosen.kinds]
    kinds = {kill.kind for kill in kills}
    server = _start_server(folder) if "remote" in kinds else None
    try:
        _carry_out(chosen, folder, kills, kinds, begun)
    finally:
        if server is not None:
            server.stop()


def _start_server(folder: Path) -> Any:
    """Start a server of objects, which the environment names."""
    sys.path.append(str(TESTS / "storage"))
    from s3_server import Bucket, Server

    server = Server.start(folder)
    os.environ.update(server.environment())
    Bucket(BUCKET, server).create()
    return server


def _carry_out(
    chosen: argparse.Namespace, folder: Path, kills: list[Kill], kinds: set[str], begun: float
) -> None:
    harness = Harness(folder, kills)
    print(f"undisturbed, in {time.monotonic() - begun:.0f} s: {harness.seconds}", flush=True)
    rows = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for kill in pool.map(harness.carry_out, kills):
            rows.append(kill)
            print("  ".join(kill.row()), flush=True)
    wrong = [kill for kill in rows if kill.faults]
    table: Any = Counter((kill.kind, kill.signal.name, bool(kill.faults)) for kill in rows)
    print(
        tabulate(
            [
                [
                    kind,
                    *(
                        f"{table[kind, s.name, False]} sound, {table[kind, s.name, True]} wrong"
                        for s in SIGNALS
                    ),
                ]
                for kind in chosen.kinds
            ],
            ["", *(each.name for each in SIGNALS)],
        )
    )
    print(
        f"seed {chosen.seed}: {len(rows)} kills, {len(wrong)} wrong, "
        f"{time.monotonic() - begun:.0f} s"
    )
    if wrong:
        raise SystemExit(f"the projects of those are in {folder}")
    if chosen.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""A build tells others of itself, keeps what it replaces, and stops where it cannot write."""

from __future__ import annotations

import copy
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import world
from item_world import inputs_of, work_of
from latentmake.caches.encode import carry_out
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.errors import ConfigError, StorageError
from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.files.workspace import OWNER, check_folder, check_run_folder, claim, other_owner
from latentmake.plan import build, receipts, store
from latentmake.plan.build import BUILDS, Build, announce, refuse_other_items, running_builds
from latentmake.plan.orders import Order
from latentmake.plan.receipts import Receipt
from latentmake.plan.state import PartState, Stale
from latentmake.plan.target import PROMPTS, Target
from latentmake.session import Session

PACKAGE = Path(build.__file__).parents[2]
LOCK = Path(".snakemake/locks/0.output.lock")
WEEK = 8 * 24 * 3600


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(folder: Path) -> None:
    (folder / ".latentmake").mkdir()
    LOCK.parent.mkdir(parents=True)


def make_order(kind: str, **found: str | None) -> Order:
    model = Model.model_validate({"vae": "vae", "text": ["text"]})
    items = tuple(
        work_of(stem, f"{stem}.png", None, (Target("64", stem, there),))
        for stem, there in found.items()
    )
    order = Order(kind, "cats", "small", Dataset(path="."), model, {"a": 1}, items)
    order.write()
    return order


# -- begin and end --------------------------------------------------------------------------------


def begun(*orders: Order) -> Build:
    made = Build(cluster=True)
    made.begin(orders, [], [])
    return made


@pytest.mark.usefixtures("project")
def test_a_build_that_ends_well_and_alone_limits_the_store_and_forgets_old_orders() -> None:
    store.STORE.mkdir(parents=True)
    store.stored("replaced").write_bytes(bytes(10))
    kept, old, new = (make_order(kind, a=None) for kind in ("latents", "text", "other"))
    for order in (kept, old, new):
        Receipt({}, {}, [], {}, 0.0).write(order.receipt)
    for path in (path for order in (kept, old) for path in (order.path, order.receipt)):
        os.utime(path, (time.time() - WEEK, time.time() - WEEK))
    begun(kept).end(None)
    first, second = begun(kept), begun()
    first.end(0)
    assert old.path.exists() and store.keys() == {"replaced"}
    del second
    begun(kept).end(0)
    assert not old.path.exists() and store.keys() == set()
    assert set(receipts.receipts()) == {kept.receipt, new.receipt}


@pytest.mark.usefixtures("project")
def test_a_command_that_deletes_files_of_builds_works_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planning = Build(cluster=True)
    with pytest.raises(StorageError, match="another build is running here; wait"), build.alone():
        pass
    planning.begin([make_order("text", a=None)], [], ["text_r"])
    line = rf"a build is running here \(text_r, process {os.getpid()}\); wait"
    with pytest.raises(StorageError, match=line), build.alone():
        pass
    planning.end(None)
    del planning
    waiting = threading.Thread(target=lambda: Build(cluster=True))
    with build.alone():
        with pytest.raises(StorageError, match="another build"), build.alone():
            pass
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and "waiting for another command" in capsys.readouterr().err
    waiting.join()


@pytest.mark.parametrize(
    ("targets", "kinds"),
    [
        (("latents_tiny",), {"latents"}),
        ((), {"latents", "text"}),
        (("cache/shapes/micro/text/ant.text.safetensors", "latents_tiny"), {"latents", "text"}),
    ],
)
def test_a_build_keeps_what_it_replaces(
    micro: Path, targets: tuple[str, ...], kinds: set[str]
) -> None:
    shutil.copytree(micro, "models/micro")
    world.make_dataset(Path("data/shapes"))
    values = world.config()

    def session(*targets: str) -> Session:
        return Session(copy.deepcopy(values), targets=targets, main=True, side_by_side=None)

    for order in session("caches_tiny").plan.orders:
        carry_out(order, order.receipt, say=lambda _: None, threads=1)
    values["models"]["micro"]["dtype"] = "bfloat16"
    stale = session(*targets)
    stale.begin()
    replaced = {path for order in stale.plan.orders if order.kind in kinds for path in order.paths}
    assert replaced and all(Path(path).stat().st_nlink > 1 for path in replaced)
    (running,) = running_builds()
    assert {work.split()[0] for work in running["made"]} == kinds
    stale.end(succeeded=False)


# -- running builds -------------------------------------------------------------------------------


def test_targets_count_once_they_are_no_longer_what_was_found() -> None:
    Path("b").touch()
    os.utime("b", ns=(5, 5))
    orders = [make_order("latents", a=None, b="key@5", c=None), make_order("text", d=None)]
    held = announce(orders, ["r"], ["train_r"])
    assert held is not None
    (found,) = running_builds()
    assert (found["process"], found["targets"]) == (os.getpid(), ["train_r"])
    assert found["made"] == {"latents small": (0, 3), "text small": (0, 1)}
    assert found["training"] == {"r": ""}
    for made in "abd":
        Path(made).touch()
    log = Path("logs/train/r.log")
    log.parent.mkdir(parents=True)
    log.write_text("begun\nr:  1%|\rr: 50%| 100/200\r")
    (found,) = running_builds()
    assert found["made"] == {"latents small": (2, 3), "text small": (1, 1)}
    assert found["training"] == {"r": "r: 50%| 100/200"}
    os.utime(log, (found["began"] - 9, found["began"] - 9))  # of an earlier training
    assert running_builds()[0]["training"] == {"r": ""}
    held.close()
    assert running_builds() == []


def test_what_a_running_build_makes_is_made_by_no_other() -> None:
    orders = [make_order("latents", a=None), make_order("text", b=None)]
    assert announce([], ["r"], ["check_r"]) is None and not BUILDS.exists()
    held = announce(orders, ["r", "other"], ["train_r"])
    assert held is not None
    for targets in (["train_r"], ["latents_r"], []):
        with pytest.raises(StorageError, match=r"another build makes .*\(train_r, "):
            announce(orders, ["r"], targets)
    with pytest.raises(StorageError, match="wait until it ends"):
        announce([], ["r"], ["train_r"])
    beside = announce([], ["other"], ["train_other"])
    held.close()
    again = announce(orders, ["r"], ["train_r"])
    assert beside is not None and again is not None


# -- killed builds --------------------------------------------------------------------------------


def command(*, cluster: bool = False, locks: bool = False) -> None:
    """Begin a command, let it lock, and let it end: killed, where it `locks`."""
    held = Build(cluster=cluster)
    if locks:
        LOCK.touch()
    del held


@pytest.mark.usefixtures("project")
def test_the_lock_of_a_killed_build_and_its_half_written_files_are_removed_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = [Path("runs/cats/.training.lock"), Path("runs/cats/.old.latentmake-partial/weights")]
    left = [Path(place, ".0a.1.latentmake-partial") for place in ("reports", "runs/cats/samples")]
    for path in (*kept, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command(locks=True)
    assert all(path.exists() for path in (*kept, *left))
    assert capsys.readouterr().err == ""
    command()
    assert not LOCK.exists()
    assert all(path.exists() for path in kept) and not any(path.exists() for path in left)
    assert "its lock of this folder is removed" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("whose", ["a running one's", "a cluster's", "nobody knows whose"])
def test_any_other_lock_stays(whose: str) -> None:
    running = Build(cluster=False) if whose == "a running one's" else None
    if whose == "a cluster's":
        command(cluster=True, locks=True)
    LOCK.touch()
    command()
    command(cluster=True)
    assert LOCK.exists()
    del running


@pytest.mark.usefixtures("project")
def test_the_lock_of_another_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it came while a build of this one ran: it may know nothing of our locks."""
    running = Build(cluster=False)
    LOCK.with_name("1.output.lock").touch()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        command(locks=True)
    del running
    command()
    assert LOCK.exists()


# -- folders --------------------------------------------------------------------------------------


def test_a_folder_that_can_be_written_is_taken_and_left_as_it_was(folder: Path) -> None:
    check_folder(folder, dry=True)
    assert list(folder.iterdir()) == []
    (folder / "logs/text").mkdir(parents=True)
    names = {"text", "import.log", ".gitkeep", "nohup"}  # files of the user's own, too
    for name in names - {"text"}:
        (folder / "logs" / name).touch()
    check_folder(folder, dry=False)
    assert {each.name for each in (folder / "logs").iterdir()} == names


def test_a_file_in_the_place_of_a_folder_is_named(folder: Path) -> None:
    text = "".join(path.read_text() for path in (PACKAGE.parent / "rules").glob("*.smk"))
    logs = {*re.findall(r'"logs/(\w+)/', text), "latents", "text"}
    assert len(logs) >= 9
    for name in ("logs", ".snakemake", ".latentmake", *(f"logs/{each}" for each in logs)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        for dry in (True, False):
            with pytest.raises(StorageError, match=f"^{name}: a file is in the place of a folder"):
                check_folder(folder, dry=dry)
        (folder / name).unlink()


def test_braces_in_the_project_are_refused_and_elsewhere_taken(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"my {project}: .* braces .*; rename the folder"):
        check_folder(folder / "my {project}", dry=True)
    place = folder / "work {x}"
    place.mkdir()
    os.chdir(place)
    check_folder(folder, dry=False)


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("logs", "size=16k", "free some"),
        (".snakemake", "size=16k", "free some"),
        ("temporary", "size=4k", "set TMPDIR to another folder, or free some"),
        ("temporary", "nr_inodes=1", "set TMPDIR to another folder, or free some"),
    ],
)
def test_a_full_disk_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: str, hint: str
) -> None:
    place = folder / name
    place.mkdir()
    monkeypatch.delenv("TMP", raising=False)
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        with pytest.raises(StorageError, match=f"{name}: no space left on the disk; {hint}"):
            check_folder(folder, dry=False)
        check_folder(folder, dry=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    check_folder(folder, dry=False)


def test_a_folder_whose_name_is_not_utf8_is_refused(folder: Path) -> None:
    place = folder / os.fsdecode(b"caf\xe9")
    place.mkdir()
    for home, working in ((place, folder), (folder, place)):
        os.chdir(working)
        with pytest.raises(ConfigError, match="which is not UTF-8; rename the folder"):
            check_folder(home, dry=True)


@pytest.mark.parametrize("name", ["runs", "runs/cats"])
def test_a_runs_folder_that_is_none_or_cannot_be_written_is_named(folder: Path, name: str) -> None:
    run = Path("runs/cats")
    check_run_folder(run)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with pytest.raises(StorageError, match=f"^{name}: a file is in the place of a folder; "):
        check_run_folder(run)
    (folder / name).unlink()
    (folder / name).mkdir()
    if subprocess.run(["chattr", "+i", name], capture_output=True).returncode:
        pytest.skip("a folder that nobody may write needs the rights of root")
    try:
        with pytest.raises(StorageError, match=f"^{name}: this folder cannot be written; give"):
            check_run_folder(run)
    finally:
        subprocess.run(["chattr", "-i", name], check=True)
    check_run_folder(run)


def test_a_folder_without_permission_is_named(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from latentmake.plan.build import check_folder\n"
        "try: check_folder(Path(), dry=sys.argv[1] == 'dry')\n"
        "except Exception as error: print(error)\n"
    )
    asked = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # who may write anywhere, unless that right is given up
        asked = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *asked]
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anywhere")
    for name, how in (("logs", "real"), (".snakemake", "dry")):
        (folder / name).mkdir(mode=0o500)
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        done = subprocess.run(
            [*asked, how], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"{name}: no permission to write; give your user the right")


# -- shared cache folders -------------------------------------------------------------------------


def make_project(place: Path, cache: Path | None = None) -> Path:
    """Make a project that was built once, with a cache folder of its own or with a link to one."""
    (place / ".latentmake").mkdir(parents=True)
    if cache is None:
        (place / "cache/cats").mkdir(parents=True)
    else:
        (place / "cache").symlink_to(cache)
    return place


def owner(place: Path) -> Path | None:
    os.chdir(place)
    return other_owner("cats")


def build_in(place: Path) -> None:
    os.chdir(place)
    claim(["cats"])


@pytest.fixture
def shared(folder: Path) -> Path:
    (folder / "shared/cats").mkdir(parents=True)
    return folder / "shared"


def test_the_first_that_builds_in_a_folder_elsewhere_owns_it(shared: Path, folder: Path) -> None:
    first, second = make_project(folder / "1", shared), make_project(folder / "2", shared)
    assert owner(first) is owner(second) is None  # as it was before there were notes
    build_in(first)
    build_in(second)
    assert owner(first) is None and owner(second) == first
    (shared / "cats" / OWNER).unlink()
    build_in(second)
    assert owner(first) == second


def test_a_folder_inside_of_another_project_is_that_projects(folder: Path) -> None:
    home = make_project(folder / "home")
    guest = make_project(folder / "guest", home / "cache")
    for each in (guest, home):
        build_in(each)
    assert owner(guest) == home and owner(home) is None
    assert not (home / "cache/cats" / OWNER).exists()  # it needs none


def test_a_project_that_was_moved_or_copied_goes_on(shared: Path, folder: Path) -> None:
    first = make_project(folder / "1", shared)
    build_in(first)
    moved = first.rename(folder / "moved")
    assert owner(moved) is None
    build_in(moved)
    assert (shared / "cats" / OWNER).read_text() == f"{moved}/cache/cats"
    (moved / "cache").unlink()
    shutil.copytree(shared, moved / "cache")  # notes are copied too
    shutil.copytree(moved, folder / "copy")
    assert owner(moved) is owner(folder / "copy") is None
    shutil.rmtree(moved)
    other = make_project(folder / "2", shared)
    assert owner(other) is None
    build_in(other)
    assert (shared / "cats" / OWNER).read_text() == f"{other}/cache/cats"


def test_a_project_under_another_mount_is_the_same(shared: Path, folder: Path) -> None:
    first, place = make_project(folder / "1", shared), folder / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "--bind", first, place], capture_output=True).returncode:
        pytest.skip("a mount needs the rights of root")
    try:
        build_in(first)
        assert owner(place) is None
    finally:
        os.chdir(folder)
        subprocess.run(["umount", place], check=True)


def part(
    *, new: int = 0, fresh: int = 0, edited: int = 0, orphans: tuple[str, ...] = ()
) -> PartState:
    item = inputs_of("a", "a.png")
    stale = [Stale(item, Target("64", "new"), "new")] * new
    stale += [Stale(item, Target("64", "edited", "key@1"), "edited")] * edited
    return PartState(fresh, stale, [*orphans])


def test_other_items_in_anothers_folder_are_refused_and_the_same_are_shared(
    shared: Path, folder: Path
) -> None:
    first, second = make_project(folder / "1", shared), make_project(folder / "2", shared)
    build_in(first)
    mine = [part(fresh=1, new=1, edited=1, orphans=("cache/cats/m/64/b",))]
    refuse_other_items("cats", mine)
    os.chdir(second)
    with pytest.raises(ConfigError) as refused:
        refuse_other_items("cats", mine)
    line = str(refused.value)
    assert line.startswith(f"cache/cats: the project {first} uses this folder too, and its items")
    assert f"those of {second}: 3 cache files differ; rename the dataset in one of them" in line
    half = f"cache/cats/m/64/.x{TEMPORARY_SUFFIX}"
    mine = [part(fresh=3), part(new=3, orphans=(half,))]  # one more resolution
    refuse_other_items("cats", mine)
    assert mine[1].orphans == []  # the other project may be writing it


def test_prompts_of_another_project_stay(shared: Path, folder: Path) -> None:
    (shared / PROMPTS).mkdir()
    first, second = make_project(folder / "1", shared), make_project(folder / "2", shared)
    for place in (first, second):
        os.chdir(place)
        claim([PROMPTS])
        mine = [part(fresh=1, new=1, orphans=("theirs",))]
        refuse_other_items(PROMPTS, mine)
        assert mine[0].orphans == (["theirs"] if place == first else [])

"""A build tells others of itself, keeps what it replaces, and stops where it cannot write."""

from __future__ import annotations

import copy
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import world
from latentmake.base.errors import StorageError
from latentmake.plan import build_locks, store
from latentmake.plan.build_locks import BUILDS, Build, announce, running
from latentmake.plan.orders import Order
from latentmake.plan.receipts import Receipt
from latentmake.session import Session
from order_world import carry_out, written_order

LOCK = Path(".snakemake/locks/0.output.lock")
WEEK = 8 * 24 * 3600


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def project(own_folder: None) -> None:
    Path(".latentmake").mkdir()
    LOCK.parent.mkdir(parents=True)


def begun(*orders: Order) -> Build:
    made = Build(cluster=True)
    made.begin(orders, [], [])
    return made


@pytest.mark.usefixtures("project")
def test_a_build_that_ends_well_and_alone_limits_the_store_and_forgets_old_orders() -> None:
    store.STORE.mkdir(parents=True)
    store.stored("replaced").write_bytes(bytes(10))
    kept, old, new = (written_order(kind, a=None) for kind in ("latents", "text", "other"))
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
    assert kept.receipt.exists() and new.receipt.exists() and not old.receipt.exists()


@pytest.mark.usefixtures("project")
def test_a_command_that_deletes_files_of_builds_works_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planning = Build(cluster=True)
    with (
        pytest.raises(StorageError, match="another build is running here; wait"),
        build_locks.alone(),
    ):
        pass
    planning.begin([written_order("text", a=None)], [], ["text_r"])
    line = rf"a build is running here \(text_r, process {os.getpid()}\); wait"
    with pytest.raises(StorageError, match=line), build_locks.alone():
        pass
    planning.end(None)
    del planning
    waiting = threading.Thread(target=lambda: Build(cluster=True))
    with build_locks.alone():
        with pytest.raises(StorageError, match="another build"), build_locks.alone():
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
        carry_out(order, say=lambda _: None, threads=1)
    values["models"]["micro"]["dtype"] = "bfloat16"
    stale = session(*targets)
    stale.begin()
    replaced = {path for order in stale.plan.orders if order.kind in kinds for path in order.paths}
    assert replaced and all(Path(path).stat().st_nlink > 1 for path in replaced)
    ((_, note),) = running()
    made = {order.name for order in stale.plan.orders if order.kind in kinds}
    assert made and made <= {*note.orders}
    stale.end(succeeded=False)


def test_what_a_running_build_makes_is_made_by_no_other() -> None:
    orders = [written_order("latents", a=None), written_order("text", b=None)]
    assert announce([], [], ["check_r"]) is None and not BUILDS.exists()
    held = announce(orders, ["r"], ["train_r"])
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
@pytest.mark.parametrize("whose", ["a running one's", "a cluster's", "nobody's", "a machine's"])
def test_any_other_lock_stays(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a machine that knows nothing of our locks, made while a build runs here."""
    running = Build(cluster=False) if whose in ("a running one's", "a machine's") else None
    if whose == "a cluster's":
        command(cluster=True, locks=True)
    if whose == "a machine's":
        LOCK.with_name("1.output.lock").touch()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
            command(locks=True)
        del running
    LOCK.touch()
    command()
    command(cluster=True)
    assert LOCK.exists()

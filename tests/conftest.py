"""What all tests share."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import preloaded
import pytest
import world
from hypothesis import HealthCheck, settings
from made_once import made_once
from project import Project
from slow_tests import is_slow

# Before anything imports torch: tests run side by side, and threads that wait actively would halve
# the speed of everything beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Of all that test side by side, one process is there before and after the others.
os.environ.setdefault(preloaded.OWNER, str(os.getpid()))

# What a shell script starts in the background ignores Ctrl-C, what `nohup` starts ignores a closed
# terminal, and so does all that these start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, handler)

# Beside builds, how long an example takes says nothing. The same examples each time:
# `--hypothesis-profile random` looks for others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")

# What waits or builds longest, so that no worker is left with it at the end.
FIRST = ("test_slurm.py", "test_wan.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out where the command names no file, and compile each module once."""
    if config.args_source is config.ArgsSource.TESTPATHS and not config.option.all:
        config.option.markexpr = config.option.markexpr or "not slow"
    # Workers and all that tests start inherit it; folders of tests are not met again.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and config.cache is not None:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(config.cache.mkdir("compiled"))
        shutil.rmtree(f"{sys.pycache_prefix}{tempfile.gettempdir()}", ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker("slow")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@contextmanager
def _permitted(path: str | os.PathLike[str], mode: int) -> Iterator[None]:
    system, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the upper half of each
    os.chmod(path, mode)
    system.capget(header, rights)
    kept = rights[0]
    rights[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    system.capset(header, rights)
    try:
        yield
    finally:
        rights[0] = kept
        system.capset(header, rights)
        os.chmod(path, 0o755)


@pytest.fixture
def permitted() -> Callable[[str | os.PathLike[str], int], AbstractContextManager[None]]:
    """Give a folder a mode, which counts for root as well."""
    return _permitted


@pytest.fixture(scope="module")
def preloading() -> Iterator[None]:
    """Let trainings that a module's tests start find their libraries imported."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in preloaded.environment().items():
            patched.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the micro model."""
    return made_once(tmp_path_factory, "micro", world.make_model)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Project:
    """A project whose caches are all built. Not to be changed: copy it."""

    def make(folder: Path) -> None:
        project = Project.make(folder, world.config(), micro)
        world.make_dataset(project / "data/shapes")
        project.run("caches_tiny")

    return Project(made_once(tmp_path_factory, "template", make))


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

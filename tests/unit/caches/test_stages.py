"""The account of a job's time names its bottleneck, and the share in which the device was busy."""

from __future__ import annotations

import contextlib
import threading

import pytest
from latentmake.caches.stages import Clocks, Stages


class Machine:
    """Clocks that go on as a test says."""

    def __init__(self) -> None:
        self.wall = self.thread = self.process = 0.0
        self.load = 1.0
        self.clocks = Clocks(
            lambda: self.wall, lambda: self.thread, lambda: self.process, lambda: self.load
        )

    def work(self, seconds: float, thread: float = 0.0, others: float = 0.0) -> None:
        """Let time pass; `thread` is the share of a core that each worker gets."""
        self.wall += seconds
        self.thread += thread * seconds
        self.process += others * seconds


@pytest.fixture
def machine() -> Machine:
    return Machine()


def gpu(machine: Machine, threads: int = 4) -> Stages:
    stages = Stages(threads, machine.clocks)
    stages.begin(workers=3, queues=True)
    return stages


def cpu(machine: Machine) -> Stages:
    stages = Stages(2, machine.clocks)
    stages.begin(workers=2, queues=False)
    return stages


def test_a_device_that_always_has_work_queued_is_the_bottleneck(machine: Machine) -> None:
    stages = gpu(machine)
    with stages.encoding():
        machine.work(2)
        for _ in range(3):
            with stages.encoding():
                machine.work(3)
            with stages.writing():  # meanwhile the first batch is still encoded
                machine.work(2)
    machine.work(100)  # what comes after the last sample does not count
    assert stages.words == "device busy 100%, bottleneck: encoding"
    assert stages.hint == ""
    assert stages.seconds == {"reading": 0.0, "encoding": 17.0, "writing": 0.0}


@pytest.mark.parametrize(
    ("cores", "load", "hint"),
    [
        (3.9, 9.0, " (all its cores are busy: give it more)"),
        (1.0, 1.0, " (slow storage: its cores are 75% idle)"),
        (1.0, 9.0, " (other programs take its cores)"),
        (2.5, 1.0, ""),
    ],
)
def test_a_device_whose_workers_are_idle_waits_for_reading(
    machine: Machine, cores: float, load: float, hint: str
) -> None:
    stages = gpu(machine)
    machine.load = load
    for _ in range(4):
        with stages.encoding():
            machine.work(1, others=cores)
        with stages.writing():  # the two other workers have nothing to encode
            machine.work(1, others=cores)
        machine.work(1, others=cores)
    with stages.encoding():
        pass
    assert stages.words == "device busy 33%, bottleneck: reading"
    assert stages.hint == hint


def test_a_device_whose_workers_all_write_waits_for_writing(machine: Machine) -> None:
    stages = gpu(machine)
    for _ in range(4):
        with stages.encoding():
            machine.work(2)
        with contextlib.ExitStack() as all_write:
            for _ in range(3):
                all_write.enter_context(stages.writing())
            machine.work(1)
    assert stages.words == "device busy 67%, bottleneck: writing"


def test_reading_takes_cores_from_encoding_where_these_are_the_device(machine: Machine) -> None:
    stages = cpu(machine)
    with stages.encoding(), stages.encoding():
        machine.work(10, thread=0.4, others=2.0)  # of which the workers use 0.8
    assert stages.words == "device busy 40%, bottleneck: reading"
    assert stages.seconds == {"reading": 6.0, "encoding": 4.0, "writing": 0.0}


def test_other_programs_that_take_cores_are_not_called_reading(machine: Machine) -> None:
    stages = cpu(machine)
    with stages.encoding(), stages.encoding():
        machine.work(10, thread=0.4, others=0.9)  # of which the workers use 0.8
    assert stages.words == "device busy 95%, bottleneck: encoding"


def test_workers_of_a_cpu_that_write_do_not_encode(machine: Machine) -> None:
    stages = cpu(machine)
    for _ in range(4):
        with stages.encoding():
            with stages.encoding():
                machine.work(1, thread=1.0, others=2.0)
            with stages.writing():
                machine.work(2, thread=1.0, others=2.0)
    assert stages.seconds == {"reading": 0.0, "encoding": 8.0, "writing": 4.0}
    assert stages.words == "device busy 67%, bottleneck: encoding"


def test_a_job_of_a_few_seconds_names_no_bottleneck(machine: Machine) -> None:
    stages = cpu(machine)
    assert (stages.words, stages.hint) == ("", "")
    with stages.encoding():
        machine.work(4)
    assert (stages.words, stages.hint) == ("", "")
    assert stages.seconds["encoding"] == 2.0  # of half of the workers


def test_of_another_program_nothing_is_known(machine: Machine) -> None:
    stages = Stages(4, machine.clocks)
    for _ in range(9):
        machine.work(4)
        with stages.writing():
            machine.work(1)
    assert (stages.words, stages.hint, stages.seconds) == ("", "", {})


def test_threads_that_change_stages_at_once_are_all_counted(machine: Machine) -> None:
    stages = Stages(4, machine.clocks)
    stages.begin(workers=4, queues=False)

    def work() -> None:
        for _ in range(500):
            with stages.encoding(), stages.writing():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with stages.encoding():
        machine.work(8, thread=1.0)
    assert stages.seconds == {"reading": 6.0, "encoding": 2.0, "writing": 0.0}

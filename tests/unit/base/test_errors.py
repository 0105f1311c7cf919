"""Errors in one line of what can be printed; messages of libraries about devices and memory."""

from __future__ import annotations

import pytest
from latentmake.base.errors import SourceError, is_device_fault, is_out_of_memory, joined

SHORT = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB",
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory",
    "CUDA error: out of memory",
    "MPS backend out of memory (MPS allocated: 8.94 GB, max: 9.07 GB)",
    "Invalid buffer size: 20.00 GB",
    "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
    "GET was unable to find an engine to execute this computation",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)
FAULTS = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA driver error: device lost",
    "CUDA unknown error - this may be due to an incorrectly set up environment",
    "HIP error: unspecified launch failure",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "Found no NVIDIA driver on your system.",
    "No CUDA GPUs are available",
)
OTHERS = (
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "cannot identify image file 'data/cuda.png'",
    "",
)


def test_an_error_is_one_line_that_no_terminal_acts_upon() -> None:
    error = SourceError("is \x1b[31mred\0", where="a\nb\udcff.txt", hint="grün, 猫,\u00a0")
    assert str(error) == r"a b\udcff.txt: is \x1b[31mred\x00; grün, 猫,"


def test_the_middle_of_a_long_line_is_left_out() -> None:
    line = str(SourceError("\x1b" * 1000, where="a.txt", hint="remove it"))
    assert line.startswith(r"a.txt: \x1b") and line.endswith("; remove it") and " ... " in line
    assert len(f"error: {line}") <= 500


def test_faults_that_do_not_fit_into_a_message_are_said_in_lines_of_their_own() -> None:
    said: list[str] = []
    assert joined(["a is bad", "b is bad", "a is bad"], said.append) == "a is bad | b is bad"
    assert said == []
    lines = [f"{number}.png is bad; {'x' * 150}" for number in range(9)]
    assert joined(lines, said.append) == f"{lines[0]} | {lines[1]} | and 7 more"
    assert said == [f"faulty: {line}" for line in lines]


@pytest.mark.parametrize("message", [*SHORT, *FAULTS, *OTHERS])
def test_short_memory_and_other_faults_of_a_device_are_known_by_each_librarys_words(
    message: str,
) -> None:
    assert is_out_of_memory(message) == (message in SHORT)
    assert is_device_fault(message) == (message in (*SHORT, *FAULTS))

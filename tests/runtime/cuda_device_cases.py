"""CudaDevice through the real cuda-python over `fake_driver.c`; `test_cuda_device.py` runs these in a process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specrun.device.cuda import CudaDevice, DeviceArray
from specrun.errors import BundleError, CaptureError
from specrun.plugins.errors import ContractError
from specrun.plugins.gather_rows.reference import gather_rows
from specrun.plugins.launch import Extent, Launch, Parameter

KERNEL = "gather_rows.float32.h64"
RECORD = Launch(
    kernel=KERNEL,
    entry="gather_rows_kernel",
    architecture=90,
    parameters=(
        Parameter("source", "*fp32", ("B", "N", "H")),
        Parameter("rows", "*i64", ("B", "M")),
        Parameter("N", "i32"),
        Parameter("M", "i32"),
        Parameter("gathered", "*fp32", ("B", "M", "H")),
    ),
    grid=(Extent(("B", "M")), Extent(("H",), 64), Extent(())),
    threads=128,
    shared_bytes=60_000,  # above what a kernel gets without asking
    sizes={"H": 64},
)
CUBIN = b"\x7fELF and the rest"
SOURCE = np.random.default_rng(0).standard_normal((2, 5, 64), dtype=np.float32)
ROWS = np.array([[4, -1, 0], [1, 2, 3]])


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice([(replace(RECORD, architecture=80), b"for another GPU"), (RECORD, CUBIN)])


@pytest.fixture
def buffers(device: CudaDevice) -> list[DeviceArray]:
    made = [device.allocate(array.shape, array.dtype) for array in (SOURCE, ROWS)]
    for buffer, array in zip(made, (SOURCE, ROWS), strict=True):
        device.copy(buffer, array)
    return [*made, device.allocate((2, 3, 64), np.float32)]


def test_the_gpu_is_described(device: CudaDevice) -> None:
    assert (device.architecture, device.processors) == (90, 132)
    assert device.stream_handle != 0


def test_buffers_start_as_zeros_and_keep_what_is_copied(device: CudaDevice) -> None:
    buffer = device.allocate((2, 5, 64), np.float32)
    assert (device.read(buffer) == 0).all()
    device.copy(buffer, SOURCE[:, ::-1])
    assert (device.read(buffer) == SOURCE[:, ::-1]).all()
    other = device.allocate((2, 5, 64), np.float32)
    device.copy(other, buffer)
    assert (device.read(other) == SOURCE[:, ::-1]).all()


def test_a_part_shares_the_memory(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    part = buffers[0][1]
    assert part.shape == (5, 64) and (device.read(part) == SOURCE[1]).all()
    device.copy(part, SOURCE[0])
    assert (device.read(buffers[0])[1] == SOURCE[0]).all()
    with pytest.raises(IndexError, match="index 2 of an array of 2"):
        buffers[0][2]


def test_copies_need_equal_shapes_and_types(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    with pytest.raises(CaptureError, match=r"destination is float32\[2, 5, 64\], source is float64\[2, 5, 64\]"):
        device.copy(buffers[0], SOURCE.astype(np.float64))


def test_a_launch_runs_the_stored_kernel(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    device.launch(KERNEL, *buffers)
    assert (device.read(buffers[2]) == gather_rows(SOURCE, ROWS)).all()


def test_a_grid_of_nothing_launches_nothing(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    nothing = [device.allocate(shape, kind) for shape, kind in (((2, 0), np.int64), ((2, 0, 64), np.float32))]
    device.launch(KERNEL, buffers[0], *nothing)


def test_arguments_outside_the_record_are_refused(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    source, rows, gathered = buffers
    with pytest.raises(ContractError, match=r"argument 'gathered': found shape \[2, 5, 64\]; supported: \[B, M, H\]"):
        device.launch(KERNEL, source, rows, source)
    narrow = device.allocate(ROWS.shape, np.int32)
    with pytest.raises(ContractError, match="argument 'rows': found dtype int32; supported: int64"):
        device.launch(KERNEL, source, narrow, gathered)
    with pytest.raises(ContractError, match="found 2 tensors; supported: 3: source, rows, gathered"):
        device.launch(KERNEL, source, rows)


def test_a_kernel_that_the_bundle_lacks_is_named(device: CudaDevice) -> None:
    with pytest.raises(BundleError, match=f"kernel 'commit_rows' is not in the bundle for sm_90.*: {KERNEL}. Compile"):
        device.launch("commit_rows")
    with pytest.raises(BundleError, match="kernels for it: none"):
        CudaDevice([(replace(RECORD, architecture=120), CUBIN)]).launch(KERNEL)


def test_an_ops_name_finds_the_variant_that_fits(buffers: list[DeviceArray]) -> None:
    wide = replace(RECORD, kernel="gather_rows.float32.h128", sizes={"H": 128})
    half = replace(
        RECORD, kernel="gather_rows.float16.h64", parameters=(Parameter("source", "*fp16", ("B", "N", "H")),)
    )
    device = CudaDevice([(wide, CUBIN), (RECORD, CUBIN), (half, CUBIN)])
    device.launch("gather_rows", *buffers)
    assert (device.read(buffers[2]) == gather_rows(SOURCE, ROWS)).all()
    with pytest.raises(
        ContractError, match=r"gather_rows: argument 'arguments': found float32\[2, 5, 64\]; supported: g"
    ):
        device.launch("gather_rows", buffers[0])


def test_a_captured_step_runs_when_it_is_replayed(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    copied = device.allocate((2, 3, 64), np.float32)
    with device.capture() as step:
        device.launch(KERNEL, *buffers)
        device.copy(copied, buffers[2])
    assert (device.read(copied) == 0).all()
    for shift in (1, 2):
        device.copy(buffers[0], SOURCE + shift)
        device.replay(step)
        assert (device.read(copied) == gather_rows(SOURCE + shift, ROWS)).all()
    assert {id(operand) for operand in step.operands} >= {id(buffer) for buffer in (*buffers, copied)}


def test_capture_refuses_what_a_graph_cannot_hold(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    with device.capture() as done:
        device.launch(KERNEL, *buffers)

    def nested() -> None:
        with device.capture():
            pass

    refused = {
        "allocate a buffer": lambda: device.allocate((1,), np.float32),
        "copy from host memory": lambda: device.copy(buffers[0], SOURCE),
        "read a buffer on the host": lambda: device.read(buffers[0]),
        "synchronize": device.synchronize,
        "replay a step": lambda: device.replay(done),
        "capture another step": nested,
    }
    with device.capture():
        for what, call in refused.items():
            with pytest.raises(CaptureError, match=f"CudaDevice: a captured step tried to {what}"):
                call()


def test_a_step_that_fails_leaves_the_device_usable(device: CudaDevice, buffers: list[DeviceArray]) -> None:
    with pytest.raises(ZeroDivisionError), device.capture():
        _ = 1 / 0
    device.launch(KERNEL, *buffers)
    assert (device.read(buffers[2]) == gather_rows(SOURCE, ROWS)).all()


def test_an_engine_runs_and_is_kept_by_the_step(device: CudaDevice) -> None:
    class Engine:
        runs = 0

        def enqueue(self) -> None:
            self.runs += 1

    engine = Engine()
    with device.capture() as step:
        device.enqueue(engine)
    assert engine.runs == 1 and step.operands == [engine]


def test_what_the_driver_refuses_is_named(device: CudaDevice) -> None:
    with pytest.raises(RuntimeError, match="cuKernelSetAttribute failed: CUDA_ERROR_INVALID_VALUE"):
        device._call("cuKernelSetAttribute", device._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, 1, 0, 0)

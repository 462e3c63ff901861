"""ONNX Runtime on the CPU: any machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specrun.backends.huge_pages import huge_pages
from specrun.bundle import Bundle, EngineRecord
from specrun.device import Device
from specrun.device.host import HostDevice
from specrun.errors import BundleError

Array = npt.NDArray[Any]


def open_device(bundle: Bundle) -> HostDevice:
    return HostDevice()


def open_session(bundle: Bundle, record: EngineRecord, device: Device, threads: int | None) -> OrtSession:
    """``threads``: None takes the cores this process may use."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or usable_cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A drafter's idle threads must not spin while the target runs: measured, that doubled the time of both.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    path = bundle.file(record.files[0])
    try:
        with huge_pages():
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types, none of them public
        first = str(error).splitlines()[0]
        raise BundleError(
            f"{path}: ONNX Runtime {ort.__version__} cannot load it ({first}); it was compiled with {record.compiler}. "
            "Install that version or newer, or compile the bundle again."
        ) from error
    return OrtSession(session)


def usable_cores() -> int:
    """Cores this process may run on (affinity and cpusets count, unlike os.cpu_count)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class OrtSession:
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundOrt:
        """A cache appears in both maps, once under its input's and once under its output's name, with one buffer."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, _element(array), array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, _element(array), array.shape, array.ctypes.data)
        return BoundOrt(self._session, binding, (*inputs.values(), *outputs.values()))


class BoundOrt:
    """One io_binding. Holds its arrays: the binding knows only their addresses."""

    def __init__(self, session: ort.InferenceSession, binding: Any, arrays: tuple[Array, ...]) -> None:
        self._session, self._binding, self._arrays = session, binding, arrays

    def enqueue(self) -> None:
        self._session.run_with_iobinding(self._binding)


def _element(array: Array) -> Any:
    if not array.flags.c_contiguous:
        raise ValueError("a bound buffer must be contiguous")
    return np.bool_ if array.dtype == np.bool_ else array.dtype.type

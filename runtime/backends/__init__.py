"""Backends: what opens an engine file and binds its tensors to buffers. One module a compiler target."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from specrun.bundle import Bundle, EngineRecord
from specrun.device import Buffer, Device, Enqueueable
from specrun.errors import BundleError

MODULES = {
    "cpu": "specrun.backends.ort",
    "tensorrt-rtx": "specrun.backends.trt",
    "tensorrt": "specrun.backends.trt",
}


class Session(Protocol):
    """An opened engine."""

    def bind(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Enqueueable:
        """Binds every tensor of the engine to a buffer; the shapes are fixed from here on."""


def open_device(bundle: Bundle, target: str) -> Device:
    """The device that engines of ``target`` run on. Raises BundleError where the machine has none."""
    device: Device = _module(target).open_device(bundle)
    return device


def open_session(bundle: Bundle, record: EngineRecord, device: Device, threads: int | None = None) -> Session:
    """Opens one engine of a bundle on ``device``. Raises BundleError when this machine cannot run it."""
    session: Session = _module(record.target).open_session(bundle, record, device, threads)
    return session


def _module(target: str) -> ModuleType:
    if target not in MODULES:
        raise BundleError(f"Engine target {target!r}: unknown to this specrun, which runs {sorted(MODULES)}.")
    return importlib.import_module(MODULES[target])

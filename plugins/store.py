"""A folder of compiled kernels, named by content: ``<key>.cubin`` and ``<key>.json`` with the launch and the report.

The key is the SHA-256 of both, so equal kernels of several engines are stored once and an altered file is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.plugins.errors import ContractError
from specrun.plugins.launch import Launch

if TYPE_CHECKING:
    from specrun.plugins.compile import CompiledKernel


class KernelStore:
    """Write-once artifacts under ``folder``; a half-written one is never visible under its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, kernel: CompiledKernel) -> str:
        """Store one kernel and return its key; storing it again changes nothing."""
        record = {"launch": kernel.launch.to_json(), "report": asdict(kernel.report)}
        text = json.dumps(record, indent=1, sort_keys=True)
        key = _key(kernel.cubin, text)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"{key}.cubin", kernel.cubin)
        _write(self.folder / f"{key}.json", text.encode())
        return key

    def get(self, key: str) -> tuple[Launch, bytes]:
        """The launch and the device binary of ``key``; ContractError when a file is absent or altered."""
        try:
            text = (self.folder / f"{key}.json").read_text()
            cubin = (self.folder / f"{key}.cubin").read_bytes()
        except FileNotFoundError as error:
            supported = "the files written at compile time"
            raise ContractError("kernel store", key, f"no {error.filename}", supported) from error
        if _key(cubin, text) != key:
            supported = "the bytes written at compile time; compile the bundle again"
            raise ContractError("kernel store", key, "other contents than its name says", supported)
        return Launch.from_json(json.loads(text)["launch"]), cubin

    def keys(self) -> list[str]:
        """Every stored kernel's key, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.json"))


def _key(cubin: bytes, text: str) -> str:
    return hashlib.sha256(hashlib.sha256(cubin).digest() + text.encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

"""The kernels that a bundle carries beside its engines: what the runtime itself launches on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specrun.backends.trt import KERNEL_FOLDER
from specrun.bundle import EngineRecord
from specrun.errors import CompileError
from specrun.plugins.contract import Bound
from specrun.plugins.registry import OPS
from specrun.plugins.store import KernelStore


def store_kernels(directory: Path, engines: Iterable[EngineRecord]) -> dict[str, Any]:
    """Compiles the kernels that the caches of GPU engines need, and returns the manifest's entry for them.

    One ``commit_rows`` for each cache layout and architecture. An empty entry where no engine runs on a GPU. Raises
    CompileError where Triton is not installed.
    """
    wanted = {
        (engine.cache.dtype, engine.cache.kv_heads, engine.cache.head_dim, int(architecture.removeprefix("sm_")))
        for engine in engines
        if engine.cache is not None
        for architecture in engine.architectures
    }
    if not wanted:
        return {}
    try:
        import triton  # noqa: F401
    except ImportError:
        raise CompileError(
            "Package triton is not installed; the kernels that move cache rows on a GPU are compiled with it (no GPU "
            "is needed). Run `pip install 'specbuild[kernels]'`, or choose --target cpu."
        ) from None
    from specrun.plugins.compile import compile_kernel

    store, op, keys = KernelStore(directory / KERNEL_FOLDER), OPS["commit_rows"], []
    for dtype, kv_heads, head_dim, architecture in sorted(wanted):
        spec = op.spec(Bound({"H_kv": kv_heads, "D": head_dim}, {"T": dtype}, {}))
        keys.append(store.put(compile_kernel(spec, architecture)))
    return {"keys": keys}

"""Triton's CPU interpreter in a process of its own.

Whether Triton compiles or interprets is decided when it is imported, for its own library functions too. So kernels are
interpreted in one worker process, started once, and this process stays free to compile. Arrays travel by pickle and
come back changed, as a launch would change device memory.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from specrun.plugins.launch import Launch
from tests.compare import poisoned

if TYPE_CHECKING:
    from specrun.plugins.compile import KernelSpec
    from specrun.plugins.registry import Op


class Interpreter:
    """Runs ``triton.jit`` functions, named ``module:function``, over numpy arrays in place."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.plugins.interpreter"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._worker = subprocess.Popen(command, **pipes, env=environment, cwd=Path(__file__).parents[2])

    def launch(self, kernel: str, grid: tuple[int, ...], arrays: dict[str, Any], **constants: Any) -> None:
        """Run ``kernel`` over ``grid``, changing arrays in place.

        ``arrays`` maps every run-time parameter to an array, a number, or the parameter whose buffer it shares.
        """
        assert self._worker.stdin is not None and self._worker.stdout is not None
        _send(self._worker.stdin, (kernel, grid, arrays, constants))
        failure, changed = _receive(self._worker.stdout)
        if failure is not None:
            raise AssertionError(f"{kernel} failed in the interpreter:\n{failure}")
        for name, value in changed.items():
            arrays[name][...] = value

    def launch_spec(self, spec: KernelSpec, tensors: Sequence[np.ndarray]) -> None:
        """Run a kernel variant on its inputs, then its outputs, as a stored binary would be launched."""
        launch = Launch(spec.name, "", 0, spec.parameters, spec.grid, 0, 0, spec.sizes)
        sizes = launch.sizes_for([tensor.shape for tensor in tensors])
        arguments: dict[str, Any] = {p.name: sizes[p.name] for p in spec.parameters if not p.pointer}
        seen: list[tuple[str, np.ndarray]] = []
        for parameter, tensor in zip((p for p in spec.parameters if p.pointer), tensors, strict=True):
            name = f"{parameter.name}_ptr"
            arguments[name] = next((other for other, array in seen if array is tensor), tensor)
            seen.append((name, tensor))
        function = f"{spec.function.fn.__module__}:{spec.function.fn.__name__}"
        self.launch(function, launch.grid_for(sizes), arguments, **spec.constants)

    def run(self, op: Op, inputs: dict[str, np.ndarray], **attributes: Any) -> dict[str, np.ndarray]:
        """Check the inputs, interpret the op's kernel over poisoned outputs, and return the outputs by name.

        An output that aliases an input is that input's array, changed.
        """
        bound = op.contract.check(inputs, attributes)
        layouts = op.contract.output_layouts(bound)
        outputs = {t.name: inputs[t.aliases] if t.aliases else poisoned(*layouts[t.name]) for t in op.contract.outputs}
        ordered = [inputs[tensor.name] for tensor in op.contract.inputs]
        self.launch_spec(op.spec(bound), [*ordered, *outputs.values()])
        return outputs

    def close(self) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait(timeout=30)


def _send(pipe: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError("the other side has closed")
    return pickle.loads(pipe.read(struct.unpack("<q", header)[0]))


def _run(
    kernel: str, grid: tuple[int, ...], arrays: dict[str, Any], constants: dict[str, Any]
) -> dict[str, np.ndarray]:
    import torch

    def tensor(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.name == "bfloat16":
            return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(value))

    module, function = kernel.split(":")
    arguments = {name: tensor(value) for name, value in arrays.items()}
    arguments |= {name: arguments[value] for name, value in arrays.items() if isinstance(value, str)}
    getattr(import_module(module), function)[grid](**arguments, **constants)
    changed = {}
    for name, value in arguments.items():
        if isinstance(arrays[name], np.ndarray):
            half = value.dtype == torch.bfloat16
            changed[name] = value.view(torch.int16).numpy().view(arrays[name].dtype) if half else value.numpy()
    return changed


def _widen_bfloat16_products() -> None:
    """The interpreter keeps bfloat16 as integers and multiplies those; a GPU multiplies the numbers, in fp32."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        wide = [self.create_fp_ext(h, tl.float32) if h.dtype.scalar == tl.bfloat16 else h for h in (left, right)]
        return plain(self, *wide, *rest)

    InterpreterBuilder.create_dot = create_dot


def _serve() -> None:
    import traceback

    _widen_bfloat16_products()

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not land among the answers
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        try:
            answer = (None, _run(*request))
        except Exception:
            answer = (traceback.format_exc(), {})
        _send(answers, answer)


if __name__ == "__main__":
    _serve()

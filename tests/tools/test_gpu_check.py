"""tools.gpu_check as far as a machine without a GPU can run it: every check at small sizes, in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from specrun.plugins.compile import KernelSpec
from specrun.plugins.registry import OPS
from tests.plugins.interpreter import Interpreter
from tests.plugins.kernel_checks import CHECKS, Check
from tools import gpu_check


class InterpretedDevice:
    """Host arrays, and one kernel run by the interpreter under the name that a stored binary would have."""

    def __init__(self, interpreter: Interpreter, spec: KernelSpec) -> None:
        self.interpreter, self.spec = interpreter, spec

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def copy(self, destination: np.ndarray, source: np.ndarray) -> None:
        np.copyto(destination, source)

    def read(self, buffer: np.ndarray) -> np.ndarray:
        return buffer

    def launch(self, kernel: str, *arguments: np.ndarray) -> None:
        assert kernel == self.spec.name
        self.interpreter.launch_spec(self.spec, arguments)


def test_every_op_has_a_check() -> None:
    assert {check.op for check in CHECKS} == set(OPS)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_checks_pass_in_the_interpreter(interpreter: Interpreter, check: Check) -> None:
    def open_device(spec: KernelSpec) -> InterpretedDevice:
        return InterpretedDevice(interpreter, spec)

    (verdict,) = gpu_check.check_all([check], "small", open_device, Console(quiet=True))
    assert verdict.failure == ""


def test_a_wrong_kernel_is_reported(interpreter: Interpreter) -> None:
    class Forgetful(InterpretedDevice):
        def launch(self, kernel: str, *arguments: np.ndarray) -> None:
            """Leaves the outputs as they were."""

    check = next(check for check in CHECKS if check.op == "gather_rows")
    (verdict,) = gpu_check.check_all([check], "small", lambda s: Forgetful(interpreter, s), Console(quiet=True))
    assert "gathered: NaN in other places" in verdict.failure and "first at [0, 0, 0]" in verdict.failure


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_bytes_that_have_to_move_are_counted(check: Check) -> None:
    inputs, _ = check.make(np.random.default_rng(0), **check.small)
    assert 0 < gpu_check.touched_bytes(check.op)(inputs) <= 4 * sum(array.nbytes for array in inputs.values())


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "missing", lambda: ["an NVIDIA GPU and its driver: torch sees none"])
    result = CliRunner().invoke(gpu_check.main, [])
    assert result.exit_code == 2
    assert "an NVIDIA GPU and its driver: torch sees none" in result.output


def test_what_is_missing_here_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: run tools.gpu_check on it")
    assert any("CUDA" in line or "GPU" in line for line in gpu_check.missing())

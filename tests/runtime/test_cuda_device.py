"""CudaDevice on a machine without a GPU: the real cuda-python packages over a driver of our own.

What this shows: every call has the form that cuda-python takes, arguments reach a kernel in the record's order and
width, what is captured runs when it is replayed. What it cannot: that a GPU computes the same (`tools.gpu_check` does).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_cuda_device_over_a_fake_driver(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(HERE / "fake_driver.c"), "-ldl"]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    cases = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "cuda_device_cases.py")]
    result = subprocess.run(cases, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_the_module_imports_without_cuda_python() -> None:
    code = "import sys; sys.modules['cuda'] = None; from specrun.device import cuda; print(cuda.CudaDevice.name)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "cuda"

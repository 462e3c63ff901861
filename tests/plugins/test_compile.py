"""Ahead-of-time compilation: every kernel for every architecture, the assembler's report, the stored artifacts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specrun.plugins import store
from specrun.plugins.compile import (
    ARCHITECTURES,
    SHARED_LIMIT,
    CompiledKernel,
    Report,
    compile_kernel,
    entry_signature,
    parse_report,
    without_scratch_parameters,
)
from specrun.plugins.errors import ContractError
from specrun.plugins.launch import Extent, Launch, Parameter
from specrun.plugins.store import KernelStore
from tests.plugins.variants import VARIANTS, Variant


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_kernel_compiles_without_spills(variant: Variant, architecture: int) -> None:
    spec = variant.spec
    kernel = compile_kernel(spec, architecture)
    assert kernel.cubin[:4] == b"\x7fELF"
    assert f".target sm_{architecture}" in kernel.ptx
    assert kernel.report.spill_bytes == 0
    assert 0 < kernel.report.registers <= 255
    assert kernel.launch.shared_bytes <= kernel.report.shared_bytes <= SHARED_LIMIT[architecture]
    assert kernel.launch.threads == 32 * spec.warps
    entry, parameters = entry_signature(kernel.ptx)
    assert entry == kernel.launch.entry
    assert parameters == ["u64" if p.pointer else "u32" for p in spec.parameters]


@pytest.mark.parametrize("architecture", [75, 86, 103, 121])
def test_the_runtimes_kernel_compiles_wherever_engines_do(architecture: int) -> None:
    """commit_rows goes into every GPU bundle, whatever TensorRT for RTX built its engines for."""
    variant = next(v for v in VARIANTS if v.op == "commit_rows")
    assert compile_kernel(variant.spec, architecture).report.spill_bytes == 0


def test_commit_rows_reads_a_tile_before_it_writes_it() -> None:
    """The interpreter runs threads in step and cannot show this: a barrier stands between loads and stores."""
    variant = next(v for v in VARIANTS if v.op == "commit_rows")
    ptx = compile_kernel(variant.spec, 90).ptx
    assert re.search(r"ld\.global.*bar\.sync.*st\.global", ptx, re.DOTALL)


def test_binaries_hold_no_path_of_this_machine() -> None:
    kernel = compile_kernel(VARIANTS[0].spec, 90)
    folder = str(Path(__file__).parents[2])
    assert folder not in kernel.ptx and folder.encode() not in kernel.cubin


PTX = """.visible .entry k(
\t.param .u64 .ptr .global .align 1 k_param_0,
\t.param .u32 k_param_1,
\t.param .u64 .ptr .global .align 1 k_param_2
)
.reqntid 128
{ ld.param.b64 %rd1, [k_param_0]; ret; }"""


def test_unused_trailing_parameters_are_dropped() -> None:
    stripped = without_scratch_parameters(PTX, 2)
    assert entry_signature(stripped) == ("k", ["u64", "u32"])
    assert stripped.endswith(PTX[PTX.index(".reqntid") :])


def test_a_used_trailing_parameter_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="reads k_param_2, a parameter outside its contract"):
        without_scratch_parameters(PTX.replace("[k_param_0]", "[k_param_2]"), 2)


def test_report_counts_spills_and_both_kinds_of_shared_memory() -> None:
    text = """ptxas info    : Function properties for k
    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem"""
    assert parse_report(text, 1024) == Report(registers=255, shared_bytes=1536, spill_bytes=32)


LAUNCH = Launch(
    kernel="k.float32",
    entry="k",
    architecture=90,
    parameters=(Parameter("x", "*fp32", ("B", "N", 4)), Parameter("N", "i32"), Parameter("y", "*fp32", ("B", "parts"))),
    grid=(Extent(("B", "N"), 16), Extent(("parts",)), Extent(())),
    threads=128,
    shared_bytes=64,
    sizes={"parts": 3},
)
KERNEL = CompiledKernel(LAUNCH, PTX, b"\x7fELF binary", Report(10, 64, 0))


def test_sizes_come_from_the_shapes() -> None:
    sizes = LAUNCH.sizes_for([(2, 9, 4), (2, 3)])
    assert sizes == {"parts": 3, "B": 2, "N": 9}
    assert LAUNCH.grid_for(sizes) == (2, 3, 1)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 9, 4)], "argument 'arguments': found 1 tensors; supported: 2: x, y"),
        ([(2, 9, 5), (2, 3)], "argument 'x': found shape [2, 9, 5]; supported: [B, N, 4]"),
        ([(2, 9, 4), (1, 3)], "argument 'y': found shape [1, 3]; supported: [B, parts] with parts = 3, B = 2, N = 9"),
        ([(2, 9, 4), (2, 4)], "argument 'y': found shape [2, 4]"),
        ([(2, 9, 4), (2,)], "argument 'y': found shape [2]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ContractError, match=re.escape(f"k.float32: {message}")):
        LAUNCH.sizes_for(shapes)


def test_store_returns_what_was_put(tmp_path: Path) -> None:
    kernels = KernelStore(tmp_path / "kernels")
    key = kernels.put(KERNEL)
    assert kernels.put(KERNEL) == key
    assert kernels.get(key) == (LAUNCH, KERNEL.cubin)
    assert kernels.keys() == [key]
    assert {path.name for path in kernels.folder.iterdir()} == {f"{key}.cubin", f"{key}.json"}


def test_store_notices_absent_and_altered_files(tmp_path: Path) -> None:
    kernels = KernelStore(tmp_path)
    key = kernels.put(KERNEL)
    record = tmp_path / f"{key}.json"
    record.write_text(record.read_text().replace('"threads": 128', '"threads": 256'))
    with pytest.raises(ContractError, match="other contents than its name says"):
        kernels.get(key)
    record.unlink()
    with pytest.raises(ContractError, match=f"found no .*{key}.json; supported: the files written at compile time"):
        kernels.get(key)


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        KernelStore(tmp_path).put(KERNEL)
    assert list(tmp_path.iterdir()) == []

"""gather_rows in Triton: one program copies up to BLOCK columns of one row."""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound
from specrun.plugins.gather_rows.contract import CONTRACT
from specrun.plugins.launch import Extent


@triton.jit
def gather_rows_kernel(source_ptr, rows_ptr, N, M, gathered_ptr, H: tl.constexpr, BLOCK: tl.constexpr):
    target = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + target)
    origin = (target // M) * N + row
    width = tl.where(row >= 0, H, 0)
    values = tl.load(source_ptr + origin * H + columns, mask=columns < width, other=0.0)
    tl.store(gathered_ptr + target * H + columns, values, mask=columns < H)


def spec(bound: Bound) -> KernelSpec:
    """The variant for one dtype and width."""
    width, kind = bound.dims["H"], bound.types["T"]
    block = min(1024, max(32, triton.next_power_of_2(width)))
    return KernelSpec(
        name=f"gather_rows.{kind}.h{width}",
        function=gather_rows_kernel,
        parameters=parameters_of(CONTRACT, bound, ("N", "M")),
        constants={"H": width, "BLOCK": block},
        sizes=sizes_of(CONTRACT, bound),
        grid=(Extent(("B", "M")), Extent(("H",), block), Extent(())),
    )

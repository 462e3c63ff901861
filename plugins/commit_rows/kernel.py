"""commit_rows in Triton: one program a lane, head and buffer of the slab moves that head's accepted rows.

A destination is never a later source (paths ascend, so source >= destination), but it can be an earlier one. So a tile
of rows is read whole, then a barrier, then it is written; tiles go in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specrun.plugins.commit_rows.contract import CONTRACT
from specrun.plugins.compile import KernelSpec, parameters_of, sizes_of
from specrun.plugins.contract import Bound
from specrun.plugins.launch import Extent


@triton.jit
def commit_rows_kernel(
    caches_ptr,
    context_lengths_ptr,
    path_ptr,
    counts_ptr,
    B,
    S,
    P,
    committed_ptr,
    new_lengths_ptr,
    H_kv: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    buffer = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) // H_kv
    head = tl.program_id(1) % H_kv
    length = tl.load(context_lengths_ptr + lane)
    count = tl.where(length < 0, 0, tl.load(counts_ptr + lane))
    start_of_head = ((buffer * B + lane) * H_kv + head) * S
    width = tl.arange(0, D_PAD)
    for start in range(0, count, TILE):
        rows = start + tl.arange(0, TILE)
        nodes = tl.load(path_ptr + lane * P + rows, mask=rows < count, other=0)
        moving = ((rows < count) & (nodes != rows))[:, None] & (width < D)[None, :]
        sources = (start_of_head + length + nodes) * D
        values = tl.load(caches_ptr + sources[:, None] + width[None, :], mask=moving, other=0)
        tl.debug_barrier()
        targets = (start_of_head + length + rows) * D
        tl.store(committed_ptr + targets[:, None] + width[None, :], values, mask=moving)
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(new_lengths_ptr + lane, length + count)


def spec(bound: Bound) -> KernelSpec:
    """The variant for one element type and head layout."""
    dims, kind = bound.dims, bound.types["T"]
    return KernelSpec(
        name=f"commit_rows.{kind}.h{dims['H_kv']}.d{dims['D']}",
        function=commit_rows_kernel,
        parameters=parameters_of(CONTRACT, bound, ("B", "S", "P")),
        constants={
            "H_kv": dims["H_kv"],
            "D": dims["D"],
            "D_PAD": triton.next_power_of_2(dims["D"]),
            "TILE": 16,
        },
        sizes=sizes_of(CONTRACT, bound),
        grid=(Extent(("C",)), Extent(("B", "H_kv")), Extent(())),
    )

"""gather_rows: pick rows of a pass's hidden states, for instance those of the accepted path."""

from __future__ import annotations

from specrun.plugins.contract import FLOATS, OpContract, Tensor

CONTRACT = OpContract(
    name="gather_rows",
    version=1,
    inputs=(
        Tensor("source", "T", ("B", "N", "H"), "one row a node"),
        Tensor("rows", "int64", ("B", "M"), "which node's row goes where, 0..N-1; a negative one gives a row of zeros"),
    ),
    outputs=(Tensor("gathered", "T", ("B", "M", "H"), "gathered[b, m] = source[b, rows[b, m]]"),),
    types={"T": FLOATS},
    static=("H",),
)

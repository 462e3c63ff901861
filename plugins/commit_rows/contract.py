"""commit_rows: after a pass, move the accepted nodes' cache rows to the front, in path order, in all layers at once."""

from __future__ import annotations

from specrun.plugins.contract import FLOATS, Limit, OpContract, Tensor

CONTRACT = OpContract(
    name="commit_rows",
    version=1,
    inputs=(
        Tensor("caches", "T", ("C", "B", "H_kv", "S", "D"), "keys and values of all layers in one buffer"),
        Tensor("context_lengths", "int64", ("B",), "committed rows before the pass; negative: an idle lane"),
        Tensor("path", "int64", ("B", "P"), "accepted nodes in path order, strictly ascending; past counts: anything"),
        Tensor("counts", "int64", ("B",), "how many of a lane's path are accepted, 0..P"),
    ),
    outputs=(
        Tensor("committed", "T", ("C", "B", "H_kv", "S", "D"), "row length + i holds row length + path[i]", "caches"),
        Tensor("new_lengths", "int64", ("B",), "length + count; an idle lane keeps its own"),
    ),
    types={"T": (*FLOATS, "uint8")},
    limits={"P": Limit(high=128), "D": Limit(high=512)},
    static=("H_kv", "D"),
)

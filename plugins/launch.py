"""How a stored kernel is launched: its parameters in order, and its grid as a formula over named sizes.

Plain data without Triton or CUDA, so that whatever runs a stored kernel needs only this and the JSON beside the binary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specrun.plugins.errors import ContractError

POINTER_TYPES = {
    "bool": "*i1",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
}


@dataclass(frozen=True, slots=True)
class Extent:
    """One side of a grid: the product of the named sizes, divided by ``per``, rounded up."""

    of: tuple[str, ...]
    per: int = 1

    def count(self, sizes: Mapping[str, int]) -> int:
        return -(-math.prod(sizes[name] for name in self.of) // self.per)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: a tensor of the op's contract (with its shape in symbols), or one of its sizes.

    ``type`` is as Triton writes it: ``*fp16`` for a tensor, ``i32`` for a size.
    """

    name: str
    type: str
    shape: tuple[str | int, ...] = ()

    @property
    def pointer(self) -> bool:
        return self.type.startswith("*")


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything but the arguments: which entry of which binary, with which parameters, over which grid.

    ``kernel`` names the variant and is unique in a bundle; ``shared_bytes`` is dynamic shared memory per block;
    ``sizes`` holds the sizes that no tensor's shape gives (integer attributes).
    """

    kernel: str
    entry: str
    architecture: int
    parameters: tuple[Parameter, ...]
    grid: tuple[Extent, Extent, Extent]
    threads: int
    shared_bytes: int
    sizes: Mapping[str, int]

    def sizes_for(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Every size by name, read off the shapes of the tensors in parameter order.

        Raises ContractError when their number, a rank, or two tensors' readings of one size disagree.
        """
        tensors = [parameter for parameter in self.parameters if parameter.pointer]
        if len(shapes) != len(tensors):
            wanted = ", ".join(parameter.name for parameter in tensors)
            raise ContractError(self.kernel, "arguments", f"{len(shapes)} tensors", f"{len(tensors)}: {wanted}")
        sizes = dict(self.sizes)
        for parameter, shape in zip(tensors, shapes, strict=True):
            expected = [s if isinstance(s, int) else sizes.get(s) for s in parameter.shape]
            fits = len(shape) == len(expected) and all(e in (None, s) for e, s in zip(expected, shape, strict=True))
            if not fits:
                known = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                supported = f"[{', '.join(map(str, parameter.shape))}] with {known}"
                raise ContractError(self.kernel, parameter.name, f"shape {list(shape)}", supported)
            sizes |= {s: n for s, n in zip(parameter.shape, shape, strict=True) if isinstance(s, str)}
        return sizes

    def grid_for(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        x, y, z = (extent.count(sizes) for extent in self.grid)
        return x, y, z

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        x, y, z = (Extent(tuple(extent["of"]), int(extent["per"])) for extent in data["grid"])
        return cls(
            kernel=data["kernel"],
            entry=data["entry"],
            architecture=int(data["architecture"]),
            parameters=tuple(Parameter(p["name"], p["type"], tuple(p["shape"])) for p in data["parameters"]),
            grid=(x, y, z),
            threads=int(data["threads"]),
            shared_bytes=int(data["shared_bytes"]),
            sizes={name: int(size) for name, size in data["sizes"].items()},
        )

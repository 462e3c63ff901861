"""Runs in a process whose ``tensorrt`` is the public bindings over other libraries: registers every op, asks each what
TensorRT's builder would ask it, and prints the answers as JSON.

The builder hands plugins its own dimension expressions; here they are numbers in the same clothes (`Number`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp
from tensorrt.plugin._lib import QDP_REGISTRY
from tensorrt.plugin._tensor import ShapeExpr, ShapeExprs, SymIntExpr

from specrun.plugins.registration import ARCHITECTURE, _tensorrt_type
from specrun.plugins.registry import register_all
from tests.plugins.variants import VARIANTS, Variant


class Number(trt.IDimensionExpr):  # type: ignore[misc]
    """A dimension expression with a value; None stands for one that is known only when the engine runs."""

    value: int | None

    def is_constant(self) -> bool:
        return self.value is not None

    def get_constant_value(self) -> int | None:
        return self.value


def number(value: int | None) -> Number:
    made: Number = Number.__new__(Number)  # TensorRT alone can construct one; its own part is never used
    made.value = value
    return made


class Arithmetic:
    """What plugins know of IExprBuilder."""

    def constant(self, value: int) -> Number:
        return number(value)

    def operation(self, operation: Any, left: Number, right: Number) -> Number:
        a, b = left.value, right.value
        results = {
            trt.DimensionOperation.SUM: lambda: a + b,
            trt.DimensionOperation.PROD: lambda: a * b,
            trt.DimensionOperation.CEIL_DIV: lambda: -(-a // b),
        }
        return number(results[operation]())


def described(variant: Variant) -> list[Any]:
    return [
        trtp.TensorDesc(ShapeExprs.from_tuple(tuple(map(ShapeExpr, t.shape))), _tensorrt_type(t.dtype))
        for t in variant.inputs.values()
    ]


def numbers(expressions: Any) -> list[int]:
    return [expression._expr.value for expression in expressions]


def ask(variant: Variant, architecture: int) -> dict[str, Any]:
    definition = QDP_REGISTRY[variant.contract.plugin_id]
    attributes = {**variant.bound.attributes, ARCHITECTURE: architecture}
    inputs = described(variant)
    outputs = definition.register_func(*inputs, **attributes)
    combination = definition.autotune_func(*inputs, *attributes.values(), outputs)[0]._get_combinations()
    entry, ptx, launch, extra = definition.aot_impl_func(*inputs, *attributes.values(), outputs, 0)
    return {
        "shapes": [numbers(output.shape_expr) for output in outputs],
        "types": [str(output.dtype) for output in outputs],
        "combination": [str(dtype) for dtype in combination[0].types],
        "aliases": [inputs.index(o.get_aliased()) if o.get_aliased() is not None else None for o in outputs],
        "entry": entry,
        "ptx": ptx,
        "grid": numbers((launch.grid_x, launch.grid_y, launch.grid_z)),
        "threads": launch.block_x._expr.value,
        "shared": launch.shared_mem._expr.value,
        "extra": numbers(extra),
        "created": create(variant, attributes),
    }


def create(variant: Variant, attributes: dict[str, Any]) -> list[str]:
    """Through the creator in the registry, as a parser or a network would: the ahead-of-time plugin's output types."""
    namespace, name = variant.contract.plugin_id.split("::")
    creator = trt.get_plugin_registry().get_creator(name, "1", namespace)
    fields = trt.PluginFieldCollection([field(key, value) for key, value in attributes.items()])
    request = trt.QuickPluginCreationRequest.STRICT_AOT
    plugin = creator.create_plugin(name, namespace, fields, trt.TensorRTPhase.BUILD, request)
    types = [_tensorrt_type(tensor.dtype) for tensor in variant.inputs.values()]
    ranks = [len(tensor.shape) for tensor in variant.inputs.values()]
    return [str(dtype) for dtype in plugin.get_output_data_types(types, ranks)]


def field(name: str, value: Any) -> Any:
    import numpy as np

    if isinstance(value, str):
        return trt.PluginField(name, value.encode(), trt.PluginFieldType.CHAR)
    kinds = {int: trt.PluginFieldType.INT64, float: trt.PluginFieldType.FLOAT64, bool: trt.PluginFieldType.INT8}
    return trt.PluginField(name, np.array([value]), kinds[type(value)])


def refusals() -> dict[str, str]:
    """A dtype and a rank that an op does not take, and a compiled-in size that is out of range or not known yet."""
    definition = QDP_REGISTRY["specbuild::gather_rows"]
    variant = next(v for v in VARIANTS if v.op == "gather_rows")
    source, rows = described(variant)
    flat = trtp.TensorDesc(ShapeExprs.from_tuple((source.shape_expr[0], source.shape_expr[2])), source.dtype)
    unknown = trtp.TensorDesc(ShapeExprs.from_tuple((*source.shape_expr[:2], ShapeExpr(number(None)))), source.dtype)
    split = next(v for v in VARIANTS if v.op == "tree_attention_split")
    heads = described(replace(split, sizes={**split.sizes, "D": 72}))
    values = (*split.bound.attributes.values(), 90)
    attention = QDP_REGISTRY["specbuild::tree_attention_split"]
    return {
        "dtype": refusal(definition.register_func, rows, rows, 90),
        "rank": refusal(definition.register_func, flat, rows, 90),
        "unknown": refusal(definition.aot_impl_func, unknown, rows, 90, (), 0),
        "range": refusal(attention.aot_impl_func, *heads, *values, (), 0),
    }


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return "accepted"


def main() -> None:
    register_all()
    SymIntExpr._exprBuilder = Arithmetic()
    answers = {str(variant): ask(variant, 90) for variant in VARIANTS}
    creators = [f"{c.plugin_namespace}::{c.name}" for c in trt.get_plugin_registry().all_creators]
    json.dump({"answers": answers, "creators": creators, "refusals": refusals()}, sys.stdout)


if __name__ == "__main__":
    main()

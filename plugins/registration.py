"""Any op of this room as a TensorRT plugin, from its contract and its kernel's spec.

TensorRT's Python decorators (`tensorrt.plugin`: ``register``, ``autotune``, ``aot_impl``) read the signatures of the
functions they decorate; these are built from the contract, so shapes, types, aliasing and launch parameters are written
once. The ahead-of-time half embeds PTX in the engine: where it runs, neither Python nor a plugin library is needed.

Every plugin takes the contract's attributes and one more, ``architecture`` (90 for sm_90): the GPU that the engine is
for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any

from specrun.plugins.compile import KernelSpec, compile_kernel
from specrun.plugins.contract import Bound, OpContract
from specrun.plugins.errors import ContractError
from specrun.plugins.launch import Extent

ARCHITECTURE = "architecture"
TENSORRT_TYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float16": "FP16",
    "float32": "FP32",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
}


def register_op(contract: OpContract, spec: Callable[[Bound], KernelSpec]) -> None:
    """Register the op's shape function, type combination and ahead-of-time kernel under the contract's plugin id."""
    import tensorrt.plugin as trtp

    plugin = _Plugin(contract, spec)
    tensors = [(tensor.name, trtp.TensorDesc) for tensor in contract.inputs]
    attributes = [(a.name, type(a.default)) for a in contract.attributes] + [(ARCHITECTURE, int)]
    descriptions: Any = GenericAlias(tuple, (trtp.TensorDesc,) * len(contract.outputs))
    combinations = list[trtp.AutoTuneCombination]
    kernel = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    outputs, tactic = ("outputs", inspect.Parameter.empty), ("tactic", int)
    steps = (
        (trtp.register, plugin.describe, tensors + attributes, descriptions),
        (trtp.autotune, plugin.combinations, [*tensors, *attributes, outputs], combinations),
        (trtp.aot_impl, plugin.kernel, [*tensors, *attributes, outputs, tactic], kernel),
    )
    for decorate, method, parameters, returns in steps:
        decorate(contract.plugin_id)(_with_signature(method, parameters, returns))


def _with_signature(method: Callable[..., Any], parameters: list[tuple[str, Any]], returns: Any) -> Callable[..., Any]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    declared = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters]
    signature = inspect.Signature(declared, return_annotation=returns)

    def function(*args: Any, **kwargs: Any) -> Any:
        return method(**signature.bind(*args, **kwargs).arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__name__ = method.__name__
    return function


class _Plugin:
    """The three functions behind the decorators; each takes the op's inputs and attributes by name."""

    def __init__(self, contract: OpContract, spec: Callable[[Bound], KernelSpec]) -> None:
        self.contract = contract
        self.spec = spec

    def describe(self, **arguments: Any) -> tuple[Any, ...]:
        """The outputs' descriptions: shapes as expressions of the inputs' shapes, types, aliases."""
        import tensorrt.plugin as trtp

        types, symbols = self._types(arguments), self._symbols(arguments)
        described = []
        for tensor in self.contract.outputs:
            if tensor.aliases is not None:
                described.append(arguments[tensor.aliases].aliased())
                continue
            shape = tuple(symbols[size] if isinstance(size, str) else size for size in tensor.shape)
            dtype = _tensorrt_type(types.get(tensor.type, tensor.type))
            described.append(trtp.from_shape_expr(trtp.ShapeExprs.from_tuple(shape), dtype=dtype))
        return tuple(described)

    def combinations(self, outputs: Any, **arguments: Any) -> list[Any]:
        """The one combination of types that the network's own types allow; all layouts linear."""
        import tensorrt.plugin as trtp

        dtypes = self._types(arguments)
        tensors = (*self.contract.inputs, *self.contract.outputs)
        names = [TENSORRT_TYPES[dtypes.get(tensor.type, tensor.type)] for tensor in tensors]
        return [trtp.AutoTuneCombination(", ".join(names), "LINEAR")]

    def kernel(self, outputs: Any, tactic: int, **arguments: Any) -> tuple[Any, ...]:
        """The entry's name, its PTX, launch parameters and the int32 sizes between inputs and outputs."""
        import tensorrt.plugin as trtp

        symbols = self._symbols(arguments)
        attributes = {a.name: arguments[a.name] for a in self.contract.attributes}
        bound = Bound(self._static_sizes(symbols), self._types(arguments), self.contract.check_attributes(attributes))
        self.contract.check_known(bound)
        spec = self.spec(bound)
        compiled = compile_kernel(spec, arguments[ARCHITECTURE])
        sizes = [symbols[p.name] for p in spec.parameters if not p.pointer]
        extra = trtp.SymIntExprs(len(sizes))
        for index, size in enumerate(sizes):
            extra[index] = trtp.SymInt32(size)
        grid = [_extent(extent, {**spec.sizes, **symbols}) for extent in spec.grid]
        launch = trtp.KernelLaunchParams(
            *grid, block_x=compiled.launch.threads, shared_mem=compiled.launch.shared_bytes
        )
        return compiled.launch.entry, compiled.ptx, launch, extra

    def _symbols(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Every dimension as an expression, every integer attribute as a number."""
        symbols: dict[str, Any] = {a.name: arguments[a.name] for a in self.contract.attributes}
        for tensor in self.contract.inputs:
            expressions = arguments[tensor.name].shape_expr
            if len(expressions) != len(tensor.shape):
                supported = f"{len(tensor.shape)}: [{', '.join(map(str, tensor.shape))}]"
                raise ContractError(self.contract.name, tensor.name, f"{len(expressions)} dimensions", supported)
            for name, expression in zip(tensor.shape, expressions, strict=True):
                if isinstance(name, str):
                    symbols.setdefault(name, expression)
        return symbols

    def _types(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        names = {_tensorrt_type(name): name for name in TENSORRT_TYPES}
        types: dict[str, str] = {}
        for tensor in self.contract.inputs:
            found = names.get(arguments[tensor.name].dtype, str(arguments[tensor.name].dtype))
            allowed = self.contract.types.get(tensor.type, (tensor.type,))
            if found not in allowed or types.setdefault(tensor.type, found) != found:
                raise ContractError(self.contract.name, tensor.name, f"dtype {found}", " or ".join(allowed))
        return {v: str(arguments[v]) for v in self.contract.types if v in arguments} | types

    def _static_sizes(self, symbols: Mapping[str, Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in self.contract.static:
            if not symbols[name].is_constant:
                supported = "a size fixed when the network is built; it is compiled into the kernel"
                raise ContractError(self.contract.name, name, "a dynamic size", supported)
            sizes[name] = symbols[name].constant_value()
        return sizes


def _tensorrt_type(name: str) -> Any:
    import tensorrt as trt

    return getattr(trt.DataType, {"FP32": "FLOAT", "FP16": "HALF"}.get(TENSORRT_TYPES[name], TENSORRT_TYPES[name]))


def _extent(extent: Extent, symbols: Mapping[str, Any]) -> Any:
    """One side of the grid as a number or an expression; TensorRT's expressions take numbers on their right only."""
    import tensorrt.plugin as trtp

    number, expression = 1, None
    for name in extent.of:
        if isinstance(symbols[name], int):
            number *= symbols[name]
        else:
            expression = symbols[name] if expression is None else expression * symbols[name]
    if expression is None:
        return -(-number // extent.per)
    scaled = expression * number if number != 1 else expression
    return trtp.cdiv(scaled, extent.per) if extent.per != 1 else scaled

"""What an op takes and gives: names, types, shapes, attributes, limits, and the check that refuses everything else.

A contract is data. The same object drives the host-side check before a launch, the shapes and types of the outputs,
the TensorRT registration (`specrun.plugins.registration`) and the order of a kernel's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from specrun.plugins.errors import ContractError

NAMESPACE = "specbuild"
FLOATS = ("float16", "bfloat16", "float32")

Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output.

    ``type`` is a dtype name or a type variable of the contract; ``shape`` holds names of dimensions and constants. An
    output may also name integer attributes in its shape; with ``aliases`` it is that input's own buffer.
    """

    name: str
    type: str
    shape: tuple[str | int, ...]
    meaning: str
    aliases: str | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A build-time constant of the op; its value's type is the type of ``default``. A required one has no default."""

    name: str
    default: Value
    meaning: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """The values that a dimension or an integer attribute may take."""

    low: int = 1
    high: int | None = None
    choices: tuple[int, ...] = ()

    def admits(self, value: int) -> bool:
        if self.choices:
            return value in self.choices
        return value >= self.low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(map(str, self.choices))
        return f"{self.low} or more" if self.high is None else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition between dimensions and attributes; ``found`` is a format string over the names that it is about."""

    argument: str
    found: str
    supported: str
    holds: Callable[[Mapping[str, Any]], bool]

    @property
    def names(self) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(self.found) if name}


@dataclass(frozen=True, slots=True)
class Bound:
    """A contract with its symbols filled in: sizes of dimensions, dtype names of type variables, attribute values."""

    dims: Mapping[str, int]
    types: Mapping[str, str]
    attributes: Mapping[str, Value]

    @property
    def values(self) -> dict[str, Any]:
        """Dimensions and attributes in one mapping."""
        return {**self.attributes, **self.dims}


def dtype_name(tensor: Any) -> str:
    """The dtype's plain name, for anything that has a ``dtype``: numpy (with ml_dtypes), torch, a device buffer."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class OpContract:
    """One op: see the module's text. ``static`` lists the dimensions that are compiled into the kernel.

    ``types`` maps each type variable to the dtypes it may stand for; one that no input binds is a string attribute.
    """

    name: str
    version: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...] = ()
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    static: tuple[str, ...] = ()
    namespace: str = NAMESPACE

    @property
    def plugin_id(self) -> str:
        """The id that graph nodes carry. TensorRT's decorators fix the registry's own version, so later ones rename."""
        suffix = "" if self.version == 1 else f"_v{self.version}"
        return f"{self.namespace}::{self.name}{suffix}"

    def check(self, arguments: Mapping[str, Any], attributes: Mapping[str, Value] | None = None) -> Bound:
        """Bind the inputs' shapes and types, or raise ContractError naming the argument, what was found and what fits.

        ``arguments`` maps input names to anything with ``shape`` and ``dtype``.
        """
        missing = [tensor.name for tensor in self.inputs if tensor.name not in arguments]
        if missing:
            raise ContractError(self.name, missing[0], "nothing", "a tensor; the op cannot run without it")
        dims: dict[str, int] = {}
        types: dict[str, str] = {}
        for tensor in self.inputs:
            self._bind_type(tensor, dtype_name(arguments[tensor.name]), types)
            self._bind_shape(tensor, tuple(arguments[tensor.name].shape), dims)
        bound = Bound(dims, types, self.check_attributes(attributes or {}))
        for variable, allowed in self.types.items():
            if variable not in types:
                types[variable] = self._dtype_attribute(variable, allowed, bound.attributes)
        self.check_known(bound)
        return bound

    def check_outputs(self, arguments: Mapping[str, Any], bound: Bound) -> None:
        """Refuse output buffers whose shape or type is not what the inputs imply."""
        for name, (shape, dtype) in self.output_layouts(bound).items():
            if name not in arguments:
                raise ContractError(self.name, name, "nothing", f"a buffer {dtype} {list(shape)}")
            found = (tuple(arguments[name].shape), dtype_name(arguments[name]))
            if found != (shape, dtype):
                raise ContractError(self.name, name, f"{found[1]} {list(found[0])}", f"{dtype} {list(shape)}")

    def output_layouts(self, bound: Bound) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output."""
        values = bound.values
        return {
            tensor.name: (
                tuple(int(values[size]) if isinstance(size, str) else size for size in tensor.shape),
                bound.types.get(tensor.type, tensor.type),
            )
            for tensor in self.outputs
        }

    def check_attributes(self, attributes: Mapping[str, Value]) -> dict[str, Value]:
        """All attributes, defaults filled in; unknown names and wrong types are refused."""
        known = {attribute.name: attribute for attribute in self.attributes}
        for name, value in attributes.items():
            if name not in known:
                raise ContractError(self.name, name, "an attribute of that name", ", ".join(known) or "no attributes")
            if type(value) is not type(known[name].default):
                supported = f"a value of type {type(known[name].default).__name__}"
                raise ContractError(self.name, name, f"{value!r} ({type(value).__name__})", supported)
        for name, attribute in known.items():
            if attribute.required and name not in attributes:
                raise ContractError(self.name, name, "nothing", f"a value: {attribute.meaning}")
        return {name: attributes.get(name, attribute.default) for name, attribute in known.items()}

    def check_known(self, bound: Bound) -> None:
        """Refuse sizes and attributes outside the limits and rules; those that ``bound`` leaves open are not judged."""
        values = bound.values
        for name, limit in self.limits.items():
            if name in values and not limit.admits(values[name]):
                raise ContractError(self.name, name, f"{name} = {values[name]}", str(limit))
        for rule in self.rules:
            if rule.names <= values.keys() and not rule.holds(values):
                raise ContractError(self.name, rule.argument, rule.found.format(**values), rule.supported)

    def _bind_type(self, tensor: Tensor, found: str, types: dict[str, str]) -> None:
        allowed = self.types.get(tensor.type, (tensor.type,))
        if found not in allowed:
            raise ContractError(self.name, tensor.name, f"dtype {found}", " or ".join(allowed))
        if types.setdefault(tensor.type, found) != found:
            supported = f"{types[tensor.type]}, as the inputs before it"
            raise ContractError(self.name, tensor.name, f"dtype {found}", supported)

    def _bind_shape(self, tensor: Tensor, found: tuple[int, ...], dims: dict[str, int]) -> None:
        wanted = "[" + ", ".join(map(str, tensor.shape)) + "]"
        if len(found) != len(tensor.shape):
            supported = f"{len(tensor.shape)} dimensions, {wanted}"
            raise ContractError(self.name, tensor.name, f"shape {list(found)}", supported)
        for size, symbol in zip(found, tensor.shape, strict=True):
            expected = symbol if isinstance(symbol, int) else dims.setdefault(symbol, size)
            if size != expected:
                supported = f"{wanted} with {symbol} = {expected}"
                raise ContractError(self.name, tensor.name, f"shape {list(found)}", supported)

    def _dtype_attribute(self, variable: str, allowed: tuple[str, ...], attributes: Mapping[str, Value]) -> str:
        value = str(attributes[variable])
        if value not in allowed:
            raise ContractError(self.name, variable, repr(value), " or ".join(allowed))
        return value

"""OpContract: what it binds, and how it words what it refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from specrun.plugins.contract import Attribute, Limit, OpContract, Rule, Tensor
from specrun.plugins.errors import ContractError
from specrun.plugins.registry import OPS

CONTRACT = OpContract(
    name="op",
    version=2,
    inputs=(Tensor("x", "T", ("B", "N", 2), ""), Tensor("y", "T", ("B", "K"), ""), Tensor("i", "int64", ("N",), "")),
    outputs=(Tensor("z", "T", ("B", "parts", 2), ""), Tensor("w", "U", ("K",), "")),
    attributes=(Attribute("parts", 4, ""), Attribute("U", "float32", ""), Attribute("must", 1.0, "", required=True)),
    types={"T": ("float16", "float32"), "U": ("float32", "int8")},
    limits={"N": Limit(high=8), "parts": Limit(choices=(4, 8))},
    rules=(Rule("y", "K = {K} with N = {N}", "K at most N", lambda v: v["K"] <= v["N"]),),
)


def inputs(**change: Any) -> dict[str, Any]:
    found = {"x": np.zeros((3, 5, 2), np.float16), "y": np.zeros((3, 4), np.float16), "i": np.zeros(5, np.int64)}
    return found | change


def test_symbols_are_bound() -> None:
    bound = CONTRACT.check(inputs(), {"must": 2.0, "U": "int8"})
    assert bound.dims == {"B": 3, "N": 5, "K": 4}
    assert bound.types["T"] == "float16"
    assert bound.attributes == {"parts": 4, "U": "int8", "must": 2.0}
    assert CONTRACT.output_layouts(bound) == {"z": ((3, 4, 2), "float16"), "w": ((4,), "int8")}
    assert CONTRACT.plugin_id == "specbuild::op_v2"


def test_torch_tensors_bind_as_well() -> None:
    import torch

    tensors = {name: torch.from_numpy(value) for name, value in inputs().items()}
    assert CONTRACT.check(tensors, {"must": 2.0}) == CONTRACT.check(inputs(), {"must": 2.0})


@pytest.mark.parametrize(
    ("change", "attributes", "message"),
    [
        ({"x": np.zeros((3, 5, 3), np.float16)}, {}, "'x': found shape [3, 5, 3]; supported: [B, N, 2] with 2 = 2"),
        ({"x": np.zeros((3, 5), np.float16)}, {}, "'x': found shape [3, 5]; supported: 3 dimensions, [B, N, 2]"),
        ({"x": np.zeros((3, 5, 2), np.float64)}, {}, "'x': found dtype float64; supported: float16 or float32"),
        ({"y": np.zeros((3, 4), np.float32)}, {}, "'y': found dtype float32; supported: float16, as the inputs before"),
        ({"y": np.zeros((2, 4), np.float16)}, {}, "'y': found shape [2, 4]; supported: [B, K] with B = 3"),
        ({"y": np.zeros((3, 6), np.float16)}, {}, "'y': found K = 6 with N = 5; supported: K at most N"),
        ({"i": np.zeros(5, np.int32)}, {}, "'i': found dtype int32; supported: int64"),
        ({}, {"parts": 5}, "'parts': found parts = 5; supported: 4 or 8"),
        ({}, {"parts": 4.0}, "'parts': found 4.0 (float); supported: a value of type int"),
        ({}, {"prats": 4}, "'prats': found an attribute of that name; supported: parts, U, must"),
        ({}, {"U": "int4"}, "'U': found 'int4'; supported: float32 or int8"),
    ],
)
def test_refusals_name_what_was_found_and_what_fits(
    change: dict[str, Any], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match=re.escape(f"op: argument {message}")) as caught:
        CONTRACT.check(inputs(**change), {"must": 1.0, **attributes})
    assert caught.value.op == "op" and f"'{caught.value.argument}'" in message


def test_missing_arguments_are_refused() -> None:
    some = inputs()
    del some["y"]
    with pytest.raises(ContractError, match="argument 'y': found nothing; supported: a tensor"):
        CONTRACT.check(some, {"must": 1.0})
    with pytest.raises(ContractError, match="argument 'must': found nothing"):
        CONTRACT.check(inputs(), {})


def test_output_buffers_are_checked() -> None:
    bound = CONTRACT.check(inputs(), {"must": 1.0})
    outputs = {"z": np.zeros((3, 4, 2), np.float16), "w": np.zeros(4, np.float32)}
    CONTRACT.check_outputs(outputs, bound)
    with pytest.raises(ContractError, match=re.escape("'w': found int32 [4]; supported: float32 [4]")):
        CONTRACT.check_outputs(outputs | {"w": np.zeros(4, np.int32)}, bound)
    with pytest.raises(ContractError, match=re.escape("'w': found nothing; supported: a buffer float32 [4]")):
        CONTRACT.check_outputs({"z": outputs["z"]}, bound)


@pytest.mark.parametrize("contract", [op.contract for op in OPS.values()], ids=lambda c: c.name)
def test_contracts_are_closed(contract: OpContract) -> None:
    """Every symbol that an output, a limit, a rule or the kernel uses is bound by an input or is an attribute."""
    attributes = {attribute.name for attribute in contract.attributes}
    dims = {symbol for tensor in contract.inputs for symbol in tensor.shape if isinstance(symbol, str)}
    used = {symbol for tensor in contract.outputs for symbol in tensor.shape if isinstance(symbol, str)}
    used |= set(contract.limits) | {name for rule in contract.rules for name in rule.names}
    assert used <= dims | attributes
    assert set(contract.static) <= dims
    inputs_by_name = {tensor.name: tensor for tensor in contract.inputs}
    for tensor in contract.outputs:
        assert tensor.aliases is None or inputs_by_name[tensor.aliases].shape == tensor.shape
    variables = {tensor.type for tensor in contract.inputs} & set(contract.types)
    assert set(contract.types) <= variables | attributes

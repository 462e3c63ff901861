"""TensorRT registration of every op, exercised as far as public packages allow on a machine without a GPU.

Executed here: the public bindings of TensorRT 11 (the Python half and its compiled module) are imported over the
libraries of TensorRT for RTX, under the names that the bindings ask for. The decorators validate every op's signatures;
creators appear in the plugin registry; ahead-of-time plugins are created through them and give their output types;
shape, type, alias, launch and kernel functions are called with what a builder would pass, and what they return is
compared with the contract, with our own launcher's geometry and with the entry that the PTX declares.

Not executed here, because the libraries of RTX have no plugins and those of TensorRT are on no public index:
adding a plugin to a network, building an engine with one, autotuning on a device, and running one. TensorRT's own
dimension expressions are replaced by numbers in the calls above.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specrun.plugins.compile import compile_kernel, entry_signature
from specrun.plugins.registry import OPS
from tests.plugins.variants import VARIANTS, Variant

ROOT = Path(__file__).parents[2]
TYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float16": "HALF",
    "float32": "FLOAT",
    "int32": "INT32",
    "int64": "INT64",
}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `registration_probe.py` printed."""
    folder = tmp_path_factory.mktemp("bindings")
    _lay_out_bindings(folder)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "tests.plugins.registration_probe"]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    answers: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{") :])
    return answers


def _lay_out_bindings(folder: Path) -> None:
    """The bindings as package ``tensorrt``, and RTX's libraries under the names that they load."""
    libraries = find_spec("tensorrt_rtx_libs")
    compiler = shutil.which("cc")
    if libraries is None or libraries.origin is None or compiler is None:
        pytest.skip("needs the package tensorrt-rtx-cu13 and a C compiler")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-d",
        str(folder),
        "tensorrt-cu13-bindings==11.4.*",
    ]
    download = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if download.returncode:
        pytest.skip(f"the package index is out of reach: {download.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    (folder / "tensorrt_bindings").rename(folder / "tensorrt")
    lib = folder / "lib"
    lib.mkdir()
    source = Path(libraries.origin).parent
    (lib / "libnvinfer.so.11").symlink_to(source / "libtensorrt_rtx.so.1")
    (lib / "libnvonnxparser.so.11").symlink_to(source / "libtensorrt_onnxparser_rtx.so.1")
    stub = "int initLibNvInferPlugins(void* logger, const char* name) { return 1; }"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(lib / "libnvinfer_plugin.so.11")]
    subprocess.run(command, input=stub, text=True, check=True)


def test_every_op_is_in_the_registry(probe: dict[str, Any]) -> None:
    assert {op.contract.plugin_id for op in OPS.values()} <= set(probe["creators"])
    assert {variant.op for variant in VARIANTS} == set(OPS), "every op has a variant here"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_descriptions_follow_the_contract(probe: dict[str, Any], variant: Variant) -> None:
    answer, contract = probe["answers"][str(variant)], variant.contract
    layouts = contract.output_layouts(variant.bound).values()
    assert answer["shapes"] == [list(shape) for shape, _ in layouts]
    assert answer["types"] == [f"DataType.{TYPES[dtype]}" for _, dtype in layouts]
    assert answer["created"] == answer["types"]
    inputs = [f"DataType.{TYPES[tensor.dtype]}" for tensor in variant.inputs.values()]
    assert answer["combination"] == inputs + answer["types"]
    names = [tensor.name for tensor in contract.inputs]
    assert answer["aliases"] == [t.aliases and names.index(t.aliases) for t in contract.outputs]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kernel_arguments_match_the_entry_of_the_ptx(probe: dict[str, Any], variant: Variant) -> None:
    """TensorRT passes pointers of the inputs, the int32 extras, pointers of the outputs: the entry takes just those."""
    answer, contract = probe["answers"][str(variant)], variant.contract
    entry, parameters = entry_signature(answer["ptx"])
    assert entry == answer["entry"]
    expected = ["u64"] * len(contract.inputs) + ["u32"] * len(answer["extra"]) + ["u64"] * len(contract.outputs)
    assert parameters == expected


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_launch_equals_our_own_launchers(probe: dict[str, Any], variant: Variant) -> None:
    answer = probe["answers"][str(variant)]
    compiled = compile_kernel(variant.spec, 90)
    outputs = [shape for shape, _ in variant.contract.output_layouts(variant.bound).values()]
    sizes = compiled.launch.sizes_for([tensor.shape for tensor in variant.inputs.values()] + outputs)
    assert answer["grid"] == list(compiled.launch.grid_for(sizes))
    assert answer["threads"] == compiled.launch.threads
    assert answer["shared"] == compiled.launch.shared_bytes
    assert answer["extra"] == [sizes[p.name] for p in compiled.launch.parameters if not p.pointer]
    assert answer["ptx"] == compiled.ptx


def test_what_the_contract_does_not_allow_is_refused(probe: dict[str, Any]) -> None:
    assert "argument 'source': found dtype int64; supported: float16 or bfloat16" in probe["refusals"]["dtype"]
    assert "argument 'source': found 2 dimensions; supported: 3: [B, N, H]" in probe["refusals"]["rank"]
    assert "argument 'H': found a dynamic size; supported: a size fixed when" in probe["refusals"]["unknown"]
    assert "argument 'D': found D = 72; supported: 64 or 80 or 96" in probe["refusals"]["range"]

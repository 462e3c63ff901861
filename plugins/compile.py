"""Ahead-of-time compilation of Triton kernels: PTX for TensorRT plugins, device binaries for our own launcher.

Needs Triton, which brings its own assembler, and no GPU. Nothing here is needed where kernels run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.plugins.contract import Bound, OpContract
from specrun.plugins.launch import POINTER_TYPES, Extent, Launch, Parameter

ARCHITECTURES = (80, 89, 90, 100, 120)
# The most dynamic shared memory one block may have, bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# The oldest PTX version that knows an architecture: TensorRT hands PTX to the driver, and old drivers refuse new ones.
PTX_VERSION = {103: 88, 121: 88}
OLDEST_PTX_VERSION = 87


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One variant of a Triton kernel, ready to compile.

    ``function`` is a ``triton.jit`` function whose run-time parameters are ``parameters``, in order, named
    ``<tensor>_ptr`` for tensors and by themselves for int32 sizes; ``constants`` are its compile-time parameters;
    ``sizes`` the static dimensions and integer attributes behind them.
    ``aligned`` names int32 parameters that are always multiples of 16; pointers always are.
    """

    name: str
    function: Any
    parameters: tuple[Parameter, ...]
    constants: Mapping[str, Any]
    sizes: Mapping[str, int]
    grid: tuple[Extent, Extent, Extent]
    warps: int = 4
    stages: int = 2
    aligned: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Report:
    """What the assembler said: registers a thread, bytes of shared memory a block, spilled bytes a thread."""

    registers: int
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled variant: how to launch it, its PTX text, its device binary, the assembler's report."""

    launch: Launch
    ptx: str
    cubin: bytes
    report: Report


def parameters_of(contract: OpContract, bound: Bound, sizes: tuple[str, ...]) -> tuple[Parameter, ...]:
    """A kernel's parameters in the order of TensorRT's ahead-of-time plugins: inputs, int32 sizes, outputs."""

    def pointers(tensors: Any) -> list[Parameter]:
        return [Parameter(t.name, POINTER_TYPES[bound.types.get(t.type, t.type)], t.shape) for t in tensors]

    numbers = [Parameter(name, "i32") for name in sizes]
    return tuple(pointers(contract.inputs) + numbers + pointers(contract.outputs))


def sizes_of(contract: OpContract, bound: Bound) -> dict[str, int]:
    """The sizes that are fixed when a kernel is compiled: static dimensions and integer attributes."""
    attributes = {name: value for name, value in bound.attributes.items() if type(value) is int}
    return {name: bound.dims[name] for name in contract.static} | attributes


def compile_kernel(spec: KernelSpec, architecture: int) -> CompiledKernel:
    """Compile one variant for ``sm_<architecture>``.

    Raises RuntimeError when the assembler refuses it or when the kernel needs scratch memory that no launcher provides.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    names = [f"{p.name}_ptr" if p.pointer else p.name for p in spec.parameters]
    _check_names(spec, names)
    signature = {name: p.type for name, p in zip(names, spec.parameters, strict=True)}
    signature |= dict.fromkeys(spec.constants, "constexpr")
    source = triton.compiler.ASTSource(
        fn=spec.function,
        signature={name: signature[name] for name in spec.function.arg_names},
        constexprs=dict(spec.constants),
        attrs=_alignment(spec),
    )
    options = {
        "num_warps": spec.warps,
        "num_stages": spec.stages,
        "ptx_version": PTX_VERSION.get(architecture, OLDEST_PTX_VERSION),
        "enable_fp_fusion": True,
    }
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # else the binary holds this machine's paths
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise RuntimeError(f"{spec.name}: the kernel needs global scratch memory, which a stored kernel has none of")
    ptx = without_scratch_parameters(compiled.asm["ptx"], len(names))
    cubin, report = assemble(ptx, architecture, int(meta.shared))
    launch = Launch(
        kernel=spec.name,
        entry=meta.name,
        architecture=architecture,
        parameters=spec.parameters,
        grid=spec.grid,
        threads=32 * int(meta.num_warps),
        shared_bytes=int(meta.shared),
        sizes=spec.sizes,
    )
    return CompiledKernel(launch, ptx, cubin, report)


def _check_names(spec: KernelSpec, names: list[str]) -> None:
    found = [name for name in spec.function.arg_names if name not in spec.constants]
    if found != names:
        raise RuntimeError(f"{spec.name}: the kernel's run-time parameters are {found}, its contract implies {names}")


def _alignment(spec: KernelSpec) -> dict[tuple[int, ...], list[list[Any]]]:
    position = {name: index for index, name in enumerate(spec.function.arg_names)}
    aligned = [f"{p.name}_ptr" for p in spec.parameters if p.pointer] + list(spec.aligned)
    return {(position[name],): [["tt.divisibility", 16]] for name in aligned}


_ENTRY = re.compile(r"\.visible \.entry (?P<name>[\w$]+)\(\s*(?P<parameters>[^)]*)\)")


def entry_signature(ptx: str) -> tuple[str, list[str]]:
    """The entry's name and the type of each of its parameters as PTX writes it (``u64`` for pointers, ``u32``)."""
    match = _ENTRY.search(ptx)
    if match is None:
        raise RuntimeError("the PTX has no entry")
    return match["name"], re.findall(r"\.param \.(\w+)", match["parameters"])


def without_scratch_parameters(ptx: str, wanted: int) -> str:
    """Drop the scratch pointers that Triton appends to every entry, so that the entry takes what the contract says.

    A launcher that passes only the contract's arguments would otherwise have the driver read past their end.
    """
    match = _ENTRY.search(ptx)
    if match is None:
        raise RuntimeError("the PTX has no entry")
    declared = [part.strip() for part in match["parameters"].split(",")]
    for dropped in declared[wanted:]:
        if f"[{dropped.split()[-1]}]" in ptx:
            raise RuntimeError(f"the kernel reads {dropped.split()[-1]}, a parameter outside its contract")
    kept = ",\n\t".join(declared[:wanted])
    return f"{ptx[: match.start('parameters')]}{kept}\n{ptx[match.end('parameters') :]}"


def assemble(ptx: str, architecture: int, dynamic_shared: int) -> tuple[bytes, Report]:
    """PTX to a device binary with the assembler that Triton brings, and what the assembler reports."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise RuntimeError("the PTX names no target")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(binary)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"ptxas refused the kernel for {target[1]}: {result.stderr.strip()}")
        return binary.read_bytes(), parse_report(result.stderr, dynamic_shared)


def parse_report(text: str, dynamic_shared: int) -> Report:
    """Read the assembler's verbose output; ``dynamic_shared`` is what the launch adds to the kernel's own."""
    registers = re.search(r"Used (\d+) registers", text)
    if registers is None:
        raise RuntimeError(f"the assembler's report names no registers: {text.strip()}")
    static = re.search(r"(\d+) bytes smem", text)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
    return Report(int(registers[1]), dynamic_shared + (int(static[1]) if static else 0), sum(spills))

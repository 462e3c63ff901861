"""Check every kernel on this machine's GPU, then time them: `python -m tools.gpu_check --json results.json`.

Needs an NVIDIA GPU, torch with CUDA, triton and cuda-python; takes under three minutes. Every kernel is compiled ahead
of time for the GPU at hand and launched by the runtime's own CudaDevice over fresh random inputs; outputs start
poisoned and are compared with the numpy oracles. Times are medians by CUDA events over captured graphs that walk
through several copies of the data, so that the GPU's cache cannot serve them; they stand beside the bytes that have to
move over a measured copy bandwidth, and beside torch's scaled_dot_product_attention with a dense mask.

Exit codes: 0 all right, 1 a kernel is wrong, 2 this machine lacks something.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from specrun.plugins.compile import CompiledKernel, KernelSpec, compile_kernel
from specrun.plugins.contract import Bound
from specrun.plugins.registry import OPS
from specrun.plugins.tree_attention.contract import split_count, tile_rows
from tests.compare import assert_close, poisoned
from tests.plugins.kernel_checks import Check

REPLAYS = 30
ROTATION_BYTES = 512 << 20  # data that one graph walks through, several times any GPU's cache


class Launcher(Protocol):
    """What a check needs of a device (`specrun.device.Device` has it)."""

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any: ...
    def copy(self, destination: Any, source: Any) -> None: ...
    def launch(self, kernel: str, *arguments: Any) -> None: ...
    def read(self, buffer: Any) -> Any: ...


@dataclass(frozen=True)
class Verdict:
    """One check's outcome; ``failure`` is empty when the kernel is right."""

    check: str
    failure: str


@dataclass(frozen=True)
class Timing:
    """Microseconds of one case: ours, the floor (bytes over copy bandwidth), and torch's where it has the operation."""

    case: str
    microseconds: float
    floor: float
    torch: float | None

    @property
    def over_floor(self) -> float:
        return self.microseconds / self.floor


def upload(device: Launcher, array: np.ndarray) -> Any:
    buffer = device.allocate(array.shape, array.dtype)
    device.copy(buffer, array)
    return buffer


def run_check(check: Check, inputs: dict[str, np.ndarray], attributes: dict[str, Any], device: Launcher) -> Verdict:
    """Launch the check's kernel on ``device`` over poisoned outputs and compare what it wrote."""
    contract = OPS[check.op].contract
    bound = contract.check(inputs, attributes)
    buffers = {name: upload(device, inputs[name]) for name in (t.name for t in contract.inputs)}
    for tensor in contract.outputs:
        shape, dtype = contract.output_layouts(bound)[tensor.name]
        buffers[tensor.name] = buffers[tensor.aliases] if tensor.aliases else upload(device, poisoned(shape, dtype))
    device.launch(OPS[check.op].spec(bound).name, *buffers.values())
    found = {tensor.name: device.read(buffers[tensor.name]) for tensor in contract.outputs}
    try:
        for name, (left, right) in check.pairs(found, inputs, attributes).items():
            assert_close(left, right, check.tolerance if right.dtype.kind in "fV" else 0.0, name)
    except AssertionError as error:
        return Verdict(str(check), str(error))
    return Verdict(str(check), "")


def check_all(
    checks: list[Check], sizes: str, open_device: Callable[[KernelSpec], Launcher], console: Console
) -> list[Verdict]:
    """Every check at its ``sizes`` (``real`` or ``small``), each on a device that holds its kernel."""
    rng = np.random.default_rng()
    verdicts = []
    for check in checks:
        inputs, attributes = check.make(rng, **getattr(check, sizes))
        spec = OPS[check.op].spec(OPS[check.op].contract.check(inputs, attributes))
        verdict = run_check(check, inputs, attributes, open_device(spec))
        console.print(f"[{'red' if verdict.failure else 'green'}]{'wrong' if verdict.failure else 'right'}[/] {check}")
        if verdict.failure:
            console.print(f"      {verdict.failure}", markup=False)
        verdicts.append(verdict)
    return verdicts


def missing() -> list[str]:
    """What this machine lacks, one line each; empty if all is there."""
    found = []
    for package, why in (("torch", "to time"), ("triton", "to compile"), ("cuda.core", "to launch")):
        try:
            __import__(package)
        except ImportError as error:
            found.append(f"{package} ({why} kernels): {error}")
    if not found:
        import torch

        if torch.version.cuda is None:
            found.append(f"torch with CUDA: this is {torch.__version__}")
        elif not torch.cuda.is_available():
            found.append("an NVIDIA GPU and its driver: torch sees none")
    return found


@dataclass(frozen=True)
class AttentionCase:
    """A verification pass of a model with 32 heads of size 128 in 8 groups, as of 8 billion parameters, in bfloat16."""

    batch: int
    context: int
    nodes: int = 16
    heads: int = 32
    kv_heads: int = 8
    size: int = 128

    def __str__(self) -> str:
        return f"tree attention, batch {self.batch}, context {self.context}, {self.nodes} nodes"

    @property
    def cache_bytes(self) -> int:
        """Keys and values of the rows that a pass reads."""
        return 2 * 2 * self.batch * self.kv_heads * (self.context + self.nodes) * self.size

    @property
    def floor_bytes(self) -> int:
        return self.cache_bytes + 2 * 2 * self.batch * self.nodes * self.heads * self.size

    @property
    def copies(self) -> int:
        return max(1, min(64, ROTATION_BYTES // self.cache_bytes))


ATTENTION = [
    AttentionCase(1, 1024),
    AttentionCase(1, 8192),
    AttentionCase(1, 32_768),
    AttentionCase(1, 131_072),
    AttentionCase(8, 8192),
    AttentionCase(32, 2048),
    AttentionCase(8, 8192, nodes=64),
]


class Bench:
    """Times captured steps of a CudaDevice, and torch functions on the same stream, by CUDA events."""

    def __init__(self) -> None:
        import torch

        from specrun.device.cuda import CudaDevice

        self.torch = torch
        self.open: Callable[..., CudaDevice] = CudaDevice
        device = CudaDevice()
        self.architecture, self.processors = device.architecture, device.processors
        self.bandwidth = self._copy_bandwidth()

    def kernels(self, *specs: KernelSpec) -> list[tuple[Any, bytes]]:
        compiled: list[CompiledKernel] = [compile_kernel(spec, self.architecture) for spec in specs]
        return [(kernel.launch, kernel.cubin) for kernel in compiled]

    def microseconds(self, run: Callable[[], Any], stream: Any, repeats: int) -> float:
        """Median time of ``run``, which holds ``repeats`` of what is measured, over REPLAYS runs after a warm-up."""
        events = [tuple(self.torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(REPLAYS)]
        for _ in range(3):
            run()
        for start, end in events:
            start.record(stream)
            run()
            end.record(stream)
        self.torch.cuda.synchronize()
        return float(np.median([start.elapsed_time(end) for start, end in events])) * 1000 / repeats

    def captured(self, device: Any, launches: list[Callable[[], None]]) -> float:
        """Median microseconds of one of ``launches``, captured together in one graph."""
        for launch in launches:
            launch()
        with device.capture() as step:
            for launch in launches:
                launch()
        stream = self.torch.cuda.ExternalStream(device.stream_handle)
        return self.microseconds(lambda: device.replay(step), stream, len(launches))

    def _copy_bandwidth(self) -> float:
        """Bytes a second that a device-to-device copy reads and writes."""
        source = self.torch.empty(ROTATION_BYTES, dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        stream = self.torch.cuda.current_stream()
        return 2 * ROTATION_BYTES / self.microseconds(lambda: target.copy_(source), stream, 1) * 1e6

    def attention(self, case: AttentionCase) -> Timing:
        tile = tile_rows(case.nodes, case.heads, case.kv_heads)
        tiles = -(-case.nodes * case.heads // case.kv_heads // tile)
        splits = split_count(case.batch, case.kv_heads, tiles, case.context + case.nodes, self.processors)
        query_shape = (case.batch, case.nodes, case.heads, case.size)
        dims = {"B": case.batch, "N": case.nodes, "H": case.heads, "H_kv": case.kv_heads, "D": case.size}
        attributes = {"scale": case.size**-0.5, "splits": splits, "tile_rows": tile}
        split_op, merge_op = OPS["tree_attention_split"], OPS["tree_attention_merge"]
        known = split_op.contract.check_attributes(attributes)
        split = split_op.spec(Bound(dims, {"T": "bfloat16"}, known))
        merging = {"output_type": "bfloat16"}
        merge = merge_op.spec(Bound({**dims, "splits": splits}, merging, merging))
        device = self.open(self.kernels(split, merge))
        rows = case.context + case.nodes
        shared = self._attention_inputs(device, case)
        partial = device.allocate((*query_shape[:3], splits, case.size), "float32")
        lse = device.allocate((*query_shape[:3], splits), "float32")
        query, output = (upload(device, self._noise(query_shape)) for _ in range(2))

        def attend(keys: Any, values: Any) -> Callable[[], None]:
            def launch() -> None:
                device.launch(split.name, query, keys, values, *shared, partial, lse)
                device.launch(merge.name, partial, lse, output)

            return launch

        cache = self._noise((case.batch, case.kv_heads, rows, case.size))
        launches = [attend(upload(device, cache), upload(device, cache)) for _ in range(case.copies)]
        measured = self.captured(device, launches)
        return Timing(str(case), measured, self.floor(case.floor_bytes), self._torch_attention(case))

    def floor(self, moved: int) -> float:
        """Microseconds that ``moved`` bytes take at the copy's bandwidth."""
        return moved / self.bandwidth * 1e6

    def _attention_inputs(self, device: Any, case: AttentionCase) -> list[Any]:
        lengths = np.full(case.batch, case.context)
        mask = np.tile(np.tri(case.nodes, dtype=bool), (case.batch, 1, 1))
        positions = lengths[:, None] + np.arange(case.nodes)
        return [upload(device, array) for array in (lengths, positions, mask)]

    def _noise(self, shape: tuple[int, ...]) -> np.ndarray:
        import ml_dtypes

        return np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)

    def _torch_attention(self, case: AttentionCase) -> float:
        torch, rows = self.torch, case.context + case.nodes
        kinds = {"dtype": torch.bfloat16, "device": "cuda"}
        query = torch.randn(case.batch, case.heads, case.nodes, case.size, **kinds)
        caches = torch.randn(case.copies, 2, case.batch, case.kv_heads, rows, case.size, **kinds)
        mask = torch.ones(case.batch, 1, case.nodes, rows, dtype=torch.bool, device="cuda")
        mask[..., case.context :] = torch.ones(case.nodes, case.nodes, dtype=torch.bool, device="cuda").tril()

        def run() -> None:
            for keys, values in caches:
                torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

        return self.microseconds(run, torch.cuda.current_stream(), case.copies)

    def single(self, check: Check, moved: Callable[[dict[str, np.ndarray]], int]) -> Timing:
        """One kernel at its check's real sizes; ``moved`` gives the bytes that its work on those inputs has to move."""
        inputs, attributes = check.make(np.random.default_rng(0), **check.real)
        op = OPS[check.op]
        bound = op.contract.check(inputs, attributes)
        spec = op.spec(bound)
        device = self.open(self.kernels(spec))
        copies = max(1, min(16, ROTATION_BYTES // sum(array.nbytes for array in inputs.values())))

        def prepared() -> Callable[[], None]:
            buffers = {name: upload(device, inputs[name]) for name in (t.name for t in op.contract.inputs)}
            for tensor in op.contract.outputs:
                layout = op.contract.output_layouts(bound)[tensor.name]
                buffers[tensor.name] = buffers[tensor.aliases] if tensor.aliases else device.allocate(*layout)
            return lambda: device.launch(spec.name, *buffers.values())

        measured = self.captured(device, [prepared() for _ in range(copies)])
        return Timing(str(check), measured, self.floor(moved(inputs)), None)


def touched_bytes(op: str) -> Callable[[dict[str, np.ndarray]], int]:
    """The bytes that an op has to move, from its inputs: all of them once, but of caches the moved rows only."""

    def everything(inputs: dict[str, np.ndarray]) -> int:
        return sum(array.nbytes for array in inputs.values())

    def gathered(inputs: dict[str, np.ndarray]) -> int:
        return 2 * inputs["rows"].size * inputs["source"][0, 0].nbytes

    def committed(inputs: dict[str, np.ndarray]) -> int:
        caches, path = inputs["caches"], inputs["path"]
        kept = np.arange(path.shape[1]) < np.where(inputs["context_lengths"] < 0, 0, inputs["counts"])[:, None]
        moved = int((kept & (path != np.arange(path.shape[1]))).sum())
        return max(1, 2 * moved * caches.shape[0] * caches.shape[2] * caches.shape[4] * caches.itemsize)

    def walked(inputs: dict[str, np.ndarray]) -> int:
        """One row a sequence: a walk that is rejected at once reads no more."""
        return sum(array.nbytes // (array.shape[1] if array.ndim == 3 else 1) for array in inputs.values())

    walks = {name: walked for name in OPS if name.endswith(("_walk", "_walk_dense"))}
    return {"gather_rows": gathered, "commit_rows": committed, **walks}.get(op, everything)


def show(verdicts: list[Verdict], timings: list[Timing], card: str, bandwidth: float, console: Console) -> None:
    table = Table(title=f"{card}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    for column in ("case", "us", "floor us", "x floor", "torch us"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for t in timings:
        torch = "" if t.torch is None else f"{t.torch:.1f}"
        table.add_row(t.case, f"{t.microseconds:.1f}", f"{t.floor:.1f}", f"{t.over_floor:.2f}", torch)
    console.print(table)
    wrong = sum(bool(verdict.failure) for verdict in verdicts)
    console.print(f"{len(verdicts) - wrong} of {len(verdicts)} kernel checks right")


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all results to this file.")
def main(path: Path | None) -> None:
    """Check every kernel on this machine's GPU against its oracle, then time them."""
    console = Console()
    lacking = missing()
    if lacking:
        console.print("gpu_check needs what this machine does not have:")
        for line in lacking:
            console.print(f"  {line}", markup=False)
        raise SystemExit(2)
    from tests.plugins.kernel_checks import CHECKS

    bench = Bench()
    card = bench.torch.cuda.get_device_name()
    verdicts = check_all(CHECKS, "real", lambda spec: bench.open(bench.kernels(spec)), console)
    timings = [bench.attention(case) for case in ATTENTION]
    single = {check.op: check for check in reversed(CHECKS) if check.op != "tree_attention_split"}
    timings += [bench.single(check, touched_bytes(check.op)) for check in reversed(single.values())]
    show(verdicts, timings, card, bench.bandwidth, console)
    if path is not None:
        results = {"card": card, "architecture": bench.architecture, "copy_bandwidth": bench.bandwidth}
        results |= {"checks": [asdict(v) for v in verdicts], "timings": [asdict(t) for t in timings]}
        path.write_text(json.dumps(results, indent=1))
    raise SystemExit(1 if any(verdict.failure for verdict in verdicts) else 0)


if __name__ == "__main__":
    main()

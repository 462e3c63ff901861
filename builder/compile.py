"""compile_bundle: checkpoint -> engines and drafters -> bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbuild.bundle_writer import finish, publish, staged
from specbuild.checkpoint import Checkpoint, open_checkpoint
from specbuild.doctor.watch import watch
from specbuild.drafters import CompileContext, DrafterPlan, plan_drafters
from specbuild.kernels import store_kernels
from specbuild.model.decoder import DecoderSpec
from specbuild.progress import Progress, Silent
from specbuild.targets import default_shapes, open_target
from specrun.bundle import Bundle, DrafterRecord, FileRecord, Limits, Manifest, ModelSummary
from specrun.errors import CompileError
from specrun.profiles import ProfileError, ShapeProfile, load_shapes

PRODUCER = "specbuild 0.1.0"
SAMPLE = (
    "The library was founded in 1897 and holds about 12,000 manuscripts; most of them came from three monasteries.\n"
    "def mean(values):\n    return sum(values) / len(values)\n\nQ: ¿Dónde está la estación? A: 駅は左側です。"
)  # text, numbers, code and other scripts: what activations' ranges are checked on


def compile_bundle(
    model: str | Path,
    output: str | Path,
    *,
    drafters: Sequence[str] = (),
    target: str = "cpu",
    quantize: str | None = None,
    quantize_drafters: str | None = None,
    max_length: int | None = None,
    max_batch: int = 8,
    profile: str | None = None,
    doctor: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Compiles ``model`` (a directory, a hub id or a .gguf file) into the bundle directory ``output``.

    ``drafters``: ``KIND[=SOURCE][,option=value...]`` each. ``target``: ``cpu``, ``tensorrt-rtx[:sm89[,sm120]]`` or
    ``tensorrt``. ``quantize``: ``int4`` or ``int8``. ``quantize_drafters``: the same or ``none``, for what
    only drafts (by default ``int8`` on the cpu target). ``max_length``: tokens a sequence may use, prompt included (the
    model's own by default). ``max_batch``: sequences a pass may carry. ``profile``: a shape profile by name.
    ``doctor``: score the drafters' readings on a little text (cpu target), see ``specbuild.doctor.watch``.

    Nothing is written at ``output`` before everything is; a bundle that was there is replaced in one step. Raises
    UserError.
    """
    output = Path(output)
    shapes = _shapes(profile or default_shapes(target))
    limits = _limits(shapes, max_length, max_batch)
    with staged(output) as directory:
        checkpoint = open_checkpoint(model, max_length=max_length)
        length = _length(checkpoint, max_length, target, shapes)
        context = CompileContext(
            checkpoint=checkpoint,
            target=open_target(target, quantize, checkpoint.config.dtype, length, quantize_drafters),
            limits=limits,
            max_length=length,
            taps=(),
            directory=directory,
            progress=progress or Silent(),
        )
        plans = plan_drafters(list(drafters), checkpoint)
        context.taps = _union(plans)
        _compile_target(context)
        records = [_compile_drafter(plan, context) for plan in plans]
        checkpoint.tokenizer.write(directory)
        readings = watch(drafters, context) if doctor else []
        kernels = store_kernels(directory, context.engines)
        finish(directory, lambda files: _manifest(context, records, files, shapes, kernels, readings))
        publish(directory, output)
    return Bundle.open(output, verify=False)


def _shapes(profile: str) -> ShapeProfile:
    try:
        return load_shapes(profile)
    except ProfileError as error:
        raise CompileError(str(error)) from error


def _limits(shapes: ShapeProfile, max_length: int | None, max_batch: int) -> Limits:
    for name, value in (("max_length", max_length), ("max_batch", max_batch)):
        if value is not None and value < 1:
            raise CompileError(f"{name}: found {value}, expected an integer of at least 1.")
    return Limits(max_batch, shapes.max_nodes, shapes.prefill_chunk)


def _length(checkpoint: Checkpoint, asked: int | None, target: str, shapes: ShapeProfile) -> int:
    """Tokens a sequence may use. A target with a fixed cache gets the profile's length unless the user names one."""
    longest = checkpoint.config.max_position
    if asked is not None and asked > longest:
        raise CompileError(
            f"max_length: found {asked}, but {checkpoint.source} was made for {longest} positions. Ask for {longest} "
            "or less."
        )
    if asked is None and not target.startswith("cpu"):
        return min(longest, shapes.static_length)
    return asked or longest


def _union(plans: Sequence[DrafterPlan]) -> tuple[int, ...]:
    return tuple(sorted({tap for plan in plans for tap in plan.taps}))


def _compile_target(context: CompileContext) -> None:
    checkpoint = context.checkpoint
    sample = tuple(checkpoint.tokenizer.tokenizer.encode(SAMPLE).ids)
    spec = DecoderSpec("target", checkpoint.config, checkpoint.tensors, context.max_positions, context.taps, sample)
    context.compile_target(spec.describe())


def _compile_drafter(plan: DrafterPlan, context: CompileContext) -> DrafterRecord:
    before = _size(context.directory)
    record = plan.compile(context)
    return dataclasses.replace(record, bytes=_size(context.directory) - before)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _manifest(
    context: CompileContext,
    drafters: Sequence[DrafterRecord],
    files: tuple[FileRecord, ...],
    shapes: ShapeProfile,
    kernels: Mapping[str, Any],
    readings: Sequence[Mapping[str, Any]],
) -> Manifest:
    checkpoint = context.checkpoint
    config = checkpoint.config
    return Manifest(
        producer=PRODUCER,
        model=ModelSummary(
            family=config.family,
            vocab_size=config.vocab_size,
            tokenizer_size=checkpoint.tokenizer.vocab_size,
            max_length=context.max_length,
            eos_token_ids=tuple(config.eos_token_ids),
            details=config.to_json(),
        ),
        limits=context.limits,
        engines=tuple(context.engines),
        drafters=tuple(drafters),
        files=files,
        profile=shapes.to_json(),
        calibration={"readings": list(readings)} if readings else {},
        kernels=kernels,
    )

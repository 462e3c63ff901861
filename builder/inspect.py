"""What is inside a bundle, as data and as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from specrun.bundle import Bundle, DrafterRecord, EngineRecord
from specrun.profiles import load_hardware, names


def summary(bundle: Bundle) -> dict[str, Any]:
    """The bundle as plain JSON values. Sizes in bytes, lengths in tokens."""
    manifest = bundle.manifest
    model = manifest.model
    return {
        "path": str(bundle.path),
        "producer": manifest.producer,
        "format_version": manifest.format_version,
        "contract_version": manifest.contract_version,
        "model": {
            "family": model.family,
            "vocab_size": model.vocab_size,
            "tokenizer_size": model.tokenizer_size,
            "max_length": model.max_length,
            "eos_token_ids": list(model.eos_token_ids),
            "notes": list(model.details.get("notes", ())),
        },
        "limits": {
            "max_batch": manifest.limits.max_batch,
            "max_nodes": manifest.limits.max_nodes,
            "prefill_chunk": manifest.limits.prefill_chunk,
        },
        "engines": [_engine(bundle, record) for record in manifest.engines],
        "drafters": [_drafter(record) for record in manifest.drafters],
        "readings": list(manifest.calibration.get("readings", ())),
        "files": [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in manifest.files],
        "kernels": len(manifest.kernels),
        "floors": floors(bundle),
        "bytes": sum(f.bytes for f in manifest.files),
    }


def _engine(bundle: Bundle, record: EngineRecord) -> dict[str, Any]:
    sizes = {f.path: f.bytes for f in bundle.manifest.files}
    cache = record.cache
    return {
        "name": record.name,
        "kind": record.kind,
        "target": record.target,
        "architectures": list(record.architectures),
        "precision": record.precision,
        "compiler": record.compiler,
        "files": list(record.files),
        "bytes": sum(sizes.get(name, 0) for name in record.files),
        "vocab_size": record.vocab_size,
        "min_rows": record.min_rows,
        "taps": list(record.taps),
        "hidden_in": record.hidden_in,
        "heads": record.heads,
        "cache_bytes_per_token": None if cache is None else _row_bytes(record),
        "cache_capacity": None if cache is None else cache.capacity,
    }


def floors(bundle: Bundle) -> list[dict[str, Any]]:
    """What memory and arithmetic allow on known GPUs, for every 16-bit engine compiled for them.

    ``pass_ms``: reading the weights once. ``nodes``: how many a pass may carry before its products take longer than
    that, which is what makes a draft tree nearly free.
    """
    sizes = {f.path: f.bytes for f in bundle.manifest.files}
    machines = [load_hardware(name) for name in names("hardware")]
    found = []
    for engine in bundle.manifest.engines:
        for machine in (m for m in machines if m.architecture in engine.architectures):
            read = sizes[engine.files[0]] / (machine.bandwidth_gb_s * 1e9)
            nodes = machine.half_tflops * 1e12 / (machine.bandwidth_gb_s * 1e9)  # 2 operations and 2 bytes a weight
            found.append({"engine": engine.name, "gpu": machine.name, "pass_ms": read * 1e3, "nodes": int(nodes)})
    return found


def _row_bytes(record: EngineRecord) -> int:
    """Bytes that one token of one sequence takes in the cache, all layers."""
    cache = record.cache
    assert cache is not None
    return 2 * cache.layers * cache.kv_heads * cache.head_dim * (4 if cache.dtype == "float32" else 2)


def _drafter(record: DrafterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "kind": record.kind,
        "engine": record.engine,
        "options": dict(record.options),
        "bytes": record.bytes,
    }


def tables(bundle: Bundle) -> RenderableType:
    """The same for people."""
    data = summary(bundle)
    model, limits = data["model"], data["limits"]
    head = (
        f"[bold]{data['path']}[/]  {size(data['bytes'])} in {len(data['files'])} files, written by {data['producer']}\n"
        f"{model['family']}, vocabulary {model['vocab_size']}, context {model['max_length']} tokens, "
        f"batch up to {limits['max_batch']}, up to {limits['max_nodes']} nodes a pass"
    )
    notes = [f"[yellow]note:[/] {note}" for note in model["notes"]]
    warnings = [f"[yellow]warning:[/] {escape(warning)}" for warning in reading_warnings(bundle)]
    return Group(head, *notes, *warnings, _engine_table(data["engines"]), _drafter_table(data["drafters"]))


def reading_warnings(bundle: Bundle) -> list[str]:
    """What compile found wrong with the readings of drafters' checkpoints."""
    readings = bundle.manifest.calibration.get("readings", ())
    return [entry["warning"] for entry in readings if entry["warning"]]


def _engine_table(engines: Iterable[dict[str, Any]]) -> Table:
    table = Table("engine", "target", "precision", "size", "cache a token", "exposes", "compiler", title_justify="left")
    for engine in engines:
        target = ":".join([engine["target"], *(engine["architectures"] and [",".join(engine["architectures"])])])
        row = engine["cache_bytes_per_token"]
        exposes = f"taps {engine['taps']}" if engine["taps"] else f"{engine['heads']} heads" if engine["heads"] else ""
        table.add_row(
            engine["name"],
            target,
            engine["precision"],
            size(engine["bytes"]),
            "" if row is None else size(row),
            exposes,
            engine["compiler"],
        )
    return table


def _drafter_table(drafters: Iterable[dict[str, Any]]) -> Table:
    table = Table("drafter", "kind", "adds", "options")
    table.add_row("none", "none", size(0), "")
    for drafter in drafters:
        options = ", ".join(f"{key}={_short(value)}" for key, value in sorted(drafter["options"].items()))
        table.add_row(drafter["name"], drafter["kind"], size(drafter["bytes"]), options)
    return table


def _floor_table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table("engine", "GPU", "least time a pass", "nodes nearly free")
    for row in rows:
        table.add_row(row["engine"], row["gpu"], f"{row['pass_ms']:.2f} ms", str(row["nodes"]))
    return table


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"

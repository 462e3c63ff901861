"""Bundle and Manifest: what a compiled bundle holds, read strictly and checked before anything is loaded.

A bundle is a directory: ``bundle.json`` (the manifest), ``tokenizer.json`` and ``text.json``, engines, drafters' arrays
and kernels. The builder writes it whole or not at all; this module is the only reader and the only place that knows
the manifest's layout.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specrun.contract import CONTRACT_VERSION
from specrun.errors import BundleError

FORMAT_VERSION = 1
MANIFEST_NAME = "bundle.json"


@dataclass(frozen=True)
class FileRecord:
    """One file of the bundle: ``path`` relative to it, with forward slashes."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class CacheShape:
    """A decoder's cache: ``layers`` pairs of [B, kv_heads, S, head_dim] in ``dtype``.

    ``capacity`` is S where the engine fixes it (TensorRT), None where the runtime may let it grow (ONNX Runtime).
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    capacity: int | None = None


@dataclass(frozen=True)
class EngineRecord:
    """One compiled function of the contract. ``files[0]`` is what the backend opens; the rest belong to it."""

    name: str  # "target", or the drafter's name
    kind: str  # "decoder" or "heads"
    target: str  # "cpu", "tensorrt-rtx", "tensorrt"
    precision: str  # "fp32", "fp16", "bf16", "int4", "int8"
    compiler: str  # for example "onnxruntime 1.32.0"
    files: tuple[str, ...]
    vocab_size: int  # columns of the logits
    hidden_size: int  # H of each tap
    architectures: tuple[str, ...] = ()  # ("sm_89",): what the engine was compiled for; empty: anything
    min_rows: int = 1  # every pass has at least this many nodes and logit rows, so that a row's bits never depend on N
    cache: CacheShape | None = None
    taps: tuple[int, ...] = ()  # what HIDDEN holds, see contract.py
    hidden_in: int | None = None  # H_in where the engine takes HIDDEN_IN
    heads: int = 0  # of a head engine
    scratch: bool = False  # takes WRITE_ROWS: the passes of one draft see each other's rows

    @property
    def chains_only(self) -> bool:
        """Whether a row is only exact in the slot it has in plain decoding: right behind its ancestors.

        Attention sums a row's keys in the order of their slots. Where activations are quantized (hence ``min_rows``) a
        sum that differs in its last bit moves logits by tenths, so a node beside a sibling's slot is no longer the
        plain step's.
        """
        return self.min_rows > 1


@dataclass(frozen=True)
class DrafterRecord:
    """A drafter of the bundle. ``options`` is what its runtime class takes; ``arrays`` a safetensors file or None."""

    name: str
    kind: str
    engine: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    arrays: str | None = None
    bytes: int = 0  # what it adds to the bundle


@dataclass(frozen=True)
class ModelSummary:
    """What the runtime needs to know of the model; ``details`` is the builder's ModelConfig, for people."""

    family: str
    vocab_size: int  # rows of the embedding
    tokenizer_size: int  # ids from here on are padding: never emitted
    max_length: int  # positions a sequence may use
    eos_token_ids: tuple[int, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Shapes the engines were compiled for."""

    max_batch: int
    max_nodes: int  # nodes a verify pass may carry, the pending token included
    prefill_chunk: int  # nodes a prefill pass may carry


@dataclass(frozen=True)
class Manifest:
    producer: str
    model: ModelSummary
    limits: Limits
    engines: tuple[EngineRecord, ...]
    drafters: tuple[DrafterRecord, ...]
    files: tuple[FileRecord, ...]
    profile: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)  # content-addressed binaries and their launch geometry
    format_version: int = FORMAT_VERSION
    contract_version: int = CONTRACT_VERSION

    def engine(self, name: str) -> EngineRecord:
        for record in self.engines:
            if record.name == name:
                return record
        raise BundleError(f"Engine {name!r}: not in the bundle, which holds {[e.name for e in self.engines]}.")

    def drafter(self, name: str) -> DrafterRecord:
        for record in self.drafters:
            if record.name == name:
                return record
        names = ["none", *(d.name for d in self.drafters)]
        raise BundleError(f"Drafter {name!r}: not in the bundle, which holds {names}. Choose one, or compile it in.")

    def to_json(self) -> str:
        """The manifest's text, the same bytes for the same content."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str, where: str) -> Manifest:
        """Reads ``text``; ``where`` names the file in errors. Raises BundleError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BundleError(f"{where}: not valid JSON ({error}). The bundle is damaged; compile it again.") from None
        if not isinstance(data, dict):
            raise BundleError(f"{where}: found a {type(data).__name__}, expected an object. Compile the bundle again.")
        for key, expected in (("format_version", FORMAT_VERSION), ("contract_version", CONTRACT_VERSION)):
            if data.get(key) != expected:
                raise BundleError(
                    f"{where}: {key} is {data.get(key)!r}; this specrun reads {expected}. "
                    "Compile the bundle again with this version, or open it with the version that wrote it."
                )
        return _read(Manifest, data, where)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its directory and manifest. Files have been checked when it comes from ``open``."""

    path: Path
    manifest: Manifest

    @staticmethod
    def open(path: str | Path, verify: bool = True, progress: Callable[[int], None] | None = None) -> Bundle:
        """Opens ``path`` and checks every file: present, the right size, and with ``verify`` the right sha256.

        ``progress`` is called with the bytes hashed since the last call. Raises BundleError.
        """
        directory = Path(path)
        manifest_file = directory / MANIFEST_NAME
        if not directory.is_dir():
            raise BundleError(f"{directory}: no such bundle. Give the directory that `specbuild compile -o` wrote.")
        try:
            text = manifest_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BundleError(f"{manifest_file}: cannot be read ({reason}). {directory} is not a bundle.") from None
        bundle = Bundle(directory, Manifest.from_json(text, str(manifest_file)))
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda record: bundle._check(record, verify, progress), bundle.manifest.files))
        return bundle

    def file(self, relative: str) -> Path:
        """The absolute path of a file the manifest lists."""
        if all(record.path != relative for record in self.manifest.files):
            raise BundleError(f"{self.path}: the manifest refers to {relative!r} but does not list it. Compile again.")
        return (self.path / relative).resolve()

    def _check(self, record: FileRecord, verify: bool, progress: Callable[[int], None] | None) -> None:
        pure = PurePosixPath(record.path)
        if pure.is_absolute() or ".." in pure.parts:
            raise BundleError(f"{self.path}: file path {record.path!r} leaves the bundle. Refused.")
        path = self.path / record.path
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            found = "no such file" if size is None else f"{size} bytes"
            raise BundleError(f"{path}: found {found}, expected {record.bytes} bytes. Copy or compile it again.")
        if verify and (digest := sha256_of(path, progress)) != record.sha256:
            raise BundleError(
                f"{path}: its sha256 is {digest}, the manifest says {record.sha256}. "
                "The file was altered after compilation; copy or compile the bundle again."
            )


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """sha256 of a file in hex, read in pieces of 8 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 23):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()


T = TypeVar("T")


def _read(cls: type[T], data: Any, where: str) -> T:
    """Builds dataclass ``cls`` from parsed JSON, refusing unknown, missing and mistyped fields by name."""
    if not isinstance(data, dict):
        raise BundleError(f"{where}: {cls.__name__}: found {data!r}, expected an object. Compile the bundle again.")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise BundleError(f"{where}: {cls.__name__} has unknown fields {unknown}. Compile the bundle again.")
    hints = get_type_hints(cls)
    values = {}
    for name, info in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}: {cls.__name__}.{name}")
        elif info.default is MISSING and info.default_factory is MISSING:
            raise BundleError(f"{where}: {cls.__name__}.{name} is missing. Compile the bundle again.")
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # only Optional occurs
        return None if value is None else _value(args[0], value, where)
    if is_dataclass(hint):
        return _read(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_value(args[0], item, where) for item in value)
    expected = dict if origin is not None else hint
    if origin is not tuple and isinstance(value, expected) and not (expected is int and isinstance(value, bool)):
        return value
    raise BundleError(f"{where}: found {value!r}, expected {getattr(hint, '__name__', hint)}. Compile it again.")

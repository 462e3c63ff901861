"""Tensor files: safetensors and PyTorch pickles (weights only), single or sharded, as lazy WeightSources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specbuild.checkpoint.weights import BFLOAT16, WeightSource
from specrun.errors import CheckpointError

_SAFETENSORS_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def open_tensors(path: str | Path) -> dict[str, WeightSource]:
    """Every tensor of a file (.safetensors, .bin, .pt, .pth, an index) or directory, under its stored name.

    Raises CheckpointError for missing, truncated or unreadable files, and for pickles that would run code.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if not path.is_dir():
        return _open_file(path)
    for name in _WHOLE:
        if (path / name).exists():
            return _open_file(path / name)
    return _merge(_open_file(file) for file in _loose_files(path))


def _loose_files(directory: Path) -> list[Path]:
    """The tensor files of a directory that follows no standard naming (drafter heads)."""
    for suffixes in ((".safetensors",), _TORCH_SUFFIXES):
        found = sorted(file for file in directory.iterdir() if file.suffix in suffixes)
        if found:
            return found
    raise CheckpointError(
        f"{directory}: no weights found; expected model.safetensors, model.safetensors.index.json with its shards, "
        "or another .safetensors, .bin or .pt file"
    )


def _merge(parts: Iterator[dict[str, WeightSource]]) -> dict[str, WeightSource]:
    merged: dict[str, WeightSource] = {}
    for part in parts:
        merged.update(part)
    return merged


def _open_file(path: Path) -> dict[str, WeightSource]:
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in _TORCH_SUFFIXES:
        return _open_torch(path)
    raise CheckpointError(f"{path}: not a tensor file; expected .safetensors, .bin, .pt or a .index.json")


def _open_index(path: Path) -> dict[str, WeightSource]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: the index has no weight_map from tensor names to shard files")
    tensors: dict[str, WeightSource] = {}
    for shard in sorted(set(weight_map.values())):
        file = path.parent / shard
        if Path(shard).name != shard or not file.exists():
            raise CheckpointError(f"{file}: this shard is named by {path.name} but is missing; download it again")
        held = _open_file(file)
        wanted = [name for name, place in weight_map.items() if place == shard]
        absent = [name for name in wanted if name not in held]
        if absent:
            raise CheckpointError(
                f"{file}: {path.name} says this shard holds {shorten(absent)}, but it does not; "
                "the index and the shards are of different checkpoints, download them again"
            )
        tensors.update({name: held[name] for name in wanted})
    return tensors


def _open_safetensors(path: Path) -> dict[str, WeightSource]:
    try:
        handle = safe_open(path, framework="np")
        names = list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({error}); it is truncated or damaged, download it again"
        ) from error
    return {name: _safetensors_source(path, handle, name) for name in names}


def _safetensors_source(path: Path, handle: Any, name: str) -> WeightSource:
    view = handle.get_slice(name)
    code, shape = view.get_dtype(), tuple(view.get_shape())
    if code not in _SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has the dtype {code}, which is not supported; "
            f"expected one of {', '.join(_SAFETENSORS_DTYPES)}. Use an unquantized checkpoint."
        )

    def load(rows: slice) -> np.ndarray:
        whole = not shape or rows.indices(shape[0]) == (0, shape[0], 1)
        return np.asarray(handle.get_tensor(name) if whole else handle.get_slice(name)[rows])

    return WeightSource(name, shape, _SAFETENSORS_DTYPES[code], load)


def _open_torch(path: Path) -> dict[str, WeightSource]:
    state = _load_torch(path)
    import torch

    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise CheckpointError(f"{path}: expected a flat mapping from names to tensors, found something else inside")
    return {str(name): _torch_source(str(name), tensor) for name, tensor in state.items()}


def _load_torch(path: Path) -> Any:
    """torch.load with weights_only, so that nothing in the pickle can run; memory-mapped where the format allows."""
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{path}: reading PyTorch files needs torch, which is not installed; run `pip install torch`, "
            "or use a .safetensors checkpoint"
        ) from error
    import zipfile

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (
        Exception
    ) as error:  # torch raises its own, pickle's and zip's errors; all mean: not loadable as plain weights
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path}: cannot be read as plain weights ({reason}); the file is damaged, or holds pickled code, which is "
            "never run. Convert it to .safetensors."
        ) from error


def _torch_source(name: str, tensor: Any) -> WeightSource:
    import torch

    bfloat = tensor.dtype == torch.bfloat16
    dtype = BFLOAT16 if bfloat else tensor.new_empty(0).numpy().dtype

    def load(rows: slice) -> np.ndarray:
        part = (tensor[rows] if tensor.dim() else tensor).detach().contiguous()
        return np.asarray(part.view(torch.int16).numpy().view(BFLOAT16) if bfloat else part.numpy())

    return WeightSource(name, tuple(tensor.shape), dtype, load)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or CheckpointError saying what is wrong with the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: this file is missing") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def shorten(names: list[str]) -> str:
    """The first three names and a count of the rest."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest

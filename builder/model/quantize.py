"""Blockwise integer weights, as ``MatMulNBits`` and ``GatherBlockQuantized`` store them.

Each row of a weight [out, in] is cut into blocks of 32 values with one float32 scale each: value = (code - half) *
scale, where half is 8 or 128. The value farthest from zero gets code 0, so the whole range of codes is used.
Measured on the demo model, zero points of their own (4 bits each) made the logits no better and the engine larger.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
_CHUNK = 1 << 22  # values quantized at a time: temporaries stay small beside the weight


def code_shape(shape: tuple[int, ...], bits: int) -> tuple[int, int, int]:
    """[out, blocks, bytes a block] of a weight [out, in]."""
    rows, columns = shape
    return rows, -(-columns // BLOCK), BLOCK * bits // 8


def quantize(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [out, blocks, 32 * bits / 8], two 4-bit codes a byte with the first in the lower half, and scales
    float32 [out, blocks], of weight float32 [out, in]. The last block is padded with zeros."""
    rows, columns = weight.shape
    shape = code_shape(weight.shape, bits)
    codes, scales = np.empty(shape, dtype=np.uint8), np.empty(shape[:2], dtype=np.float32)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes[part], scales[part] = _quantize(weight[part], shape[1], bits)
    return codes, scales


def _quantize(weight: np.ndarray, blocks: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = weight.shape
    values = np.pad(weight, ((0, 0), (0, blocks * BLOCK - columns))).reshape(rows, blocks, BLOCK)
    half = 2 ** (bits - 1)
    low, high = values.min(axis=-1), values.max(axis=-1)
    scale = np.where(-low >= high, -low, -high) / np.float32(half)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.clip(np.rint(values * inverse[..., None]) + half, 0, 2 * half - 1).astype(np.uint8)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, scale


def dequantize(codes: np.ndarray, scales: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """The float32 [out, columns] that ``codes`` and ``scales`` stand for."""
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], BLOCK)
    values = (codes.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
    return values.reshape(codes.shape[0], -1)[:, :columns]

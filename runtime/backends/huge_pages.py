"""Moves what a library allocated onto huge pages.

A decode step on a CPU reads every weight once, and with 4 KiB pages much of that time goes into address translation.
numpy asks for huge pages itself, ONNX Runtime does not. Where the kernel gives them only on request (``madvise``, the
default of most distributions), this asks for them: MADV_COLLAPSE, Linux 6.1. Everywhere else nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

HUGE_PAGE = 2 << 20  # bytes; x86-64, and AArch64 with 4 KiB pages
STEP = 16 * HUGE_PAGE
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25

Region = tuple[int, int]  # first address, address after the last


@contextmanager
def huge_pages() -> Iterator[Thread]:
    """Private memory that appears in this block is moved to huge pages after it, as far as the kernel can.

    Yields the thread that does it, started at the end of the block: a gigabyte takes one to three seconds, which
    nobody should wait for before the first token.
    """
    before = set(_anonymous_regions())
    new: list[Region] = []
    mover = Thread(target=_collapse, args=(new,), name="huge pages", daemon=True)
    yield mover
    new += [region for region in _anonymous_regions() if region not in before]
    mover.start()


def _anonymous_regions() -> list[Region]:
    """Writable private mappings without a file, of at least one huge page."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else []
    except OSError:
        return []
    regions = []
    for line in lines:
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in span.split("-"))
            regions.append((first, end))
    return [(first, end) for first, end in regions if end - first >= HUGE_PAGE]


def _collapse(regions: list[Region]) -> None:
    """Advice: where the kernel refuses or has no huge page left, the pages stay as they are.

    Memory that was freed meanwhile, or serves something else, takes no harm from it either. Step by step, so that a
    process that ends need not wait for a whole region.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for region in regions:
        first, end = -(-region[0] // HUGE_PAGE) * HUGE_PAGE, region[1] // HUGE_PAGE * HUGE_PAGE
        for address in range(first, end, STEP):
            size = min(STEP, end - address)
            madvise(address, size, MADV_HUGEPAGE)
            madvise(address, size, MADV_COLLAPSE)

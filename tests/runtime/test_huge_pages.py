"""Huge pages are asked for, contents stay, and where there are none nothing happens."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from specrun.backends import huge_pages as module
from specrun.backends.huge_pages import HUGE_PAGE, huge_pages

SIZE = 8 * HUGE_PAGE
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def collapses() -> bool:
    """Whether this kernel has huge pages on request, and the call that moves memory onto them (Linux 6.1)."""
    if sys.platform != "linux" or not SWITCH.is_file() or "[never]" in SWITCH.read_text():
        return False
    release = Path("/proc/sys/kernel/osrelease").read_text().split(".")
    return (int(release[0]), int(release[1])) >= (6, 1)


def huge_kilobytes(address: int) -> int:
    """AnonHugePages of the mapping that holds ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split()[0]
        if "-" in span:
            first, end = (int(part, 16) for part in span.split("-"))
            inside = first <= address < end
        elif inside and span == "AnonHugePages:":
            return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.fixture
def memory():
    """Returns the address of new memory: a mapping of its own, for C's allocator may hand out what was moved before."""
    maps: list[mmap.mmap] = []

    def allocate() -> int:
        maps.append(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        maps[-1].write(b"\x07" * SIZE)
        return ctypes.addressof(ctypes.c_char.from_buffer(maps[-1]))

    return allocate


@pytest.mark.skipif(not collapses(), reason="this kernel cannot move memory onto huge pages")
def test_memory_that_appears_inside_lies_on_huge_pages_and_keeps_its_contents(memory) -> None:
    outside = memory()
    assert huge_kilobytes(outside + SIZE // 2) == 0 or "[always]" in SWITCH.read_text()
    with huge_pages() as mover:
        inside = memory()
    mover.join()
    assert huge_kilobytes(inside + SIZE // 2) >= (SIZE - 2 * HUGE_PAGE) // 1024
    assert ctypes.string_at(inside, SIZE) == b"\x07" * SIZE == ctypes.string_at(outside, SIZE)


def test_nothing_happens_where_the_process_has_no_such_list(monkeypatch, memory) -> None:
    asked: list[object] = []
    monkeypatch.setattr(module.sys, "platform", "darwin")
    monkeypatch.setattr(module, "_collapse", lambda regions: asked.extend(regions))
    with huge_pages() as mover:
        memory()
    mover.join()
    assert asked == []

"""HostDevice refuses what a CUDA graph refuses; a step replays on the buffers it was captured with."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.device.host import HostDevice
from specrun.errors import CaptureError


def test_capture_records_and_replay_runs():
    device = HostDevice({"double": lambda x: np.multiply(x, 2, out=x)})
    x = device.allocate((2,), np.float32)
    with device.capture() as step:
        device.launch("double", x)
    assert x.tolist() == [0, 0]
    device.copy(x, np.ones(2, np.float32))
    assert x.tolist() == [1, 1], "capturing runs nothing"
    device.replay(step)
    device.replay(step)
    assert x.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("allocate", lambda d, x: d.allocate((1,), np.float32)),
        ("read", lambda d, x: d.read(x)),
        ("synchronize", lambda d, x: d.synchronize()),
        ("capture", lambda d, x: d.capture().__enter__()),
        ("replay", lambda d, x: d.replay(None)),
    ],
)
def test_captured_steps_refuse_what_a_graph_refuses(what, call):
    device = HostDevice()
    x = device.allocate((1,), np.float32)
    with pytest.raises(CaptureError, match=what), device.capture():
        call(device, x)
    device.allocate((1,), np.float32)  # the refusal ends the capture


@pytest.mark.parametrize("bad", [np.zeros(3, np.float32), np.zeros(2, np.float64)])
def test_copies_refuse_another_shape_or_type(bad):
    with pytest.raises(CaptureError, match="must be equal"):
        HostDevice().copy(np.zeros(2, np.float32), bad)


def test_views_share_memory():
    device = HostDevice()
    buffer = device.allocate((2, 3, 4), np.float32)
    view = device.view(buffer, 12, (3, 4))
    view[1, 2] = 5
    assert buffer[1, 1, 2] == 5


def test_commit_rows_by_its_name():
    rng = np.random.default_rng(0)
    for path in ([0, 2, 3, 7], [0, 1, 2], [3], [0, 1, 4, 5, 6], [1, 2, 3]):
        cache = rng.normal(size=(4, 3, 2, 12, 5)).astype(np.float32)
        expected = cache.copy()
        for i, node in enumerate(path):
            expected[:, 1, :, 2 + i] = cache[:, 1, :, 2 + node]
        nodes = np.zeros((3, 8), np.int64)
        nodes[1, : len(path)] = path
        new = np.zeros(3, np.int64)
        lengths, counts = np.array([-1, 2, -1]), np.array([0, len(path), 0])
        HostDevice().launch("commit_rows", cache, lengths, nodes, counts, cache, new)
        assert np.array_equal(cache, expected) and new.tolist() == [-1, 2 + len(path), -1]

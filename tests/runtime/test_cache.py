"""KVCache: five verbs; nobody else does length arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specrun.bundle import CacheShape
from specrun.cache import KVCache
from specrun.device.host import HostDevice
from specrun.errors import CapacityError

SHAPE = CacheShape(2, 1, 3, "float32")


class Model(RuleBasedStateMachine):
    """Random verbs against lists: every lane holds exactly the rows that were committed, in order."""

    def __init__(self):
        super().__init__()
        self.cache = KVCache(SHAPE, HostDevice(), max_batch=4, max_length=700, max_nodes=100)
        self.lanes = {}
        self.counter = 0.0

    @precondition(lambda self: self.cache.has_lane)
    @rule()
    def acquire(self):
        self.lanes[self.cache.acquire()] = []

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), nodes=st.integers(1, 100))
    def verify(self, data, nodes):
        lane = data.draw(st.sampled_from(list(self.lanes)))
        if lane.length + nodes > 700:
            with pytest.raises(CapacityError, match="context ends"):
                self.cache.reserve([lane], nodes, [nodes])
            return
        self.cache.reserve(list(self.lanes), nodes, [nodes if other is lane else 0 for other in self.lanes])
        values = np.arange(self.counter, self.counter + nodes, dtype=np.float32)
        self.counter += nodes
        for view in self.cache.views(lane.slot, 1).values():
            view[0, :, lane.length : lane.length + nodes] = values[None, :, None]
        path = sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
        self.cache.commit(lane, path)
        self.lanes[lane] += [float(values[i]) for i in path]

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def rewind(self, data):
        lane = data.draw(st.sampled_from(list(self.lanes)))
        length = data.draw(st.integers(0, lane.length))
        self.cache.rewind(lane, length)
        del self.lanes[lane][length:]

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def release(self, data):
        lane = data.draw(st.sampled_from(list(self.lanes)))
        self.cache.release(lane)
        del self.lanes[lane]
        with pytest.raises(ValueError, match="released before"):
            self.cache.release(lane)

    @invariant()
    def rows_are_as_committed(self):
        assert sorted(lane.slot for lane in self.lanes) == list(range(len(self.lanes)))
        for lane, rows in self.lanes.items():
            assert lane.length == len(rows)
            for view in self.cache.views(lane.slot, 1).values():
                assert (view[0, 0, : lane.length] == np.array(rows)[:, None]).all()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_growing_cache_starts_small_and_shrinks_when_it_is_empty():
    cache = KVCache(SHAPE, HostDevice(), 2, 9000, 8)
    lane = cache.acquire()
    assert cache.capacity == 256
    for needed, capacity in ((256, 256), (257, 512), (700, 768), (3000, 3072), (3073, 3840)):
        cache.reserve([lane], needed, [needed])
        assert cache.capacity == capacity
    other = cache.acquire()
    cache.release(lane)
    assert cache.acquire().live and cache.capacity == 3840  # a lane is in use
    cache.release(other)
    cache.release(cache.lanes(0, 0)[0])
    cache.release(cache.acquire(rows=1900))  # half of what there is: not worth moving
    assert cache.capacity == 3840
    assert cache.acquire(rows=300).live and cache.capacity == 512


def test_a_static_cache_refuses_what_it_cannot_hold():
    """F06."""
    fixed = CacheShape(2, 1, 3, "float32", capacity=128)
    with pytest.raises(CapacityError, match="128 rows, 136 are needed"):
        KVCache(fixed, HostDevice(), 1, 128, 8)
    cache = KVCache(fixed, HostDevice(), 1, 120, 8)
    lane = cache.acquire()
    cache.commit(lane, range(120))
    cache.reserve([lane], 8, [0])
    with pytest.raises(CapacityError, match="context ends at 120"):
        cache.reserve([lane], 1, [1])


def test_bfloat16_buffers():
    cache = KVCache(CacheShape(1, 1, 4, "bfloat16"), HostDevice(), 1, 8, 2)
    assert str(cache.buffer.dtype) == "bfloat16"

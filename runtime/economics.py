"""What drafting costs on this machine and what it brings: the numbers that set every node budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np


class PassCosts:
    """Cost of a target pass over ``batch`` sequences of N nodes each, in plain passes of one sequence (N = 1).

    ``curve`` maps node counts to costs at batch 1, measured on this machine or a profile's prior; ``batches`` holds
    the curves of larger batches where they were measured. Between points the cost is linear, beyond the last one it
    goes on with the last slope. A batch without a curve costs what as many nodes of one sequence do: weights are read
    once a pass either way.

    ``longer``: the curve over a larger cache, by its rows, beside ``rows`` of the others: attention's share of a pass
    grows with them, and with the nodes. It is taken to be linear in both directions.
    """

    def __init__(
        self,
        curve: Mapping[int, float],
        batches: Mapping[int, Mapping[int, float]] | None = None,
        rows: int = 0,
        longer: tuple[int, Mapping[int, float]] | None = None,
    ) -> None:
        self._measured = {1: dict(curve)} | {b: dict(points) for b, points in (batches or {}).items()}
        self._rows = self._at = rows
        self._growth = None if longer is None else _growth(curve, longer[1], longer[0] - rows)
        self.plain_seconds: float | None = None  # of a plain pass of one sequence, followed while running
        self._lay(0)

    def at(self, rows: int) -> None:
        """Set by the loop before a pass: rows of the cache that attention goes over."""
        if rows != self._at and self._growth is not None:
            self._at = rows
            self._lay(rows - self._rows)

    def _lay(self, more: int) -> None:
        """The curves over a cache of so many rows more than was measured."""
        self._curves = {batch: _Curve(points) for batch, points in self._measured.items()}
        if self._growth is not None and more:
            for batch, points in self._measured.items():
                self._curves[batch] = _Curve({n: c + batch * more * self._growth(n) for n, c in points.items()})
        self._relative: dict[tuple[int, int], float] = {}
        self._slopes: dict[tuple[int, int], list[float]] = {}

    def observe(self, nodes: int, batch: int, seconds: float) -> None:
        """Takes over how long a pass took."""
        plain = seconds / self(nodes, batch)
        known = self.plain_seconds or plain
        # A pass that was captured anew, or disturbed, counts as twice the usual at most.
        self.plain_seconds = known + 0.05 * (min(plain, 2 * known) - known)

    def __call__(self, nodes: int, batch: int = 1) -> float:
        if batch in self._curves:
            return self._curves[batch](nodes)
        below = max(b for b in self._curves if b < batch)
        above = min((b for b in self._curves if b > batch), default=None)
        if above is None:
            return self._curves[below](nodes) * self._curves[1](nodes * batch) / self._curves[1](nodes * below)
        share = (batch - below) / (above - below)
        return (1 - share) * self._curves[below](nodes) + share * self._curves[above](nodes)

    def slopes(self, limit: int, batch: int = 1) -> list[float]:
        """[limit]: what a node costs in the cheapest run of nodes that starts with the k-th drafted one, relatively."""
        key = (limit, batch)
        if key not in self._slopes:
            costs = [self.relative(nodes, batch) for nodes in range(1, limit + 2)]
            self._slopes[key] = [
                min((costs[m] - costs[k]) / (m - k) for m in range(k + 1, limit + 1)) for k in range(limit)
            ]
        return self._slopes[key]

    def relative(self, nodes: int, batch: int = 1) -> float:
        """The same over the cost of the batch's plain pass."""
        key = (nodes, batch)
        if key not in self._relative:
            self._relative[key] = self(nodes, batch) / self(1, batch)
        return self._relative[key]


def _growth(curve: Mapping[int, float], longer: Mapping[int, float], rows: int) -> _Curve:
    """What each row of the cache adds to a pass of N nodes."""
    return _Curve({n: max(0.0, cost - curve[n]) / rows for n, cost in longer.items()})


class _Curve:
    """Piecewise linear, never falling."""

    def __init__(self, points: Mapping[int, float]) -> None:
        ordered = sorted(points.items())
        self._nodes = np.array([n for n, _ in ordered], dtype=np.float64)
        self._costs = np.maximum.accumulate(np.array([c for _, c in ordered], dtype=np.float64))

    def __call__(self, nodes: int) -> float:
        last = self._nodes[-1]
        if nodes > last and self._nodes.size > 1:
            slope = (self._costs[-1] - self._costs[-2]) / (last - self._nodes[-2])
            return float(self._costs[-1] + slope * (nodes - last))
        return float(np.interp(nodes, self._nodes, self._costs))


# Relative cost of N nodes for a small model on two cores: what a run starts from until it has been measured.
CPU_PRIOR = {1: 1.0, 2: 1.15, 4: 1.35, 8: 1.65, 16: 2.2, 32: 3.2}


def usual(known: float | None, seconds: float) -> float:
    """A running time: whatever disturbs a call, or a first call that captures a shape, only makes it slower.

    So a faster call is believed soon, and a slower one little by little, as twice ``known`` at most.
    """
    if known is None:
        return seconds
    return known + (0.3 if seconds < known else 0.05) * (min(seconds, 2 * known) - known)


class Acceptance:
    """Acceptance rates learned while running, by key (a source, a match length, a depth ...).

    Each key starts from a prior worth ``weight`` observations; old observations fade with ``decay`` so that a change
    of text is noticed.
    """

    def __init__(self, weight: float = 8.0, decay: float = 0.98) -> None:
        self._weight, self._decay = weight, decay
        self._counts: defaultdict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])  # accepted, seen

    def rate(self, key: object, prior: float) -> float:
        accepted, seen = self._counts.get(key, (0.0, 0.0))
        return (prior * self._weight + accepted) / (self._weight + seen)

    def observe(self, key: object, accepted: bool) -> None:
        counts = self._counts[key]
        counts[0] = counts[0] * self._decay + accepted
        counts[1] = counts[1] * self._decay + 1.0


class Average:
    """Running means by key, each starting from a prior worth ``weight`` observations."""

    def __init__(self, weight: float = 4.0, decay: float = 0.95) -> None:
        self._weight, self._decay = weight, decay
        self._sums: defaultdict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])  # sum, count

    def mean(self, key: object, prior: float) -> float:
        total, count = self._sums.get(key, (0.0, 0.0))
        return (prior * self._weight + total) / (self._weight + count)

    def observe(self, key: object, value: float) -> None:
        entry = self._sums[key]
        entry[0] = entry[0] * self._decay + value
        entry[1] = entry[1] * self._decay + 1.0


class Economics:
    """Chooses how many tokens are worth verifying.

    A pass that yields 1 + E tokens for cost c is worth it while another token's chance exceeds what its node costs
    at the pace reached anyway: with pace = tokens per plain pass, the best length maximizes 1 + E(k) - pace * c(k)
    (renewal-reward; the pace is followed while running and never below plain decoding's 1). Costs are relative to the
    plain pass of the batch at hand, so that a pace means the same at every batch size.

    ``of(name)`` is a drafter's own part: the same costs and batch, a pace and acceptance rates of its own.
    """

    def __init__(self, costs: PassCosts, memory: float = 0.02) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self.batch = 1
        self.pace = 1.0
        self._memory = memory
        self._parts: dict[str, Economics] = {}

    def of(self, name: str) -> Economics:
        if name not in self._parts:
            self._parts[name] = Economics(self.costs, self._memory)
            self._parts[name].batch = self.batch
        return self._parts[name]

    def start_pass(self, batch: int, rows: int | None = None) -> None:
        """Set by the loop before it asks for drafts: how many sequences share the pass, and the cache's rows."""
        self.batch = batch
        if rows is not None:
            self.costs.at(rows)
        for part in self._parts.values():
            part.batch = batch

    def cost(self, nodes: int) -> float:
        """Cost of a pass of N nodes a sequence at the batch at hand, in its plain passes."""
        return self.costs.relative(nodes, self.batch)

    def floors(self, limit: int) -> list[float]:
        """The chance of being reached that the k-th drafted node (k = 1 to ``limit``) needs for a draft that may pay.

        Later nodes are never likelier than the k-th, so it fails when even the cheapest run of nodes from there on
        costs more, at today's pace, than as many nodes of its chance bring.
        """
        return [self.pace * slope for slope in self.costs.slopes(limit, self.batch)]

    def value(self, reaches: Sequence[float]) -> float:
        """Tokens that the best cut of a draft gains over plain decoding, if all of the batch had one like it."""
        gain, best, base = 0.0, 0.0, self.cost(1)
        for k, reach in enumerate(reaches):
            gain += reach
            best = max(best, gain - self.pace * (self.cost(k + 2) - base))
        return best

    def best_sizes(self, reaches: Sequence[Sequence[float]], riders: int = 0) -> list[int]:
        """How many nodes of each sequence's draft to verify. ``reaches[i][k]``: chance that its node k is accepted.

        The sequences share a pass, which is as wide as the widest of them: one width is chosen for all. ``riders``
        nodes ride along whatever is drafted.
        """
        width, gain, best_value = 0, 0.0, 0.0
        base = self.pace * self.cost(1 + riders)
        for k in range(max(map(len, reaches), default=0)):
            gain += sum(reach[k] for reach in reaches if k < len(reach)) / self.batch
            value = gain - self.pace * self.cost(k + 2 + riders) + base
            if value > best_value:
                width, best_value = k + 1, value
        return [min(width, len(reach)) for reach in reaches]

    def best_length(self, chances: Sequence[float], draft_costs: Sequence[float] | None = None) -> int:
        """How many of a chain's tokens to verify. ``chances[i]``: token i is accepted given those before it.

        ``draft_costs[i]``: what drafting token i costs beforehand, in plain passes (nothing for lookups).
        """
        best, best_value, reach, gain, spent = 0, -self.pace * self.cost(1), 1.0, 0.0, 0.0
        for i, chance in enumerate(chances):
            reach *= chance
            gain += reach
            spent += draft_costs[i] if draft_costs is not None else 0.0
            value = gain - self.pace * (self.cost(i + 2) + spent)
            if value > best_value:
                best, best_value = i + 1, value
        return best

    def observe_pass(self, nodes: int, emitted: float, draft_cost: float = 0.0) -> None:
        """Follows the pace: ``emitted`` tokens of one sequence from a pass of ``nodes`` nodes."""
        pace = emitted / (self.cost(nodes) + draft_cost)
        self.pace = max(1.0, self.pace + self._memory * (pace - self.pace))

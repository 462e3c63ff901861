"""What drafting costs on this machine and what it brings: the numbers that set every node budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np


class PassCosts:
    """Cost of a target pass of N nodes, in plain passes (N = 1).

    ``curve`` maps node counts to relative costs, measured on this machine or a profile's prior; between its points
    the cost is linear, beyond the last one it goes on with the last slope.
    """

    def __init__(self, curve: Mapping[int, float]) -> None:
        points = sorted(curve.items())
        self._nodes = np.array([n for n, _ in points], dtype=np.float64)
        self._costs = np.maximum.accumulate(np.array([c for _, c in points], dtype=np.float64))

    def __call__(self, nodes: int) -> float:
        last = self._nodes[-1]
        if nodes > last:
            slope = (self._costs[-1] - self._costs[-2]) / (last - self._nodes[-2])
            return float(self._costs[-1] + slope * (nodes - last))
        return float(np.interp(nodes, self._nodes, self._costs))


# Relative cost of N nodes for a small model on two cores: what a run starts from until it has been measured.
CPU_PRIOR = {1: 1.0, 2: 1.15, 4: 1.35, 8: 1.65, 16: 2.2, 32: 3.2}


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


class Economics:
    """Chooses how many tokens are worth verifying.

    A pass that yields 1 + E tokens for cost c is worth it while another token's chance exceeds what its node costs
    at the pace reached anyway: with pace = tokens per plain pass, the best length maximizes 1 + E(k) - pace * c(k)
    (renewal-reward; the pace is followed while running and never below plain decoding's 1).
    """

    def __init__(self, costs: PassCosts, memory: float = 0.02) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self._memory = memory
        self.pace = 1.0

    def best_length(self, chances: Sequence[float], draft_costs: Sequence[float] | None = None) -> int:
        """How many of a chain's tokens to verify. ``chances[i]``: token i is accepted given those before it.

        ``draft_costs[i]``: what drafting token i costs beforehand, in plain passes (nothing for lookups).
        """
        best, best_value, reach, gain, spent = 0, -self.pace * self.costs(1), 1.0, 0.0, 0.0
        for i, chance in enumerate(chances):
            reach *= chance
            gain += reach
            spent += draft_costs[i] if draft_costs is not None else 0.0
            value = gain - self.pace * (self.costs(i + 2) + spent)
            if value > best_value:
                best, best_value = i + 1, value
        return best

    def observe_pass(self, nodes: int, emitted: float, draft_cost: float = 0.0) -> None:
        """Follows the pace: ``emitted`` tokens of one sequence from a pass of ``nodes`` nodes."""
        pace = emitted / (self.costs(nodes) + draft_cost)
        self.pace = max(1.0, self.pace + self._memory * (pace - self.pace))

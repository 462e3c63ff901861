"""Writes a sparse static draft tree from measured head accuracies (Medusa, Cai et al. 2024, section 2.3.3).

Run as `python -m tools.tune_tree profiles/drafters/NAME/accuracy.json --nodes 16 -o profiles/trees/NAME-16.json`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click

from specrun.errors import UserError

Choices = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Drafted nodes as paths of ranks: (0, 2) is the third choice of depth 2 under the best of depth 1."""

    paths: tuple[Choices, ...]
    accepted: tuple[float, ...]

    def to_json(self, name: str, source: str) -> dict[str, Any]:
        """The tree profile: ``paths`` in the order of nodes of ``DraftTree.from_paths``."""
        return {
            "name": name,
            "nodes": len(self.paths),
            "expected_accepted_tokens": round(sum(self.accepted), 4),
            "measured_from": source,
            "paths": [list(path) for path in sorted(self.paths, key=lambda path: (len(path), path))],
        }


def likeliest_paths(accuracies: Sequence[Sequence[float]]) -> Iterator[tuple[float, Choices]]:
    """Paths in falling order of their chance to be accepted whole; a path never comes before its parent.

    ``accuracies[d][k]`` is the share of positions whose token at depth d + 1 is the head's choice number k + 1. Depths
    are taken as independent, as the paper does.
    """
    frontier: list[tuple[float, Choices]] = [(-accuracies[0][0], (0,))] if accuracies else []
    while frontier:
        negative, path = heapq.heappop(frontier)
        yield -negative, path
        depth, rank = len(path), path[-1]
        if depth < len(accuracies):
            heapq.heappush(frontier, (negative * accuracies[depth][0], (*path, 0)))
        ranks = accuracies[depth - 1]
        if rank + 1 < len(ranks) and ranks[rank] > 0:
            heapq.heappush(frontier, (negative / ranks[rank] * ranks[rank + 1], (*path[:-1], rank + 1)))


def tune(accuracies: Sequence[Sequence[float]], most_nodes: int, node_cost: float = 0.0) -> Tree:
    """The tree with most expected tokens per cost, where a pass costs 1 and every drafted node ``node_cost`` more.

    With a cost of 0 all ``most_nodes`` are used. Accuracies must fall with rank, or order is made so.
    """
    falling = [sorted(ranks, reverse=True) for ranks in accuracies]
    candidates = list(islice(likeliest_paths(falling), most_nodes))
    speeds, tokens = [1.0], 1.0
    for nodes, (chance, _) in enumerate(candidates, 1):
        tokens += chance
        speeds.append(tokens / (1.0 + node_cost * nodes))
    best = max(range(len(speeds)), key=speeds.__getitem__)
    kept = candidates[:best]
    return Tree(tuple(path for _, path in kept), tuple(chance for chance, _ in kept))


def read_accuracies(path: Path) -> list[list[float]]:
    """``by_rank`` of an accuracy file. Raises UserError for anything but rows of shares between 0 and 1."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["by_rank"]
        accuracies = [[float(share) for share in row] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path}: expected JSON with "by_rank", a list of shares for every depth ({error})') from None
    if not accuracies or any(not row or not all(0.0 <= share <= 1.0 for share in row) for row in accuracies):
        raise UserError(f'{path}: "by_rank" must hold, for every depth, shares between 0 and 1')
    return accuracies


@click.command()
@click.argument("accuracy", type=click.Path(exists=True, path_type=Path))
@click.option("--nodes", type=click.IntRange(1, 512), required=True, help="Most drafted nodes.")
@click.option("--node-cost", type=float, default=0.0, show_default=True, help="Cost of a node, a plain pass being 1.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Profile to write.")
def main(accuracy: Path, nodes: int, node_cost: float, output: Path) -> None:
    """Write the best static tree for the head accuracies in the file ACCURACY."""
    try:
        tree = tune(read_accuracies(accuracy), nodes, node_cost)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
    output.parent.mkdir(parents=True, exist_ok=True)
    source = f"{accuracy.parent.name}/{accuracy.name}"
    output.write_text(json.dumps(tree.to_json(output.stem, source)) + "\n", encoding="utf-8")
    click.echo(f"{output}: {len(tree.paths)} nodes, {sum(tree.accepted):.3f} accepted tokens expected a pass")


if __name__ == "__main__":
    main()

"""check_bundle: every engine that can run here against the portable reference graph.

The reference of a cpu engine is its own graph, unfused (no graph optimizations), with integer weights widened to
float32 one at a time, run without cache and without tree: each root path of a draft is a plain prefill. So a wrong
mask, position, cache row or fused kernel shows, and for integers the rounding of activations is measured. An engine
that is no graph (TensorRT) is compared with the float32 graph of the checkpoint it was compiled from.

The engine runs through the runtime's own decoder: prompts of different lengths in one batch, random trees on each,
an accepted path committed, trees again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specbuild.checkpoint import Checkpoint
from specbuild.reference import Reference, reference_of_checkpoint, reference_of_engine
from specrun.backends import open_device, open_session
from specrun.bundle import Bundle, EngineRecord
from specrun.cache import KVCache, Lane
from specrun.decoder import Decoder, Row
from specrun.errors import UserError
from specrun.heads import Heads
from specrun.prompts import BUILTIN, load_tasks
from specrun.text import Text
from specrun.tree import DraftTree

# Largest allowed distance of a row from its reference, relative to the row's own size. With integer weights the
# engine also rounds activations to 8 bits, which the reference does not: up to 0.2 on the demo model; a wrong mask or
# position is 1 and more.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 4e-1, "int4": 4e-1}
PROMPTS = 3
PROMPT_TOKENS = 48
TREE_NODES = 8


@dataclass
class Finding:
    """What comparing one engine gave. ``skipped`` says why it could not be compared.

    ``difference`` is the largest absolute difference of any logit or feature, ``distance`` the largest relative
    distance of a row; ``mismatch`` the first row beyond ``tolerance``.
    """

    engine: str
    target: str
    precision: str
    tolerance: float
    rows: int = 0
    difference: float = 0.0
    distance: float = 0.0
    other_argmax: int = 0
    mismatch: str | None = None
    skipped: str | None = None

    def compare(self, where: str, found: np.ndarray, expected: np.ndarray) -> None:
        """Adds one row."""
        gap = np.abs(found - expected)
        distance = float(np.linalg.norm(gap) / (np.linalg.norm(expected) or 1.0))
        if not np.isfinite(distance):
            distance = float("inf")
        self.rows += 1
        self.difference = max(self.difference, float(gap.max()))
        self.distance = max(self.distance, distance)
        self.other_argmax += int(found.argmax() != expected.argmax())
        if distance > self.tolerance and self.mismatch is None:
            at = int(np.nanargmax(gap)) if np.isfinite(gap).any() else 0
            self.mismatch = (
                f"{where}: relative distance {distance:.3g} exceeds {self.tolerance:g}; farthest at column {at}, "
                f"found {found[at]:.6g}, expected {expected[at]:.6g}"
            )


@dataclass
class _Sequence:
    """A sequence under check: what is committed, and the features each token came with."""

    lane: Lane
    tokens: list[int]
    features: list[np.ndarray] = field(default_factory=list)


def check_bundle(
    bundle: Bundle, checkpoint: Checkpoint | None = None, progress: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Compares every engine. ``checkpoint``: what the bundle was compiled from; float32 engines are then compared with
    it and not with their own graph. ``progress`` is called with each engine's name before it is compared."""
    findings = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in bundle.manifest.engines:
            progress(record.name)
            finding = Finding(record.name, record.target, record.precision, TOLERANCE[record.precision])
            findings.append(finding)
            reference = _reference(bundle, record, checkpoint, Path(scratch))
            if reference is None:
                finding.skipped = "no graph to compare with; give the checkpoint with --model"
                continue
            try:
                _check(bundle, record, reference, finding)
            except UserError as error:
                finding.skipped = str(error)
    return findings


def _reference(bundle: Bundle, record: EngineRecord, checkpoint: Checkpoint | None, scratch: Path) -> Reference | None:
    directory = scratch / record.name
    directory.mkdir()
    quantized = record.precision.startswith("int")
    if checkpoint is not None and record.name == "target" and not quantized:
        return reference_of_checkpoint(checkpoint, record, bundle.manifest.model.max_length, directory)
    return reference_of_engine(bundle, record, directory) if record.target == "cpu" else None


def _check(bundle: Bundle, record: EngineRecord, reference: Reference, finding: Finding) -> None:
    device = open_device(bundle, record.target)
    session = open_session(bundle, record, device)
    if record.cache is None:
        _check_heads(Heads(record, session, device), reference, finding)
        return
    limits, longest = bundle.manifest.limits, bundle.manifest.model.max_length
    cache = KVCache(record.cache, device, min(2, limits.max_batch), longest, limits.max_nodes)
    decoder = Decoder(record, session, device, cache)
    _Comparison(decoder, reference, finding).run(_prompts(bundle, longest - 2 * TREE_NODES))


def _check_heads(heads: Heads, reference: Reference, finding: Finding) -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((4, heads.record.hidden_in or 0)).astype(np.float32)
    found, expected = heads.run(features), reference.heads(features)
    for row in range(4):
        for head in range(heads.record.heads):
            finding.compare(f"features {row}, head {head}", found[row, head], expected[row, head])


def _prompts(bundle: Bundle, room: int) -> list[list[int]]:
    """Token ids of built-in prompts, of different lengths, each fitting into ``room`` tokens."""
    text = Text(bundle.path)
    tasks = load_tasks(BUILTIN, 1)[:PROMPTS]
    lengths = [max(1, min(room, PROMPT_TOKENS - 17 * i)) for i in range(PROMPTS)]
    return [text.encode(task.turns[0])[:length] for task, length in zip(tasks, lengths, strict=True)]


class _Comparison:
    def __init__(self, decoder: Decoder, reference: Reference, finding: Finding) -> None:
        self.decoder, self.reference, self.finding = decoder, reference, finding
        self.rng = np.random.default_rng(0)

    def run(self, prompts: Sequence[list[int]]) -> None:
        """Two sequences at a time where the bundle allows two: prefill, a tree on each, a commit, a tree on each."""
        step = self.decoder.cache.max_batch
        for start in range(0, len(prompts), step):
            names = [f"prompt {start + i}" for i in range(len(prompts[start : start + step]))]
            sequences = [_Sequence(self.decoder.cache.acquire(), tokens) for tokens in prompts[start : start + step]]
            self._prefill(names, sequences)
            for turn in ("first tree", "second tree"):
                self._verify([f"{name}, {turn}" for name in names], sequences)
            for sequence in reversed(sequences):
                self.decoder.cache.release(sequence.lane)

    def _prefill(self, names: Sequence[str], sequences: Sequence[_Sequence]) -> None:
        rows = []
        for sequence in sequences:
            sequence.features = self._features(len(sequence.tokens))
            chain = DraftTree.chain(len(sequence.tokens) - 1)
            rows.append(self._row(sequence.lane, sequence.tokens, chain, sequence.features))
        out = self.decoder.run(rows)
        for i, (name, sequence) in enumerate(zip(names, sequences, strict=True)):
            expected = self.reference.prefill(sequence.tokens, sequence.features)
            for node in range(len(sequence.tokens)):
                self.finding.compare(f"{name}, token {node}", out.logits[i][node], expected.logits[node])
            self.decoder.cache.commit(sequence.lane, range(len(sequence.tokens)))

    def _verify(self, names: Sequence[str], sequences: Sequence[_Sequence]) -> None:
        trees = [self._tree() for _ in sequences]
        drafts = [self.rng.integers(0, self.decoder.record.vocab_size, TREE_NODES).tolist() for _ in sequences]
        features = [self._features(TREE_NODES) for _ in sequences]
        out = self.decoder.run(
            [self._row(s.lane, d, t, f) for s, d, t, f in zip(sequences, drafts, trees, features, strict=True)]
        )
        for i, sequence in enumerate(sequences):
            for node, logits, hidden in self._expected(sequence, drafts[i], features[i], trees[i]):
                where = f"{names[i]} {trees[i].parents.tolist()}, node {node}"
                self.finding.compare(where, out.logits[i][node], logits)
                if hidden is not None and out.hidden is not None:
                    self.finding.compare(f"{where}, hidden", out.hidden[i][node], hidden)
        for i, sequence in enumerate(sequences):
            path = trees[i].path_to(int(trees[i].depths.argmax()))
            self.decoder.cache.commit(sequence.lane, path)
            sequence.tokens = sequence.tokens + [drafts[i][node] for node in path]
            sequence.features = sequence.features + [features[i][node] for node in path if features[i]]

    def _expected(
        self, sequence: _Sequence, draft: Sequence[int], features: Sequence[np.ndarray], tree: DraftTree
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """Every node's reference, from a plain prefill of the context and a leaf's root path."""
        seen: set[int] = set()
        for leaf in (node for node in range(tree.size) if not tree.children[node]):
            path = tree.path_to(leaf)
            tokens = sequence.tokens + [draft[node] for node in path]
            result = self.reference.prefill(tokens, sequence.features + [features[node] for node in path if features])
            for place, node in enumerate(path, start=len(sequence.tokens)):
                if node not in seen:
                    seen.add(node)
                    yield node, result.logits[place], None if result.hidden is None else result.hidden[place]

    def _row(self, lane: Lane, tokens: Sequence[int], tree: DraftTree, features: Sequence[np.ndarray]) -> Row:
        hidden_in = np.stack(features) if features else None
        return Row.of_tree(lane, np.asarray(tokens, dtype=np.int64), tree, hidden_in=hidden_in)

    def _tree(self) -> DraftTree:
        return DraftTree(np.array([-1, *(self.rng.integers(0, i) for i in range(1, TREE_NODES))]))

    def _features(self, count: int) -> list[np.ndarray]:
        """Random HIDDEN_IN rows; none for an engine that takes no features."""
        width = self.decoder.record.hidden_in
        return [] if width is None else list(self.rng.standard_normal((count, width)).astype(np.float32))


def as_json(findings: Sequence[Finding]) -> list[Mapping[str, object]]:
    """Plain JSON values."""
    return [{**vars(finding), "distance": min(finding.distance, 1e30)} for finding in findings]

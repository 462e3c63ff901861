"""The training loop: Muon for matrices, AdamW for the rest, checkpoints that survive an interruption."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.train.drafters import Drafter, Kind
from tools.train.objective import (
    Acceptance,
    Vocabulary,
    depth_losses,
    likely_tokens,
    sampled_vocabulary,
    total_loss,
)
from tools.train.shards import HiddenCache, Rows, epochs

HELD_OUT_EVERY = 40


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    tokens: int
    batch_tokens: int = 2048
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    vocabulary: int = 4096
    seed: int = 0
    checkpoint_seconds: float = 120.0
    report_seconds: float = 120.0


@dataclass
class Progress:
    """Where a run stands; what the report callback sees."""

    step: int = 0
    tokens: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    acceptance: tuple[float, ...] = ()


class Trainer:
    """One drafter, its optimizers and its data. ``run`` goes on from the checkpoint in ``folder`` if there is one."""

    def __init__(self, drafter: Drafter, kind: Kind, cache: HiddenCache, plan: Plan, folder: Path) -> None:
        self.drafter, self.kind, self.cache, self.plan = drafter, kind, cache, plan
        self.checkpoint, self.log = folder / "checkpoint.pt", folder / "log.jsonl"
        self.counts = torch.bincount(
            torch.from_numpy(cache.corpus.tokens.astype("int64")), minlength=drafter.config.vocab_size
        )
        self.draft_ids: Tensor = likely_tokens(self.counts, plan.vocabulary)
        self.random = torch.Generator().manual_seed(plan.seed)
        self.optimizers = self._optimizers()
        self.progress = Progress()
        everything = range(len(cache.corpus))
        self.held_out = [index for index in everything if index % HELD_OUT_EVERY == 0]
        self.training = [index for index in everything if index % HELD_OUT_EVERY]
        folder.mkdir(parents=True, exist_ok=True)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.drafter.parameters())
        matrices = [p for p in parameters if p.dim() == 2]
        vectors = [p for p in parameters if p.dim() != 2]
        return [
            torch.optim.Muon(matrices, lr=self.plan.muon_rate, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(vectors, lr=self.plan.adam_rate, weight_decay=0.0, betas=(0.9, 0.95)),
        ]

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train until the plan's tokens have been seen."""
        self._resume()
        lengths = self.cache.lengths()
        batches = epochs(
            [lengths[i] for i in self.training], self.plan.batch_tokens, self.plan.seed, self.cache.longest
        )
        saved = reported = started = time.monotonic()
        before = self.progress.seconds
        for group in itertools.islice(batches, self.progress.step, None):
            if self.progress.tokens >= self.plan.tokens:
                break
            self._step(self.cache.batch([self.training[place] for place in group]))
            now = time.monotonic()
            self.progress.seconds = before + now - started
            if now - reported > self.plan.report_seconds:
                self._evaluate(report)
                reported = time.monotonic()
            if now - saved > self.plan.checkpoint_seconds:
                self._save()
                saved = time.monotonic()
            report(self.progress)
        self._evaluate(report)
        self._save()

    def _step(self, rows: Rows) -> None:
        done = self.progress.tokens / self.plan.tokens
        for optimizer, rate in zip(self.optimizers, (self.plan.muon_rate, self.plan.adam_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (self.progress.step + 1) / 20) * max(0.0, 1.0 - done)
        with torch.autocast("cpu", torch.bfloat16):
            losses = list(depth_losses(self.drafter, rows, self.vocabulary(rows), self.kind.depth(done)))
        total_loss(losses).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        first = float(losses[0].detach())
        self.progress.loss = 0.98 * self.progress.loss + 0.02 * first if self.progress.step else first
        self.progress.step += 1
        self.progress.tokens += int(rows.real.sum())

    def vocabulary(self, rows: Rows) -> Vocabulary:
        """The drafter's own reduced vocabulary, or a sample that stands for the full one."""
        ids = self.draft_ids
        if not self.drafter.reduced_vocabulary:
            ids = sampled_vocabulary(rows, self.counts, self.plan.vocabulary, self.random)
        return Vocabulary(ids, self.drafter.frozen[1])

    def measure(self, cache: HiddenCache, indices: Sequence[int], depth: int) -> Acceptance:
        """Acceptance over the responses of some conversations, with the vocabulary used at run time."""
        full = torch.arange(self.drafter.config.vocab_size)
        vocabulary = Vocabulary(self.draft_ids if self.drafter.reduced_vocabulary else full, self.drafter.frozen[1])
        acceptance = Acceptance.none(min(depth, self.drafter.max_depth))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for index in indices:
                acceptance.add(self.drafter, cache.batch([index]), vocabulary)
        return acceptance

    def _evaluate(self, report: Callable[[Progress], None]) -> None:
        self.progress.acceptance = tuple(self.measure(self.cache, self.held_out[:64], depth=4).by_depth())
        with self.log.open("a") as log:
            log.write(json.dumps(vars(self.progress)) + "\n")
        report(self.progress)

    def _save(self) -> None:
        state: dict[str, Any] = {
            "model": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
            "random": self.random.get_state(),
            "draft_ids": self.draft_ids,
        }
        temporary = self.checkpoint.with_suffix(".partial")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.drafter.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self.random.set_state(state["random"])
        self.draft_ids = state["draft_ids"]

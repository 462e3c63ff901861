"""Workshop: compiles the target once and the engines of many readings beside it, and opens them on this machine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.checkpoint import Checkpoint
from specbuild.doctor.scoring import DecoderDrafting, Drafting, HeadsDrafting
from specbuild.drafters import CompileContext, DrafterPlan
from specbuild.model.blocks import EngineDescription
from specbuild.model.decoder import DecoderSpec
from specbuild.progress import Progress, Silent
from specbuild.targets import Target
from specrun.backends import Session, open_session
from specrun.bundle import Bundle, EngineRecord, FileRecord, Limits, Manifest, ModelSummary
from specrun.cache import KVCache
from specrun.decoder import Decoder
from specrun.device.host import HostDevice
from specrun.drafters.vocabulary import Vocabulary
from specrun.heads import Heads

PREFIX = "doctor"  # of the files it writes: they may lie in the directory of a bundle that is being written
OPEN = 3  # readings whose engines stay open


@dataclass
class ReadingContext(CompileContext):
    """A compile whose arrays stay in memory."""

    arrays: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict)

    def save_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        self.arrays[name] = arrays
        return name


@dataclass
class Once:
    """A target that compiles what it was given under ``key`` before no second time, and numbers the engines."""

    target: Target
    made: dict[Hashable, EngineRecord]
    key: Hashable

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def drafting(self) -> Target:
        return self

    def compile(self, engine: EngineDescription, directory: Path, limits: Limits, progress: Progress) -> EngineRecord:
        place = (self.key, engine.name)
        if place not in self.made:
            numbered = replace(engine, name=f"{PREFIX}.{len(self.made)}")
            self.made[place] = self.target.compile(numbered, directory, limits, progress)
        return self.made[place]


class Workshop:
    """``context``: of a compile for the cpu target; its engines and directory are used, its records are not."""

    def __init__(self, context: CompileContext, threads: int | None = None) -> None:
        self.context = context
        self._threads = threads
        self._device = HostDevice()
        self._made: dict[Hashable, EngineRecord] = {}
        self._opened: OrderedDict[str, Decoder | Heads] = OrderedDict()

    @property
    def checkpoint(self) -> Checkpoint:
        return self.context.checkpoint

    @property
    def vocabulary(self) -> int:
        """Ids that the target may emit."""
        return min(self.checkpoint.config.vocab_size, self.checkpoint.tokenizer.vocab_size)

    def target(self, taps: tuple[int, ...], batch: int) -> Decoder:
        """The target with ``taps`` exposed, for ``batch`` sequences."""
        config, context = self.checkpoint.config, self.context
        spec = DecoderSpec(f"{PREFIX}.target", config, self.checkpoint.tensors, context.max_positions, taps)
        record = context.target.compile(spec.describe(), context.directory, context.limits, context.progress)
        return self._decoder(record, batch)

    def drafting(self, plan: DrafterPlan, key: Hashable) -> Drafting:
        """The drafter of ``plan``. Plans whose engines are the same have the same ``key``."""
        values: dict[str, Any] = vars(self.context) | {
            "target": Once(self.context.target.drafting, self._made, key),
            "engines": [],
            "progress": Silent(),
        }
        context = ReadingContext(**values)
        drafter = plan.compile(context)
        record = context.engines[0]  # of several (one a depth) the first is scored
        ids = None if drafter.arrays is None else context.arrays[drafter.arrays]["target_ids"]
        vocabulary = Vocabulary(self.checkpoint.tokenizer.vocab_size, ids)
        if record.kind == "heads":
            return HeadsDrafting(self._kept(record, self._heads), vocabulary, plan.taps)
        return DecoderDrafting(self._kept(record, self._decoder), vocabulary, plan.taps)

    def close(self) -> None:
        """Closes every engine and removes the files."""
        self._opened.clear()
        for path in self.context.directory.glob(f"{PREFIX}.*"):
            path.unlink()

    def _kept(self, record: EngineRecord, opener: Callable[[EngineRecord], Any]) -> Any:
        if record.name not in self._opened:
            self._opened[record.name] = opener(record)
            if len(self._opened) > OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(record.name)
        return self._opened[record.name]

    def _decoder(self, record: EngineRecord, batch: int = 1) -> Decoder:
        assert record.cache is not None
        reach = self.context.max_positions
        cache = KVCache(record.cache, self._device, batch, reach, reach)
        return Decoder(record, self._session(record), self._device, cache)

    def _heads(self, record: EngineRecord) -> Heads:
        return Heads(record, self._session(record), self._device)

    def _session(self, record: EngineRecord) -> Session:
        """What is opened is not in a bundle yet: a manifest of this engine alone stands for it."""
        directory, config = self.context.directory, self.checkpoint.config
        manifest = Manifest(
            producer=PREFIX,
            model=ModelSummary(config.family, config.vocab_size, self.vocabulary, self.context.max_length, ()),
            limits=self.context.limits,
            engines=(record,),
            drafters=(),
            files=tuple(FileRecord(name, "", (directory / name).stat().st_size) for name in record.files),
        )
        return open_session(Bundle(directory, manifest), record, self._device, self._threads)

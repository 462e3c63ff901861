"""examine: scores every plausible reading of a drafter's checkpoint and says which one is right."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specbuild.checkpoint import Checkpoint, open_checkpoint
from specbuild.doctor.findings import Diagnosis, Outcome, words
from specbuild.doctor.notes import notes_of
from specbuild.doctor.readings import RESCUES, Options, Readings, readings_of
from specbuild.doctor.scoring import Drafting, Score, score
from specbuild.doctor.transcript import Transcript, prompts_of, record
from specbuild.doctor.workshop import Workshop
from specbuild.drafters import CompileContext, DrafterPlan, DrafterRequest, open_compiler
from specbuild.progress import Progress, Silent
from specbuild.targets import open_target
from specrun.bundle import Limits
from specrun.errors import CompileError, UserError
from specrun.profiles import load_shapes
from specrun.text import Text

ROUNDS = 3  # changes on top of each other
LONGEST = 2048  # positions that the doctor's engines reach
LEAST_POSITIONS = 20

WITHOUT_WEIGHTS = ("hybrid", "suffix", "prompt-lookup", "lookahead", "ngram")


@dataclass(frozen=True)
class Effort:
    """How much text readings are scored on: ``prompts`` of them, ``tokens`` of continuation each.

    ``combinations``: readings tried at most where no single change helps. ``enough``: acceptance of the first token at
    which compile's reading is believed, and no other is tried.
    """

    prompts: int = 8
    tokens: int = 64
    combinations: int = 96
    enough: float = 2.0


class TooLittleText(CompileError):
    """The target says so little that no reading can be judged by it."""


def examine(
    model: str | Path,
    drafter: str,
    *,
    quantize: str | None = None,
    effort: Effort = Effort(),
    threads: int | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Scores the readings of ``drafter`` (``KIND=PATH[,option=value...]``) on the target's own greedy text.

    ``quantize``: the target's and the heads' weights in blocks, to fit a large model into memory. Engines are compiled
    for the cpu target into a temporary directory. ``note`` is told what is being done. Raises UserError for files that
    no reading can open.
    """
    request = DrafterRequest.parse(drafter)
    if request.kind in WITHOUT_WEIGHTS:
        raise CompileError(f"Drafter {request.kind}: it has no checkpoint that could be misread. Nothing to examine.")
    checkpoint = open_checkpoint(model, max_length=None)
    opened = Opened.open(request, checkpoint)
    with tempfile.TemporaryDirectory(prefix="specbuild-doctor-") as directory:
        context = context_of(checkpoint, Path(directory), quantize, progress)
        workshop = Workshop(context, threads)
        try:
            return Examination(workshop, opened, effort, note).run()
        finally:
            workshop.close()


def context_of(
    checkpoint: Checkpoint, directory: Path, quantize: str | None, progress: Progress | None = None
) -> CompileContext:
    """A compile for the cpu target into ``directory``, of one sequence a pass."""
    shapes = load_shapes("default")
    length = min(checkpoint.config.max_position, LONGEST)
    return CompileContext(
        checkpoint=checkpoint,
        target=open_target("cpu", quantize, checkpoint.config.dtype, length, quantize or "none"),
        limits=Limits(1, shapes.max_nodes, shapes.prefill_chunk),
        max_length=length,
        taps=(),
        directory=directory,
        progress=progress or Silent(),
    )


@dataclass(frozen=True)
class Opened:
    """A drafter that at least one reading opens. ``base``: the first reading that does, {} being compile's own;
    ``refusal``: why compile refuses its own."""

    request: DrafterRequest
    checkpoint: Checkpoint
    base: Options
    plan: DrafterPlan
    refusal: str | None

    @staticmethod
    def open(request: DrafterRequest, checkpoint: Checkpoint) -> Opened:
        """Raises UserError, compile's own refusal, where no reading opens it."""
        refusal: UserError | None = None
        for options in ({}, *RESCUES.get(request.kind, ())):
            try:
                plan = plan_of(request, options, checkpoint)
            except UserError as error:
                refusal = refusal or error
                continue
            return Opened(request, checkpoint, options, plan, None if refusal is None else str(refusal))
        assert refusal is not None
        raise refusal

    @property
    def readings(self) -> Readings:
        """An option that the user gave is one value among others: the doctor is asked whether it is the right one."""
        return readings_of(self.request, self.plan, self.checkpoint)


def plan_of(request: DrafterRequest, changes: Options, checkpoint: Checkpoint) -> DrafterPlan:
    """The plan of ``request`` with some of its options changed. Raises UserError."""
    changed = replace(request, options={**request.options, **changes})
    return open_compiler(request.kind).plan(changed, checkpoint)


class Examination:
    """One drafter's readings, each planned, compiled and scored once."""

    def __init__(
        self, workshop: Workshop, opened: Opened, effort: Effort, note: Callable[[str], None] = lambda line: None
    ) -> None:
        self.workshop, self.opened, self.effort, self.note = workshop, opened, effort, note
        self.readings = opened.readings
        self._outcomes: dict[frozenset[tuple[str, str]], Outcome] = {}
        self._lines: list[Transcript] = []

    def run(self) -> Diagnosis:
        """Reads the target once, then climbs from compile's reading; where that leads nowhere tries combinations.

        Raises TooLittleText.
        """
        self._lines = self._transcripts()
        best = self._evaluate(self.opened.base)
        if best.score is None or best.score.first < self.effort.enough:
            best = self._search(best)
        return self._diagnosis(best)

    def _search(self, base: Outcome) -> Outcome:
        best = self._climb(base)
        if best.score is None or best.score.mean < Diagnosis.NEARLY_NOTHING:
            combinations = sorted(self.readings.combinations(), key=lambda o: repr(self.readings.engine_key(o)))
            for options in combinations[
                : self.effort.combinations
            ]:  # those of one engine after each other: few stay open
                self._evaluate(options)
            best = self._climb(self._best())
        return best

    def told(self) -> Outcome:
        """Compile's own reading."""
        if self.opened.refusal is not None:
            return Outcome({}, None, self.opened.refusal)
        return self._evaluate({})

    def _diagnosis(self, best: Outcome) -> Diagnosis:
        told = self.told()
        if told.score is not None and best.score is not None and best.score.mean <= told.score.mean:
            best = told
        outcomes = {frozenset(o.options.items()): o for o in (told, *self._outcomes.values())}
        return Diagnosis(
            request=self.opened.request,
            readings=self.readings,
            outcomes=tuple(sorted(outcomes.values(), key=Outcome.rank)),
            told=told,
            best=best,
            control=self._control(best),
            notes=(*notes_of(self.opened.request, self.opened.plan, self.opened.checkpoint), *self._notes(told)),
        )

    def _notes(self, told: Outcome) -> list[str]:
        if told.score is None:
            return []
        return self._drafting(self.opened.plan, told.options).notes(self._lines)

    def _transcripts(self) -> list[Transcript]:
        """The target's text, with every stream that a reading wants."""
        workshop, checkpoint = self.workshop, self.workshop.checkpoint
        checkpoint.tokenizer.write(workshop.context.directory)
        half = workshop.context.max_positions // 2
        prompts = prompts_of(checkpoint, Text(workshop.context.directory), self.effort.prompts, half)
        tokens = min(self.effort.tokens, half)
        self.note("compiling the target")
        target = workshop.target(self._taps(), len(prompts))
        self.note(f"the target continues {len(prompts)} prompts by {tokens} tokens")
        eos = frozenset(checkpoint.tokenizer.eos_token_ids)
        lines = record(target, prompts, tokens, workshop.vocabulary, eos)
        positions = sum(line.tokens.size - line.start for line in lines)
        if positions < LEAST_POSITIONS:
            raise TooLittleText(
                f"{checkpoint.source}: it continued {len(prompts)} prompts by {positions} tokens in all, fewer than "
                f"the {LEAST_POSITIONS} that readings need to be told apart. Ask for more prompts or tokens."
            )
        return lines

    def _taps(self) -> tuple[int, ...]:
        opened = self.opened
        choices = [axis.values for axis in self.readings.axes if axis.option == "taps"]
        plans = [
            plan_of(opened.request, {**opened.base, "taps": value}, opened.checkpoint)
            for values in choices
            for value in values
        ]
        return tuple(sorted({tap for plan in (opened.plan, *plans) for tap in plan.taps}))

    def _climb(self, best: Outcome) -> Outcome:
        """Changes one option at a time while that helps."""
        for _ in range(ROUNDS):
            for options in self.readings.singles(best.options):
                self._evaluate(options)
            found = self._best()
            if found is best or not found.beats(best):
                break
            best = found
        return best

    def _best(self) -> Outcome:
        return min(self._outcomes.values(), key=Outcome.rank)

    def _evaluate(self, options: Mapping[str, str]) -> Outcome:
        key = frozenset(options.items())
        if key not in self._outcomes:
            self._outcomes[key] = self._try(dict(options))
        return self._outcomes[key]

    def _try(self, options: dict[str, str]) -> Outcome:
        try:
            plan = plan_of(self.opened.request, options, self.opened.checkpoint)
        except UserError as error:
            return Outcome(options, None, str(error))
        self.note(f"reading {len(self._outcomes) + 1}: {words(options)}")
        return Outcome(options, self._score(plan, options, self._lines))

    def _score(self, plan: DrafterPlan, options: Options, lines: Sequence[Transcript], shuffled: bool = False) -> Score:
        return score(self._drafting(plan, options), lines, np.random.default_rng(0) if shuffled else None)

    def _drafting(self, plan: DrafterPlan, options: Options) -> Drafting:
        return self.workshop.drafting(plan, self.readings.engine_key(options))

    def _control(self, best: Outcome) -> Score | None:
        """The best reading, with the target's features dealt out at random."""
        if best.score is None or not self.opened.plan.taps:
            return None
        plan = plan_of(self.opened.request, best.options, self.opened.checkpoint)
        return self._score(plan, best.options, self._lines, shuffled=True)

"""What compile says of the readings it was told: a short examination with the engines that it has just compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specbuild.doctor.examine import Effort, Examination, Opened, TooLittleText
from specbuild.doctor.findings import Diagnosis, clearly_above
from specbuild.doctor.readings import AXES
from specbuild.doctor.workshop import Workshop
from specbuild.drafters import CompileContext, DrafterRequest

QUICK = Effort(prompts=4, tokens=24, combinations=0, enough=0.6)
FAR = 0.1  # accepted tokens of a chain of two that a reading must be behind to be warned of


def watch(drafters: Sequence[str], context: CompileContext) -> list[dict[str, Any]]:
    """One entry a drafter whose checkpoint leaves readings open: ``drafter``, ``first`` (acceptance of the first
    token), ``best`` (the best reading's options), ``best_first`` and ``warning`` (None where all is well).

    ``context``: of a compile for the cpu target, after its engines were written; elsewhere nothing can be run, and the
    list is empty. Its directory is left as it was.
    """
    if context.target.name != "cpu":
        return []
    requests = [DrafterRequest.parse(text) for text in drafters if text != "none"]
    found = [_examine(request, context) for request in requests if request.kind in AXES]
    return [_entry(diagnosis) for diagnosis in found if diagnosis is not None]


def _examine(request: DrafterRequest, context: CompileContext) -> Diagnosis | None:
    workshop = Workshop(replace(context, engines=[]))
    try:
        return Examination(workshop, Opened.open(request, context.checkpoint), QUICK).run()
    except TooLittleText:
        return None
    finally:
        workshop.close()


def _entry(diagnosis: Diagnosis) -> dict[str, Any]:
    told, best = diagnosis.told.score, diagnosis.best.score
    return {
        "drafter": diagnosis.request.kind,
        "first": None if told is None else told.first,
        "best": dict(diagnosis.best.options),
        "best_first": None if best is None else best.first,
        "warning": _warning(diagnosis),
    }


def _warning(diagnosis: Diagnosis) -> str | None:
    told, best, kind = diagnosis.told.score, diagnosis.best.score, diagnosis.request.kind
    if told is None or best is None:
        return None
    if diagnosis.unrelated:
        return f"Drafter {kind}: {diagnosis.verdict} `specbuild doctor` tries more readings on more text."
    if clearly_above(best, told) and best.mean - told.mean > FAR:
        return f"Drafter {kind}: {diagnosis.verdict}"
    return None

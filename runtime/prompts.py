"""Prompt sets for measurements: the built-in one, JSON lines of the same form, and Spec-Bench's question file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun import profiles
from specrun.errors import RequestError

BUILTIN = "builtin"

# Spec-Bench (Xia et al. 2024) groups MT-Bench's eight categories into one of its six tasks.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Task:
    """One conversation to decode: ``turns`` are the user's messages. ``chat``: through the chat template if there is
    one; otherwise the turns are raw text to continue."""

    name: str
    group: str
    turns: tuple[str, ...]
    chat: bool = True


def load_tasks(source: str, limit: int | None = None) -> list[Task]:
    """Tasks of ``builtin`` or of a JSON-lines file, at most ``limit`` of each group. Raises RequestError.

    A line is ``{"id", "group", "turns"}`` with an optional ``"chat": false``, or ``{"question_id", "category",
    "turns"}`` as in Spec-Bench.
    """
    path = profiles.ROOM / "prompts" / "builtin.jsonl" if source == BUILTIN else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"{path}: prompts cannot be read ({reason}). Give a JSON-lines file, or {BUILTIN}."
        ) from None
    tasks = [_task(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not tasks:
        raise RequestError(f"{path}: found no prompts. Give a file with a JSON object on each line.")
    return tasks if limit is None else _first(tasks, limit)


def _first(tasks: Sequence[Task], limit: int) -> list[Task]:
    taken: Counter[str] = Counter()
    kept = []
    for task in tasks:
        taken[task.group] += 1
        if taken[task.group] <= limit:
            kept.append(task)
    return kept


def _task(line: str, where: str) -> Task:
    try:
        data: dict[str, Any] = json.loads(line)
        name = data["id"] if "id" in data else data["question_id"]
        group = data["group"] if "group" in data else data["category"]
        turns = data["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise TypeError("turns must be a list of text")
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(
            f"{where}: not a prompt ({reason}). Expected an object with id, group and turns, or Spec-Bench's "
            "question_id, category and turns."
        ) from None
    return Task(str(name), "mt-bench" if group in MT_BENCH else str(group), tuple(turns), bool(data.get("chat", True)))

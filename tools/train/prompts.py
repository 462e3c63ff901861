"""Prompts to generate training text from: read from a file, or written by the model itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from specbuild.checkpoint import Checkpoint
from specrun.errors import UserError
from specrun.text import Text


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: JSON with ``prompt`` or ``turns`` (the first counts) in ``.jsonl`` files, else plain text."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(path, number, line) for number, line in enumerate(lines, 1)]


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
        return str(row["prompt"] if "prompt" in row else row["turns"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(
            f'{path}, line {number}: found {line[:60]!r}, expected a JSON object with "prompt" or "turns"; '
            "name the file .txt if its lines are the prompts themselves"
        ) from None


class Chat:
    """Renders prompts as the target expects them, and openings from which it writes its own instructions."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.tokenizer.write(folder)
            self.text = Text(Path(folder))
        self.stops = list(checkpoint.tokenizer.eos_token_ids)

    def render(self, prompt: str) -> list[int]:
        """Token ids of one user turn, open for the answer; the bare text for a model without a chat template."""
        if not self.text.has_chat_template:
            return self.text.encode(prompt)
        return self.text.encode(self.text.chat([{"role": "user", "content": prompt}]), special=False)

    def opening(self) -> list[int]:
        """The template up to where the user's words begin: what the model writes from here is an instruction."""
        marker = "\x00"
        if not self.text.has_chat_template:
            return self.text.encode("")
        before, _, _ = self.text.chat([{"role": "user", "content": marker}]).partition(marker)
        return self.text.encode(before, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Plain text without special tokens."""
        return self.text.decode(tokens).strip()


def chunks(prompts: Sequence[str], size: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Consecutive slices of ``size`` prompts with their numbers."""
    for number, start in enumerate(range(0, len(prompts), size)):
        yield number, prompts[start : start + size]

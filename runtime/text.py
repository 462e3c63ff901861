"""Text in and out: the tokenizer, chat templates, and streams that never split a character or miss a stop string."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from specrun.errors import BundleError, RequestError

REPLACEMENT = "\ufffd"


class Text:
    """A bundle's tokenizer, chat template and special ids (``tokenizer.json`` and ``text.json``)."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = RawTokenizer.from_file(str(directory / "tokenizer.json"))
            self._settings: dict[str, Any] = json.loads((directory / "text.json").read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{directory}: its tokenizer cannot be read ({error}). Compile it again.") from None

    @property
    def size(self) -> int:
        """Number of ids the tokenizer knows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._settings.get("chat_template") is not None

    @property
    def generation(self) -> Mapping[str, Any]:
        """Defaults of the checkpoint's generation_config (temperature, top_p, ...)."""
        defaults: dict[str, Any] = self._settings.get("generation") or {}
        return defaults

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; ``special`` adds BOS where the tokenizer does (a rendered chat template brings its own)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The messages (``role``, ``content``) as the template renders them, open for the assistant's answer.

        Rendered in jinja2's sandbox. Raises RequestError when the bundle has no template or the template refuses.
        """
        if self._template is None:
            raise RequestError("chat: the bundle has no chat template. Use --raw, or give a rendered prompt.")
        from jinja2 import TemplateError

        tokens = {name: self._settings.get(name) or "" for name in ("bos_token", "eos_token")}
        try:
            return str(self._template.render(messages=list(messages), add_generation_prompt=True, **tokens))
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"chat: the model's template refused the messages ({error}).") from None

    @cached_property
    def _template(self) -> Any:
        source = self._settings.get("chat_template")
        if source is None:
            return None
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(source)
        except TemplateError as error:
            raise RequestError(f"chat: the bundle's chat template cannot be parsed ({error}). Use --raw.") from None


def _refuse(message: str) -> None:
    raise ValueError(message)


class TextStream:
    """Turns tokens into text that is safe to show: whole characters only, and nothing that may belong to a stop string.

    ``push`` returns the text that became certain; ``text`` is all of it. Once ``stopped`` is set (the stop string
    found) the text ends right before it.
    """

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = text, tuple(stop)
        self._ids: list[int] = []
        self._prefix = self._read = 0  # ids[prefix:read] are shown already and give the next ones their context
        self._decoded = ""  # all whole characters so far
        self._shown = 0
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        return self._decoded[: self._shown]

    def push(self, token: int) -> str:
        self._ids.append(token)
        before = self._codec.decode(self._ids[self._prefix : self._read])
        after = self._codec.decode(self._ids[self._prefix :])
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self._extend(after[len(before) :])
            self._prefix, self._read = self._read, len(self._ids)
        return self._show(hold=True)

    def finish(self) -> str:
        """The rest, at the end of the output: incomplete characters as the tokenizer shows them."""
        if self.stopped is None:
            before = self._codec.decode(self._ids[self._prefix : self._read])
            self._extend(self._codec.decode(self._ids[self._prefix :])[len(before) :])
            self._read = len(self._ids)
        return self._show(hold=False)

    def _extend(self, new: str) -> None:
        searched = len(self._decoded)
        self._decoded += new
        found = []
        for stop in self._stop:
            at = self._decoded.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if found:
            at, _, self.stopped = min(found)
            self._decoded = self._decoded[:at]

    def _show(self, hold: bool) -> str:
        end = len(self._decoded)
        if hold and self.stopped is None:
            end -= max((_overlap(self._decoded, stop) for stop in self._stop), default=0)
        new = self._decoded[self._shown : max(end, self._shown)]
        self._shown += len(new)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

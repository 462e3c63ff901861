"""TokenizerAssets: the tokenizer, chat template, special tokens and generation defaults that come with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specbuild.checkpoint.files import read_json
from specrun.errors import CheckpointError

# What generation_config.json may say about sampling; the rest of that file is about transformers itself.
GENERATION_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TokenizerAssets:
    """``json`` is a tokenizer.json, whose own post-processor adds a BOS token where ``add_bos`` says so."""

    json: bytes
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself (Hugging Face `tokenizers`)."""
        return Tokenizer.from_buffer(self.json)

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def add_bos(self) -> bool:
        """Whether encoding a text (with special tokens) puts BOS in front."""
        ids = self.tokenizer.encode("", add_special_tokens=True).ids
        return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]

    def text_json(self) -> dict[str, Any]:
        """What the runtime needs beside tokenizer.json: template, special tokens, generation defaults."""

        def text(token: int | None) -> str | None:
            return None if token is None else self.tokenizer.id_to_token(token)

        return {
            "chat_template": self.chat_template,
            "bos_token": text(self.bos_token_id),
            "eos_token": text(self.eos_token_ids[0] if self.eos_token_ids else None),
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
            "add_bos": self.add_bos,
            "generation": dict(self.generation),
        }

    def write(self, directory: str | Path) -> None:
        """Writes tokenizer.json and text.json into ``directory``."""
        directory = Path(directory)
        (directory / "tokenizer.json").write_bytes(self.json)
        text = json.dumps(self.text_json(), ensure_ascii=False, indent=1, sort_keys=True)
        (directory / "text.json").write_text(text + "\n", encoding="utf-8")


def read_tokenizer(directory: Path, config: Mapping[str, Any]) -> TokenizerAssets:
    """The assets of a Hugging Face directory; ``config`` is its parsed config.json.

    End-of-sequence ids come from generation_config.json, then config.json, then the tokenizer: transformers' order.
    """
    data, tokenizer = _tokenizer_json(directory)
    settings = _optional(directory / "tokenizer_config.json")
    generation = _optional(directory / "generation_config.json")
    eos = _first(generation.get("eos_token_id"), config.get("eos_token_id"), _special(settings, "eos_token", tokenizer))
    return TokenizerAssets(
        json=data,
        chat_template=_chat_template(directory, settings),
        bos_token_id=_first(_special(settings, "bos_token", tokenizer), config.get("bos_token_id")),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=_first(_special(settings, "pad_token", tokenizer), config.get("pad_token_id")),
        generation={key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None},
    )


def _tokenizer_json(directory: Path) -> tuple[bytes, Tokenizer]:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: the tokenizer is missing; a model directory needs a tokenizer.json (transformers writes one: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
        )
    data = path.read_bytes()
    try:
        return data, Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise CheckpointError(f"{path}: not a readable tokenizer ({error}); download it again") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _special(settings: Mapping[str, Any], key: str, tokenizer: Tokenizer) -> int | None:
    token = settings.get(key)
    token = token.get("content") if isinstance(token, Mapping) else token
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over the key; of several named templates the one called "default" is taken."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        return named.get("default")
    return template

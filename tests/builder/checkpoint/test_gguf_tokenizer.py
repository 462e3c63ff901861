"""Tokenizers built from GGUF metadata: against transformers, the published patterns, and SentencePiece's algorithm."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from gguf import GGUFReader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from specbuild.checkpoint import open_checkpoint
from specbuild.checkpoint.gguf_file import Metadata
from specbuild.checkpoint.gguf_tokenizer import _PRE_TOKENIZERS, gguf_tokenizer
from tests.builder.tiny import tiny_tokenizer, write_tiny_checkpoint
from tests.builder.tiny_gguf import write_tiny_gguf

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "It's 2024-11-30; we've 12,345.678 items & they're O'Brien's.",
    "def f(x):\n\treturn {'a': x ** 2}  # done\n\n\n",
    "  leading and trailing  \n \n ",
    "naïve café — “quotes” … 中文字符 한국어 العربية עברית",
    "emoji 👩‍👩‍👧‍👦🏽 and combining é vs é",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "https://example.org/a?b=c%20d&e=f#g",
    "tabs\t\tand\r\nwindows\r\nlines",
]


@pytest.mark.demo
def test_demo_tokenizer_equals_transformers(demo_gguf: Path, demo_reader: GGUFReader) -> None:
    # transformers' GGUF converter leaves out the splitting of digits, which shows only in other scripts' digits and
    # after runs of blanks; those are compared with the published patterns below.
    ours = gguf_tokenizer(Metadata(demo_reader))
    theirs = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    for text in TEXTS:
        ids = ours.tokenizer.encode(text).ids
        assert ids == theirs(text).input_ids, text
        assert ours.tokenizer.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.chat_template == theirs.chat_template
    assert theirs.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>system")
    text = ours.text_json()
    assert (text["bos_token"], text["eos_token"], text["add_bos"]) == ("<|im_start|>", "<|im_end|>", False)


def test_tiny_tokenizer_survives_the_conversion(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "model", "llama")
    ours = open_checkpoint(write_tiny_gguf(tmp_path / "model.gguf", directory)).tokenizer
    theirs = open_checkpoint(directory).tokenizer
    assert ours.vocab_size == theirs.vocab_size == 512
    for text in TEXTS:
        assert ours.tokenizer.encode(text).ids == theirs.tokenizer.encode(text).ids
    assert ours.eos_token_ids == (2,)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
}


def split_by(patterns: list[str], text: str) -> list[str]:
    """Each pattern splits every piece the one before left: its matches and what lies between them."""
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def visible_bytes(piece: str) -> str:
    """GPT-2's rendering of bytes as printable characters."""
    return "".join(word for word, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece))


@pytest.mark.parametrize("pre", PUBLISHED)
@given(text=st.text(st.sampled_from("ab Z'sSLl1٣½²\n\r\t .,!é中😀_"), max_size=24))
@example(text="a  12 it's IT'S 1234\n\n b")
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pre_tokenizers_split_as_published(pre: str, text: str) -> None:
    steps = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    pieces = [piece for piece, _ in steps.pre_tokenize_str(text)]
    assert pieces == [visible_bytes(piece) for piece in split_by(PUBLISHED[pre], text)]


class Fields(Metadata):
    """Metadata from a dictionary instead of a file."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.architecture = "llama"

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)


PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "▁a": -5.0, "ab": -6.0, "bc": -6.5, "▁ab": -7.0, "abc": -8.0}
PIECES |= {"▁abc": -9.0, "bb": -10.0, "▁b": -11.0, "aa": -12.0, "aab": -13.0}


def sentencepiece(**changes: Any) -> Any:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *PIECES, "<extra>", "<pad0>", "<pad1>"],
        "tokenizer.ggml.scores": [0.0] * len(special) + list(PIECES.values()) + [0.0] * 3,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4, 5, 5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }
    return gguf_tokenizer(Fields(values))


def by_scores(text: str) -> list[str]:
    """SentencePiece's BPE: of all adjacent pairs that form a piece, merge the best score's, the leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-PIECES[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in PIECES]
        if not pairs:
            return [t for s in symbols for t in ([s] if s in PIECES else [f"<0x{byte:02X}>" for byte in s.encode()])]
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(text=st.text(st.sampled_from("abcé "), min_size=1, max_size=16))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_sentencepiece_merges_by_score(text: str) -> None:
    assets = sentencepiece()
    encoding = assets.tokenizer.encode(text)
    assert encoding.tokens == ["<s>", *by_scores(text)]
    assert assets.tokenizer.decode(encoding.ids) == text


def test_sentencepiece_special_tokens() -> None:
    assets = sentencepiece()
    assert assets.add_bos
    assert assets.vocab_size == 3 + 256 + len(PIECES) + 1  # the unused fillers at the end do not count
    assert assets.tokenizer.encode("a</s>b<extra>", add_special_tokens=False).tokens == ["▁a", "</s>", "▁b", "<extra>"]
    assert not sentencepiece(**{"tokenizer.ggml.add_bos_token": False}).add_bos
    plain = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    assert plain.tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_end_tokens_and_sampling_defaults() -> None:
    assets = sentencepiece(
        **{"tokenizer.ggml.eot_token_id": 5, "general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    )
    assert assets.eos_token_ids == (2, 5)
    assert assets.text_json()["generation"] == {"temperature": 0.7, "top_k": 20}


def test_tiny_tokenizer_is_exactly_as_large_as_asked() -> None:
    for size in (16, 120, 258, 259, 300, 512, 1000):
        assert tiny_tokenizer(size).get_vocab_size(with_added_tokens=True) == size

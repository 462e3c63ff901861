"""The tokenizer of a GGUF file as a tokenizer.json: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The pre-tokenizers are those of the models' own tokenizer.json files, selected by the metadata's `pre` name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specbuild.checkpoint.tokenizer import TokenizerAssets
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from specbuild.checkpoint.gguf_file import Metadata

# Values of tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[Any]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _digits_then_gpt2() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


# `pre` name -> its pre-tokenizer steps
_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3),
    "smaug-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "tekken": lambda: _split(_TEKKEN),
}
_IGNORE_MERGES = ("llama-bpe", "tekken")  # whole words of the vocabulary are taken before merges are tried
_BOS_BY_DEFAULT = ("llama-bpe", "tekken")
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def gguf_tokenizer(meta: Metadata) -> TokenizerAssets:
    """Builds the tokenizer from ``meta``; kinds and `pre` names that are not known are refused by name."""
    kind = meta.get("tokenizer.ggml.model")
    if kind is None:
        raise CheckpointError(
            "the GGUF file holds no tokenizer (tokenizer.ggml.model is absent); convert it again with one"
        )
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"GGUF tokenizer kind {kind!r} is not supported; supported: gpt2 (byte-level BPE) and "
            "llama (SentencePiece BPE). Use the model's Hugging Face directory."
        )
    tokenizer = _byte_level(meta) if kind == "gpt2" else _sentencepiece(meta)
    bos = meta.get("tokenizer.ggml.bos_token_id")
    by_default = kind == "llama" or meta.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", by_default):
        _prepend_bos(tokenizer, bos)
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return TokenizerAssets(
        json=tokenizer.to_str().encode("utf-8"),
        chat_template=meta.get("tokenizer.chat_template"),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
        generation={name: meta.get(key) for name, key in _SAMPLING_KEYS.items() if meta.get(key) is not None},
    )


def _vocabulary(meta: Metadata) -> tuple[dict[str, int], list[int]]:
    """Token -> id and each id's type, without the fillers that pad the embedding at its end."""
    tokens = meta.need("tokenizer.ggml.tokens")
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    used = len(tokens)
    while used and types[used - 1] == _UNUSED:
        used -= 1
    return {token: i for i, token in enumerate(tokens[:used])}, types[:used]


def _byte_level(meta: Metadata) -> Tokenizer:
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"GGUF pre-tokenizer {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face directory."
        )
    vocabulary, types = _vocabulary(meta)
    merges = [tuple(merge.split(" ", 1)) for merge in meta.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, vocabulary, types)
    return tokenizer


def _sentencepiece(meta: Metadata) -> Tokenizer:
    vocabulary, types = _vocabulary(meta)
    merges = sentencepiece_merges(vocabulary, meta.need("tokenizer.ggml.scores"))
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=meta.need("tokenizer.ggml.tokens")[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special(tokenizer, vocabulary, types)
    return tokenizer


def sentencepiece_merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges equivalent to SentencePiece's scores: a pair merges the earlier, the higher its piece's score."""
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token], vocabulary[left], vocabulary[right], (left, right)))
    merges.sort(key=lambda merge: merge[:3])
    return [pair for _, _, _, pair in merges]


def _add_special(tokenizer: Tokenizer, vocabulary: dict[str, int], types: Iterable[int]) -> None:
    """Control tokens are special (never split, skipped when decoding); user-defined ones are only never split."""
    by_type: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(vocabulary, types, strict=True):
        if kind in by_type:
            by_type[kind].append(AddedToken(token, normalized=False, special=kind == _CONTROL))
    tokenizer.add_special_tokens(by_type[_CONTROL])
    tokenizer.add_tokens(by_type[_USER_DEFINED])


def _prepend_bos(tokenizer: Tokenizer, bos: int) -> None:
    token = tokenizer.id_to_token(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, bos)]
    )

"""Streams: whole characters only, stop strings cut exactly, whatever the tokens' boundaries."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from specrun.errors import BundleError, RequestError
from specrun.text import Text, TextStream


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> Text:
    """One token a byte: every multi-byte character is split everywhere."""
    directory = tmp_path_factory.mktemp("text")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    settings = {"chat_template": template, "bos_token": "<bos>", "bos_token_id": 256}
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "text.json").write_text(json.dumps(settings))
    return Text(directory)


def run(codec, ids, stop=()):
    stream = TextStream(codec, stop)
    deltas = []
    for token in ids:
        deltas.append(stream.push(token))
        if stream.stopped is not None:
            break
    deltas.append(stream.finish())
    return stream, deltas


HARD = ["한국어 텍스트", "👩‍👩‍👧‍👦 family", "e\u0301 combining", "naïve café", "日本語🎌\u200d", "plain"]


@pytest.mark.parametrize("text", HARD)
def test_characters_are_never_split(codec, text):
    """C07."""
    ids = codec.encode(text, special=False)
    stream, deltas = run(codec, ids)
    assert "".join(deltas) == text == stream.text
    assert all("\ufffd" not in delta for delta in deltas)


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_bytes_join_to_the_full_decode(codec, data):
    """Also bytes that are no UTF-8: replacement characters appear exactly where the full decode has them."""
    alphabet = codec.encode(bytes(range(128)).decode(), special=False)
    ids = [alphabet[b] if b < 128 else 255 - (b % 60) for b in data]
    stream, deltas = run(codec, ids)
    assert "".join(deltas) == stream.text == codec.decode(ids)


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_at_the_first_occurrence(codec, text, stops):
    stream, deltas = run(codec, codec.encode(text, special=False), stops)
    # token by token, the first stop string to be complete wins; among those, the one that starts first
    expected = text
    for end in range(1, len(text) + 1):
        found = [(text[:end].find(s), -len(s)) for s in stops if s in text[:end]]
        if found:
            expected = text[: min(found)[0]]
            break
    assert stream.text == expected == "".join(deltas)
    assert (stream.stopped is not None) == any(s in text for s in stops)


def test_text_that_may_become_a_stop_string_is_held_back(codec):
    stream = TextStream(codec, ["STOP"])
    shown = [stream.push(t) for t in codec.encode("a STxSTOP", special=False)]
    assert shown == ["a", " ", "", "", "STx", "", "", "", ""]
    assert stream.stopped == "STOP" and stream.text == "a STx"


def test_chat_is_rendered_in_a_sandbox(codec, tmp_path):
    assert codec.chat([{"role": "user", "content": "hi"}]) == "[user]hi[assistant]"
    assert codec.encode("a")[0] == 256 and codec.encode("a", special=False)[0] != 256
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for source, problem in ((evil, "refused"), ("{% if %}", "cannot be parsed"), ("{{ raise_exception('no') }}", "no")):
        (tmp_path / "tokenizer.json").write_text(codec._tokenizer.to_str())
        (tmp_path / "text.json").write_text(json.dumps({"chat_template": source}))
        with pytest.raises(RequestError, match=problem):
            Text(tmp_path).chat([{"role": "user", "content": "hi"}])


def test_bad_tokenizer_files(tmp_path):
    with pytest.raises(BundleError, match=r"tokenizer cannot be read"):
        Text(tmp_path)

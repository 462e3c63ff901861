"""specrun chat, piped: a line is a turn, the cache is kept, commands work."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

import specrun
from specrun.cli import main
from specrun.commands.chat import Chat
from specrun.errors import RequestError


def invoke(*arguments: object, stdin: bytes) -> Result:
    return CliRunner().invoke(main, ["chat", *map(str, arguments)], input=stdin)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    return specrun.load(tiny_bundle)


def answer(engine, messages, **params) -> str:
    prompt = engine.text.encode(engine.text.chat(messages), special=False)
    return engine.generate(prompt, specrun.SamplingParams(**params)).text


def test_turns_build_on_each_other(engine, tiny_bundle):
    messages = [{"role": "system", "content": "Be brief."}]
    wanted = ""
    for line in ("hello there", "and again"):
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": answer(engine, messages, max_tokens=6)})
        wanted += messages[-1]["content"] + "\n"
    result = invoke(tiny_bundle, "--system", "Be brief.", "--max-tokens", 6, stdin=b"hello there\n\nand again\n")
    assert (result.exit_code, result.stdout) == (0, wanted)


def test_the_cache_is_kept_until_reset(tiny_bundle):
    result = invoke(tiny_bundle, "--max-tokens", 6, "--stats", stdin=b"one two\nthree\n/reset\nfour\n")
    first, second, third = map(int, re.findall(r"\((\d+) from the cache\)", result.stderr))
    assert first == third == 0 and second > 5


def test_commands(tiny_bundle):
    result = invoke(tiny_bundle, "--max-tokens", 3, stdin=b"/stats\n/quit\nnever said\n")
    assert result.exit_code == 0 and result.stdout == "" and "No turn is complete yet." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"caf\xe9\n", "stdin, line 1: not valid UTF-8"),
        ([], b"word " * 600 + b"\n", "the context is 512"),
        (["--top-p", 3], b"x\n", "top_p: found 3"),
        (["--drafter", "magic"], b"x\n", "Drafter 'magic'"),
    ],
)
def test_refusals(tiny_bundle, arguments, stdin, message):
    result = invoke(tiny_bundle, *arguments, stdin=stdin)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_refused_or_stopped_turn_leaves_the_conversation_whole(engine):
    chat = Chat(engine, specrun.SamplingParams(max_tokens=40, ignore_eos=True), None, None)
    with pytest.raises(RequestError, match="context"):
        list(chat.turn("word " * 600))
    assert chat.messages == []
    turn = chat.turn("tell me")
    said = "".join(next(turn) for _ in range(10))
    turn.close()
    assert chat.messages == [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": said}]
    messages = [*chat.messages, {"role": "user", "content": "go on"}]
    assert "".join(chat.turn("go on")) == answer(engine, messages, max_tokens=40, ignore_eos=True)
    chat.reset()
    assert not engine._loop.active and len(engine._target.cache.lanes(0, 7)) == 0

"""specrun generate: what comes out, and every refusal: exit code 2, one paragraph on stderr, nothing on stdout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import specrun
from specrun.cli import main

PROMPT = "The quick brown fox"


def invoke(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], input=stdin)


def start(*arguments: object, **options) -> subprocess.Popen:
    """The command in a process of its own. It listens to Ctrl-C even where the tests run in a shell's background."""
    command = [sys.executable, "-c", "from specrun.cli import main; main()", "generate", *map(str, arguments)]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    return specrun.load(tiny_bundle)


def expected(engine, text: str, chat: bool = False, **params) -> specrun.Generation:
    prompt = engine.text.encode(engine.text.chat([{"role": "user", "content": text}]), special=False) if chat else text
    return engine.generate(prompt, specrun.SamplingParams(**params))


def test_chat_is_the_default_where_there_is_a_template(engine, tiny_bundle):
    result = invoke(tiny_bundle, "-p", PROMPT, "--max-tokens", 12)
    assert result.exit_code == 0
    assert result.stdout == expected(engine, PROMPT, chat=True, max_tokens=12).text + "\n"
    raw = invoke(tiny_bundle, "-p", PROMPT, "--max-tokens", 12, "--raw")
    assert raw.stdout == expected(engine, PROMPT, max_tokens=12).text + "\n" != result.stdout


def test_prompt_from_file_and_stdin(engine, tiny_bundle, tmp_path):
    """One newline at the end is not part of the prompt."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße, 世界\n".encode())
    wanted = expected(engine, "Grüße, 世界", max_tokens=8).text + "\n"
    for arguments, stdin in (((["-f", file]), None), ([], file.read_bytes()), (["-f", "-"], file.read_bytes())):
        assert invoke(tiny_bundle, "--raw", "--max-tokens", 8, *arguments, stdin=stdin).stdout == wanted


def test_json_holds_the_whole_answer(engine, tiny_bundle):
    options = ("--max-tokens", 9, "--temperature", 1.1, "--seed", 5, "--n", 2, "--logprobs", 3, "--ignore-eos")
    result = invoke(tiny_bundle, "-p", PROMPT, "--raw", "--json", "--drafter", "none", *options)
    answer = json.loads(result.stdout)
    wanted = expected(engine, PROMPT, max_tokens=9, temperature=1.1, seed=5, n=2, logprobs=3, ignore_eos=True)
    assert answer["prompt_token_ids"] == wanted.prompt_token_ids
    assert (answer["drafter"], answer["rule"], answer["lossless"]) == ("none", "sample-and-match", True)
    for found, choice in zip(answer["choices"], wanted.choices, strict=True):
        assert (found["token_ids"], found["text"]) == (choice.token_ids, choice.text)
        assert [entry["token"] for entry in found["logprobs"]] == choice.token_ids
        assert all(len(entry["top"]) == 3 for entry in found["logprobs"])
        assert found["stats"]["emitted"] == 9 == found["stats"]["accepted"] + found["stats"]["passes"] + 1


def test_every_sampling_option_arrives(tiny_bundle, monkeypatch):
    seen = []

    def record(self, prompt, params, **options):
        seen.append((params, options))
        raise specrun.UserError("enough")

    monkeypatch.setattr(specrun.Engine, "stream", record)
    options = {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": -0.4, "seed": 9, "n": 2, "logprobs": 4,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    lists = ["--logit-bias", "5=-2.5", "--logit-bias", "6=1", "--stop", "a", "--stop", "b c", "--ignore-eos"]
    assert invoke(tiny_bundle, "-p", "x", *words, *lists, "--drafter", "prompt-lookup").exit_code == 2
    ((params, rest),) = seen
    wanted = specrun.SamplingParams(**options, logit_bias={5: -2.5, 6: 1.0}, stop=("a", "b c"), ignore_eos=True)
    assert params == wanted and rest == {"drafter": "prompt-lookup", "rule": None}


def test_stats_go_to_stderr_and_lossy_is_said(tiny_bundle):
    exact = invoke(tiny_bundle, "-p", PROMPT, "--max-tokens", 6, "--stats")
    assert "tokens/s" in exact.stderr and "lossless" in exact.stderr and "tokens/s" not in exact.stdout
    options = ("--max-tokens", 6, "--temperature", 1, "--accept", "typical")
    assert "LOSSY" in invoke(tiny_bundle, "-p", PROMPT, *options).stderr  # without being asked
    answer = json.loads(invoke(tiny_bundle, "-p", PROMPT, *options, "--json").stdout)
    assert answer["rule"] == "typical-acceptance" and answer["lossless"] is False


def test_choices_come_one_after_the_other(tiny_bundle):
    result = invoke(tiny_bundle, "-p", PROMPT, "--n", 2, "--temperature", 1, "--max-tokens", 4)
    assert [line for line in result.stdout.splitlines() if line.startswith("---")] == ["--- choice 0", "--- choice 1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "prompt: it is empty"),
        (["-p", "x", "-f", "y"], "both -p and -f"),
        (["-f", "no-such-file"], "no-such-file: cannot be read"),
        (["-p", "x\udcff"], "--prompt: not valid UTF-8"),
        (["-p", "word " * 600], "the context is 512"),
        (["-p", "x", "--max-tokens", 0], "max_tokens: found 0"),
        (["-p", "x", "--max-tokens", -3], "max_tokens: found -3"),
        (["-p", "x", "--temperature", -0.1], "temperature: found -0.1"),
        (["-p", "x", "--temperature", "nan"], "temperature: found nan"),
        (["-p", "x", "--top-p", 0], "top_p: found 0"),
        (["-p", "x", "--top-p", 1.5], "top_p: found 1.5"),
        (["-p", "x", "--top-k", -1], "top_k: found -1"),
        (["-p", "x", "--min-p", 1], "min_p: found 1"),
        (["-p", "x", "--repetition-penalty", 0], "repetition_penalty: found 0"),
        (["-p", "x", "--frequency-penalty", 2.5], "frequency_penalty: found 2.5"),
        (["-p", "x", "--presence-penalty", -3], "presence_penalty: found -3"),
        (["-p", "x", "--seed", -1], "seed: found -1"),
        (["-p", "x", "--n", 0], "n: found 0"),
        (["-p", "x", "--logprobs", -1], "logprobs: found -1"),
        (["-p", "x", "--stop", ""], "stop: found"),
        (["-p", "x", "--logit-bias", "7"], "expected ID=VALUE"),
        (["-p", "x", "--logit-bias", "7=inf"], "logit_bias[7]: found inf"),
        (["-p", "x", "--logit-bias", "99999=1"], "logit_bias: token ids [99999]"),
        (["-p", "x", "--drafter", "magic"], "Drafter 'magic': not in the bundle"),
        (["-p", "x", "--accept", "magic"], "verification rule: found 'magic'"),
    ],
)
def test_refusals(tiny_bundle, arguments, message):
    """B08's kin: nothing is dropped silently; what cannot be served is refused by name."""
    refused(invoke(tiny_bundle, *arguments), message)


@pytest.mark.parametrize("stdin", [b"", b"\n", b"caf\xe9"])
def test_refused_stdin(tiny_bundle, stdin):
    refused(invoke(tiny_bundle, stdin=stdin), "stdin: not valid UTF-8" if stdin[:1] == b"c" else "prompt: it is empty")


def test_refused_bundles(tiny_bundle, tmp_path):
    """F08: a bundle that is absent, altered, or of another version."""
    refused(invoke(tmp_path / "absent", "-p", "x"), "no such bundle")
    refused(invoke(tmp_path, "-p", "x"), "is not a bundle")
    altered = shutil.copytree(tiny_bundle, tmp_path / "altered")
    file = max(altered.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(invoke(altered, "-p", "x"), "sha256")
    manifest = json.loads((tiny_bundle / "bundle.json").read_text())
    for key in ("format_version", "contract_version"):
        (altered / "bundle.json").write_text(json.dumps({**manifest, key: 99}))
        refused(invoke(altered, "-p", "x"), f"{key} is 99")


def refused(result: Result, message: str) -> None:
    assert message in result.stderr
    assert result.exit_code == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr


def test_utf8_leaves_under_an_ascii_locale(engine, tiny_bundle):
    """C07's kin: the terminal's locale does not decide what text may be printed."""
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start(tiny_bundle, "-p", "x", "--raw", "--ignore-eos", "--max-tokens", 60, env={**os.environ, **locale})
    out, err = process.communicate(timeout=60)
    text = expected(engine, "x", max_tokens=60, ignore_eos=True).text
    assert process.returncode == 0, err
    assert not text.isascii(), "the case needs text beyond ASCII: choose another prompt"
    assert out.decode("utf-8") == (text + "\n").replace("\n", os.linesep)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_cleanly(long_bundle: Path):
    process = start(long_bundle, "-p", "x", "--raw", "--ignore-eos", "--max-tokens", 100000, bufsize=0)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert first and b"Traceback" not in err and b"Interrupted" in err and out.endswith(b"\n")


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_closed_pipe_is_no_error_message(long_bundle: Path):
    process = start(long_bundle, "-p", "x", "--raw", "--ignore-eos", "--max-tokens", 100000, bufsize=0)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    begin = time.monotonic()
    assert process.wait(timeout=60) == 141 and time.monotonic() - begin < 30


@pytest.fixture(scope="module")
def long_bundle(tmp_path_factory) -> Path:
    """A bundle with a context so long that a process does not come to its end before the test acts."""
    from specbuild.compile import compile_bundle
    from tests.builder.tiny import write_tiny_checkpoint

    root = tmp_path_factory.mktemp("long")
    checkpoint = write_tiny_checkpoint(root / "checkpoint", "llama", max_position_embeddings=100_000)
    compile_bundle(checkpoint, root / "bundle")
    return root / "bundle"

"""The simulator: what it predicts for a text whose right answer can be counted by hand, and through the command."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import specrun
from specrun.drafters.none import NoDrafter
from specrun.economics import Economics, PassCosts
from specrun.proposal import Proposal
from specrun.sampling import SamplingParams
from tests.runtime.scripted import oracle_chain
from tools.simulate_drafters import Stream, main, read_streams, replay, simulate


def test_plain_decoding_is_one_and_an_oracle_is_counted_exactly():
    economics = Economics(PassCosts({1: 1.0, 5: 1.5}))
    stream = Stream([1, 2, 3], list(range(10, 31)), "a")
    plain = simulate(NoDrafter(), economics, [stream, stream])
    assert plain["overall"].speedup == 1.0 and plain["a"].tokens == 40
    outcome = replay(oracle_chain(stream.output, 4), economics, stream)
    assert (outcome.tokens, outcome.passes, outcome.accepted) == (20, 4, 16)
    assert outcome.speedup == pytest.approx(20 / (4 * 1.5))


def test_trees_are_walked_as_the_target_would():
    from specrun.tree import DraftTree
    from tools.simulate_drafters import walk

    tree = Proposal(np.array([9, 1, 2, 3, 4]), DraftTree(np.array([-1, 0, 0, 2, 3])))
    assert walk(tree, [2, 3, 7, 8]).tokens == [2, 3, 7]
    assert walk(tree, [2, 3, 7, 8]).path == [0, 2, 3]
    assert walk(tree, [2]).path == [0]


def test_the_command_prints_a_row_a_group(tiny_bundle, tmp_path):
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    np.savez(
        tmp_path / "s.npz", tokens=text * 2, offsets=[0, 48, 96], prompt_lengths=[16, 20], groups=["copy", "other"]
    )
    args = ["replay", str(tiny_bundle), str(tmp_path / "s.npz"), "--drafter", "suffix", "--drafter", "hybrid"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert result.output.count("copy") == result.output.count("other") == result.output.count("overall") == 2
    assert CliRunner().invoke(main, [*args[:-1], "nothing"]).exit_code != 0
    assert CliRunner().invoke(main, [*args, "--costs", "1"]).exit_code == 2


def test_what_is_recorded_is_what_the_engine_decodes(tiny_bundle, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "s.npz"
    prompts.write_text('{"id": "a", "group": "g", "turns": ["some words to go on with"], "chat": false}\n')
    args = ["record", str(tiny_bundle), str(prompts), "-o", str(out), "--max-tokens", "12"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    (stream,) = read_streams(out)
    engine = specrun.load(tiny_bundle)
    expected = engine.generate("some words to go on with", SamplingParams(max_tokens=12), drafter="none")
    assert (stream.prompt, stream.output) == (expected.prompt_token_ids, expected.token_ids) and stream.group == "g"

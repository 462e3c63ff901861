"""Drafters without weights, from the command line's words to tokens: compiled, opened, lossless, refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specrun
from specbuild.compile import compile_bundle
from specbuild.drafters import DrafterRequest, open_compiler, plan_drafters
from specbuild.drafters.ngram import count_ngrams
from specrun.drafters.ngram_table import NgramTable, hash_context
from specrun.errors import CompileError
from specrun.sampling import SamplingParams
from tests.builder.tiny import write_tiny_checkpoint

PROMPTS = [[11, 200, 7, 45, 45, 9], [3, 4, 3, 4, 3], [17, 18, 19, 20, 17, 18, 19]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    root = tmp_path_factory.mktemp("weightless")
    checkpoint = write_tiny_checkpoint(root / "model", "llama")
    save_file(count_ngrams([[45, 9, 45, 9, 3], [45, 9, 45, 7]] * 2), root / "ngram.safetensors")
    asked = [f"ngram={root}", "suffix,shared=500,width=3", "lookahead,window=2,level=3"]
    return specrun.load(compile_bundle(checkpoint, root / "bundle", drafters=asked).path)


def test_every_drafter_is_there_and_hybrid_leads(engine):
    assert engine.drafters == ["none", "hybrid", "ngram", "suffix", "lookahead", "prompt-lookup"]
    assert engine.default_drafter == "hybrid"
    assert engine.manifest.drafter("ngram").bytes > 0 and engine.manifest.drafter("suffix").bytes == 0


@pytest.mark.parametrize("name", ["hybrid", "ngram", "suffix", "lookahead", "prompt-lookup"])
def test_greedy_and_batched_tokens_are_plain_decodings(engine, name):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = [engine.generate(prompt, params, drafter="none").token_ids for prompt in PROMPTS]
    together = engine.generate_batch(PROMPTS, params, drafter=name)
    assert [g.token_ids for g in together] == plain
    assert [engine.generate(prompt, params, drafter=name).token_ids for prompt in PROMPTS] == plain


@pytest.fixture(scope="module")
def with_model(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    checkpoint = write_tiny_checkpoint(root / "model", "llama")
    bundle = compile_bundle(checkpoint, root / "bundle", drafters=[f"draft-model={checkpoint}"])
    return specrun.load(bundle.path)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_a_hybrid_with_a_real_model_drafter(with_model, sampling):
    """The target as its own draft model, taken in by the hybrid: it is asked, its tokens are accepted, and the output
    is plain decoding's: sample-and-match emits what the request's uniforms choose, whatever was drafted."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, **sampling)
    hybrid = with_model.drafter("hybrid")
    assert hybrid.member.drafter is with_model.drafter("draft-model")
    hybrid.member.priced = Free(hybrid.member.drafter)
    plain = [with_model.generate(prompt, params, drafter="none").token_ids for prompt in PROMPTS]
    together = with_model.generate_batch(PROMPTS, params, drafter="hybrid")
    assert [g.token_ids for g in together] == plain
    alone = [with_model.generate(prompt, params, drafter="hybrid") for prompt in PROMPTS]
    assert [g.token_ids for g in alone] == plain
    assert sum(g.stats.accepted for g in alone) > 20


class Free:
    def __init__(self, drafter):
        self.draft_now = drafter.draft_now

    def draft_costs(self, length):
        return [0.0] * length


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("suffix=x", "takes no source"),
        ("hybrid=x", "takes no source"),
        ("lookahead=x", "takes no source"),
        ("suffix,depth=3", "option 'depth' is unknown"),
        ("suffix,width=0", "width is '0'"),
        ("lookahead,level=1", "level is 1, expected at least 2"),
        ("hybrid,model=gpt", "model is 'gpt', expected one of"),
        ("ngram", "needs a table"),
        ("ngram=/nowhere.safetensors", "cannot be read"),
    ],
)
def test_wrong_words_are_refused_by_name(text, message):
    request = DrafterRequest.parse(text)
    with pytest.raises(CompileError, match=message):
        open_compiler(request.kind).plan(request, None)


def test_a_window_that_no_pass_can_carry_is_refused(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(CompileError, match="has 120 nodes, but a pass carries 64"):
        compile_bundle(checkpoint, tmp_path / "bundle", drafters=["lookahead,window=30,level=5"])
    assert not (tmp_path / "bundle").exists()


def test_a_damaged_table_is_refused(tmp_path):
    from specbuild.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path / "model", "llama"))
    good = count_ngrams([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]])
    cases = {
        "missing": ({k: v for k, v in good.items() if k != "tokens.2"}, r"expected all of"),
        "length": ({**good, "chances.1": good["chances.1"][:-1]}, "differ in length"),
        "vocabulary": ({**good, "tokens.1": good["tokens.1"] + 100000}, "another tokenizer"),
        "foreign": ({"weight": np.zeros(3, np.float32)}, "expected keys.n"),
    }
    for name, (arrays, message) in cases.items():
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, tmp_path / f"{name}.safetensors")
        with pytest.raises(CompileError, match=message):
            plan_drafters([f"ngram={tmp_path / name}.safetensors"], checkpoint)


def test_counts_by_hand():
    """Three texts of four hold (7, 8) -> 9; what one text repeats counts once; a prompt only gives context."""
    texts = [[7, 8, 9, 7, 8, 9, 7, 8, 9], [7, 8, 9], [0, 7, 8, 9], [7, 8, 5, 5]]
    table = NgramTable(count_ngrams(texts))
    order, rows = table.lookup((1, 7, 8))
    assert order == 2 and rows[0] == (9, pytest.approx((3 - 1) / (4 + 1), abs=1e-3))
    assert table.lookup((7,))[1][0][0] == 8
    assert table.lookup((300,)) == (0, [])
    from_second = NgramTable(count_ngrams(texts, [2, 2, 3, 2]))
    assert from_second.lookup((7, 8))[1][0][0] == 9 and from_second.lookup((7,)) == (0, [])


def test_hashes_of_the_file_format_do_not_change():
    assert [hash_context(context) for context in ((1,), (1, 2), (1, 2, 3))] == HASHES


def test_the_size_bound_keeps_the_most_useful_rows(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 30, 200).tolist() for _ in range(40)]
    small = count_ngrams(texts, max_bytes=2000)
    save_file(small, tmp_path / "t.safetensors")
    kept = load_file(tmp_path / "t.safetensors")
    rows = sum(kept[f"keys.{n}"].size for n in (1, 2, 3))
    assert 150 <= rows <= 230
    assert all(np.all(np.diff(kept[f"keys.{n}"].astype(np.int64)) >= 0) for n in (1, 2, 3))


HASHES = [1013904243, 4083814248, 1286569926]

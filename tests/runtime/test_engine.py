"""Engine over a compiled tiny bundle: requests in, results out, errors before any compute."""

from __future__ import annotations

import json
import shutil

import pytest

import specrun
from specrun.errors import BundleError, RequestError
from specrun.sampling import SamplingParams
from tests.runtime.scripted import oracle_chain, random_tree

PROMPT = [11, 200, 7, 45, 45, 9]


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    return specrun.load(tiny_bundle)


def test_generate_stream_and_batch_agree(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2)
    whole = engine.generate(PROMPT, params, drafter="none")
    deltas = list(engine.stream(PROMPT, params, drafter="none"))
    batch = engine.generate_batch([PROMPT[:3], PROMPT, PROMPT[1:]] * 4, params)
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids == batch[1].token_ids == batch[10].token_ids
    assert "".join(d.text for d in deltas) == whole.text == engine.text.decode(whole.token_ids)
    assert deltas[-1].choice.token_ids == whole.token_ids and all(d.choice is None for d in deltas[:-1])
    assert len(whole.logprobs) == 30 and all(p.top[0] == (p.token, p.logprob) for p in whole.logprobs)
    assert whole.finish_reason == "length" and whole.prompt_token_ids == PROMPT and whole.lossless


def test_trees_and_chains_leave_tokens_alone(engine):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answer = engine.generate(PROMPT, params, drafter="none").token_ids
    for drafter in (oracle_chain(answer, 5), random_tree(answer, engine.vocabulary, 1), "prompt-lookup"):
        result = engine.generate(PROMPT, params, drafter=drafter)
        assert result.token_ids == answer
    assert result.drafter == "prompt-lookup"


def test_choices(engine):
    """C08: n sampled choices differ and repeat with the seed; greedy ones are equal; streams carry the index."""
    sampled = SamplingParams(max_tokens=12, temperature=1.5, seed=4, n=3, ignore_eos=True)
    first, again = (engine.generate(PROMPT, sampled) for _ in range(2))
    assert [c.token_ids for c in first.choices] == [c.token_ids for c in again.choices]
    assert len({tuple(c.token_ids) for c in first.choices}) == 3
    assert [c.index for c in first.choices] == [0, 1, 2]
    by_index = {0: [], 1: [], 2: []}
    for delta in engine.stream(PROMPT, sampled):
        by_index[delta.index] += delta.token_ids
    assert [by_index[i] for i in range(3)] == [c.token_ids for c in first.choices]
    greedy = engine.generate(PROMPT, SamplingParams(max_tokens=8, n=2))
    assert greedy.choices[0].token_ids == greedy.choices[1].token_ids


def test_same_request_in_any_batch(engine):
    """B09: three times alone and three times inside a shuffled batch of eight."""
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=s, ignore_eos=True) for s in range(8)]
    prompts = [PROMPT[: 2 + s % 4] for s in range(8)]
    alone = [engine.generate(p, s).token_ids for p, s in zip(prompts, params, strict=True)]
    for shift in (0, 3, 5):
        order = [(i + shift) % 8 for i in range(8)]
        batch = engine.generate_batch([prompts[i] for i in order], [params[i] for i in order])
        assert [g.token_ids for g in batch] == [alone[i] for i in order]


def test_greedy_rows_beside_sampled_ones(engine):
    """B11: a greedy row of a mixed batch is its solo run."""
    greedy, hot = SamplingParams(max_tokens=16, ignore_eos=True), SamplingParams(max_tokens=16, temperature=2.0, seed=1)
    alone = engine.generate(PROMPT, greedy).token_ids
    assert engine.generate_batch([PROMPT] * 4, [greedy, hot, greedy, hot])[2].token_ids == alone


def test_closing_a_stream_frees_its_lane(engine):
    for _ in range(20):
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=50, n=4, ignore_eos=True))
        next(stream)
        stream.close()
    assert not engine._loop.active and engine._target.cache.has_lane


def test_a_conversation_keeps_its_cache(engine):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    talk = engine.conversation()
    first = list(talk.stream(PROMPT, params))[-1].choice
    prompt = [*PROMPT, *first.token_ids, 5, 6]
    second = list(talk.stream(prompt, params))[-1].choice
    assert second.token_ids == engine.generate(prompt, params).token_ids
    assert second.stats.cached_tokens == len(PROMPT) + 7
    other = list(talk.stream([*PROMPT[:3], 99], params))[-1].choice  # an edited history: the cache is rewound
    assert other.stats.cached_tokens == 3
    assert other.token_ids == engine.generate([*PROMPT[:3], 99], params).token_ids
    talk.close()
    assert len(engine._target.cache.lanes(0, 7)) == 0


def test_a_request_that_cannot_be_served_leaves_the_others(engine):
    """H06, H07: refused before compute; ten others run."""
    with pytest.raises(RequestError, match="context is"):
        engine.generate_batch([PROMPT] * 10 + [[1] * engine.max_length])
    assert not engine._loop.active
    assert len(engine.generate_batch([PROMPT] * 10, SamplingParams(max_tokens=4))) == 10


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "it is empty"),
        ("", {}, "it is empty"),
        ([1, 99999], {}, r"\[99999\] are outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"logit_bias": {99999: 1.0}}, "logit_bias: token ids"),
    ],
)
def test_bad_requests(engine, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt, SamplingParams(**params))


def test_unknown_drafter(engine):
    with pytest.raises(BundleError, match=r"Drafter 'magic'.*none"):
        engine.generate(PROMPT, drafter="magic")


def test_logit_bias_and_min_p_reach_every_token(engine):
    """B07: a banned token never appears, drafted or not."""
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    usual = engine.generate(PROMPT, params, drafter="none").token_ids
    banned = max(set(usual), key=usual.count)
    biased = SamplingParams(max_tokens=200, temperature=1.0, seed=3, ignore_eos=True, logit_bias={banned: -100.0})
    for drafter in ("none", oracle_chain(usual, 4)):
        assert banned not in engine.generate(PROMPT, biased, drafter=drafter).token_ids


def test_damaged_bundles(tiny_bundle, tmp_path):
    """F08 and the hashes: refused by name before anything is loaded."""

    def copy(name):
        return shutil.copytree(tiny_bundle, tmp_path / name)

    def edit(path, **changes):
        manifest = json.loads((path / "bundle.json").read_text())
        (path / "bundle.json").write_text(json.dumps(manifest | changes))

    altered = copy("altered")
    weights = max(altered.rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else 0)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match="sha256"):
        specrun.load(altered)
    weights.write_bytes(data[:-1])
    with pytest.raises(BundleError, match=r"expected .* bytes"):
        specrun.load(altered)
    for key in ("format_version", "contract_version"):
        other = copy(key)
        edit(other, **{key: 99})
        with pytest.raises(BundleError, match=f"{key} is 99; this specrun reads 1"):
            specrun.load(other)
    with pytest.raises(BundleError, match="no such bundle"):
        specrun.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="is not a bundle"):
        specrun.load(tmp_path / "empty")
    operators = copy("operators")
    _rename_an_operator(operators)
    with pytest.raises(BundleError, match=r"cannot load it .*NoSuchOp.*compiled with onnxruntime"):
        specrun.load(operators)  # F07
    foreign = copy("foreign")
    manifest = json.loads((foreign / "bundle.json").read_text())
    manifest["engines"][0]["target"] = "abacus"
    (foreign / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="'abacus': unknown"):
        specrun.load(foreign)


def _rename_an_operator(bundle):
    """An engine with an operator that this ONNX Runtime does not know, with a manifest that vouches for it."""
    import onnx

    from specrun.bundle import sha256_of

    manifest = json.loads((bundle / "bundle.json").read_text())
    name = manifest["engines"][0]["files"][0]
    model = onnx.load(bundle / name, load_external_data=False)
    model.graph.node[-1].op_type = "NoSuchOp"
    onnx.save(model, bundle / name)
    for record in manifest["files"]:
        if record["path"] == name:
            record |= {"sha256": sha256_of(bundle / name), "bytes": (bundle / name).stat().st_size}
    (bundle / "bundle.json").write_text(json.dumps(manifest))

"""Drafters that run no engine, over the tiny numpy target: made, run in batches, compared with plain decoding."""

from __future__ import annotations

from functools import partial

import numpy as np
from scipy.stats import chisquare

from specbuild.drafters.ngram import count_ngrams
from specrun.decoder import Row
from specrun.drafters.hybrid import Hybrid, Member
from specrun.drafters.lookahead import Lookahead, PoolSource
from specrun.drafters.ngram_table import Ngram, NgramSource, NgramTable
from specrun.drafters.prompt_lookup import PromptLookup, newest
from specrun.drafters.suffix import OwnText, Suffix, suffix_sources
from specrun.economics import Economics, PassCosts
from specrun.proposal import Proposal
from tests.runtime.scripted import Scripted
from tests.runtime.test_loop import finish, plain, sequence
from tests.runtime.tiny_engine import TinyEngine

FREE = {1: 1.0, 64: 1.06}  # a GPU's: rows cost next to nothing, so trees are drafted
TWO_CORES = {1: 1.0, 2: 1.15, 4: 1.35, 8: 1.65, 16: 2.15, 32: 3.15}
EOS = frozenset({3})
PROMPTS = [
    [5, 9, 2, 7, 1, 1, 8, 20, 30, 4, 6],
    [1, 2, 1, 2, 1, 2, 1],
    [8],
    [11, 12, 13, 14, 11, 12, 13, 15, 11, 12, 13, 14, 11, 12],
]


class ModelDrafter(Scripted):
    """Stands for a drafter with an engine: it knows the answer to each prompt and is right ``rate`` of the time."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], rate: float, cost: float, seed: int = 0) -> None:
        super().__init__(self._chain)
        self.name, self.answers, self.rate, self.cost = "model", answers, rate, cost
        self.asked = 0
        self.rng = np.random.default_rng(seed)

    def draft_now(self, sequences, budgets):
        return self.propose(sequences, budgets)

    def draft_costs(self, length: int) -> list[float]:
        return [self.cost] * length

    def _chain(self, sequence, budget):
        self.asked += 1
        at = len(sequence.output)
        tokens = [
            token if self.rng.random() < self.rate else (token + 1) % 32
            for token in self.answers[tuple(sequence.prompt)][at : at + min(2, budget)]
        ]
        chain = Proposal.chain(sequence.pending, tokens)
        return Proposal(chain.tokens, chain.tree, draft_cost=self.cost)


def lookup(economics: Economics) -> PromptLookup:
    return PromptLookup("lookup", economics.of("lookup"), EOS, [OwnText(partial(newest, "lookup", 2, 4))], width=1)


def suffix(economics: Economics, shared: int = 0, **options) -> Suffix:
    return Suffix("suffix", economics.of("suffix"), EOS, suffix_sources("suffix", shared=shared), **options)


def table(texts) -> NgramTable:
    return NgramTable(count_ngrams(texts))


def ngram(economics: Economics, texts) -> Ngram:
    return Ngram("ngram", economics.of("ngram"), EOS, [NgramSource("ngram", table(texts))])


def hybrid(economics: Economics, texts, model=None) -> Hybrid:
    sources = [*suffix_sources("suffix"), NgramSource("ngram", table(texts))]
    made = Hybrid("hybrid", economics.of("hybrid"), EOS, sources)
    made.member = None if model is None else Member(model, model)
    return made


def lookahead(economics: Economics, window=3, level=3, guesses=3, capacity=16) -> Lookahead:
    return Lookahead(
        "lookahead",
        economics.of("lookahead"),
        EOS,
        [PoolSource("lookahead", level, guesses)],
        max_nodes=guesses * (level - 1),
        width=guesses,
        window=window,
        level=level,
        capacity=capacity,
    )


def loop_of(engine: TinyEngine, costs=None):
    """A loop whose cost curve is ``costs``."""
    loop = engine.loop()
    loop.economics = Economics(PassCosts(costs or FREE))
    return loop


def decode(engine, loop, drafter, prompts, **params):
    return finish(loop, *[sequence(engine, prompt, drafter, **params) for prompt in prompts])


def recorded(drafter) -> list[Proposal]:
    """Collects what ``drafter`` proposes from here on."""
    seen: list[Proposal] = []
    propose = drafter.propose

    def recording(sequences, budgets):
        proposals = propose(sequences, budgets)
        seen.extend(proposals)
        return proposals

    drafter.propose = recording
    return seen


def answers(engine, prompts, **params):
    return [plain(engine, prompt, **params).output for prompt in prompts]


LAW_PROMPT = [1, 2, 4, 1, 2, 0, 1, 2, 4, 1, 2]


def sampled_law(engine: TinyEngine, loop, drafter, draws: int = 960) -> tuple[float, int]:
    """(p-value of chi-square between the first three sampled tokens and their exact joint law, tokens accepted)."""
    size = engine.vocab
    joint = np.zeros((size, size, size))
    first = law(engine, LAW_PROMPT)
    for a in range(size):
        second = law(engine, [*LAW_PROMPT, a])
        for b in range(size):
            joint[a, b] = first[a] * second[b] * law(engine, [*LAW_PROMPT, a, b])
    counts, accepted = np.zeros_like(joint), 0
    for start in range(0, draws, 8):
        params = {"max_tokens": 5, "temperature": 1.0}
        batch = [sequence(engine, LAW_PROMPT, drafter, seed=start + i, **params) for i in range(8)]
        for s in finish(loop, *batch):
            counts[tuple(s.output[:3])] += 1
            accepted += s.stats.accepted
    expected = joint.ravel() * counts.sum()
    rare = expected < 5
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    return float(chisquare(observed, np.append(expected[~rare], expected[rare].sum())).pvalue), accepted


def law(engine: TinyEngine, tokens: list[int]) -> np.ndarray:
    """Softmax of the target's logits after ``tokens``."""
    decoder = engine.decoder()
    lane = decoder.cache.acquire()
    row = decoder.run([Row.of_chunk(lane, np.array(tokens), logits=True)]).logits[0][0, : engine.vocab]
    p = np.exp(row.astype(np.float64) - row.max())
    return p / p.sum()

"""Engine: a loaded bundle. ``specrun.load(path)`` makes one; ``generate`` and ``stream`` decode with it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from specrun.backends import open_device, open_session
from specrun.bundle import Bundle, DrafterRecord, EngineRecord
from specrun.cache import KVCache, Lane
from specrun.calibration import pass_costs
from specrun.decoder import Decoder
from specrun.drafters import DraftContext, Drafter, open_drafter
from specrun.economics import Economics
from specrun.errors import BundleError, RequestError
from specrun.heads import Heads
from specrun.loop import Emission, Loop
from specrun.rules import Rule
from specrun.sampling import SamplingParams
from specrun.sequence import Sequence, Statistics, TokenLogprob
from specrun.text import Text, TextStream

Prompt = str | Seq[int]


@dataclass(frozen=True)
class Choice:
    """One continuation. ``text`` ends before a stop string; ``token_ids`` end with the token that completed it."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" or "length"
    stop_reason: int | str | None  # the EOS id or stop string that ended it
    logprobs: list[TokenLogprob] | None
    stats: Statistics


@dataclass(frozen=True)
class Generation:
    """The answer to one request: ``params.n`` choices; the first one's fields are here as well."""

    prompt_token_ids: list[int]
    choices: tuple[Choice, ...]
    drafter: str
    lossless: bool

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def stats(self) -> Statistics:
        return self.choices[0].stats


@dataclass(frozen=True)
class Delta:
    """A piece of a stream. ``text`` may be empty while a character or a possible stop string is incomplete."""

    index: int
    token_ids: list[int]
    text: str
    choice: Choice | None = None  # the whole continuation, on its last delta


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    verify: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Engine:
    """Opens a bundle that ``specbuild compile`` wrote.

    ``threads``: CPU threads a pass uses (None: the cores this process may use). ``verify`` hashes every file first;
    ``progress`` is called with the bytes hashed. Raises BundleError for a bundle that cannot be run here.
    """
    return Engine(Bundle.open(path, verify, progress), threads)


class Engine:
    """Decodes requests with one bundle. Calls from several threads take turns."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.bundle, self.manifest = bundle, bundle.manifest
        self.text = Text(bundle.path)
        self._threads = threads
        record = self.manifest.engine("target")
        self._device = open_device(bundle, record.target)
        self._target = self._open_decoder("target")
        self.economics = Economics(pass_costs(bundle, self._target, threads))
        self._loop = Loop(self._target, self.manifest.limits, self.economics, self.vocabulary)
        self._drafters: dict[str, Drafter] = {}
        self._lock = threading.RLock()

    @property
    def vocabulary(self) -> int:
        """Ids that may be emitted: 0 to here."""
        return min(self.manifest.model.vocab_size, self.manifest.model.tokenizer_size)

    @property
    def max_length(self) -> int:
        """Positions a sequence may use, prompt and output together."""
        return self.manifest.model.max_length

    @property
    def drafters(self) -> list[str]:
        """Names to choose from; ``none`` is always there."""
        return ["none", *(record.name for record in self.manifest.drafters)]

    @property
    def default_drafter(self) -> str:
        """The first of the bundle's drafters: the builder puts the one to prefer in front."""
        return self.manifest.drafters[0].name if self.manifest.drafters else "none"

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        rule: Rule | None = None,
    ) -> Generation:
        """Decodes one request to its end.

        ``prompt`` is text (BOS is added where the model has one) or token ids. ``drafter`` is a name of the bundle, an
        object, or None for the bundle's default; ``rule`` replaces the drafter's verification rule. Raises
        RequestError, before any compute, for what cannot be served.
        """
        return self.generate_batch([prompt], params, drafter=drafter, rule=rule)[0]

    def generate_batch(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | list[str | Drafter | None] | None = None,
        rule: Rule | None = None,
    ) -> list[Generation]:
        """Decodes several requests together, as many at a time as the bundle has lanes. One params (and drafter) for
        all, or one each. Results come in the order of the prompts and do not depend on it."""
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) or params is None else list(params)
        chosen = drafter if isinstance(drafter, list) else [drafter] * len(prompts)
        if not len(prompts) == len(all_params) == len(chosen):
            raise RequestError(
                f"generate_batch: {len(prompts)} prompts, {len(all_params)} params and {len(chosen)} drafters; "
                "give one for all, or one for each."
            )
        with self._lock:
            requests = [
                self._sequences(prompt, settings or SamplingParams(), name, rule)
                for prompt, settings, name in zip(prompts, all_params, chosen, strict=True)
            ]
            for _ in self._run([sequence for request in requests for sequence in request]):
                pass
        return [_generation(request) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        rule: Rule | None = None,
    ) -> Generator[Delta, None, None]:
        """Decodes one request and yields what it gains pass by pass. Closing the iterator cancels it."""
        sequences = self._sequences(prompt, params or SamplingParams(), drafter, rule)
        return self._deltas(sequences)

    def conversation(self) -> Conversation:
        """A place for several turns that keeps the cache between them."""
        return Conversation(self)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids a prompt stands for, checked. Raises RequestError."""
        ids = self.text.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise RequestError("prompt: it is empty and the model has no BOS to start from. Give at least a token.")
        wrong = [token for token in ids if not 0 <= token < self.vocabulary]
        if wrong:
            raise RequestError(f"prompt: token ids {wrong[:5]} are outside the vocabulary, 0 to {self.vocabulary - 1}.")
        if len(ids) >= self.max_length:
            raise RequestError(
                f"prompt: {len(ids)} tokens, but the context is {self.max_length} and one must be left to generate. "
                "Shorten the prompt or compile with a larger --max-length."
            )
        return ids

    def drafter(self, name: str | Drafter | None) -> Drafter:
        """The drafter of that name, opened on first use."""
        if name is None:
            name = self.default_drafter
        if not isinstance(name, str):
            return name
        if name not in self._drafters:
            record = DrafterRecord("none", "none") if name == "none" else self.manifest.drafter(name)
            self._drafters[name] = open_drafter(record, self._context())
        return self._drafters[name]

    def _sequences(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafter: str | Drafter | None,
        rule: Rule | None,
        lane: Lane | None = None,
    ) -> list[Sequence]:
        ids = self.encode(prompt)
        wrong = [token for token in params.logit_bias if token >= self.vocabulary]
        if wrong:
            raise RequestError(f"logit_bias: token ids {wrong[:5]} are outside 0 to {self.vocabulary - 1}.")
        opened = self.drafter(drafter)
        return [
            Sequence(
                ids,
                params,
                opened,
                rule or opened.rule,
                TextStream(self.text, params.stop),
                frozenset(self.manifest.model.eos_token_ids),
                self.max_length,
                choice,
                lane,
                lane is not None,
            )
            for choice in range(params.n)
        ]

    def _run(self, sequences: list[Sequence]) -> Iterator[Emission]:
        """Admits sequences as lanes come free and steps until all are finished; cancels the rest when closed early."""
        waiting = deque(sequences)
        try:
            while waiting or any(sequence in self._loop.active for sequence in sequences):
                while waiting and (waiting[0].lane or self._loop.has_room):
                    yield self._loop.admit(waiting.popleft())
                if self._loop.active:
                    yield from self._loop.step()
        finally:
            for sequence in sequences:
                self._loop.cancel(sequence)

    def _deltas(self, sequences: list[Sequence]) -> Generator[Delta, None, None]:
        with self._lock:
            for emission in self._run(sequences):
                sequence = emission.sequence
                choice = _choice(sequence) if sequence.finish_reason else None
                yield Delta(sequence.choice, emission.tokens, emission.text, choice)

    def _context(self) -> DraftContext:
        return DraftContext(
            self.bundle,
            self.manifest.engine("target"),
            self.economics,
            self.vocabulary,
            frozenset(self.manifest.model.eos_token_ids),
            self._open_decoder,
            self._open_heads,
            self.drafter,
        )

    def _open_decoder(self, name: str) -> Decoder:
        record = self._record(name, "decoder")
        if record.cache is None:
            raise BundleError(f"Engine {name!r}: a decoder without a cache shape. Compile the bundle again.")
        limits = self.manifest.limits
        cache = KVCache(record.cache, self._device, limits.max_batch, self.max_length, limits.max_nodes)
        return Decoder(record, open_session(self.bundle, record, self._device, self._threads), self._device, cache)

    def _open_heads(self, name: str) -> Heads:
        record = self._record(name, "heads")
        return Heads(record, open_session(self.bundle, record, self._device, self._threads), self._device)

    def _record(self, name: str, kind: str) -> EngineRecord:
        record = self.manifest.engine(name)
        if record.kind != kind:
            raise BundleError(f"Engine {name!r}: a {record.kind} engine, expected a {kind} engine. Compile again.")
        return record


class Conversation:
    """Turns that share a cache lane: each prompt only computes what the cache does not hold yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lane: Lane | None = None
        self._tokens: list[int] = []

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Generator[Delta, None, None]:
        """Like Engine.stream, for a prompt that usually starts with all that was said before."""
        engine, settings = self._engine, params or SamplingParams()
        if settings.n != 1:
            raise RequestError(f"n: a conversation has one continuation a turn, found n={settings.n}.")
        cache = engine._target.cache
        with engine._lock:
            ids = engine.encode(prompt)
            if self._lane is None:
                self._lane = cache.acquire()
            cache.rewind(self._lane, min(_common(self._tokens, ids), self._lane.length, len(ids) - 1))
            (sequence,) = engine._sequences(ids, settings, drafter, None, self._lane)
            try:
                yield from engine._deltas([sequence])
            finally:
                self._tokens = sequence.tokens

    def close(self) -> None:
        """Gives the lane back."""
        if self._lane is not None:
            self._engine._target.cache.release(self._lane)
            self._lane = None
            self._tokens = []


def _common(left: Seq[int], right: Seq[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _choice(sequence: Sequence) -> Choice:
    return Choice(
        sequence.choice,
        sequence.output,
        sequence.stream.text,
        sequence.finish_reason or "cancelled",
        sequence.stop_reason,
        sequence.logprobs if sequence.params.logprobs is not None else None,
        sequence.stats,
    )


def _generation(sequences: list[Sequence]) -> Generation:
    first = sequences[0]
    return Generation(first.prompt, tuple(map(_choice, sequences)), first.drafter.name, first.rule.lossless)

"""Plain decoding against peers, alternately in one run: a bare ONNX Runtime loop over the same graph, and transformers.

    python -m tools.bench_peers demo.bundle --model MODEL.gguf

Every contender decodes the same prompt greedily to the same number of tokens, prefill included, with the same number of
threads. Needs the test extra for transformers; without --model only ONNX Runtime is compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import specrun
from specbuild.checkpoint import open_checkpoint
from specrun import contract
from specrun.backends.ort import usable_cores
from specrun.bundle import Bundle
from specrun.cache import STEP, grown
from specrun.errors import RequestError, UserError
from specrun.prompts import BUILTIN, load_tasks

Decode = Callable[[list[int], int], list[int]]  # (prompt, new tokens) -> new tokens


class BareLoop:
    """The target's graph in the shortest loop there is: bound buffers, one pass a token, numpy's argmax."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        self.record = bundle.manifest.engine("target")
        if self.record.target != "cpu" or self.record.cache is None:
            raise RequestError(f"{bundle.path}: its target engine is for {self.record.target}; expected a cpu bundle.")
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        path = str(bundle.file(self.record.files[0]))
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.capacity = 0

    def __call__(self, prompt: list[int], count: int) -> list[int]:
        self._reserve(len(prompt) + count)
        step = self._bind(self.record.min_rows)
        token = self._bind(len(prompt))(np.array(prompt), 0, len(prompt) - 1)
        output = [token]
        while len(output) < count:
            token = step(np.full(self.record.min_rows, token), len(prompt) + len(output) - 1, 0)
            output.append(token)
        return output

    def _reserve(self, rows: int) -> None:
        """Buffers of the capacity that the product's cache has for so many rows: attention's cost follows it."""
        capacity = grown(STEP, rows)
        if capacity == self.capacity:
            return
        cache = self.record.cache
        assert cache is not None
        self.capacity = capacity
        names = [name(layer) for layer in range(cache.layers) for name in (contract.key_cache, contract.value_cache)]
        self.caches = {
            name: np.zeros((1, cache.kv_heads, capacity, cache.head_dim), dtype=cache.dtype) for name in names
        }

    def _bind(self, nodes: int) -> Callable[[np.ndarray, int, int], int]:
        """One pass of ``nodes`` tokens: (tokens, context length, row with logits) -> its argmax."""
        inputs = {
            contract.TOKENS: np.zeros((1, nodes), dtype=np.int64),
            contract.POSITIONS: np.zeros((1, nodes), dtype=np.int64),
            contract.CONTEXT_LENGTHS: np.zeros(1, dtype=np.int64),
            contract.TREE_MASK: np.tril(np.ones((1, nodes, nodes), dtype=np.bool_)),
            contract.LOGIT_ROWS: np.zeros((1, self.record.min_rows), dtype=np.int64),
        }
        logits = np.zeros((1, self.record.min_rows, self.record.vocab_size), dtype=np.float32)
        binding = self.session.io_binding()
        for name, array in {**inputs, **self.caches}.items():
            kind = np.bool_ if array.dtype == np.bool_ else array.dtype.type
            binding.bind_input(name, "cpu", 0, kind, array.shape, array.ctypes.data)
        outputs = {contract.LOGITS: logits, **{contract.updated(name): array for name, array in self.caches.items()}}
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in {output.name for output in self.session.get_outputs()} - set(outputs):
            binding.bind_output(name, "cpu")

        def run(tokens: np.ndarray, context: int, row: int) -> int:
            inputs[contract.TOKENS][0] = tokens
            inputs[contract.POSITIONS][0] = context + np.arange(nodes)
            inputs[contract.CONTEXT_LENGTHS][0] = context
            inputs[contract.LOGIT_ROWS][0] = row
            self.session.run_with_iobinding(binding)
            return int(logits[0, 0].argmax())

        return run


def own(engine: specrun.Engine, drafter: str) -> Decode:
    """The product, plain or with a drafter."""

    def decode(prompt: list[int], count: int) -> list[int]:
        params = specrun.SamplingParams(max_tokens=count, ignore_eos=True)
        return engine.generate(prompt, params, drafter=drafter).token_ids

    return decode


def transformers(model: Path, threads: int, lookup: int | None = None) -> Decode:
    """transformers' generate in fp32, plain or with its own prompt lookup."""
    try:
        import torch
    except ImportError:
        raise UserError("torch is not installed. Run: pip install 'specbuild[test]'") from None
    torch.set_num_threads(threads)
    network = _llama(model)
    options: dict[str, Any] = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}

    def decode(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        with torch.inference_mode():
            out = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **options)
        return [int(token) for token in out[0, len(prompt) :]]

    return decode


def _llama(model: Path) -> Any:
    """transformers' Llama in fp32 with the checkpoint's tensors (its own GGUF reader needs yet another package)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(model)
    c = checkpoint.config
    if c.family != "llama":
        raise RequestError(f"{model}: of family {c.family}; this comparison builds transformers' Llama only.")
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope.theta,
        tie_word_embeddings=c.tie_embeddings,
        max_position_embeddings=c.max_position,
    )
    network = LlamaForCausalLM(config)
    network.load_state_dict({name: torch.from_numpy(w.read_float32()) for name, w in checkpoint.tensors.items()}, False)
    network.tie_weights()
    return network.eval()


def measure(contenders: dict[str, Decode], prompt: list[int], count: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of each contender, alternately, ``rounds`` times after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    outputs: dict[str, list[int]] = {}
    for number in range(rounds + 1):
        for name, decode in contenders.items():
            begin = time.perf_counter()
            outputs[name] = decode(prompt, count)
            if number:
                seconds[name].append(time.perf_counter() - begin)
    first = next(iter(contenders))
    return [
        {
            "contender": name,
            "seconds": times,
            "tokens_per_second": count / statistics.median(times),
            "plain_over_it": statistics.median(a / b for a, b in zip(times, seconds[first], strict=True)),
            "same_tokens": _same(outputs[first], outputs[name]),
        }
        for name, times in seconds.items()
    ]


def _same(expected: list[int], found: list[int]) -> int:
    """Tokens up to the first difference."""
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), len(expected))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="The checkpoint, for transformers.")
@click.option("--drafter", "drafters", multiple=True, help="Of the bundle, beside plain; repeatable. [default: all]")
@click.option("--group", default="copy", show_default=True, help="The first built-in prompt of this group.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--lookup", type=int, help="Also transformers with its prompt lookup of so many tokens.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def main(
    bundle: Path,
    model: Path | None,
    drafters: tuple[str, ...],
    group: str,
    max_tokens: int,
    rounds: int,
    lookup: int | None,
    json_file: Path | None,
) -> None:
    """Compare BUNDLE's plain decoding with peers."""
    try:
        rows = _compare(bundle, model, drafters, group, max_tokens, rounds, lookup)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    table = Table(
        "contender", "tokens/s", "own plain is x times as fast", "same tokens", caption=f"{max_tokens} tokens"
    )
    for row in rows:
        speeds = (f"{row['tokens_per_second']:.1f}", f"{row['plain_over_it']:.2f}")
        table.add_row(row["contender"], *speeds, f"{row['same_tokens']}/{max_tokens}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _compare(
    path: Path,
    model: Path | None,
    drafters: tuple[str, ...],
    group: str,
    count: int,
    rounds: int,
    lookup: int | None,
) -> list[dict[str, Any]]:
    threads = usable_cores()
    engine = specrun.load(path, threads=threads)
    task = next((task for task in load_tasks(BUILTIN) if task.group == group), None)
    if task is None:
        raise RequestError(f"--group: found {group!r}, which is not among the built-in prompts.")
    messages = [{"role": "user", "content": task.turns[0]}]
    text = engine.text.chat(messages) if task.chat else task.turns[0]
    prompt = engine.text.encode(text, special=not task.chat)
    contenders = {"own plain": own(engine, "none"), "bare ONNX Runtime loop": BareLoop(engine.bundle, threads)}
    contenders |= {f"own {name}": own(engine, name) for name in drafters or engine.drafters if name != "none"}
    if model is not None:
        contenders["transformers"] = transformers(model, threads)
        if lookup is not None:
            contenders[f"transformers, lookup {lookup}"] = transformers(model, threads, lookup)
    return measure(contenders, prompt, count, rounds)


if __name__ == "__main__":
    main()

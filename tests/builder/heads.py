"""Heads that are right under one reading by construction: random weights, and an LM head fitted to the target's text.

What comes before the LM head is random and depends on every reading; the LM head is fitted so that under one of them
the head predicts the target's own greedy continuations of the built-in prompts. Under another it meets other features.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from specbuild.checkpoint import open_checkpoint
from specbuild.doctor.examine import Effort, context_of
from specbuild.doctor.transcript import prompts_of, record
from specbuild.doctor.workshop import Workshop
from specbuild.drafters import DrafterRequest, open_compiler
from specrun.contract import FINAL_NORM
from specrun.decoder import Row
from specrun.text import Text
from tests.runtime.drafters import fixtures

EFFORT = Effort(prompts=6, tokens=40)


def softmax_fit(x, labels, classes, steps=150, rate=0.05):
    """Weights [classes, H] of a linear classifier of rows x [N, H], by Adam on the cross-entropy. Classes that no row
    has stay zero."""
    used, labels = np.unique(labels, return_inverse=True)
    weights = np.zeros((used.size, x.shape[1]))
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(1, steps + 1):
        logits = x @ weights.T
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(x)), labels] -= 1
        gradient = p.T @ x / len(x)
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        weights -= rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
    whole = np.zeros((classes, x.shape[1]), dtype=np.float32)
    whole[used] = weights
    return whole


def transcripts(target, taps):
    """The target's text as the doctor reads it, with ``taps``; and the workshop that wrote it."""
    checkpoint = open_checkpoint(target)
    directory = Path(tempfile.mkdtemp())
    workshop = Workshop(context_of(checkpoint, directory, None), threads=1)
    checkpoint.tokenizer.write(directory)
    prompts = prompts_of(checkpoint, Text(directory), EFFORT.prompts)
    eos = frozenset(checkpoint.tokenizer.eos_token_ids)
    decoder = workshop.target(tuple(sorted(set(taps))), len(prompts))
    return workshop, record(decoder, prompts, EFFORT.tokens, workshop.vocabulary, eos)


def states(target, drafter):
    """x [P, H], what the head's output norm reads, and the token [P] it should predict, two passes a position: after
    the target's features and after its own."""
    request = DrafterRequest.parse(drafter)
    plan = open_compiler(request.kind).plan(request, open_checkpoint(target))
    workshop, lines = transcripts(target, plan.taps)
    drafting = workshop.drafting(plan, None)
    decoder, xs, labels = drafting.decoder, [], []
    for line in lines:
        rows = line.tokens.size - 3
        known = np.arange(rows)
        mask = np.tri(rows, dtype=bool)
        lane = decoder.cache.acquire()
        given = drafting._inputs(line.features(plan.taps)[:rows], front=True)
        x = decoder.run([Row(lane, line.tokens[1 : 1 + rows], known, mask, known, 0, given)]).hidden[0].copy()
        own = drafting._inputs(x, front=False)
        both = np.concatenate([mask, np.eye(rows, dtype=bool)], axis=1)
        y = decoder.run([Row(lane, line.tokens[2 : 2 + rows], known + 1, both, known, 0, own, rows)]).hidden[0].copy()
        decoder.cache.release(lane)
        xs += [x[line.start - 1 :], y[line.start - 1 :]]
        labels += [line.tokens[line.start + 1 : 2 + rows], line.tokens[line.start + 2 : 3 + rows]]
    workshop.close()
    return np.concatenate(xs), np.concatenate(labels)


def fit_eagle3(target, path):
    """Tensors of an EAGLE-3 head in the authors' layout, over a pruned vocabulary that holds what the target says."""
    tensors = fixtures.eagle3_tensors(pruned=False)
    x, labels = states(target, f"eagle3={fixtures.write_eagle3(path, tensors)}")
    ids = np.unique(np.concatenate([labels, np.arange(0, fixtures.VOCAB, 7)]))
    lm_head = softmax_fit(normed(x, tensors["norm.weight"]), np.searchsorted(ids, labels), ids.size)
    return tensors | {
        "lm_head.weight": lm_head,
        "d2t": ids - np.arange(ids.size),
        "t2d": np.isin(np.arange(fixtures.VOCAB), ids),
    }


def fit_eagle(target, path, options=""):
    """An EAGLE-1 head with an LM head of its own; right when it is read with ``options``."""
    tensors = fixtures.eagle_tensors()
    x, labels = states(target, f"eagle={fixtures.write_eagle(path, tensors)}{options}")
    return tensors | {"lm_head.weight": softmax_fit(x, labels, fixtures.VOCAB)}


def fit_deepseek(write, layers, options=""):
    """One MTP layer in DeepSeek-V3's layout for the target that ``write`` makes with some extra tensors."""
    tensors, prefix = fixtures.deepseek_tensors(target_layers=layers), f"model.layers.{layers}."
    x, labels = states(write(tensors), f"mtp{options}")
    x = normed(x, tensors[f"{prefix}shared_head.norm.weight"])
    return tensors | {f"{prefix}shared_head.head.weight": softmax_fit(x, labels, fixtures.VOCAB)}


def fit_medusa(target, offset, heads=2):
    """Medusa heads of which head i predicts the token ``offset`` + i places on."""
    tensors = fixtures.medusa_tensors(heads=heads, blocks=1)
    workshop, lines = transcripts(target, (FINAL_NORM,))
    workshop.close()
    for i in range(heads):
        xs, labels = [], []
        for line in lines:
            at = np.arange(line.start - 1, line.tokens.size - offset - i)
            xs.append(line.streams[FINAL_NORM][at])
            labels.append(line.tokens[at + offset + i])
        x = np.concatenate(xs)
        z = x @ tensors[f"{i}.0.linear.weight"].T + tensors[f"{i}.0.linear.bias"]
        fitted = softmax_fit(x + z / (1 + np.exp(-z)), np.concatenate(labels), fixtures.VOCAB)
        tensors[f"{i}.1.weight"] = fitted
    return tensors


def normed(x, weight):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight

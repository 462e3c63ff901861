"""Draft heads in torch, written from the papers: whole rows from scratch, no cache, no trees.

A head is asked for its law after the target's tokens and a drafted path; it is given the target's features.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.runtime.drafters.fixtures import DIM, HEADS, KV


def rms(x, weight, epsilon=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(x, stretch, theta=10000.0):
    """x [rows, heads, DIM] at positions 0, 1, ..., interpolated by ``stretch``."""
    half = DIM // 2
    angles = (
        torch.arange(x.shape[0], dtype=x.dtype)[:, None] / stretch / theta ** (torch.arange(half, dtype=x.dtype) / half)
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attention(x, w, prefix, stretch=1.0):
    def project(name):
        return F.linear(x, w[f"{prefix}{name}.weight"], w.get(f"{prefix}{name}.bias"))

    q = rotate(project("q_proj").view(-1, HEADS, DIM), stretch)
    k = rotate(project("k_proj").view(-1, KV, DIM), stretch).repeat_interleave(HEADS // KV, 1)
    v = project("v_proj").view(-1, KV, DIM).repeat_interleave(HEADS // KV, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    return F.linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1), w[f"{prefix}o_proj.weight"])


def mlp(x, w, prefix):
    gate, up = F.linear(x, w[f"{prefix}gate_proj.weight"]), F.linear(x, w[f"{prefix}up_proj.weight"])
    return F.linear(F.silu(gate) * up, w[f"{prefix}down_proj.weight"])


class Head:
    """``w``: the head's tensors; ``target``: the target's. ``rows`` gives logits and fed-back features of all rows."""

    def __init__(self, w, target):
        self.w = {name: torch.from_numpy(value).double() for name, value in w.items()}
        self.target = {name: torch.from_numpy(value).double() for name, value in target.items()}
        self.embedding = self.target["model.embed_tokens.weight"]
        self.lm_head = self.target["lm_head.weight"]

    def first(self, features):
        """The target's features as the head reads them."""
        return features

    def rows(self, tokens, features):
        raise NotImplementedError

    def law(self, tokens, features, path):
        """Probabilities of the token after ``tokens`` and ``path``; features [len(tokens) - 1, W] of the target."""
        features, after = self.first(torch.as_tensor(features).double()), [*tokens[1:], *path]
        for known in range(len(tokens) - 1, len(after) + 1):
            logits, fed_back = self.rows(torch.tensor(after[:known]), features)
            features = torch.cat((features, fed_back[-1:]))
        return logits[-1].softmax(-1).numpy()

    def layer(self, x, prefix):
        w = self.w
        first = w.get(f"{prefix}input_layernorm.weight")
        x = x + attention(x if first is None else rms(x, first), w, f"{prefix}self_attn.")
        return x + mlp(rms(x, w[f"{prefix}post_attention_layernorm.weight"]), w, f"{prefix}mlp.")


class Eagle(Head):
    """EAGLE-1: concat[embedding, feature], a layer without input norm, the target's head on its output."""

    def rows(self, tokens, features):
        x = F.linear(torch.cat((self.embedding[tokens], features), -1), self.w["fc.weight"], self.w.get("fc.bias"))
        x = self.layer(x, "layers.0.")
        return x @ self.lm_head.T, x


class Eagle3(Head):
    norm_before_residual = False
    norm_output = False
    stretch = 1.0

    def first(self, features):
        w, width = self.w, features.shape[1]
        parts = features.split(width // 3, -1)
        for names in (["aux_norm_low", "aux_norm_mid", "aux_norm_high"], ["fc_norm.0", "fc_norm.1", "fc_norm.2"]):
            if f"{names[0]}.weight" in w:
                parts = [rms(x, w[f"{name}.weight"]) for x, name in zip(parts, names, strict=True)]
        fused = torch.cat(parts, -1)
        if "input_norm.weight" in w:
            fused = rms(fused, w["input_norm.weight"])
        return F.linear(fused, w["fc.weight"], w.get("fc.bias"))

    def rows(self, tokens, features):
        w = self.w
        embedding = w.get("embed_tokens.weight", self.embedding)
        normed = rms(features, w["midlayer.hidden_norm.weight"])
        both = torch.cat((rms(embedding[tokens], w["midlayer.input_layernorm.weight"]), normed), -1)
        x = (normed if self.norm_before_residual else features) + attention(
            both, w, "midlayer.self_attn.", self.stretch
        )
        x = x + mlp(rms(x, w["midlayer.post_attention_layernorm.weight"]), w, "midlayer.mlp.")
        output = rms(x, w["norm.weight"])
        logits = torch.full((len(tokens), len(self.embedding)), float("-inf"), dtype=torch.float64)
        ids = (torch.arange(len(w["lm_head.weight"])) + w["d2t"]).long()
        logits[:, ids] = output @ w["lm_head.weight"].T
        return logits, output if self.norm_output else x


class MiMo(Head):
    """concat[norm(hidden), norm(embedding)]; the final norm's output is predicted from and fed back."""

    prefix = "model.mtp_layers.0."

    def rows(self, tokens, features):
        w, p = self.w, self.prefix
        embedded = rms(self.embedding[tokens], w[f"{p}token_layernorm.weight"])
        both = torch.cat((rms(features, w[f"{p}hidden_layernorm.weight"]), embedded), -1)
        x = rms(self.layer(F.linear(both, w[f"{p}input_proj.weight"]), p), w[f"{p}final_layernorm.weight"])
        return x @ self.lm_head.T, x


class DeepSeek(Head):
    """concat[enorm(embedding), hnorm(hidden)]; logits from the shared head's norm, the layer's output is fed back."""

    prefix = "model.layers.4."

    def rows(self, tokens, features):
        w, p = self.w, self.prefix
        embedded = rms(w[f"{p}embed_tokens.weight"][tokens], w[f"{p}enorm.weight"])
        both = torch.cat((embedded, rms(features, w[f"{p}hnorm.weight"])), -1)
        x = self.layer(F.linear(both, w[f"{p}eh_proj.weight"]), p)
        return rms(x, w[f"{p}shared_head.norm.weight"]) @ w[f"{p}shared_head.head.weight"].T, x


class MiMoTwo(Head):
    """Two layers: the second reads the first one's output at the same row, with the token one further on."""

    def law(self, tokens, features, path):
        features = torch.as_tensor(features).double()
        first = MiMo.__new__(MiMo)
        first.__dict__ = self.__dict__ | {"prefix": "model.mtp_layers.0."}
        second = MiMo.__new__(MiMo)
        second.__dict__ = self.__dict__ | {"prefix": "model.mtp_layers.1."}
        logits, own = first.rows(torch.tensor(tokens[1:]), features)
        if path:
            logits, _ = second.rows(torch.tensor([*tokens[2:], path[0]]), own)
        return logits[-1].softmax(-1).numpy()


class Medusa(Head):
    """Head i of the features at the last committed row predicts the token after a path of i tokens."""

    def law(self, tokens, features, path):
        x, head, w = torch.as_tensor(features[-1]).double(), len(path), self.w
        blocks = sum(name.startswith("0.") and name.endswith("linear.weight") for name in w)
        for block in range(blocks):
            linear = f"{head}.{block}.linear."
            x = x + F.silu(F.linear(x, w[f"{linear}weight"], w[f"{linear}bias"]))
        return (w.get(f"{head}.{blocks}.weight", self.lm_head) @ x).softmax(-1).numpy()


def target_features(checkpoint, tokens, taps):
    """float64 [len(tokens), k * H]: the residual streams entering the layers ``taps`` (-1: after the final norm; n:
    what leaves the last layer), by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    streams = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: streams.__setitem__(i, args[0]))
    model.model.norm.register_forward_pre_hook(lambda _, args: streams.__setitem__(len(model.model.layers), args[0]))
    model.model.norm.register_forward_hook(lambda _, args, output: streams.__setitem__(-1, output))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.cat([streams[tap][0] for tap in taps], -1).numpy()

"""Trained drafters written in the public formats, half precision, with the configuration their loaders expect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specbuild.config import ModelConfig
from tools.train.drafters import Drafter, DraftModel, Eagle, Eagle3, Medusa
from tools.train.target import default_taps

Weights = dict[str, Tensor]


def _llama(config: ModelConfig, architecture: str, layers: int) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "torch_dtype": "float16",
    }


def _plain(drafter: Drafter) -> Weights:
    return {name: tensor.detach() for name, tensor in drafter.state_dict().items()}


def eagle3(drafter: Eagle3, draft_ids: Tensor) -> tuple[Weights, dict[str, object]]:
    """SafeAILab's layout: offsets in ``d2t``, the target's LM-head rows of the draft vocabulary, no embedding."""
    config = drafter.config
    in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    in_draft[draft_ids] = True
    weights = _plain(drafter) | {
        "lm_head.weight": drafter.frozen[1][draft_ids],
        "d2t": draft_ids - torch.arange(len(draft_ids)),
        "t2d": in_draft,
    }
    described = _llama(config, "LlamaForCausalLMEagle3", 1) | {
        "draft_vocab_size": len(draft_ids),
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": 3,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(default_taps(config))},
    }
    return weights, described


def eagle(drafter: Eagle, draft_ids: Tensor) -> tuple[Weights, dict[str, object]]:
    """The EAGLE-1 layout: ``fc`` and ``layers.0`` without input norm; embedding and LM head are the target's."""
    return _plain(drafter), _llama(drafter.config, "LlamaForCausalLMEagle", 1) | {"bias": False}


def medusa(drafter: Medusa, draft_ids: Tensor) -> tuple[Weights, dict[str, object]]:
    """``{head}.{block}.linear.*``; a head without an LM head of its own uses the target's."""
    weights = {name.removeprefix("heads."): tensor for name, tensor in _plain(drafter).items()}
    blocks = len(list(next(iter(drafter.heads)).children()))
    config: dict[str, object] = {
        "architectures": ["MedusaModel"],
        "medusa_num_heads": len(drafter.heads),
        "medusa_num_layers": blocks,
        "hidden_size": drafter.config.hidden_size,
        "vocab_size": drafter.config.vocab_size,
        "borrow_lm_head": True,
        "torch_dtype": "float16",
    }
    return weights, config


def draft_model(drafter: DraftModel, draft_ids: Tensor) -> tuple[Weights, dict[str, object]]:
    """The Hugging Face Llama layout less ``embed_tokens`` and ``lm_head``, which are the target's."""
    weights = {f"model.{name}": tensor for name, tensor in _plain(drafter).items()}
    config = _llama(drafter.config, "LlamaForCausalLM", len(drafter.layers))
    return weights, config | {"tie_word_embeddings": True, "borrow_embeddings": True}


WRITERS: dict[type[Drafter], Callable[..., tuple[Weights, dict[str, object]]]] = {
    Eagle3: eagle3,
    Eagle: eagle,
    Medusa: medusa,
    DraftModel: draft_model,
}


def write(drafter: Drafter, draft_ids: Tensor, base_model: str, folder: Path) -> None:
    """Write ``model.safetensors`` (``medusa_lm_head.safetensors`` for Medusa) and ``config.json`` into ``folder``."""
    weights, config = WRITERS[type(drafter)](drafter, draft_ids)
    halves = {
        name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous() for name, tensor in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = "medusa_lm_head.safetensors" if isinstance(drafter, Medusa) else "model.safetensors"
    save_file(halves, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": base_model}, indent=2) + "\n")

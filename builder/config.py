"""ModelConfig: what the graph writer needs to know of a decoder, whatever file it came from.

``ModelConfig.from_hf`` reads config.json as transformers 4 and 5 write it; GGUF metadata is first brought into the same
form. Where two keys disagree, the value transformers would use is taken and the conflict is put into ``notes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from specbuild.rope import RopeConfig
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["FAMILIES", "Family", "ModelConfig", "RopeConfig"]

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP.

    Lengths are in tokens. ``rope_layers[i]`` is False where layer i has no rotary embedding (NoPE).
    ``max_position`` is the longest context the model was made for, or the limit the caller asked for, if shorter.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_layers: tuple[bool, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads}); config.json does not describe a grouped-query model"
            )
        if len(self.rope_layers) != self.num_layers:
            raise CheckpointError(
                f"no_rope_layers lists {len(self.rope_layers)} layers; num_hidden_layers says {self.num_layers}"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, weights_dtype: str | None = None, max_length: int | None = None
    ) -> ModelConfig:
        """Reads a parsed config.json.

        ``weights_dtype`` is used where the config names no dtype ("auto" or absent). ``max_length`` (tokens) is the
        longest context that will ever be used: it makes models usable whose sliding window is at least that long, or
        whose rotary table does not change up to it.
        Raises CheckpointError by name for what cannot be compiled correctly.
        """
        return _HFConfigReader(config).read(weights_dtype, max_length)

    @classmethod
    def from_gguf(cls, reader: GGUFReader, *, max_length: int | None = None) -> ModelConfig:
        """Reads the metadata of an open GGUF file (see ``specbuild.checkpoint.gguf_file`` for what is mapped)."""
        from specbuild.checkpoint.gguf_file import hf_config_of

        return cls.from_hf(hf_config_of(reader), max_length=max_length)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        data = asdict(self) | {"rope": self.rope.to_json()}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Inverse of ``to_json``; unknown and missing fields are refused by name."""
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise CheckpointError(f"model configuration: fields {sorted(set(data) ^ names)} are unknown or missing")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return cls(**values | {"rope": RopeConfig.from_json(data["rope"])})


@dataclass(frozen=True)
class Family:
    """What a family fixes or leaves to config.json. ``defaults`` are transformers' for keys a config may omit."""

    name: str
    defaults: Mapping[str, Any]
    qkv_bias: Callable[[Mapping[str, Any]], bool]
    o_bias: Callable[[Mapping[str, Any]], bool]
    mlp_bias: Callable[[Mapping[str, Any]], bool]
    qk_norm: bool = False
    partial_rotary: bool = False
    rope_aliases: Mapping[str, str] | None = None


def _never(config: Mapping[str, Any]) -> bool:
    return False


def _always(config: Mapping[str, Any]) -> bool:
    return True


def _attention_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("attention_bias", False))


def _mlp_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("mlp_bias", False))


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
            _attention_bias,
            _attention_bias,
            _mlp_bias,
        ),
        Family(
            "mistral",
            {
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            _never,
            _never,
            _never,
        ),
        Family("qwen2", {"max_position_embeddings": 32768, "num_key_value_heads": 32}, _always, _never, _never),
        Family(
            "qwen3",
            {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
            _attention_bias,
            _attention_bias,
            _never,
            qk_norm=True,
        ),
        Family(
            "phi3",
            {
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "eos_token_id": 32000,
                "pad_token_id": 32000,
            },
            _never,
            _never,
            _never,
            partial_rotary=True,
            rope_aliases={"su": "longrope", "yarn": "longrope"},
        ),
        Family(
            "smollm3",
            {
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "rope_theta": 2000000.0,
                "tie_word_embeddings": True,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
                "pad_token_id": 128004,
            },
            _attention_bias,
            _attention_bias,
            _mlp_bias,
        ),
    )
}


class _HFConfigReader:
    """One pass over a config.json; conflicts gather in ``notes``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.family = _family_of(config)
        self.notes: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The config's value, the family's default where the key is absent, else ``default``. null stays None."""
        return self.config.get(key, self.family.defaults.get(key, default))

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "it is absent" if value is None else f"found {value!r}"
            raise CheckpointError(f"config.json: {key} must be a positive integer, {found}")
        return value

    def read(self, weights_dtype: str | None, max_length: int | None) -> ModelConfig:
        """The whole configuration."""
        self._refuse_unsupported()
        heads, layers, hidden = (
            self.size("num_attention_heads"),
            self.size("num_hidden_layers"),
            self.size("hidden_size"),
        )
        head_dim = self.size("head_dim", hidden // heads)
        max_position = self.size("max_position_embeddings")
        context = min(max_position, max_length or max_position)
        self._check_window(layers, context)
        rope = self._rope(head_dim, max_position)
        rope.check_length(context)
        bos, eos, pad = self._token_ids()
        family = self.family
        return ModelConfig(
            family=family.name,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.size("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=self._epsilon(),
            rope=rope,
            max_position=context,
            tie_embeddings=bool(self.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias(self.config),
            o_bias=family.o_bias(self.config),
            mlp_bias=family.mlp_bias(self.config),
            qk_norm=family.qk_norm,
            rope_layers=self._rope_layers(layers),
            dtype=self._dtype(weights_dtype),
            bos_token_id=bos,
            eos_token_ids=eos,
            pad_token_id=pad,
            notes=tuple(self.notes),
        )

    def _refuse_unsupported(self) -> None:
        quantization = self.config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
            raise CheckpointError(
                f"config.json: the weights are already quantized ({method}), which cannot be compiled; "
                "use the unquantized checkpoint or a GGUF file, and --quantize to quantize at compile time"
            )
        activation = self.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported; only silu (swish) is")

    def _epsilon(self) -> float:
        value = self.get("rms_norm_eps", 1e-6)
        if not isinstance(value, (int, float)) or not 0 < value < 1:
            raise CheckpointError(f"config.json: rms_norm_eps must be a small positive number, found {value!r}")
        return float(value)

    def _token_ids(self) -> tuple[int | None, tuple[int, ...], int | None]:
        eos = self.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        return self.get("bos_token_id"), eos_ids, self.get("pad_token_id")

    def _dtype(self, weights_dtype: str | None) -> str:
        """config `dtype`, then `torch_dtype`, then the weights' own (transformers' order)."""
        new, old = (_plain_dtype(self.config.get(key)) for key in ("dtype", "torch_dtype"))
        if new and old and new != old:
            self.notes.append(f"config.json: dtype says {new} and torch_dtype says {old}; {new} is used")
        dtype = new or old
        if dtype in (None, "auto"):
            dtype = weights_dtype or "float32"
        if dtype not in DTYPES:
            raise CheckpointError(f"config.json: dtype {dtype!r} is not known; expected one of {', '.join(DTYPES)}")
        return str(dtype)

    def _check_window(self, layers: int, context: int) -> None:
        window = self.get("sliding_window")
        if self.family.name not in ("mistral", "phi3"):
            window = window if self.get("use_sliding_window", False) else None
        kinds = self.get("layer_types") or self._window_layers(layers, window)
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise CheckpointError(
                f"config.json: layer_types {', '.join(unknown)} are not supported, only full_attention"
            )
        if "sliding_attention" in kinds and window is not None and context > window:
            raise CheckpointError(
                f"config.json: sliding-window attention over {window} tokens is not supported, and a context of "
                f"{context} tokens exceeds the window. Compile with --max-length {window} or less, where the window "
                "never binds and full attention is the same."
            )

    def _window_layers(self, layers: int, window: int | None) -> list[str]:
        """transformers' rule where the config lists no layer types."""
        first_windowed = 0 if self.family.name in ("mistral", "phi3") else self.get("max_window_layers", 28)
        if self.family.name == "smollm3":
            has_rope = self._rope_layers(layers)
            return ["full_attention" if window is None or has_rope[i] else "sliding_attention" for i in range(layers)]
        windowed = [window is not None and i >= first_windowed for i in range(layers)]
        return ["sliding_attention" if w else "full_attention" for w in windowed]

    def _rope_layers(self, layers: int) -> tuple[bool, ...]:
        if self.family.name != "smollm3":
            return (True,) * layers
        listed = self.get("no_rope_layers")  # despite its name, 1 marks a layer WITH rotary embedding
        if listed is None:
            interval = self.get("no_rope_layer_interval", 4)
            return tuple((i + 1) % interval != 0 for i in range(layers))
        return tuple(bool(has_rope) for has_rope in listed[:layers])

    def _rope(self, head_dim: int, max_position: int) -> RopeConfig:
        p = self._rope_dictionary()
        kind = str(p.pop("rope_type", None) or p.pop("type", None) or "default")
        kind = (self.family.rope_aliases or {}).get(kind, kind)
        rotary_dim = int(head_dim * self._partial_factor(p))
        theta = p.pop("rope_theta")
        if not isinstance(theta, (int, float)) or theta <= 1:
            raise CheckpointError(f"config.json: rope_theta must be a number above 1, found {theta!r}")
        p.pop("type", None)
        if kind in ("llama3", "yarn", "longrope"):
            trained = self.get("original_max_position_embeddings", p.get("original_max_position_embeddings"))
            p["original_max_position_embeddings"] = trained or max_position
        if kind in ("yarn", "longrope") and p.get("factor") is None:
            p["factor"] = max_position / p["original_max_position_embeddings"]
        if kind == "dynamic":
            p["max_position_embeddings"] = max_position
        parameters = {} if kind == "default" else {k: v for k, v in sorted(p.items()) if v is not None}
        return RopeConfig(float(theta), kind, parameters, rotary_dim)

    def _partial_factor(self, p: dict[str, Any]) -> float:
        factor = p.pop("partial_rotary_factor", None)
        factor = self.get("partial_rotary_factor") if factor is None else factor
        factor = 1.0 if factor is None else float(factor)
        if factor != 1.0 and not self.family.partial_rotary:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {factor} is not supported for {self.family.name} models"
            )
        return factor

    def _rope_dictionary(self) -> dict[str, Any]:
        """rope_scaling (v4) or rope_parameters (v5) with the base it will really use, under `rope_theta`."""
        old, new = self.config.get("rope_scaling") or {}, self.config.get("rope_parameters") or {}
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            raise CheckpointError("config.json: rope_scaling and rope_parameters must be objects or null")
        chosen = dict(_flat(old or new))
        top = self.get("rope_theta", 10000.0)
        theta = chosen.get("rope_theta")
        chosen["rope_theta"] = top if theta is None else theta
        self._note_rope_conflicts(chosen, old, _flat(new))
        return chosen

    def _note_rope_conflicts(self, chosen: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        theta = chosen["rope_theta"]
        for place, value in (("top level", self.config.get("rope_theta")), ("rope_parameters", new.get("rope_theta"))):
            if value is not None and float(value) != float(theta):
                self.notes.append(
                    f"config.json: rope_theta is {value} at {place} but {theta} is what applies; {theta} is used"
                )
        if old and new and dict(old) != dict(new):
            self.notes.append("config.json: rope_scaling and rope_parameters differ; rope_scaling is used")
        kinds = [chosen[key] for key in ("rope_type", "type") if chosen.get(key)]
        if len(set(kinds)) > 1:
            self.notes.append(f"config.json: rope_type says {kinds[0]} and type says {kinds[1]}; {kinds[0]} is used")


def _flat(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """v5 configs of models with several layer types nest the parameters by type; only full attention is compiled."""
    nested = rope.get("full_attention")
    return nested if isinstance(nested, Mapping) else rope


def _plain_dtype(value: Any) -> str | None:
    """ "torch.bfloat16" and "bfloat16" are the same; None stays None."""
    return None if value is None else str(value).removeprefix("torch.")


def _family_of(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    if name in FAMILIES:
        return FAMILIES[str(name)]
    found = name or ", ".join(config.get("architectures") or []) or "none named"
    raise CheckpointError(
        f"config.json: architecture {found!r} is not supported; supported model_type values: {', '.join(FAMILIES)}"
    )

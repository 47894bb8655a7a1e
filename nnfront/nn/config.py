# SPDX-License-Identifier: Apache-2.0
"""`Config`: what a model file reads of a config.json, and the proof that nothing in it that changes the maths is dropped.

A model file derives a frozen dataclass from it, whose fields are config.json's own names, and says of every other key that it
has met what becomes of it. What is left over, and is not switched off, is refused: whether a key changes the maths is not to be guessed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, cast, get_args, get_origin, get_type_hints

from nnfront import dtypes
from nnfront.errors import LoadError
from nnfront.files import shown_text
from nnfront.nn.rotary import ROPE_KEYS, rope_parameters

UNUSED: Mapping[str, tuple[str, ...]] = {
    "metadata": (
        "auto_map",
        "finetuning_task",
        "id2label",
        "label2id",
        "prefix",
        "problem_type",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "how transformers runs it": (
        "attn_implementation",
        "cache_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "torchscript",
        "use_cache",
        "use_return_dict",
    ),
    "training": (
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_range",
        "resid_pdrop",
        "router_aux_loss_coef",
    ),
    "choosing tokens": (
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "pad_token_id",
        "remove_invalid_values",
        "repetition_penalty",
        "sep_token_id",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
}
"""Keys of any config.json that have no say in what logits are, by what they are about. Those that begin with `_` have none either."""

USUALLY_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""What ranks divide of most decoders, for `Config.divided`."""
ROUNDED = frozenset({"vocab_size"})
"""Fields that ranks divide with a remainder: the last one fills up with zeros."""
REPEATED = frozenset({"num_key_value_heads", "n_groups", "mamba_n_groups"})
"""Fields of which several ranks may have the same one."""

_UNUSED = frozenset(key for keys in UNUSED.values() for key in keys)
_ALIASES = {"torch_dtype": "dtype"}


class Config:
    """A base for a model file's `Config`, which is a dataclass with config.json's own names; `from_hf` reads one.

    Annotations are checked: an `int` is at least 1 (`field(metadata={"min": 0})` for another bound), a `float` finite and no bool.
    A field `dtype` is one that models compute in, `rope_parameters` is read by `nn.rope_parameters`; both of either generation of keys.
    """

    model_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The model types that the file computes, each with the values of absent keys where they are not the fields' defaults. Empty: any."""
    lacks: ClassVar[Mapping[str, Collection[str]]] = {}
    """Fields that a model type does not have: where its config.json names one, it is unclear what is meant."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of fields."""
    only: ClassVar[Mapping[str, Collection[Any]]] = {}
    """Keys, fields or not, that may only have some values (of a list: each of its items)."""
    unused: ClassVar[Mapping[str, str]] = {}
    """Keys without a say in what the file computes, besides `UNUSED`, each with the reason."""
    divided: ClassVar[Sequence[str]] = ()
    """Fields that ranks divide among them: a model of heads/n, of vocabulary/n and so on is what one of n computes (`nn.divide`). Empty: it cannot be divided."""
    rope_defaults: ClassVar[Mapping[str, Any]] = {}
    """Rotary parameters of a config.json that does not give them, where they are not `rope_theta` 10000."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read a config.json. Raises LoadError that lists every key with a value that is wrong or that the file does not compute."""
        reading = _Reading(cls, config)
        reading.model_type()
        reading.rope()
        for key, value in config.items():
            reading.key(key, value)
        if reading.problems:
            raise LoadError(
                "config.json says what this model file does not compute",
                details=reading.problems,
                where=_file_of(cls),
                help=reading.help,
            )
        return cls(**reading.values)

    def of_ranks(self, world: int) -> Self:
        """Return the config of what each of `world` ranks computes: the fields of `divided` are a rank's share.

        Of fewer heads of keys and values than ranks each has one, which neighbours share; a vocabulary is rounded up.
        Raises LoadError for a model that does not say what is divided, and for sizes that do not divide.
        """
        if not self.divided:
            raise LoadError(
                "the model file does not say how ranks divide the model",
                where=_file_of(type(self)),
                help="name the fields of its Config that they divide in Config.divided, if a model of less of them is what one rank computes",
            )
        shares, problems = dict[str, Any](), []
        for name in self.divided:
            size = getattr(self, name)
            if size is None:
                continue
            if name in ROUNDED:
                shares[name] = -(-size // world)
            elif name in REPEATED and size < world and world % size == 0:
                shares[name] = 1
            elif size % world == 0:
                shares[name] = size // world
            else:
                problems.append(f"{name} is {size}")
        if problems:
            raise LoadError(
                f"the model does not divide among {world} ranks",
                details=problems,
                help=f"take a number of ranks that divides {'it' if len(problems) == 1 else 'them'}",
            )
        own = getattr(self, "head_size", None)
        if own is not None and "head_dim" in {f.name for f in fields(cast(Any, self))}:
            shares["head_dim"] = own  # which is else made of what is divided
        share = replace(cast(Any, self), **shares)
        sizes = [own, getattr(share, "head_size", None)]
        if sizes[0] != sizes[1]:
            raise LoadError(
                f"the model does not divide among {world} ranks",
                details=[f"head_size is {sizes[0]}, and {sizes[1]} where heads are divided"],
                help="let the Config make head_size of no field that ranks divide, such as of head_dim",
            )
        return share  # type: ignore[no-any-return]


def _file_of(cls: type[Config]) -> str:
    return str(getattr(sys.modules.get(cls.__module__), "__file__", cls.__module__))


@dataclass(frozen=True)
class DecoderConfig(Config):
    """The fields that every decoder with rotary positions has; a model file adds its own, and its defaults."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.rope_parameters:
            object.__setattr__(self, "rope_parameters", rope_parameters({}, self.rope_defaults))

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """How many last positions a layer sees, None for all."""
        return None


@dataclass(frozen=True)
class WindowedConfig(DecoderConfig):
    """A `DecoderConfig` of a model of whose layers some see `sliding_window` positions: those that `layer_types` says, else `is_sliding`."""

    only: ClassVar[Mapping[str, Collection[Any]]] = {"layer_types": ("full_attention", "sliding_attention")}

    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise LoadError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer sees a window where no `layer_types` are given."""
        return True

    def layer_type(self, layer: int) -> str:
        """`full_attention` or `sliding_attention`."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if self.is_sliding(layer) else "full_attention"

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None


class _Reading:
    """One config.json, read into the values of a class's fields."""

    def __init__(self, cls: type[Config], config: Mapping[str, Any]) -> None:
        self.cls, self.config = cls, config
        self.hints = get_type_hints(cls)
        self.only = {
            key: values
            for each in reversed(cls.__mro__)
            for key, values in vars(each).get("only", {}).items()
        }
        self.fields = {f.name: f for f in fields(cast(Any, cls))}
        self.values: dict[str, Any] = dict(cls.model_types.get(str(config.get("model_type")), {}))
        self.named: dict[str, str] = {}
        self.problems: list[str] = []
        self.help = ""

    def model_type(self) -> None:
        """Check that the file computes this architecture: its keys and its weights' names alone do not say so."""
        name, classes = self.config.get("model_type"), self.config.get("architectures")
        known = {type.replace("_", "") for type in self.cls.model_types}
        classes = classes if isinstance(classes, list) else []
        named = {str(each).removesuffix("ForCausalLM").lower() for each in classes}
        if known and name is not None and name not in [*self.cls.model_types] and known.isdisjoint(named):
            self.problems.append(
                f"model_type is {_shown(name)}, expected {_or([*map(repr, self.cls.model_types)])}"
            )
            self.help = "write a model file for it, or, if it computes the same, name it in the file's Config.model_types"

    def rope(self) -> None:
        if "rope_parameters" in self.fields:
            try:
                self.values["rope_parameters"] = rope_parameters(self.config, self.cls.rope_defaults)
            except LoadError as error:
                self.problems += [error.what, *error.details]

    def key(self, key: str, value: Any) -> None:
        """Take one key over into the values, or say why not."""
        name = self.cls.aliases.get(key, _ALIASES.get(key, key))
        allowed = self.only.get(name)
        if name in self.cls.lacks.get(str(self.config.get("model_type")), ()) and not _is_off(value):
            self.problems.append(
                f"{key} is {_shown(value)}, which {self.config['model_type']!r} does not have"
            )
        elif name in self.fields and name != "rope_parameters":
            hint = self.hints[name]
            if value is not None or hint is Any or NoneType in get_args(hint):
                self.field(key, name, value)
        elif allowed is None and not _is_off(value) and not self.is_known(key):
            self.problems.append(f"{key} is {_shown(value)}, and the file does not know the key")
            self.help = self.help or (
                "a key that does not change what is computed: name it in the file's Config.unused, or take it out of config.json;"
                " else write a model file that computes it"
            )
        items = value if isinstance(value, list) else [value]
        if allowed is not None and value is not None and any(item not in list(allowed) for item in items):
            self.problems.append(f"{key} is {_shown(value)}, expected {_or([_shown(a) for a in allowed])}")

    def is_known(self, key: str) -> bool:
        """Whether a key that is no field was read elsewhere, or has no say."""
        return (
            key in ("model_type", "architectures")
            or key in _UNUSED
            or key in self.cls.unused
            or key.startswith("_")
            or ("rope_parameters" in self.fields and key in ROPE_KEYS)
        )

    def field(self, key: str, name: str, value: Any) -> None:
        other = self.named.setdefault(name, key)
        if other != key and self.config[other] != value:
            self.problems.append(f"{key} is {_shown(value)}, but {other} is {_shown(self.config[other])}")
        least = self.fields[name].metadata.get("min", 1)
        expected = "" if _fits(value, self.hints[name], least) else _described(self.hints[name], least)
        if name == "dtype" and value not in dtypes.COMPUTED:
            expected = _or([*map(repr, dtypes.COMPUTED)])
        if expected:
            self.problems.append(f"{key} is {_shown(value)}, expected {expected}")
        self.values[name] = tuple(value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any, least: int) -> bool:
    """Whether a value of JSON is of an annotated type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each, least) for each in arguments)
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0], 0) for item in value)
    if hint is int:
        return type(value) is int and value >= least
    if hint is float:
        return type(value) in (int, float) and abs(value) < 1e38
    return hint is Any or isinstance(value, origin or hint)


_WORDS = {float: "a number", bool: "true or false", str: "a text", dict: "an object", NoneType: "null"}


def _described(hint: Any, least: int) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _or([_described(each, least) for each in arguments])
    if origin in (tuple, list):
        return f"a list, each item {_described(arguments[0], 0)}"
    return f"an int >= {least}" if hint is int else _WORDS.get(origin or hint, str(hint))


def _is_off(value: Any) -> bool:
    """Whether a key says nothing: it is absent, switched off or empty."""
    return value is None or value is False or value in ("", [], {})


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _shown(value: Any) -> str:
    return shown_text(json.dumps(value) if value is None or isinstance(value, bool) else repr(value), 80)

# SPDX-License-Identifier: Apache-2.0
"""Requests as data: the fields of OpenAI's API and those that other servers add, checked before anything is done.

A field that is not here is refused: what a request asks for is done, or it is said that it is not.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nnfront.engine.params import MOST_LOGPROBS, Params, Sampling
from nnfront.serve.failures import Failure

MOST_CHOICES = 64
MOST_STOPS = 16
BESIDES = ("presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")
"""What a request says of how tokens are chosen besides what a model's defaults do."""


class Checked(BaseModel):
    """Data of a client's: no other fields than these, of these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Checked):
    """`include_usage`: a last chunk with the usage and no choices. `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(Checked):
    """A named schema; answers always keep to it, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Checked):
    """What form an answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Checked):
    """One of these says what an answer may be."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Asked(Checked):
    """What all requests for answers may say."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # What these ask for is nothing that a server with one model and no accounts does.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class _Request(Asked):
    """What all kinds of requests for completions may say."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    store: Literal[False] | None = None

    def stops(self) -> list[str]:
        """The stop strings. Raises Failure for an empty one."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(found):
            raise Failure(400, "'stop' holds an empty text", param="stop")
        return found

    def params(self, defaults: Sampling, *, max_tokens: int | None, logprobs: int | None) -> Params:
        """How tokens are chosen; what is not said is as `defaults` have it. Raises RunError for values out of range."""
        known = asdict(defaults)
        said = {name: getattr(self, name) for name in (*known, *BESIDES)}
        if self.top_k in (0, -1):  # of all tokens
            known["top_k"] = said["top_k"] = None
        known |= {name: value for name, value in said.items() if value is not None}
        return Params(
            **known,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop_tokens=tuple(self.stop_token_ids or ()),
            logit_bias={_token(token): bias for token, bias in (self.logit_bias or {}).items()},
        )


class CompletionRequest(_Request):
    """A text to be continued, or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class ChatRequest(_Request):
    """A conversation to be answered."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None


class TokenizeRequest(Checked):
    """A text, or messages, whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Checked):
    """Tokens whose text is asked for."""

    model: str | None = None
    tokens: list[int]


Kind = TypeVar("Kind", bound=BaseModel)


def read(kind: type[Kind], data: Any) -> Kind:
    """Return a request of a kind. Raises Failure that names the first field which is wrong, and says what of it."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        # Behind a field's name may come the name of one of several types that it may have.
        where = str(found["loc"][0]) if found["loc"] else ""
        name = repr(found["loc"][-1]) if found["loc"] else ""
        if len(found["loc"]) > 1:
            name += f" in {where!r}"
        if found["type"] == "extra_forbidden":
            what = f"there is no field {name}"
        elif found["type"] == "missing":
            what = f"the field {name} is missing"
        else:
            what = f"{where or 'the request'}: {found['msg']}"
        raise Failure(400, what, param=where or None) from None


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise Failure(400, f"logit_bias has {text!r} for a token, expected its number", param="logit_bias")
    return int(text)

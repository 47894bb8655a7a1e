# SPDX-License-Identifier: Apache-2.0
"""What the endpoints do, as functions from requests to replies: a dict, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from nnfront.engine.params import Params
from nnfront.serve.answers import Answer, Piece, Wanted, together
from nnfront.serve.calls import CallForm, Tools, call_form, call_grammar, tools_of
from nnfront.serve.chat import ChatTemplate
from nnfront.serve.engine import Engine
from nnfront.serve.failures import Failure, check_model
from nnfront.serve.grammar import Grammars, Matcher, choice, grammar, json_schema, regex
from nnfront.serve.lark import Form
from nnfront.serve.log import Call
from nnfront.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    StructuredOutputs,
    TokenizeRequest,
)
from nnfront.serve.replies import (
    ChatStream,
    Drawn,
    Head,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    usage,
)
from nnfront.serve.sections import Sections, thoughts_grammar, thoughts_of

Chunks: TypeAlias = AsyncGenerator[dict[str, Any], None]
COMPLETION_TOKENS = 16
"""Of a completion that does not say how many, as in OpenAI's API."""


@dataclass
class Service:
    """A model that is served: its engine, the name by which clients ask for it, its chat template; `seconds`: the longest that an answer may take.

    Its adapters have names of their own, by which clients ask for the model with them.
    """

    engine: Engine
    name: str
    template: ChatTemplate | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        llm = self.engine.llm
        self.tokenizer = llm.tokenizer
        self.grammars = Grammars(llm.tokenizer, int(llm.config.vocab_size), llm.eos_token_ids)

    def model(self, asked: str | None) -> str:
        """The name of what answers a request. Raises Failure for a model that there is not."""
        check_model([self.name, *self.engine.llm.adapters], asked)
        return self.name if asked is None else asked

    def adapter(self, asked: str | None) -> str | None:
        """The adapter that a request asks for, if it is for one."""
        model = self.model(asked)
        return None if model == self.name else model

    def completion(self, request: CompletionRequest, call: Call) -> Chunks:
        """Continue texts; the last chunk of a stream, or the only one of a whole reply."""
        model = self.model(request.model)
        prompts = self._prompts(request.prompt)
        max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        head = Head("text_completion", f"cmpl-{call.number}", model)
        sampling = self.engine.llm.sampling
        params = request.params(sampling, max_tokens=max_tokens, logprobs=request.logprobs)
        wanted = _structured(request.structured_outputs)
        matcher = None if wanted is None else self.grammars.compiled(wanted)
        answers = self._answers(call, request, prompts, params, matcher)
        echoed = [self.tokenizer.decode(ids) if request.echo else "" for ids in prompts]
        count = len(answers) // len(prompts)
        texts = [echoed[i // count] for i in range(len(answers))]

        def choice(i: int, text: str, drawn: Drawn, finish: str | None, offset: int) -> dict[str, Any]:
            logprobs = None
            if request.logprobs is not None and drawn:
                logprobs = completion_logprobs(self.tokenizer, drawn, offset)
            return {
                "index": i,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": finish,
                "stop_reason": None,
            }

        lengths = [len(ids) for ids in prompts]
        if not request.stream:
            return self._whole(head, lengths, answers, texts, choice)
        written = [0 for _ in answers]

        def chosen(i: int, piece: Piece) -> Iterable[dict[str, Any]]:
            text = piece.text if written[i] else texts[i] + piece.text
            offset = written[i] or len(texts[i])
            written[i] += len(text)
            yield choice(i, text, piece.tokens, piece.finish, offset)

        return self._stream(request, head, lengths, answers, chosen)

    async def _whole(
        self, head: Head, prompts: Sequence[int], answers: Sequence[Answer], texts: list[str], choice: Any
    ) -> Chunks:
        drawn: list[list[Any]] = [[] for _ in answers]
        finish: list[str | None] = [None for _ in answers]
        offsets = [len(text) for text in texts]
        async with aclosing(together(answers)) as pieces:
            async for i, piece in pieces:
                texts[i] += piece.text
                drawn[i] += piece.tokens
                finish[i] = piece.finish
        choices = [choice(i, texts[i], drawn[i], finish[i], offsets[i]) for i in range(len(answers))]
        yield head.reply(choices, is_chunk=False, usage=usage(prompts, answers))

    async def _stream(
        self,
        request: CompletionRequest | ChatRequest,
        head: Head,
        prompts: Sequence[int],
        answers: Sequence[Answer],
        chosen: Callable[[int, Piece], Iterable[dict[str, Any]]],
    ) -> Chunks:
        """Chunks of what is `chosen` of each piece of an answer, and behind them what was used, if that is asked for."""
        options = request.stream_options
        more: dict[str, Any] = {"usage": None} if options and options.include_usage else {}
        async with aclosing(together(answers)) as pieces:
            async for i, piece in pieces:
                if options and options.continuous_usage_stats:
                    more = {"usage": usage(prompts, answers)}
                for choice in chosen(i, piece):
                    yield head.reply([choice], is_chunk=True, **more)
        if options and options.include_usage:
            yield head.reply([], is_chunk=True, usage=usage(prompts, answers))

    def chat(self, request: ChatRequest, call: Call) -> Chunks:
        """Answer a conversation; chunks as `completion` gives them."""
        model = self.model(request.model)
        if request.top_logprobs is not None and not request.logprobs:
            raise Failure(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        text = self.chat_text(request)
        prompt = self.tokenizer.encode(text, special=False)
        given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = request.params(self.engine.llm.sampling, max_tokens=given, logprobs=logprobs)
        tools = tools_of(request.tools or ()) if request.tool_choice != "none" else {}
        is_one = request.parallel_tool_calls is False
        form, wanted = self._calls(request, tools)
        wanted = wanted or _structured(request.structured_outputs) or _formatted(request.response_format)
        assert self.template is not None
        thoughts = thoughts_of(self.template)
        is_thinking = thoughts is not None and text.rstrip().endswith(thoughts.begin)
        before = ""
        if wanted is not None and thoughts is not None and not text.rstrip().endswith(thoughts.end):
            before = thoughts_grammar(thoughts, self.grammars.lark(), is_thinking=is_thinking)
        matcher = None if wanted is None else self.grammars.compiled(wanted, before)
        shows_special = thoughts is not None or form is not None
        answers = self._answers(call, request, [prompt], params, matcher, shows_special=shows_special)

        def sections() -> Sections:
            return Sections(form, thoughts, is_thinking=is_thinking, tools=tools, is_one=is_one)

        head = Head("chat.completion", f"chatcmpl-{call.number}", model)
        if request.stream:
            states = [ChatStream(sections()) for _ in answers]

            def chosen(i: int, piece: Piece) -> Iterable[dict[str, Any]]:
                for delta, drawn, finish in states[i].push(piece):
                    logprobs = chat_logprobs(self.tokenizer, drawn) if request.logprobs and drawn else None
                    yield {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

            return self._stream(request, head, [len(prompt)], answers, chosen)

        def choice(i: int, text: str, drawn: Drawn, finish: str | None, offset: int) -> dict[str, Any]:
            found, calls = chat_message(list(sections().push(text, is_last=True)))
            return {
                "index": i,
                "message": found,
                "logprobs": chat_logprobs(self.tokenizer, drawn) if request.logprobs else None,
                "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
            }

        return self._whole(head, [len(prompt)], answers, [""] * len(answers), choice)

    def chat_text(self, request: ChatRequest) -> str:
        """The prompt of a conversation. Raises Failure for a model without a chat template, and for messages that are none, RunError for those that it refuses."""
        if self.template is None:
            raise Failure(
                400,
                "this model has no chat template, so it takes no messages; /v1/completions takes a text, "
                "and the server a template: nnfront serve --chat-template FILE",
            )
        for i, message in enumerate(request.messages):
            if not isinstance(message.get("role"), str):
                raise Failure(400, f"message {i} has no role", param="messages")
            if not isinstance(message.get("content"), str | list | None):
                what = f"message {i} has a content of type {type(message['content']).__name__!r}"
                raise Failure(400, f"{what}, expected a text or a list of parts", param="messages")
        more = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            more.setdefault("reasoning_effort", request.reasoning_effort)
        generates = request.add_generation_prompt
        return self.template.render(
            request.messages,
            tools=None if request.tool_choice == "none" else request.tools,
            add_generation_prompt=not request.continue_final_message if generates is None else generates,
            continue_final_message=bool(request.continue_final_message),
            **more,
        )

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        self.model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise Failure(400, "tokenize takes a prompt or messages, and not both", param="prompt")
        if request.messages is not None:
            asked = ChatRequest(
                messages=request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                chat_template_kwargs=request.chat_template_kwargs,
            )
            tokens = self.tokenizer.encode(self.chat_text(asked), special=False)
        else:
            tokens = self.tokenizer.encode(request.prompt or "", special=request.add_special_tokens)
        return {
            "count": len(tokens),
            "max_model_len": self.engine.limits.max_model_len,
            "tokens": tokens,
            "token_strs": [self.tokenizer.decode([token], special=True) for token in tokens]
            if request.return_token_strs
            else None,
        }

    def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        self.model(request.model)
        return {"prompt": self.tokenizer.decode(request.tokens, special=True)}

    def _calls(self, request: ChatRequest, tools: Tools) -> tuple[CallForm | None, Form | None]:
        """How the answer may write calls of tools, and what it is where it must be some. Raises Failure if that cannot be."""
        choice, is_one = request.tool_choice, request.parallel_tool_calls is False
        if not tools:
            if choice not in (None, "none", "auto"):
                raise Failure(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
            return None, None
        assert self.template is not None
        form = call_form(self.template)
        if choice in (None, "auto"):
            return form, None
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else choice.get("name")
            if not isinstance(name, str) or name not in tools:
                raise Failure(
                    400, f"tool_choice names {name!r}, which is none of the tools", param="tool_choice"
                )
            tools, is_one = {name: tools[name]}, True
        if form is None:
            raise Failure(
                400, "this model's chat template does not say how it calls tools", param="tool_choice"
            )
        return form, call_grammar(form, tools, self.grammars.lark(), is_one=is_one)

    def _prompts(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self.tokenizer.encode(prompt)]
        if not prompt:
            raise Failure(400, "the prompt is empty", param="prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompt]

    def _answers(
        self,
        call: Call,
        request: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
        params: Params,
        grammar: Matcher | None,
        *,
        shows_special: bool = False,
    ) -> list[Answer]:
        """The answers to be: `n` of each prompt, each with a seed of its own."""
        stops, count = request.stops(), request.n or 1
        if count > 1 and params.seed is not None:
            seeds: list[int | None] = [params.seed + i for i in range(count)]
        else:
            seeds = [params.seed] * count
        answers = [
            Answer(
                self.engine,
                self.tokenizer,
                Wanted(
                    ids,
                    replace(params, seed=seed, grammar=grammar() if grammar is not None else None),
                    stops,
                    bool(request.include_stop_str_in_output),
                    shows_special or request.skip_special_tokens is False,
                    self.seconds,
                    request.cache_salt or "",
                    self.adapter(request.model),
                ),
            )
            for ids in prompts
            for seed in seeds
        ]
        call.prompts, call.answers = [len(ids) for ids in prompts], answers
        return answers


def _structured(wanted: StructuredOutputs | None) -> Form | None:
    """What an answer may be. Raises Failure for more than one thing, RunError for what is too long."""
    if wanted is None:
        return None
    said = [name for name, value in wanted.model_dump().items() if value not in (None, False)]
    if len(said) != 1:
        raise Failure(
            400, "structured_outputs says not one thing that an answer may be", param="structured_outputs"
        )
    if wanted.regex is not None:
        return regex(wanted.regex)
    if wanted.choice is not None:
        return choice(wanted.choice)
    if wanted.grammar is not None:
        return grammar(wanted.grammar)
    return json_schema({"type": "object"} if wanted.json_object else wanted.json_)


def _formatted(wanted: ResponseFormat | None) -> Form | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_schema({"type": "object"})
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise Failure(400, "response_format of type 'json_schema' has no schema", param="response_format")
    return json_schema(wanted.json_schema.schema_)

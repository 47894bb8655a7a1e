# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` as another form of a chat: a request becomes a chat's, and what comes of it the items and events of a response.

Nothing is kept: a conversation is given whole each time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from nnfront.engine.params import MOST_LOGPROBS
from nnfront.serve.chat import text_of
from nnfront.serve.failures import Failure
from nnfront.serve.protocol import (
    Asked,
    ChatRequest,
    Checked,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
)
from nnfront.serve.service import Chunks, Service


class TextFormat(Checked):
    """What form the text of a response has; a schema stands beside its name here."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Checked):
    """What is asked of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Checked):
    """How much thought; handed to the chat template."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Asked):
    """A conversation to be answered."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    include: list[str] | None = None
    store: bool | None = None

    def chat(self) -> ChatRequest:
        """The chat that asks for the same. Raises Failure for items that are not known."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            _add(messages, item)
        if not messages:
            raise Failure(400, "the input is empty", param="input")
        form = self.text.format if self.text is not None else None
        return ChatRequest(
            messages=messages,
            model=self.model,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=True,
            stream_options=StreamOptions(include_usage=True),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=None
            if form is None
            else ResponseFormat(
                type=form.type,
                json_schema=JsonSchema(name=form.name, schema=form.schema_, strict=form.strict)
                if form.type == "json_schema"
                else None,
            ),
        )


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append what an item of the input says to a chat's messages."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        text = content if isinstance(content, str) else "\n".join(text_of(part) for part in content or ())
        role = "system" if item.get("role") == "developer" else item.get("role", "user")
        messages.append({"role": role, "content": text})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append(
            {"role": "tool", "tool_call_id": item.get("call_id"), "content": str(item.get("output", ""))}
        )
    elif kind == "reasoning":
        pass  # models are not shown what they thought in earlier turns
    else:
        raise Failure(400, f"the input has an item of type {kind!r}, which this server does not read", param="input")  # fmt: skip


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise Failure(
            400,
            f"a tool has the type {tool.get('type')!r}, this server has functions of the client's only",
            param="tools",
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


class _Output:
    """The items of a response as they grow, and the events that tell of it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        """All text of messages."""
        parts = [part for item in self.items if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts)

    def text_delta(self, delta: str, kind: str) -> list[dict[str, Any]]:
        """More of a message, or of the reasoning before it."""
        events = []
        is_message = kind == "message"
        if not self.items or self.items[-1]["type"] != kind or self.items[-1]["status"] == "completed":
            events += self.done()
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            item: dict[str, Any] = {
                "type": kind,
                "id": f"msg_{secrets.token_hex(12)}",
                "status": "in_progress",
            }
            item |= {"role": "assistant", "content": []} if is_message else {"summary": [], "content": []}
            self.items.append(item)
            events.append(self._event("response.output_item.added", item={**item}))
            item["content"] = [part if is_message else {"type": "reasoning_text", "text": ""}]
            events.append(self._part("response.content_part.added", part={**item["content"][0]}))
        self.items[-1]["content"][0]["text"] += delta
        events.append(self._part(_named("delta", is_message), delta=delta))
        return events

    def call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """A call of a tool, whole."""
        events = self.done()
        arguments = call["arguments"]
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        events.append(self._event("response.output_item.added", item={**item}))
        item["arguments"] = arguments
        about = {"item_id": item["id"]}
        events.append(self._event("response.function_call_arguments.delta", delta=arguments, **about))
        events.append(self._event("response.function_call_arguments.done", arguments=arguments, **about))
        return [*events, *self.done()]

    def done(self) -> list[dict[str, Any]]:
        """The end of the last item."""
        if not self.items or self.items[-1]["status"] == "completed":
            return []
        item, events = self.items[-1], []
        if item["type"] != "function_call":
            part = item["content"][0]
            events = [
                self._part(_named("done", item["type"] == "message"), text=part["text"]),
                self._part("response.content_part.done", part={**part}),
            ]
        item["status"] = "completed"
        return [*events, self._event("response.output_item.done", item={**item})]

    def _event(self, name: str, **more: Any) -> dict[str, Any]:
        return {"type": name, "output_index": len(self.items) - 1, **more}

    def _part(self, name: str, **more: Any) -> dict[str, Any]:
        return self._event(name, item_id=self.items[-1]["id"], content_index=0, **more)


def _named(what: str, is_message: bool) -> str:
    return f"response.{'output_text' if is_message else 'reasoning_text'}.{what}"


async def respond(service: Service, request: ResponsesRequest, number: str, chunks: Chunks) -> Chunks:
    """Yield the events of a response to a chat; or, if it is not to be a stream, the whole of it alone."""
    output = _Output()
    response: dict[str, Any] = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": service.model(request.model),
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "text": {"format": {"type": "text"}},
        "metadata": request.metadata or {},
        "store": False,
        "usage": None,
    }
    sequence = 0
    async with aclosing(_events(output, response, chunks)) as events:
        async for event in events:
            if request.stream:
                yield {**event, "sequence_number": sequence}
                sequence += 1
    if not request.stream:
        yield response


async def _events(
    output: _Output, response: dict[str, Any], chunks: Chunks
) -> AsyncGenerator[dict[str, Any], None]:
    calls: dict[int, dict[str, Any]] = {}
    has_begun, finish = False, None
    async for chunk in chunks:
        if not has_begun:  # what is wrong with the request has been said before
            has_begun = True
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": {**response}}
        if (usage := chunk.get("usage")) is not None:
            response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        for choice in chunk["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"]
            events: list[dict[str, Any]] = []
            if delta.get("reasoning_content"):
                events = output.text_delta(delta["reasoning_content"], "reasoning")
            elif delta.get("content"):
                events = output.text_delta(delta["content"], "message")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    calls[piece["index"]] = {"id": piece["id"], "name": piece["function"]["name"]}
                else:
                    arguments = piece["function"]["arguments"]
                    events += output.call({**calls[piece["index"]], "arguments": arguments})
            for event in events:
                yield event
            if finish is not None:
                for event in output.done():
                    yield event
                response["status"] = "incomplete" if finish == "length" else "completed"
                if finish == "length":
                    response["incomplete_details"] = {"reason": "max_output_tokens"}
    response["output"] = output.items
    yield {"type": f"response.{response['status']}", "response": {**response}}

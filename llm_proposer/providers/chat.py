"""Chat completions as plain data: the request body of a prompt, the reply in a response body."""

from __future__ import annotations

import json
from typing import Any

from llm_proposer.client import MAX_REPLY_CHARS, Prompt, Reply, estimated_tokens
from llm_proposer.errors import BadReply, Refused


def body_of(
    prompt: Prompt, model: str, *, structured: bool = True, limit: str = "max_completion_tokens"
) -> dict[str, Any]:
    """Return the request body.

    `limit` is what the endpoint calls the limit on the output, empty to send none.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": prompt.user},
        ],
    }
    if limit:
        body[limit] = prompt.max_output_tokens
    if prompt.schema and structured:
        schema = {"name": prompt.kind.value, "strict": True, "schema": json.loads(prompt.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def reply_of(body: Any, prompt: Prompt, model: str, request_id: str, seconds: float) -> Reply:
    """Read a response body, as parsed JSON.

    Raises Refused when the model declined, BadReply when the body is no chat completion, is
    empty, or is longer than any program.
    """
    choice = _first_choice(body, request_id)
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        raise Refused(f"the model declined: {_head(refusal)}", request_id=request_id, text=refusal)
    # half a surrogate pair, which JSON can hold, could not be written to any file
    text = _text(message.get("content")).encode("utf-8", "replace").decode()
    finish = choice.get("finish_reason")
    if finish == "content_filter":
        raise Refused("the endpoint's filter cut the reply off", request_id=request_id, text=text)
    if len(text) > MAX_REPLY_CHARS:
        raise BadReply(
            f"the reply has {len(text)} characters, at most {MAX_REPLY_CHARS} are read",
            request_id=request_id,
            text=text[:MAX_REPLY_CHARS],
        )
    if not text.strip():
        why = "its length limit went into reasoning" if finish == "length" else "it holds no text"
        raise BadReply(f"the reply is empty: {why}", request_id=request_id)
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    given = body.get("model")
    return Reply(
        text=text,
        tokens_in=_count(usage.get("prompt_tokens"), prompt.system + prompt.user),
        tokens_out=_count(usage.get("completion_tokens"), text),
        seconds=seconds,
        model=given if isinstance(given, str) and given else model,
        request_id=request_id,
        truncated=finish == "length",
    )


def _first_choice(body: Any, request_id: str) -> dict[str, Any]:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        shown = body if isinstance(body, str) else json.dumps(body, default=str)
        raise BadReply(
            f"the endpoint's answer is no chat completion: {_head(shown)}",
            hint="check the base URL, which usually ends in /v1",
            request_id=request_id,
            text=shown[:MAX_REPLY_CHARS],
        )
    return choices[0]


def _text(content: Any) -> str:
    """Return the text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p.get("text", "") for p in content if isinstance(p, dict)]
        return "".join(p for p in parts if isinstance(p, str))
    return ""


def _count(given: Any, text: str) -> int:
    """Return the tokens that the endpoint counted, an estimate where it counted none."""
    return given if type(given) is int and given >= 0 else estimated_tokens(text)


def _head(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."

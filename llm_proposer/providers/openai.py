"""The `openai` package against any compatible endpoint: OpenAI, vLLM, llama.cpp, Ollama."""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from llm_proposer.client import Prompt, Reply
from llm_proposer.errors import (
    BadReply,
    BadRequest,
    NotConfigured,
    ProposerError,
    RateLimited,
    Unreachable,
)
from llm_proposer.providers.chat import body_of, reply_of
from llm_proposer.redact import redacted

TIMEOUT_S = 300.0
_PAUSED = (408, 409, 425)  #: statuses below 500 that pass by themselves
_UNSUPPORTED = (501, 505)  #: statuses from 500 on that stay
#: what endpoints call the limit on the output, newest first; last comes to send none
_LIMITS = ("max_completion_tokens", "max_tokens", "")
#: in a refusal, they mean that the endpoint cannot obey a schema
_SCHEMA_WORDS = ("response_format", "json_schema", "structured", "grammar", "schema")
_SPENT = ("insufficient_quota", "billing_hard_limit_reached")
NO_KEY = "none"  #: what a local server gets that asks for no key


@dataclass(slots=True)
class OpenAIClient:
    """One endpoint and model. What the endpoint turns out not to take is left out from then on."""

    sdk: Any = field(repr=False)
    model: str
    secrets: tuple[str, ...] = field(default=(), repr=False)
    structured: bool = True
    limit: str = "max_completion_tokens"

    def complete(self, prompt: Prompt) -> Reply:
        """Answer `prompt`. Raises ProposerError."""
        while True:
            try:
                return self._send(prompt)
            except (BadRequest, Unreachable) as error:
                if not self._give_up_a_field(prompt, error):
                    raise

    def _send(self, prompt: Prompt) -> Reply:
        started = time.monotonic()
        body = body_of(prompt, self.model, structured=self.structured, limit=self.limit)
        with _translated(self.secrets, self.model):
            raw = self.sdk.chat.completions.with_raw_response.create(**body)
            request_id = raw.headers.get("x-request-id") or ""
            data = raw.http_response.content
        seconds = time.monotonic() - started
        answer = _parsed(data, raw.headers.get("content-type") or "", request_id)
        if isinstance(answer, dict) and not request_id:
            request_id = str(answer.get("id") or "")
        return reply_of(answer, prompt, self.model, request_id, seconds)

    def _give_up_a_field(self, prompt: Prompt, error: ProposerError) -> bool:
        """Change the next request when this one was refused for what not every endpoint has."""
        said = error.text.lower()
        if self.limit and any(word in said for word in (self.limit, "context length")):
            self.limit = _LIMITS[_LIMITS.index(self.limit) + 1]
            return True
        if self.structured and prompt.schema and any(word in said for word in _SCHEMA_WORDS):
            self.structured = False
            return True
        return False


def check(model: str | None, base_url: str | None, environ: Mapping[str, str]) -> None:
    """Raise NotConfigured when there is no model, no key for OpenAI itself, or no address."""
    url = _address(base_url, environ)
    if not model:
        raise NotConfigured("no model named", hint="say --model NAME")
    if url is not None and not _is_address(url):
        raise NotConfigured(
            f"base URL {redacted(url)!r} is no address",
            hint="give one such as http://127.0.0.1:8000/v1",
        )
    if not environ.get("OPENAI_API_KEY") and url is None:
        raise NotConfigured(
            "no key for the model",
            hint="set OPENAI_API_KEY, or say --base-url for a server of your own, "
            "--proposer batch:DIR, or --proposer builtin",
        )


def connect(
    model: str | None,
    base_url: str | None,
    environ: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
) -> OpenAIClient:
    """Make a client. The key and, without `base_url`, the address come from `environ`.

    Raises NotConfigured as `check` does.
    """
    check(model, base_url, environ)
    assert model is not None
    key = environ.get("OPENAI_API_KEY") or ""
    import openai  # half a second, and only who asks a model pays it

    with _translated((key,), model):
        # one place decides about asking again, and it is not the SDK
        sdk = openai.OpenAI(
            api_key=key or NO_KEY,
            base_url=_address(base_url, environ),
            timeout=timeout_s,
            max_retries=0,
        )
    return OpenAIClient(sdk, model, (key,) if key else ())


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        found = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets or a port that are none
        return False
    return found and parts.scheme in ("http", "https") and url.isascii() and url.isprintable()


def _address(base_url: str | None, environ: Mapping[str, str]) -> str | None:
    return base_url or environ.get("OPENAI_BASE_URL") or None


@contextmanager
def _translated(secrets: tuple[str, ...], model: str) -> Iterator[None]:
    """Turn the SDK's errors into this package's; errors of the program pass through."""
    import openai

    try:
        yield
    except openai.APITimeoutError:
        raise Unreachable("no reply in time", retryable=True) from None
    except openai.APIConnectionError as error:
        cause = redacted(str(error.__cause__ or error), secrets)
        raise Unreachable(
            f"no connection to the endpoint: {cause}",
            retryable=True,
            hint="check the base URL and the network",
        ) from None
    except openai.APIStatusError as error:
        raise _of_status(error, secrets, model) from None
    except openai.OpenAIError as error:
        raise ProposerError(redacted(str(error), secrets)) from None


def _of_status(error: Any, secrets: tuple[str, ...], model: str) -> ProposerError:
    status: int = error.status_code
    text = redacted(_body_text(error), secrets)
    facts: dict[str, Any] = {"request_id": error.request_id or "", "text": text}
    said = f"the endpoint answered {status}: {' '.join(_message(error, secrets).split())[:200]}"
    if status == 429:
        if error.code in _SPENT or error.type in _SPENT:
            return RateLimited(said, hint="the account's credit is used up", **facts)
        wait = _retry_after(error.response.headers)
        return RateLimited(said, retryable=True, retry_after_s=wait, **facts)
    if (status >= 500 and status not in _UNSUPPORTED) or status in _PAUSED:
        wait = _retry_after(error.response.headers)
        return Unreachable(said, retryable=True, retry_after_s=wait, **facts)
    hints = {
        401: "check OPENAI_API_KEY",
        403: "the key may not use this model",
        404: f"check --model {model} and the base URL, which usually ends in /v1",
    }
    return BadRequest(said, hint=hints.get(status, ""), **facts)


def _message(error: Any, secrets: tuple[str, ...]) -> str:
    body = error.body
    inner = body.get("message") if isinstance(body, dict) else None
    text = inner if isinstance(inner, str) else _body_text(error) or str(error)
    return redacted(text, secrets)


def _body_text(error: Any) -> str:
    body = error.body
    if isinstance(body, str):
        return body
    return json.dumps(body, default=str) if body is not None else ""


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the endpoint asks to wait, from either form of the header."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            return max(0.0, float(value) / unit)
        except ValueError:
            pass  # the other form: a date
        try:
            at = email.utils.parsedate_to_datetime(value)
        except ValueError:
            continue
        return max(0.0, at.timestamp() - time.time())
    return None


def _parsed(data: bytes, content_type: str, request_id: str) -> Any:
    text = data.decode("utf-8", errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        shown = " ".join(text.split())[:80]
        raise BadReply(
            f"the endpoint's answer ({content_type or 'no content type'}) is not JSON: {shown}",
            retryable="json" in content_type,  # JSON that was cut off on its way
            hint="check the base URL, which usually ends in /v1",
            request_id=request_id,
            text=text,
        ) from None

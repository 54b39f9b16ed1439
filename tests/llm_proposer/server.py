"""A real HTTP server that serves recorded and broken replies to the real client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer. `delay_s` is waited for first; `cut` bytes are missing from the body.

    With `broken` the connection ends before the length that the headers promise.
    """

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    delay_s: float = 0.0
    cut: int = 0
    broken: bool = False


def completion(
    text: str | None,
    *,
    finish: str = "stop",
    refusal: str | None = None,
    usage: tuple[int, int] | None = (120, 40),
    request_id: str = "req-1",
) -> Answer:
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": text, "refusal": refusal}
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "served-model",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }
    if usage is not None:
        body["usage"] = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        }
    return Answer(body=json.dumps(body), headers={"x-request-id": request_id})


def failure(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    """An error as OpenAI words it."""
    body = {"error": {"message": message, "type": code, "code": code, "param": None}}
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return Answer(status, json.dumps(body), named)


Script = Answer | Callable[[dict[str, Any]], Answer]


class Server:
    """Answers requests in order by its script; the last entry answers all that follow."""

    def __init__(self) -> None:
        self.script: list[Script] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                request = json.loads(self.rfile.read(length))
                answer = outer._next(request, {k.lower(): v for k, v in self.headers.items()})
                if answer.delay_s:
                    outer._released.wait(answer.delay_s)
                data = answer.body.encode()
                sent = data[: len(data) - answer.cut]
                try:
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.content_type)
                    self.send_header("Content-Length", str(len(data if answer.broken else sent)))
                    for name, value in answer.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(sent)
                    self.close_connection = answer.broken
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client has given up: that is the test

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output clean."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def _next(self, request: dict[str, Any], headers: dict[str, str]) -> Answer:
        entry = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(request)
        self.headers.append(headers)
        return entry if isinstance(entry, Answer) else entry(request)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

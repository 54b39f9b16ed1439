"""`batch:DIR`: requests as OpenAI Batch JSONL in a folder, replies from the same folder.

For a host without internet: somebody carries the requests to an endpoint and the output files
back. Replies may come in any order, at any time, in files of any name that ends in `.jsonl`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_proposer.client import Prompt, Reply
from llm_proposer.errors import BadReply, NotConfigured, Pending
from llm_proposer.providers.chat import body_of, reply_of
from runs.files import read_regular

REQUESTS = "requests-"
URL = "/v1/chat/completions"
ANY_MODEL = "model"  #: named in a request when the user named none


def request_line(prompt: Prompt, model: str) -> str:
    """Return one line of a batch input file; the prompt's digest is its `custom_id`."""
    body = body_of(prompt, model)
    line = {"custom_id": prompt.digest, "method": "POST", "url": URL, "body": body}
    return json.dumps(line)


@dataclass(slots=True)
class BatchClient:
    """Answers from the files of a folder; what nobody has answered is written there, once."""

    folder: Path
    model: str
    _file: Path | None = None
    _asked: set[str] = field(default_factory=set)
    _replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def complete(self, prompt: Prompt) -> Reply:
        """Answer `prompt`. Raises Pending while there is no reply, ProposerError for a bad one."""
        self._read()
        found = self._replies.get(prompt.digest)
        if found is not None:
            return _reply(found, prompt, self.model)
        if prompt.digest not in self._asked:
            self._write(request_line(prompt, self.model))
            self._asked.add(prompt.digest)
        raise Pending(f"request {prompt.digest[:8]} waits for a reply in {self.folder}")

    def _write(self, line: str) -> None:
        self._file = self._file or _new_file(self.folder)
        with self._file.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """Take in what is new in the folder. A reply that worked is never lost to one that failed.

        A line still being written does not parse; its file is read again once it has grown.
        """
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                now = path.stat()
                stamp = (now.st_mtime_ns, now.st_size)
                if self._seen.get(path) == stamp:
                    continue
                lines = read_regular(path).decode(errors="replace").split("\n")
            except OSError:
                continue  # moved or replaced meanwhile: the next reading finds it
            self._seen[path] = stamp
            for entry in _objects(lines):
                name = entry["custom_id"]
                if path.name.startswith(REQUESTS):
                    self._asked.add(name)
                elif name not in self._replies or not _worked(self._replies[name]):
                    self._replies[name] = entry


def connect(folder: str, model: str | None) -> BatchClient:
    """Make a client for `batch:DIR`, the folder made when it is not there. Raises NotConfigured."""
    if not folder:
        raise NotConfigured("no folder in --proposer batch:", hint="say --proposer batch:DIR")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise NotConfigured(f"cannot use {path} for requests: {why}") from None
    return BatchClient(path, model or ANY_MODEL)


def _new_file(folder: Path) -> Path:
    """Make the next free requests-NNNN.jsonl; nobody else writes to it."""
    number = 1
    while True:
        path = folder / f"{REQUESTS}{number:04d}.jsonl"
        try:
            path.open("xb").close()
        except FileExistsError:
            number += 1
            continue
        return path


def _objects(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn, still growing, or empty
        if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str):
            yield entry


def _response(entry: dict[str, Any]) -> dict[str, Any]:
    response = entry.get("response")
    return response if isinstance(response, dict) else {}


def _worked(entry: dict[str, Any]) -> bool:
    return not entry.get("error") and _response(entry).get("status_code", 200) == 200


def _reply(entry: dict[str, Any], prompt: Prompt, model: str) -> Reply:
    """Read one output line. Raises BadReply, for a failed request too, or Refused."""
    response = _response(entry)
    request_id = str(response.get("request_id") or entry.get("id") or prompt.digest)
    body = response.get("body")
    if not _worked(entry):
        error = entry.get("error") or (body.get("error") if isinstance(body, dict) else None)
        said = error.get("message") if isinstance(error, dict) else error
        status = response.get("status_code", "no status")
        raise BadReply(
            f"the batch failed for this request ({status}): {said}",
            request_id=request_id,
            text=json.dumps(entry),
        )
    return reply_of(body, prompt, model, request_id, 0.0)

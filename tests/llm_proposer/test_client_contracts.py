"""Every provider keeps the contract of a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_contract import PROMPT, ClientContract
from server import Answer, Server

from llm_proposer.client import Client
from llm_proposer.providers import batch, openai


class TestOpenAI(ClientContract):
    """The openai package over HTTP."""

    @pytest.fixture(autouse=True)
    def _serve(self, server: Server) -> None:
        self.server = server

    def client_answering(self, body: object) -> Client:
        self.server.requests.clear()
        self.server.script = [Answer(body=json.dumps(body))]
        return openai.connect("m", self.server.url, {}, 20.0)


class TestBatch(ClientContract):
    """A folder with a batch's output file."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.made = 0

    def client_answering(self, body: object) -> Client:
        self.made += 1
        folder = self.folder / str(self.made)
        folder.mkdir()
        response = {"status_code": 200, "request_id": "r-1", "body": body}
        line = {"id": "b", "custom_id": PROMPT.digest, "response": response, "error": None}
        (folder / "output.jsonl").write_text(json.dumps(line) + "\n")
        return batch.connect(str(folder), "m")

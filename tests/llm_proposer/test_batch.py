"""batch:DIR: requests out once, replies in whenever and however they come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_proposer.client import Kind, Prompt
from llm_proposer.errors import BadReply, NotConfigured, Pending, Refused
from llm_proposer.providers.batch import BatchClient, connect

PROMPTS = [Prompt(Kind.SEEDS, "system", f"user {n}", schema='{"type":"object"}') for n in range(3)]


def output(prompt: Prompt, text: str | None, **changes: object) -> str:
    message = {"role": "assistant", "content": text, "refusal": changes.pop("refusal", None)}
    body = {
        "id": "chatcmpl-1",
        "model": "batch-model",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
    }
    line = {
        "id": "batch_req_1",
        "custom_id": prompt.digest,
        "response": {"status_code": 200, "request_id": f"req-{text}", "body": body},
        "error": None,
    }
    return json.dumps(line | changes) + "\n"


def requested(folder: Path) -> list[dict[str, object]]:
    files = sorted(folder.glob("requests-*.jsonl"))
    return [json.loads(line) for f in files for line in f.read_text().splitlines()]


def ask(client: BatchClient, prompt: Prompt) -> None:
    with pytest.raises(Pending):
        client.complete(prompt)


def test_requests_are_a_batch_input_file(tmp_path: Path) -> None:
    client = connect(str(tmp_path / "new"), "some-model")
    ask(client, PROMPTS[0])
    (line,) = requested(tmp_path / "new")
    assert line["custom_id"] == PROMPTS[0].digest
    assert (line["method"], line["url"]) == ("POST", "/v1/chat/completions")
    body = line["body"]
    assert isinstance(body, dict) and body["model"] == "some-model"
    assert body["messages"][1] == {"role": "user", "content": "user 0"}
    assert body["response_format"]["type"] == "json_schema"


def test_a_request_is_written_once_even_by_a_later_run(tmp_path: Path) -> None:
    first = connect(str(tmp_path), "m")
    for _ in range(2):
        ask(first, PROMPTS[0])
    second = connect(str(tmp_path), "m")
    ask(second, PROMPTS[0])
    ask(second, PROMPTS[1])
    assert [r["custom_id"] for r in requested(tmp_path)] == [p.digest for p in PROMPTS[:2]]
    assert len(list(tmp_path.glob("requests-*.jsonl"))) == 2


def test_replies_come_in_any_order_and_file(tmp_path: Path) -> None:
    client = connect(str(tmp_path), "m")
    for prompt in PROMPTS:
        ask(client, prompt)
    (tmp_path / "batch_output.jsonl").write_text(output(PROMPTS[2], "c") + output(PROMPTS[0], "a"))
    assert client.complete(PROMPTS[0]).text == "a"
    reply = client.complete(PROMPTS[2])
    assert (reply.text, reply.model, reply.request_id) == ("c", "batch-model", "req-c")
    assert (reply.tokens_in, reply.tokens_out) == (11, 7)
    ask(client, PROMPTS[1])
    (tmp_path / "more.jsonl").write_text(output(PROMPTS[1], "b"))
    assert client.complete(PROMPTS[1]).text == "b"
    assert len(requested(tmp_path)) == 3


def test_a_request_that_has_its_reply_already_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(output(PROMPTS[0], "a"))
    assert connect(str(tmp_path), "m").complete(PROMPTS[0]).text == "a"
    assert requested(tmp_path) == []


def test_a_line_that_is_still_being_written_is_taken_once_it_is_whole(tmp_path: Path) -> None:
    client = connect(str(tmp_path), "m")
    path, line = tmp_path / "out.jsonl", output(PROMPTS[1], "b")
    path.write_text(output(PROMPTS[0], "a") + line[:50])
    assert client.complete(PROMPTS[0]).text == "a"
    ask(client, PROMPTS[1])
    path.write_text(output(PROMPTS[0], "a") + line)
    assert client.complete(PROMPTS[1]).text == "b"


def test_foreign_lines_and_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "junk.jsonl").write_bytes(
        b'\n[1]\n{"custom_id": 7}\nnull\n\xff\xfe\n' + b"[" * 9999
    )
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "out.jsonl").write_text("\n" + output(PROMPTS[0], "a"))
    assert connect(str(tmp_path), "m").complete(PROMPTS[0]).text == "a"


def test_a_failed_request_says_why_and_a_later_reply_replaces_it(tmp_path: Path) -> None:
    client = connect(str(tmp_path), "m")
    expired = {"code": "batch_expired", "message": "not in time"}
    failed = output(PROMPTS[0], None, response=None, error=expired)
    (tmp_path / "errors.jsonl").write_text(failed)
    with pytest.raises(BadReply, match="not in time"):
        client.complete(PROMPTS[0])
    status = {"status_code": 400, "body": {"error": {"message": "too long"}}}
    (tmp_path / "errors.jsonl").write_text(output(PROMPTS[0], None, response=status))
    with pytest.raises(BadReply, match=r"\(400\): too long"):
        client.complete(PROMPTS[0])
    (tmp_path / "a-second-batch.jsonl").write_text(output(PROMPTS[0], "a"))
    assert client.complete(PROMPTS[0]).text == "a"
    (tmp_path / "z-errors.jsonl").write_text(failed)
    assert client.complete(PROMPTS[0]).text == "a"


def test_a_refusal_in_a_batch_is_one(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(output(PROMPTS[0], None, refusal="I will not"))
    with pytest.raises(Refused, match="I will not"):
        connect(str(tmp_path), "m").complete(PROMPTS[0])


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotConfigured, match="cannot use"):
        connect(str(tmp_path / "file"), "m")
    with pytest.raises(NotConfigured, match="batch:DIR"):
        connect("", "m")

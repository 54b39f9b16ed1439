"""The real openai package over real HTTP: good replies, broken ones, and what each becomes."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from server import Answer, Server, completion, failure

from llm_proposer.client import Kind, Prompt
from llm_proposer.errors import (
    BadReply,
    BadRequest,
    NotConfigured,
    ProposerError,
    RateLimited,
    Refused,
    Unreachable,
)
from llm_proposer.providers.openai import OpenAIClient, connect
from llm_proposer.retries import Backoff, Retrying

KEY = "sk-test-0123456789abcdefABCDEF"
PROMPT = Prompt(Kind.SKETCH, "system", "user")
SEEDS = Prompt(Kind.SEEDS, "system", "user", schema='{"type": "object"}')


def client(server: Server, timeout_s: float = 20.0) -> OpenAIClient:
    return connect("some-model", server.url, {"OPENAI_API_KEY": KEY}, timeout_s)


def error_of(server: Server, *script: Answer, timeout_s: float = 20.0) -> ProposerError:
    server.script = list(script)
    with pytest.raises(ProposerError) as caught:
        client(server, timeout_s).complete(PROMPT)
    return caught.value


def test_a_reply_comes_with_its_accounts(server: Server) -> None:
    server.script = [completion("Copy Q from global to shared", usage=(321, 12))]
    reply = client(server).complete(replace(PROMPT, max_output_tokens=77))
    assert reply.text == "Copy Q from global to shared"
    assert (reply.tokens_in, reply.tokens_out, reply.model) == (321, 12, "served-model")
    assert reply.request_id == "req-1" and reply.seconds > 0 and not reply.truncated
    (request,) = server.requests
    assert request["model"] == "some-model" and request["max_completion_tokens"] == 77
    assert [m["content"] for m in request["messages"]] == ["system", "user"]
    assert "response_format" not in request
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_an_endpoint_that_counts_no_tokens_is_estimated(server: Server) -> None:
    server.script = [completion("x" * 300, usage=None)]
    reply = client(server).complete(PROMPT)
    assert (reply.tokens_in, reply.tokens_out) == (4, 100)


def test_the_address_may_come_from_the_environment(server: Server) -> None:
    server.script = [completion("x")]
    found = connect("m", None, {"OPENAI_BASE_URL": server.url})
    assert found.complete(PROMPT).text == "x"


def test_the_schema_is_sent_where_the_endpoint_takes_it(server: Server) -> None:
    server.script = [completion("{}")]
    client(server).complete(SEEDS)
    sent = server.requests[0]["response_format"]["json_schema"]
    assert sent == {"name": "seeds", "strict": True, "schema": {"type": "object"}}


def test_an_endpoint_without_structured_outputs_gets_plain_requests(server: Server) -> None:
    server.script = [failure(400, "Unknown parameter: 'response_format'"), completion("{}")]
    asking = client(server)
    assert asking.complete(SEEDS).text == "{}"
    asking.complete(SEEDS)
    assert ["response_format" in r for r in server.requests] == [True, False, False]


def test_a_server_whose_grammar_fails_gets_plain_requests(server: Server) -> None:
    server.script = [failure(500, "failed to parse grammar"), completion("{}")]
    assert client(server).complete(SEEDS).text == "{}"


def test_an_endpoint_with_the_old_name_of_the_limit_gets_it(server: Server) -> None:
    server.script = [
        failure(422, "extra field max_completion_tokens not permitted"),
        completion("x"),
    ]
    client(server).complete(PROMPT)
    assert server.requests[1]["max_tokens"] == PROMPT.max_output_tokens
    assert "max_completion_tokens" not in server.requests[1]


def test_a_limit_past_the_models_context_is_left_out(server: Server) -> None:
    server.script = [
        failure(400, "max_completion_tokens is too large: 16384"),
        failure(400, "This model's maximum context length is 8192 tokens"),
        completion("x"),
    ]
    assert client(server).complete(PROMPT).text == "x"
    assert not {"max_tokens", "max_completion_tokens"} & set(server.requests[2])


def test_a_time_out_may_pass(server: Server) -> None:
    error = error_of(server, replace(completion("late"), delay_s=5.0), timeout_s=0.2)
    assert isinstance(error, Unreachable) and error.retryable
    assert len(server.requests) == 1  # the SDK's own retries are off


def test_a_refused_connection_may_pass_and_names_what_to_check() -> None:
    with pytest.raises(Unreachable) as caught:
        connect("m", "http://127.0.0.1:9/v1", {}, 2.0).complete(PROMPT)
    assert caught.value.retryable and "check the base URL" in str(caught.value)


def test_too_many_requests_says_how_long_to_wait(server: Server) -> None:
    error = error_of(server, failure(429, "slow down", retry_after="7"))
    assert isinstance(error, RateLimited) and error.retryable and error.retry_after_s == 7.0
    error = error_of(server, failure(429, "slow down", retry_after_ms="250"))
    assert error.retry_after_s == 0.25
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    error = error_of(server, failure(429, "slow down", retry_after=date))
    assert error.retry_after_s is not None and 25 < error.retry_after_s <= 30


def test_used_up_credit_is_not_waited_for(server: Server) -> None:
    error = error_of(server, failure(429, "You exceeded your quota", "insufficient_quota"))
    assert isinstance(error, RateLimited) and not error.retryable and "credit" in error.hint


def test_a_failing_server_may_recover(server: Server) -> None:
    error = error_of(server, failure(500, "oops"))
    assert isinstance(error, Unreachable) and error.retryable and "500" in str(error)
    assert error_of(server, Answer(503, "<html>busy</html>", content_type="text/html")).retryable


@pytest.mark.parametrize(
    ("status", "hint"), [(400, ""), (401, "OPENAI_API_KEY"), (403, "key"), (404, "--model")]
)
def test_what_the_endpoint_will_never_take_is_final(server: Server, status: int, hint: str) -> None:
    error = error_of(server, failure(status, "no such thing"))
    assert isinstance(error, BadRequest) and not error.retryable
    assert hint in error.hint and "no such thing" in str(error)


def test_a_refusal_is_final(server: Server) -> None:
    error = error_of(server, completion(None, refusal="I cannot help with that"))
    assert isinstance(error, Refused) and not error.retryable
    assert "I cannot help" in str(error)
    error = error_of(server, completion("Copy", finish="content_filter"))
    assert isinstance(error, Refused)


def test_a_body_cut_off_on_its_way_is_asked_for_again(server: Server) -> None:
    error = error_of(server, replace(completion("Copy Q from global to shared"), cut=60))
    assert isinstance(error, BadReply) and error.retryable and "not JSON" in str(error)


def test_a_connection_lost_half_way_is_asked_for_again(server: Server) -> None:
    error = error_of(server, replace(completion("x" * 500), cut=60, broken=True))
    assert isinstance(error, Unreachable) and error.retryable


def test_a_web_page_is_no_reply(server: Server) -> None:
    page = Answer(body="<html>welcome</html>", content_type="text/html")
    error = error_of(server, page)
    assert isinstance(error, BadReply) and not error.retryable
    assert "text/html" in str(error) and "/v1" in error.hint


def test_json_that_is_no_completion_is_no_reply(server: Server) -> None:
    for body in ('{"status": "ok"}', "[]", "null", '{"choices": []}', '{"choices": [7]}'):
        assert isinstance(error_of(server, Answer(body=body)), BadReply)
    assert isinstance(error_of(server, completion("")), BadReply)
    assert "reasoning" in str(error_of(server, completion("", finish="length")))


def test_two_megabytes_are_no_program(server: Server) -> None:
    error = error_of(server, completion("Copy Q from global to shared\n" * 72_000))
    assert isinstance(error, BadReply) and not error.retryable
    assert "2088000 characters" in str(error) and len(error.text) == 200_000


def test_a_reply_at_its_length_limit_is_marked(server: Server) -> None:
    server.script = [completion("Copy Q from", finish="length")]
    assert client(server).complete(PROMPT).truncated


def test_a_key_that_the_endpoint_echoes_goes_no_further(server: Server) -> None:
    error = error_of(server, failure(401, f"Incorrect API key provided: {KEY}"))
    assert KEY not in str(error) + error.text + repr(error)
    assert "[redacted]" in str(error)
    assert KEY not in repr(client(server))


def test_what_is_missing_is_said_before_anything_is_sent() -> None:
    with pytest.raises(NotConfigured, match="OPENAI_API_KEY"):
        connect("m", None, {})
    with pytest.raises(NotConfigured, match="--model"):
        connect(None, None, {"OPENAI_API_KEY": KEY})
    with pytest.raises(NotConfigured, match="no address"):
        connect("m", "localhost:8000", {})


def test_retries_wait_as_long_as_asked_and_then_succeed(server: Server) -> None:
    server.script = [failure(429, "slow", retry_after="3"), failure(500, "x"), completion("ok")]
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    asking = Retrying(client(server), Backoff(base_s=8.0), wait, random.Random(0))
    assert asking.complete(PROMPT).text == "ok"
    assert 3.0 <= waits[0] <= 3.8 and 8.0 <= waits[1] <= 16.0


def test_nothing_is_asked_again_after_a_bad_request(server: Server) -> None:
    server.script = [failure(400, "no"), completion("ok")]
    with pytest.raises(BadRequest):
        Retrying(client(server), wait=lambda s: pytest.fail("it waited")).complete(PROMPT)
    assert len(server.requests) == 1

"""What every client of a model keeps, whoever answers: subclass and say how to make one."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import pytest

from llm_proposer.client import MAX_REPLY_CHARS, Client, Kind, Prompt
from llm_proposer.errors import BadReply, ProposerError, Refused

PROMPT = Prompt(Kind.SEEDS, "system", "user", schema='{"type":"object"}')


class ClientContract(ABC):
    """The suite. `body` is a chat completion as parsed JSON, or anything else."""

    @abstractmethod
    def client_answering(self, body: object) -> Client:
        """Return a client whose endpoint answers PROMPT with `body`."""

    @staticmethod
    def completion(text: object, **changes: object) -> dict[str, object]:
        """Return a chat completion with one choice."""
        message = {"role": "assistant", "content": text, "refusal": changes.pop("refusal", None)}
        choice = {"index": 0, "message": message, "finish_reason": changes.pop("finish", "stop")}
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
        return {"id": "c-1", "model": "served", "choices": [choice], "usage": usage} | changes

    def test_a_reply_is_text_with_its_accounts(self) -> None:
        reply = self.client_answering(self.completion("text")).complete(PROMPT)
        assert (reply.text, reply.tokens_in, reply.tokens_out) == ("text", 9, 4)
        assert reply.model == "served" and reply.request_id and reply.seconds >= 0
        assert not reply.truncated

    def test_the_same_client_answers_again(self) -> None:
        client = self.client_answering(self.completion("text"))
        assert client.complete(PROMPT).text == client.complete(PROMPT).text == "text"

    def test_a_limit_on_the_output_is_no_part_of_the_question(self) -> None:
        limited = dataclasses.replace(PROMPT, max_output_tokens=300)
        client = self.client_answering(self.completion("text"))
        assert client.complete(limited).text == "text"

    def test_content_in_parts_is_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
        assert self.client_answering(self.completion(parts)).complete(PROMPT).text == "ab"

    def test_text_can_be_written_to_a_file(self) -> None:
        reply = self.client_answering(self.completion("a\ud800b Σ")).complete(PROMPT)
        assert reply.text.encode() == "a?b Σ".encode()

    def test_a_reply_at_its_limit_is_marked(self) -> None:
        client = self.client_answering(self.completion("te", finish="length"))
        assert client.complete(PROMPT).truncated

    def test_missing_accounts_are_estimated(self) -> None:
        for usage in (None, {}, {"prompt_tokens": "9"}, {"prompt_tokens": -1}):
            client = self.client_answering(self.completion("x" * 30, usage=usage))
            reply = client.complete(PROMPT)
            assert (reply.tokens_in, reply.tokens_out) == (4, 10)

    def test_a_refusal_is_refused_for_good(self) -> None:
        for body in (
            self.completion(None, refusal="I will not"),
            self.completion("half", finish="content_filter"),
        ):
            with pytest.raises(Refused) as caught:
                self.client_answering(body).complete(PROMPT)
            assert not caught.value.retryable

    @pytest.mark.parametrize(
        "body",
        [
            None, [], "text", {"choices": []}, {"choices": None}, {"choices": [None]},
            {"choices": [{"message": None}]}, {"choices": [{"message": {"content": 7}}]},
            {"choices": [{"message": {"content": "  "}}]},
        ],
    )  # fmt: skip
    def test_anything_else_is_a_bad_reply(self, body: object) -> None:
        with pytest.raises(BadReply):
            self.client_answering(body).complete(PROMPT)

    def test_a_reply_of_megabytes_is_one_too(self) -> None:
        client = self.client_answering(self.completion("x" * 2_000_000))
        with pytest.raises(BadReply, match="2000000 characters") as caught:
            client.complete(PROMPT)
        assert len(caught.value.text) <= MAX_REPLY_CHARS

    def test_every_error_is_of_one_family(self) -> None:
        with pytest.raises(ProposerError) as caught:
            self.client_answering({}).complete(PROMPT)
        assert str(caught.value) and "\n" not in str(caught.value)

"""What can go wrong with a model, in one flat family that says whether to try again."""

from __future__ import annotations


class ProposerError(Exception):
    """A request to a model that brought no usable reply.

    `retryable` says whether the same request may succeed later, `hint` what the user can do.
    `retry_after_s` is the wait that the endpoint asked for; `text` is the raw answer, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        hint: str = "",
        retry_after_s: float | None = None,
        request_id: str = "",
        text: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retryable = retryable
        self.hint = hint
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.text = text

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class NotConfigured(ProposerError):
    """No key, no such folder, no price: what the user gave is not enough to ask a model."""


class BadRequest(ProposerError):
    """The endpoint will not take this request, however often it is sent."""


class RateLimited(ProposerError):
    """The endpoint asks to wait."""


class Unreachable(ProposerError):
    """No answer: a time-out, a refused connection, or the server's own failure."""


class BadReply(ProposerError):
    """An answer that is not a chat completion, or is far too long."""


class Refused(ProposerError):
    """The model declined to answer."""


class BudgetSpent(ProposerError):
    """The limit on tokens or cost leaves no room for this request."""


class Pending(ProposerError):
    """The request is written where someone will take it; its reply is not there yet."""


class Stopped(ProposerError):
    """The run ended while the request waited for its turn."""

"""`tune report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

from llm_proposer.exchange import EXCHANGES, Exchange, read_exchanges
from runs.report import Talk, report
from runs.store import RunStore
from tuner.errors import UsageError


def write_report(run: Path, out: Path | None) -> Path:
    """Write the page of `run` and return where. Raises StoreError and UsageError."""
    store = RunStore.open(run)
    talks = [talk_of(e) for e in read_exchanges(run / EXCHANGES)]
    return write_page(out or run / "report.html", report(store, talks))


def write_page(path: Path, text: str) -> Path:
    """Write a page and return where. Raises UsageError."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link; name the file that it should be")
    if path.exists() and not path.is_file():  # a pipe would wait for a reader
        raise UsageError(f"{path} is no regular file; name another")
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path


def talk_of(exchange: Exchange) -> Talk:
    """Return an exchange as the report shows it."""
    e = exchange
    facts = f"{e.model} · {e.date}"
    if e.answered:
        facts += f" · {e.tokens_in} tokens in, {e.tokens_out} out · {e.seconds:.1f} s"
        if e.cost is not None:
            facts += f" · cost {e.cost:.4g}"
    answered = e.text if e.answered else "no reply yet" if e.pending else f"{e.error}\n\n{e.text}"
    asked = f"{e.system}\n\n{e.user}"
    return Talk(e.kind, asked, answered, facts, failed=bool(e.error) and not e.pending)

"""Checks of what happens to scores: masks, softmax and scale, each once and in their order."""

from __future__ import annotations

from codegen.tl.ast import (
    Arith,
    Call,
    Custom,
    Gemm,
    Name,
    walk,
)
from codegen.tl.report import Report
from codegen.tl.scaling import Context, scale_factor
from codegen.tl.subject import Facts, Subject
from codegen.tl.vocabulary import MASK_KINDS

_MASK_HINT = (
    "Write `Compute Mask S, causal`, `window(l, r)`, `window(l, r, sinks)`, `alibi`, `bias(B)` or "
    "`padding`"
)


class ScoresWalk:
    """What was done to each tile of scores so far; the flow walk reports each statement to it."""

    def __init__(self, subject: Subject, facts: Facts, report: Report) -> None:
        self.facts = facts
        self.report = report
        self.softened: dict[str, int] = {}  # tile -> line of its Softmax
        self.scaled: dict[str, int] = {}  # tile -> line of its scaling
        scale = subject.problem.head_dim**-0.5 if subject.problem else 0.0
        self.context = Context(scale, False, subject.params.numbers)

    def custom(self, stmt: Custom) -> None:
        """Check an operator's place among the others."""
        if stmt.op == "Mask":
            self._mask(stmt)
        elif stmt.op == "Softmax":
            self._softmax(stmt)
        self.scaling(stmt, stmt.name)

    def softmax_done(self, stmt: Custom) -> None:
        """Note a Softmax, once its result has its name."""
        self.softened[stmt.out or stmt.name] = stmt.span.line
        self.softened[stmt.name] = stmt.span.line

    def renamed(self, source: str, name: str) -> None:
        """Note that `name` was computed from `source`."""
        for known in (self.softened, self.scaled):
            if source in known:
                known[name] = known[source]

    def redefined(self, name: str) -> None:
        """Note that a GEMM gives `name` anew."""
        self.softened.pop(name, None)
        self.scaled.pop(name, None)

    def _mask(self, stmt: Custom) -> None:
        for kind in stmt.args:
            name = kind.id if isinstance(kind, Name) else ""
            name = kind.function if isinstance(kind, Call) else name
            if name not in MASK_KINDS:
                self.report.add(stmt.span, "unknown-mask", "this is no kind of mask", _MASK_HINT)
            elif name == "window" and isinstance(kind, Call) and len(kind.args) not in (0, 2, 3):
                self.report.add(
                    stmt.span, "unknown-mask", "a window has two sides",
                    "Write `window(l, r)`: l keys to the left and r to the right; a third number "
                    "is how many first keys stay visible",
                )  # fmt: skip
            elif name == "alibi" and isinstance(kind, Call) and len(kind.args) > 1:
                self.report.add(
                    stmt.span, "unknown-mask", "alibi takes one number at most",
                    "Write `alibi`, or `alibi(c)` for slopes 2^(-c (h + 1) / heads)",
                )  # fmt: skip
        if stmt.name in self.facts.written and stmt.name not in self.facts.products:
            self.report.add(
                stmt.span, "mask-not-scores",
                f"Mask works on scores, and {stmt.name} is no product of Q and K",
                "Write `Compute GEMM Q, K.T and get S` and then `Compute Mask S, causal`",
            )  # fmt: skip
        line = self.softened.get(stmt.name)
        if line is not None:
            self.report.add(
                stmt.span, "mask-after-softmax",
                f"{stmt.name} is masked after its Softmax on line {line}",
                f"Move the Mask above line {line}",
            )  # fmt: skip

    def _softmax(self, stmt: Custom) -> None:
        name = stmt.name
        if (line := self.softened.get(name)) is not None:
            self.report.add(
                stmt.span, "softmax-twice", f"{name} had its Softmax on line {line} already",
                "Take one of them out",
            )  # fmt: skip
            return
        sources = [s for s in walk(self.facts.block) if isinstance(s, Gemm) and s.out == name]
        chained = any(s.a.name in self.facts.products for s in sources)
        if name in self.facts.products and not chained:
            return
        if name not in self.facts.written:
            return  # already said to be undefined
        what = "an output" if chained else "no product of Q and K"
        self.report.add(
            stmt.span, "softmax-not-scores", f"Softmax works on scores, and {name} is {what}",
            "Write `Compute GEMM Q, K.T and get S` and then `Compute Softmax S`",
        )  # fmt: skip

    def scaling(self, stmt: Arith | Custom, name: str) -> None:
        """Report a second scale, or one behind the Softmax."""
        if scale_factor(stmt, self.context) is None:
            return
        if name not in self.facts.products and not self._feeds_scores(name):
            return
        targets = {name} | self._scores_from(name)
        for target in sorted(targets):
            if (line := self.scaled.get(target)) is not None:
                self.report.add(
                    stmt.span, "scale-twice",
                    f"{target} is scaled here and on line {line} already",
                    "Take one of them out: the problem's scale is applied once",
                )  # fmt: skip
                return
        for target in targets:
            self.scaled[target] = stmt.span.line
        if (line := self.softened.get(name)) is not None:
            self.report.add(
                stmt.span, "scale-after-softmax",
                f"{name} is scaled after its Softmax on line {line}",
                f"Move the scaling above line {line}",
            )  # fmt: skip

    def _feeds_scores(self, name: str) -> bool:
        return bool(self._scores_from(name))

    def _scores_from(self, name: str) -> set[str]:
        """Return the outputs of the GEMMs that read `name`, when it is loaded from global."""
        if name not in self.facts.loaded:
            return set()
        return {
            s.out
            for s in walk(self.facts.block)
            if isinstance(s, Gemm) and name in (s.a.name, s.b.name)
            and s.a.name not in self.facts.products
        }  # fmt: skip

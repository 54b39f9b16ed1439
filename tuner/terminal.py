"""A run in the terminal, with Rich: briefing, a line a trial, a bar, the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from runs.record import (
    Basis,
    Broken,
    Finalist,
    History,
    Measured,
    Rejected,
    RunSpec,
    Timing,
    TrialClass,
    TrialRecord,
)
from space.params import Point
from space.variant import DType, Phase, Shape
from tuner.briefing import Briefing
from tuner.score import rate, unit

_SHORT = {
    "q_in_registers": "qreg",
    "p_in_registers": "preg",
    "rescale_threshold": "rescale",
    "blocks_per_sm": "blocks",
    "causal_longest_first": "longest",
    "head_group": "group",
    "epilogue_smem": "epilogue",
    "consumer_warpgroups": "wgs",
    "q_stages": "qstages",
    "out_buffer": "obuf",
    "integer_max": "imax",
}
_STYLES = {TrialClass.OK: "green", TrialClass.DUPLICATE: "dim", TrialClass.BROKEN: "magenta"}


def make_console() -> Console:
    """Return a console on standard output: no colours and no bar when it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, no_color=True, width=140)


class TerminalView:
    """Shows a run to a person."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best: dict[Shape, Timing] = {}
        self._peer: dict[Shape, Finalist] = {}
        self._shapes: tuple[Shape, ...] = ()
        self._basis = Basis.MEASURED
        self._kind = (Phase.PREFILL, DType.BF16)
        self._history = History()
        self._budget = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[free]}"),
            console=console,
        )
        self._task = self._progress.add_task("programs", total=None, free="")
        self._live: Live | None = None

    def briefing(self, briefing: Briefing) -> None:
        """Print the facts as lines and the space as a table."""
        self._say(Text(f"run {briefing.run}", style="bold"))
        for subject, fact in briefing.lines:
            self._say(Text.assemble((f"{subject:>9}  ", "cyan"), fact))
        for s in briefing.spaces:
            why = ", ".join(f"{name} {count}" for name, count in s.pruned)
            text = f"{s.legal} of {s.total} configurations legal for {s.problem}"
            self._say(
                Text.assemble(("    space  ", "cyan"), text, f" ({s.sketch}); pruned by {why}")
            )

    def start(self, spec: RunSpec, history: History) -> None:
        """Start the bar where the terminal has one."""
        self._shapes, self._basis, self._budget = spec.shapes, spec.measure, spec.budget
        self._history = history
        self._kind = (spec.phase, spec.dtype)
        for record in history:
            self._keep_best(record)
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
            self._refresh()

    def peers(self, peers: Sequence[Finalist]) -> None:
        """Keep the fastest peer of each shape, to show beside the best so far."""
        for peer in peers:
            known = self._peer.get(peer.shape)
            if known is None or peer.timing.median_us < known.timing.median_us:
                self._peer[peer.shape] = peer

    def trial(self, record: TrialRecord) -> None:
        """Print the trial's line and move the bar."""
        self._history = self._history.with_record(record)
        better = self._keep_best(record)
        head = f"{record.index:4d} {self._history.spent():4d}/{self._budget} "
        verdict = f"{record.outcome.trial_class:<16}"
        style = _STYLES.get(record.outcome.trial_class, "red")
        rest = f"{_what(record)}  {record.problem.key} {short_point(record.point)}"
        line = Text.assemble(head, (verdict, style), rest)
        if better:
            line.append(f"  best on {better} of {len(self._shapes)} shapes", style="bold")
        self._say(line)
        self._refresh()

    def note(self, text: str) -> None:
        """Print one line."""
        self._say(Text(text))

    def results(self, spec: RunSpec, history: History, finalists: Sequence[Finalist]) -> None:
        """Print one table with a row for each shape, and the failures by class."""
        self.close()
        self._console.print(results_table(spec, history, finalists))
        counts: dict[str, int] = {}
        for record in history:
            name = record.outcome.trial_class
            counts[name] = counts.get(name, 0) + 1
        self._say(Text("trials: " + ", ".join(f"{n} {k}" for k, n in counts.items())))

    def files(self, run: Path, export: Path | None) -> None:
        """Print where the run and the kernels are."""
        self.close()
        self._say(Text(f"run     {run}"))
        if export is not None:
            self._say(Text(f"kernels {export}"))

    def close(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _keep_best(self, record: TrialRecord) -> int:
        better = 0
        if isinstance(record.outcome, Measured):
            for timing in record.outcome.timings:
                known = self._best.get(timing.shape)
                if known is None or timing.median_us < known.median_us:
                    self._best[timing.shape] = timing
                    better += 1
        return better

    def _refresh(self) -> None:
        if self._live is None:
            return
        spent = self._history.spent()
        free = len(self._history) - spent
        self._progress.update(
            self._task, total=self._budget, completed=spent, free=f"{free} free" if free else ""
        )
        self._live.update(Group(self._best_table(), self._progress))

    def _best_table(self) -> Table:
        """Best so far, a row for each head layout and mask and a column for each length."""
        what = unit(self._kind[0]) + (" predicted" if self._basis is Basis.PREDICTED else "")
        table = Table(title=f"best so far beside the best peer, {what}", box=None, title_style="")
        rows: dict[str, dict[str, str]] = {}
        columns: dict[str, None] = {}
        for shape in self._shapes:
            mask = "causal" if shape.causal else "full"
            heads = f"{shape.heads}/{shape.kv_heads} d{shape.head_dim}/{shape.head_dim_v} {mask}"
            length = f"{shape.seqlen_q}" if shape.seqlen_q == shape.seqlen_k else (
                f"{shape.seqlen_q}x{shape.seqlen_k}"
            )  # fmt: skip
            columns[f"{shape.batch}x{length}"] = None
            best = self._best.get(shape)
            text = "-" if best is None else f"{rate(best, *self._kind):.0f}"
            if (peer := self._peer.get(shape)) is not None:
                text += f" ({rate(peer.timing, *self._kind):.0f} {peer.name})"
            rows.setdefault(heads, {})[f"{shape.batch}x{length}"] = text
        table.add_column("BxS")
        for column in columns:
            table.add_column(column, justify="right")
        for heads, cells in rows.items():
            table.add_row(heads, *(cells.get(c, "") for c in columns))
        return table


def results_table(spec: RunSpec, history: History, finalists: Sequence[Finalist]) -> Table:
    """Return the table of a run: for each shape the chosen kernel and the best peer."""
    predicted = spec.measure is Basis.PREDICTED
    what = "predicted" if predicted else "measured, finalists interleaved"
    table = Table(title=f"{spec.variant} on {spec.gpu}, {spec.dtype} ({what})")
    for name in ("shape", "trial", "parameters"):
        table.add_column(name, overflow="fold")
    kind = (spec.phase, spec.dtype)
    for name in ("us", "interval", unit(spec.phase), "best peer", "ratio"):
        table.add_column(name, justify="right")
    for shape in spec.shapes:
        of_shape = [f for f in finalists if f.shape == shape]
        chosen = next((f for f in of_shape if f.chosen), None)
        peers = [f for f in of_shape if f.trial is None]
        peer = min(peers, key=lambda f: f.timing.median_us, default=None)
        against = "-" if peer is None else f"{peer.name} {rate(peer.timing, *kind):.0f}"
        if chosen is None or chosen.trial is None:
            table.add_row(shape.key, "-", "no right kernel", "-", "-", "-", against, "-")
            continue
        t = chosen.timing
        ratio = "-" if peer is None else f"{peer.timing.median_us / t.median_us:.3f}"
        table.add_row(
            shape.key,
            str(chosen.trial),
            short_point(history.records[chosen.trial].point),
            f"{t.median_us:.1f}",
            f"{t.low_us:.1f}..{t.high_us:.1f}",
            f"{rate(t, *kind):.0f}" + (" predicted" if predicted else ""),
            against,
            ratio,
        )
    return table


def short_point(point: Point) -> str:
    """Return a point in few characters: `BM=128 BN=64 warps=4 ...`."""
    return " ".join(f"{_SHORT.get(name, name)}={value}" for name, value in point.items)


def _what(record: TrialRecord) -> str:
    """The rates over the shapes (least to most), or the reason in one line."""
    match record.outcome:
        case Measured(timings=timings):
            problem = record.problem
            rates = sorted(rate(t, problem.phase, problem.dtype) for t in timings)
            predicted = any(t.basis is Basis.PREDICTED for t in timings)
            text = f"{rates[0]:.0f}" if len(rates) == 1 else f"{rates[0]:.0f}..{rates[-1]:.0f}"
            return f"{text} {unit(problem.phase)}" + (" predicted" if predicted else "")
        case Rejected(reason=reason) | Broken(reason=reason):
            return reason.strip().splitlines()[0] if reason.strip() else ""

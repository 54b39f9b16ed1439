"""`tune list` and `tune doctor`: their tables."""

from __future__ import annotations

from rich.table import Table

from space.variant import Phase
from tuner.catalog import catalog
from tuner.doctor import findings
from tuner.terminal import make_console


def print_catalog() -> None:
    """Print the tables of what works where, one for each phase."""
    cells = catalog()
    for phase in Phase:
        table = Table(title=f"{phase}: legal configurations (full / causal mask)")
        for name in ("variant", "head dims", "GPU", "dtypes", "full", "causal"):
            table.add_column(name, justify="right" if name in ("full", "causal") else "left")
        for cell in cells:
            if cell.phase is phase:
                dims = f"{cell.head_dim}/{cell.head_dim_v}"
                counts = (str(cell.legal_full), str(cell.legal_causal))
                table.add_row(cell.variant, dims, cell.gpu, ", ".join(cell.dtypes), *counts)
        make_console().print(table)


def print_findings() -> bool:
    """Print what was found on this machine; return whether the main job can run."""
    console = make_console()
    fit = True
    for finding in findings():
        fit = fit and (not finding.remedy or finding.optional)
        mark = "ok" if not finding.remedy else "note" if finding.optional else "MISSING"
        console.print(f"{mark:<8}{finding.subject:<14}{finding.state}", soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':<22}mend with: {finding.remedy}", soft_wrap=True)
    return fit

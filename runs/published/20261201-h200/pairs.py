"""What decode choices were worth, from `decode-tried.json`: pairs that differ in one alone.

    python runs/published/20261201-h200/pairs.py

Prints, for each value of a choice, the number of pairs and the extremes of the time without over
the time with it.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
#: choices, and the value that a kernel without them has; None: it does not say it
CHOICES = {"split_cluster": None, "column_blocks": None, "persistent": None, "split_blocks": 2}
Row = tuple[float, str, float, float]


def pairs() -> dict[str, list[Row]]:
    """Return (ratio, cell, us without, us with) of each pair, by choice."""
    found: dict[str, list[Row]] = {}
    for cell in json.loads((HERE / "decode-tried.json").read_text())["cells"]:
        named = ((json.loads(n), us) for n, us in cell["us"].items() if n.startswith("{"))
        times = {json.dumps(point, sort_keys=True): (point, us) for point, us in named}
        for point, us in times.values():
            for name, base in CHOICES.items():
                value = point.get(name)
                if value is None or (name == "split_blocks" and value < 8):
                    continue
                other = {k: v for k, v in point.items() if k != name}
                other |= {} if base is None else {name: base}
                _, without = times.get(json.dumps(other, sort_keys=True), ({}, 0.0))
                if without:
                    key = f"{name} = {value}" if base is None else f"{name} >= 8, without: {base}"
                    found.setdefault(key, []).append((without / us, cell["cell"], without, us))
    return found


def main() -> None:
    """Print the table."""
    for key, rows in sorted(pairs().items()):
        texts = [f"{r:.3f} {c} ({x:.1f} -> {y:.1f})" for r, c, x, y in (max(rows), min(rows))]
        print(f"{key} | {len(rows)} pairs | {texts[0]} | {texts[1]}")


if __name__ == "__main__":
    main()

"""What each dimension of the Hopper space was worth, from the measurements kept here.

    python runs/published/20261130-h200/pairs.py

First table, from `dimensions.json`, `clusters.json` and `packing.json`: pairs of kernels of one
batch that differ in one dimension alone; the cells with the largest gain and the largest loss.
Second table, from the journals of the published runs: the best right trial with a choice against
the best without it. The third does the same for the decode runs. Then kernels with packed
heads against those without, and last the best trials of the `mma_sync` run against
FlashAttention-2 as the referee timed it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
TOGETHER = {"BM", "consumer_warpgroups"}  #: one dimension: 64 rows for each warpgroup
RIGHT = (
    2.0  #: times the error of plain attention that a right kernel has at most, as the judge has it
)
CHOICES = (("exp2_fma", 0), ("out_buffer", 2), ("out_buffer", 0), ("q_in_registers", 1))
Row = tuple[float, str, float, float]


def cell(head_dim: int, causal: bool, length: str) -> str:
    """How the tables name a cell."""
    return f"d{head_dim} {'causal' if causal else 'full'} {length}"


def pairs() -> dict[str, list[Row]]:
    """Return (ratio, cell, TFLOP/s without, with) of each pair, by `dimension: from -> to`."""
    found: dict[str, list[Row]] = {}
    rows = [
        row
        for name in ("dimensions.json", "clusters.json", "packing.json")
        for row in json.loads((HERE / name).read_text())["measurements"]
        if row.get("error_ratio", 0.0) <= RIGHT  # clusters.json holds right kernels alone
    ]
    for a, b in itertools.combinations(rows, 2):
        if any(a[k] != b[k] for k in ("batch", "head_dim", "head_dim_v", "causal", "dtype")):
            continue
        pa, pb = a["parameters"], b["parameters"]
        other = {k for k in pa | pb if pa.get(k, 0) != pb.get(k, 0)}
        name = "BM" if other == TOGETHER else next(iter(other), "")
        if not (other == TOGETHER or len(other) == 1):
            continue
        low, high = (a, b) if pa.get(name, 0) < pb.get(name, 0) else (b, a)
        key = f"{name}: {low['parameters'].get(name, 0)} -> {high['parameters'].get(name, 0)}"
        for length in low["tflops"].keys() & high["tflops"].keys():
            x, y = low["tflops"][length], high["tflops"][length]
            last = str(a["batch"]).split()[-1]
            heads = f"{last} " if last in ("gqa", "mqa") else ""
            where = heads + cell(a["head_dim"], a["causal"], length)
            found.setdefault(key, []).append((y / x, where, x, y))
    return found


def packed() -> dict[str, tuple[float, float]]:
    """Return TFLOP/s of the best kernel without and with packed heads, by cell of one batch."""
    best: dict[str, list[float]] = {}
    for row in json.loads((HERE / "packing.json").read_text())["measurements"]:
        with_them = int(row["parameters"].get("pack_heads", 1) > 1)
        for length, tflops in row["tflops"].items():
            where = f"{row['batch']} {cell(row['head_dim'], row['causal'], length)}"
            pair = best.setdefault(where, [0.0, 0.0])
            pair[with_them] = max(pair[with_them], tflops)
    return {where: (a, b) for where, (a, b) in best.items() if a and b}


def with_and_without(name: str, value: int) -> list[Row]:
    """Return (ratio, cell, us without, with) of the best trials; exp2_fma's 0 means any share."""
    best: dict[tuple[str, bool], float] = {}
    for journal in sorted(HERE.parent.glob("*-h200/journal.jsonl")):
        for line in journal.read_text().splitlines():
            event = json.loads(line)
            trial = event["data"]
            if event["kind"] != "trial" or trial["outcome"]["outcome"] != "measured":
                continue
            point = dict(trial["point"]["items"])
            if name not in point or "consumer_warpgroups" not in point:
                continue
            chosen = point[name] != 0 if name == "exp2_fma" else point[name] == value
            for t in trial["outcome"]["timings"]:
                s = t["shape"]
                where = cell(s["head_dim"], s["causal"], str(s["seqlen_q"]))
                key = (f"{trial['problem']['variant']} {where}", chosen)
                best[key] = min(best.get(key, float("inf")), t["median_us"])
    both = [c for c, chosen in best if chosen and (c, False) in best]
    return [(best[c, False] / best[c, True], c, best[c, False], best[c, True]) for c in both]


#: choices of decode kernels, and the values that count as «with»
DECODE = (
    ("overlap", {1}), ("evict_first", {1}), ("combine_groups", {4, 8, 16}), ("combine_early", {1}),
    ("min_split_tiles", {2, 4}), ("split_blocks", {2, 3, 4}), ("blocks_per_sm", {2, 3}),
    ("integer_max", {1}), ("rescale_threshold", {8}), ("q_panels", {1}),
    ("split_cluster", {2}), ("column_blocks", {2}),
)  # fmt: skip


def of_decode(name: str, values: set[int]) -> list[Row]:
    """Return (ratio, cell, us without, with) of the best decode trials; `values` are «with»."""
    best: dict[tuple[str, bool], float] = {}
    for journal in sorted(HERE.parent.glob("*-h200/journal.jsonl")):
        for line in journal.read_text().splitlines():
            event = json.loads(line)
            trial = event["data"]
            if event["kind"] != "trial" or trial["outcome"]["outcome"] != "measured":
                continue
            point = dict(trial["point"]["items"])
            if trial["problem"].get("phase") != "decode" or name not in point:
                continue
            for t in trial["outcome"]["timings"]:
                s = t["shape"]
                heads = f"{s['heads']}/{s['kv_heads']}"
                where = f"{trial['problem']['variant']} {heads} B={s['batch']} L={s['seqlen_k']}"
                key = (where, point[name] in values)
                best[key] = min(best.get(key, float("inf")), t["median_us"])
    both = [c for c, chosen in best if chosen and (c, False) in best]
    return [(best[c, False] / best[c, True], c, best[c, False], best[c, True]) for c in both]


def beside_fa2() -> dict[int, list[float]]:
    """Return FlashAttention-2's time over that of the best mma_sync trial, by head dim of mha."""
    best: dict[tuple[int, bool, int], float] = {}
    for line in (HERE.parent / "20261130T1459Z-mha-h200/journal.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "trial" and event["data"]["outcome"]["outcome"] == "measured":
            for t in event["data"]["outcome"]["timings"]:
                s = t["shape"]
                key = (s["head_dim"], s["causal"], s["seqlen_q"])
                best[key] = min(best.get(key, float("inf")), t["median_us"])
    ratios: dict[int, list[float]] = {}
    for c in json.loads((HERE / "referee-prefill.json").read_text()):
        key = (c["d"], c["causal"], c["sq"])
        if c["name"].startswith("mha") and key in best:
            ratios.setdefault(c["d"], []).append(c["us"]["fa2"] / best[key])
    return ratios


def main() -> None:
    """Print the tables."""
    print("dimension | pairs | largest gain | largest loss (TFLOP/s)")
    for key, rows in sorted(pairs().items()):
        texts = [f"{r:.3f} {c} ({x:.0f} -> {y:.0f})" for r, c, x, y in (max(rows), min(rows))]
        print(f"{key} | {len(rows)} | {texts[0]} | {texts[1]}")
    print("choice | cells | best with it ahead in | largest gain | largest loss (us)")
    for name, value in CHOICES:
        rows = with_and_without(name, value)
        ahead = sum(r > 1 for r, *_ in rows)
        texts = [f"{r:.3f} {c} ({x:.1f} -> {y:.1f})" for r, c, x, y in (max(rows), min(rows))]
        what = "exp2_fma > 0" if name == "exp2_fma" else f"{name} = {value}"
        print(f"{what} | {len(rows)} | {ahead} | {texts[0]} | {texts[1]}")
    print("decode choice | cells | best with it ahead in | largest gain | largest loss (us)")
    for name, chosen in DECODE:
        if rows := of_decode(name, chosen):
            ahead = sum(r > 1 for r, *_ in rows)
            texts = [f"{r:.3f} {c} ({x:.1f} -> {y:.1f})" for r, c, x, y in (max(rows), min(rows))]
            print(f"{name} in {sorted(chosen)} | {len(rows)} | {ahead} | {texts[0]} | {texts[1]}")
    print("packed heads, batch and cell | ratio (TFLOP/s of the best without -> with)")
    for where, (without, with_them) in sorted(packed().items()):
        print(f"{where} | {with_them / without:.3f} ({without:.0f} -> {with_them:.0f})")
    for mask in ("causal", "full"):
        ratios = [b / a for where, (a, b) in packed().items() if f" {mask} " in where]
        mean = statistics.geometric_mean(ratios)
        print(f"all {mask} | {len(ratios)} | {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print("mma_sync over FlashAttention-2 | cells | geometric mean | lowest")
    of_dims = beside_fa2()
    both = {"mha 64 and 128": of_dims[64] + of_dims[128], "mha 256": of_dims[256]}
    for name, values in both.items():
        mean = statistics.geometric_mean(values)
        print(f"{name} | {len(values)} | {mean:.3f} | {min(values):.3f}")


if __name__ == "__main__":
    main()

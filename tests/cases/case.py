"""The real cases of `cases.json`, as problems the judge understands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from space.variant import DType, Phase, Problem, Shape
from tuner.evaluate.inputs import Check, Data, Layout

FILE = Path(__file__).with_name("cases.json")

DATA: dict[str, tuple[Data, ...]] = {
    "N(0,1)": (Data.NORMAL,),
    "any": (Data.NORMAL,),
    "none": (Data.NORMAL,),
    "N(0,1), output buffer pre-filled with NaN": (Data.NORMAL,),
    "N(0,1), skipped rows NaN": (Data.NORMAL,),
    "3*N(0,1)": (Data.NORMAL_3,),
    "N(0,1); second run V=1+0.1*N(0,1)": (Data.NORMAL, Data.MEAN_ONE),
    "N(0,1); in a second run V of kv head g is the constant g+1": (
        Data.NORMAL,
        Data.HEAD_CONSTANT,
    ),
    "V of kv head g is the constant g+1": (Data.HEAD_CONSTANT,),
    "all elements 133120": (Data.ALL_133120,),
    "q=0 so weights are uniform over visible keys; v[j,:]=j+1 (small integers, exact in "
    "fp16/bf16 for j<256)": (Data.COUNTING,),
    "q=0 except q[...,0]=300; k=0 except k[...,0]=300; V=1+0.1*N(0,1)": (Data.SCORES_OVERFLOW,),
    "0.1*N(0,1) in q,k; then q[...,0]=1, k[...,0]=-960 (scaled logit about -120); V=1+0.1*N(0,1)": (
        Data.NEGATIVE,
    ),
    "0.1*N(0,1); then q[...,0]=1, k[...,0]=-120*sqrt(128)=-1357.6 rounded to the dtype; "
    "V=1+0.1*N(0,1)": (Data.NEGATIVE,),
}

LAYOUT: dict[str, Layout] = {
    "contiguous": Layout.PACKED,
    "BSHD": Layout.PACKED,
    "BSHD contiguous q and output; guard bands of NaN around the output allocation": Layout.PACKED,
    "packed varlen, 1,280,000 tokens": Layout.PACKED,  # equal lengths: a dense batch
    "packed, total q 256, total k 3": Layout.PACKED,  # one launch a segment
    "splits 1, 2, 7, 64 (some empty for short lengths)": Layout.PACKED,
    "latent cache allocated to 16 rows (pages of 4); rows 13-15 NaN": Layout.PACKED,
    "K latent 576 wide (512+64), V = first 512 columns of K": Layout.PACKED,
    "output buffer holds the right answer from an earlier run, then NaN-poisoned": Layout.PACKED,
    "made as BHSD, passed as BSHD by transpose (strides not packed)": Layout.HEADS_FIRST,
    "K,V stored [S,B,D]: row stride B*D = 89600": Layout.ROWS_FIRST,
    "one buffer [S,B,16+2,D]; q,k,v are split views (row stride 18*64)": Layout.INTERLEAVED,
    "k = buffer[:, :, ::2] (row stride 2*D); v packed; q packed": Layout.SECOND_ROW,
    "K and V are views into larger buffers; bytes past the end are NaN": Layout.EMBEDDED,
    "K,V expanded over heads with stride 0 (not copied)": Layout.SHARED_HEADS,
    "q, k, v views starting 1 element (2 bytes) into their buffers": Layout.ODD_POINTER,
    "last dimension has stride 2 (slice [..., ::2])": Layout.SECOND_COLUMN,
}

#: (left, right) of the cases that name a window; the query itself counts
WINDOWS = {"sliding window 3": (2, 0), "sliding window left=16383": (16383, 0)}

#: Cases whose point is not their type: (their type, ours).
ADAPTED = {"mqa-stride0-expand": ("fp32", "fp16")}

REPEATS = {"repeat-50-bitwise": 49, "decode-k38": 9, "decode-k70": 9, "same-config-two-runs": 1}

#: Cases that are decode: prefill kernels are given them too, but for absorbed MLA.
DECODE = frozenset(
    {
        "headdim-96",
        "gqa-24-8-decode",
        "gqa-28-4-decode",
        "gqa-40-8-decode",
        "gqa-64-4-decode",
        "bshd-output-splitkv",
        "causal-decode-1x129",
        "mla-tail-page-nan",
        "mla-scale-192-not-576",
        "decode-65536",
        "splitkv-fp32-partials",
        "decode-k38",
        "decode-k70",
    }
)
#: Cases whose cache is longer than their sequences: rows there are.
CAPACITY = {"mla-tail-page-nan": 16}
PAGES = {"mla-tail-page-nan": (0, 16)}  #: page sizes that such a case is run with; 4 is not offered
#: Cases that state numbers of splits, and a second length for each.
SPLITS = {"splitkv-fp32-partials": ((1, 2, 7, 64), 100)}

PLANNED = ("reject", "resource")  #: kinds that the planner answers, without a launch
REFUSABLE = ("reject_or_correct", "limit")  #: kinds that may be refused with a message


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the file: raw fields, and what a run of it is."""

    id: str
    kind: str
    gpus: str
    exact: bool
    raw: dict[str, Any]

    @property
    def dtype(self) -> DType:
        """The operand type. Raises ValueError for one that is not ours."""
        adapted = ADAPTED.get(self.id)
        return DType(adapted[1] if adapted else self.raw["dtype"])

    @property
    def window(self) -> tuple[int, int] | None:
        """The sliding window, if the case has one."""
        return WINDOWS.get(self.raw["mask"] or "")

    @property
    def repeats(self) -> int:
        """How many more launches must give the same bits."""
        return REPEATS.get(self.id, 2)

    def shapes(self) -> tuple[Shape, ...]:
        """Every shape of the case: one for each mask and, with varlen, for each segment."""
        r = self.raw
        if r["varlen"]:
            lengths = list(zip(r["seqlen_q"], r["seqlen_k"], strict=True))
            batch = 1
        else:
            lengths, batch = [(r["seqlen_q"], r["seqlen_k"])], r["batch"]
        shapes = [
            Shape(
                batch, r["heads_q"], r["heads_kv"], sq, sk, r["head_dim_qk"], r["head_dim_v"],
                mask == "bottom_right",
            )
            for mask in r["causal"]
            for sq, sk in lengths
        ]  # fmt: skip
        if self.id == "vit-729x72":  # reported both ways round
            shapes += [
                replace(s, seqlen_q=16, seqlen_k=16, heads=729, kv_heads=729) for s in shapes
            ]
        return tuple(shapes)

    def checks(self) -> tuple[Check, ...]:
        """Every run of the case."""
        return tuple(check for _, check in self.runs())

    def runs(self) -> tuple[tuple[Problem, Check], ...]:
        """Every run of the case with the problem whose kernel it is for, decode first."""
        decode = [
            (self.problem(check.shape, Phase.DECODE, check.page), check)
            for check in (self._decode_checks() if self.id in DECODE else ())
        ]
        prefill = [
            (self.problem(check.shape), check)
            for check in self._plain_checks()
            if not (self.id in DECODE and check.shape.latent)
        ]
        return (*decode, *prefill)

    def _plain_checks(self) -> tuple[Check, ...]:
        return tuple(
            Check(self.id, shape, data, LAYOUT[self.raw["layout_stride_notes"]], 1, r_scale(self))
            for shape in self.shapes()
            for data in DATA[self.raw["input_distribution"]]
        )

    def _decode_checks(self) -> Iterator[Check]:
        """The case as decode: one query sees all, lengths, pages and splits are stated."""
        splits, second = SPLITS.get(self.id, ((), 0))
        for plain in self._plain_checks():
            shape = plain.shape
            causal = shape.causal and shape.seqlen_q > 1
            for keys in dict.fromkeys((shape.seqlen_k, second or shape.seqlen_k)):
                capacity = CAPACITY.get(self.id, keys)
                check = replace(plain, shape=replace(shape, causal=causal, seqlen_k=capacity))
                if capacity > keys or splits:
                    check = replace(check, counts=(keys,) * shape.batch)
                for page in PAGES.get(self.id, (0,)):
                    for count in splits or (0,):
                        yield replace(check, page=page, splits=count)

    def problem(self, shape: Shape, phase: Phase = Phase.PREFILL, page: int = 0) -> Problem:
        """The problem that a kernel for `shape` is made for."""
        return Problem(
            self.raw["variant"], self.dtype, shape.head_dim, shape.head_dim_v, shape.causal,
            phase, page,
        )  # fmt: skip

    def quick(self) -> Case:
        """The same case at a size for every day, where its notes give one."""
        smaller: dict[str, dict[str, int]] = {
            "headdim-256-noncontig": {
                "heads_q": 4,
                "heads_kv": 4,
                "seqlen_q": 1024,
                "seqlen_k": 1024,
            },
            "window-covers-all": {"seqlen_q": 1024, "seqlen_k": 1024},
        }
        return replace(self, raw={**self.raw, **smaller.get(self.id, {})})


def r_scale(case: Case) -> float:
    """The scale that the case states."""
    return float(case.raw["scale"])


def out_of_scope(case: Case) -> str | None:
    """Return why a case does not concern these variants, or None."""
    r = case.raw
    if r["dtype"] == "fp32" and case.id not in ADAPTED:
        return "fp32 operands"
    if r["mask"] and case.window is None and case.id not in ADAPTED:
        return f"mask {r['mask']!r}"
    return None


def load() -> tuple[Case, ...]:
    """Read every case."""
    rows = json.loads(FILE.read_text())
    return tuple(Case(r["id"], r["kind"], r["gpus"], r["tolerance"] == "exact", r) for r in rows)


def work(check: Check) -> int:
    """What an interpreter on a CPU must be spared of: multiply-adds, and steps of one head.

    It computes whole row tiles, so a single query is not as cheap as it looks.
    """
    s = check.shape
    rows = max(s.seqlen_q, 16)
    products = s.batch * s.heads * rows * s.seqlen_k * (s.head_dim + s.head_dim_v)
    return products + (s.batch * s.heads << 14)

"""One-line defects of emitted kernels: what a person or a translator gets wrong.

Each finds a line of today's text by a pattern and changes it; all else stays. A pattern that no
longer finds its line raises, so that the list cannot fall behind the emitted text in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class NotFound(Exception):
    """The line that a defect wants to change is not in the text."""


@dataclass(frozen=True, slots=True)
class Defect:
    """In the text of `subject`, what `pattern` matches in the `nth` line that has it changes."""

    name: str
    subject: str
    pattern: str
    becomes: str
    nth: int = 0

    @property
    def key(self) -> str:
        """Unique among the defects."""
        return f"{self.subject}: {self.name}"

    def seed(self, text: str) -> str:
        """Return the text with exactly one line changed. Raises NotFound."""
        lines = text.split("\n")
        places = [i for i, line in enumerate(lines) if re.search(self.pattern, line)]
        try:
            at = places[self.nth]
        except IndexError:
            raise NotFound(f"{self.key}: {len(places)} lines match {self.pattern!r}") from None
        changed = re.sub(self.pattern, self.becomes, lines[at], count=1)
        if changed == lines[at]:
            raise NotFound(f"{self.key}: {lines[at].strip()!r} stays as it is")
        return "\n".join((*lines[:at], changed, *lines[at + 1 :]))


SYNC_C, SYNC_F, HOPPER_C, HOPPER_F, DECODE, LATENT = (
    "mma_sync causal", "mma_sync full", "hopper causal", "hopper full", "decode gqa", "decode mla",
)  # fmt: skip
LOOP = -1  #: the last match: the masked loop, or the loop behind a peeled first step

SCORE = r"x = exp2_approx\(fmaf\(x, "
FP16_SCORE = "x = exp2_approx(fmaf(unpack(pack(x, 0.f)).x, "
NEGATIVE_SCALE = r"^(\s*)if \(scale < 0\.f\) \{"
HIDDEN = r"(if \(n \* 8 \+ c > last\) S.*)-INFINITY;"
INVERSE = r"float const inverse = .*;"
RESCALE_O = r"O\[m\]\[n\]\[r \* 2\] \*= decay;"
RESCALE_SUM = r"S_sum\[m\]\[r\] \*= decay;"
QUAD_MAX = r"return fmaxf\(x, __shfl_xor_sync\(~0u, x, 2\)\);"
QUAD_SUM = r"return x \+ __shfl_xor_sync\(~0u, x, 2\);"
DIAGONAL = r"int const diagonal = N - M;"
ROW_LIMIT = r"min\(N - 1, row \+ diagonal\)"
TAIL_LIMIT = r"int const last = N - 1 - "
BATCH = r"batch = plane / heads;"
K_WAIT = r"wait\(2 \+ K_count % 2, .*\);"
K_EMPTY = r"wait\(4 \+ slot, .*\);"
K_SLOT = r"(\+ 32768 \+ )K_count % 2( \* 32768)"

DEFECTS = (
    # ---- warp-level MMA ----
    Defect("accumulator not rescaled", SYNC_C, RESCALE_O, ";", LOOP),
    Defect("sum not rescaled", SYNC_F, RESCALE_SUM, ";"),
    Defect("causal mask one key too wide", SYNC_C, ROW_LIMIT, "min(N - 1, row + diagonal + 1)"),
    Defect("key mask one key too wide", SYNC_F, TAIL_LIMIT, "int const last = N - "),
    Defect(
        "KV head is h mod Hkv", SYNC_C, r"(gK \+= .*)head / group", r"\1head % (heads / group)"
    ),
    Defect("tail keys score 0", SYNC_F, HIDDEN, r"\g<1>0.f;"),
    Defect("finite sentinel for minus infinity", SYNC_C, HIDDEN, r"\1-1e4f;"),
    Defect("scores rounded to fp16", SYNC_F, SCORE, FP16_SCORE),
    Defect("scale after the maximum: its sign is lost", SYNC_C, NEGATIVE_SCALE, r"\1if (false) {",
           LOOP),
    Defect("causal aligned top-left", SYNC_C, DIAGONAL, "int const diagonal = 0;"),
    Defect("K written to the other stage", SYNC_F, r"stage = index % 2", "stage = (index + 1) % 2"),
    Defect("K is not waited for", SYNC_C, r"cp_async_wait<0>\(\);", ";"),
    Defect("K is not waited for, two stages", SYNC_F, r"cp_async_wait<2>\(\);", ";"),
    Defect("barrier missing before K is read", SYNC_C, r"^\s*__syncthreads\(\);", ";"),
    Defect("no division by the sum", SYNC_C, INVERSE, "float const inverse = 1.f;"),
    Defect("V column swizzle wrong", SYNC_C, r"(V_to = .*)& 7\)", r"\g<1>& 3)"),
    Defect("last row not written", SYNC_C, r"row < M\)", "row < M - 1)"),
    Defect("row maximum over half of its lanes", SYNC_C, QUAD_MAX, "return x;"),
    Defect("row sum over half of its lanes", SYNC_F, QUAD_SUM, "return x;"),
    Defect("V past the end is not zero", SYNC_F, r"valid = pass \* 8 < left;", "valid = true;", 2),
    Defect("every batch reads the first", SYNC_F, BATCH, "batch = 0;"),
    Defect("last key tile left out", SYNC_F, r"i_hi = ceil_div\(N, 64\);", "i_hi = N / 64;"),
    Defect("one masked tile taken as full", SYNC_C, r"row0 \+ diagonal \+ 1\)",
           "row0 + diagonal + 64)"),
    Defect("fragment of P in the wrong place", SYNC_F,
           r"(S_a\[m\]\[k\]\[1\] = pack\(S\[m\]\[k \* 2 \+ )0(\]\[2\].*)", r"\g<1>1\2"),
    # ---- Hopper: TMA, mbarriers, wgmma ----
    Defect("accumulator not rescaled", HOPPER_C, RESCALE_O, ";", LOOP),
    Defect("accumulator not rescaled past the threshold", HOPPER_F, RESCALE_O, ";", LOOP),
    Defect("causal mask one key too wide", HOPPER_C, ROW_LIMIT, "min(N - 1, row + diagonal + 1)"),
    Defect("key mask one key too wide", HOPPER_F, TAIL_LIMIT, "int const last = N - ", LOOP),
    Defect("KV head is h mod Hkv", HOPPER_C, r"kv_head = head / group;",
           "kv_head = head % (heads / group);"),
    Defect("tail keys score 0", HOPPER_F, HIDDEN, r"\g<1>0.f;", LOOP),
    Defect("finite sentinel for minus infinity", HOPPER_C, HIDDEN, r"\1-1e4f;"),
    Defect("scores rounded to fp16", HOPPER_C, SCORE, FP16_SCORE),
    Defect("scale after the maximum: its sign is lost", HOPPER_F, NEGATIVE_SCALE,
           r"\1if (false) {", LOOP),
    Defect("causal aligned top-left", HOPPER_C, DIAGONAL, "int const diagonal = 0;"),
    Defect("K read from the other stage", HOPPER_C, K_SLOT, r"\1(K_count + 1) % 2\2"),
    Defect("K read from the other stage, in the loop", HOPPER_F, K_SLOT, r"\1(K_count + 1) % 2\2",
           LOOP),
    Defect("K is not waited for", HOPPER_C, K_WAIT, ";"),
    Defect("K is not waited for, first step", HOPPER_F, K_WAIT, ";"),
    Defect("K overwritten before it was read", HOPPER_C, K_EMPTY, ";"),
    Defect("barrier missing before the store", HOPPER_C, r"named_sync\(1 \+ consumer, 128\);", ";",
           LOOP),
    Defect("no division by the sum", HOPPER_C, INVERSE, "float const inverse = 1.f;"),
    Defect("V panels at the wrong distance", HOPPER_C, r"(V_count % 2 \* 32768, )16384\)",
           r"\g<1>8192)"),
    Defect("output swizzle wrong", HOPPER_F, r"\^ \(out_row & 7\)", "^ (out_row & 3)"),
    Defect("last row not written", HOPPER_C, r"own_row0 < M\)", "own_row0 < M - 1)"),
    Defect("row maximum over half of its lanes", HOPPER_C, QUAD_MAX, "return x;"),
    Defect("row sum over half of its lanes", HOPPER_F, QUAD_SUM, "return x;"),
    Defect("every batch reads the first", HOPPER_C, BATCH, "batch = 0;"),
    Defect("K tile starts one row late", HOPPER_C, r"panel \* 64, i \* 128, kv_head",
           "panel * 64, i * 128 + 1, kv_head"),
    Defect("second warpgroup reads the first's queries", HOPPER_F, r" \+ consumer \* 8192, 16\)",
           ", 16)"),
    # ---- decode: splits of a cache, and their combination ----
    Defect("results are combined before they are there", DECODE,
           r'asm volatile\("griddepcontrol\.wait;" ::: "memory"\);', ";"),
    Defect("splits weigh the same", DECODE, r"w = exp2_approx\(w \* 1\.44269504089f\);",
           "w = 1.f;"),
    Defect("weight of a split without its maximum", LATENT,
           r"\(S_max\[m\]\[r\] \* S_log2 \+ log2f\(total\)\)", "log2f(total)"),
    Defect("lengths are not read", DECODE, r"key_counts == nullptr \? N : key_counts\[sequence\]",
           "N"),
    Defect("last tile of a split left out", LATENT, r"min\(tiles, i_lo \+ tiles_per_split\)",
           "min(tiles, i_lo + tiles_per_split - (i_lo > 0))"),
    Defect("key mask one key too wide", DECODE, r"n \* 8 \+ c > last\)", "n * 8 + c > last + 1)",
           LOOP),
    Defect("V past the end is not zero", LATENT, r"if \(keys < N && ", "if (false && ", LOOP),
    Defect("KV head is always the first", DECODE, r"kv_head = plane % kv_heads, sequence",
           "kv_head = 0, sequence"),
    Defect("P is read before it is written", LATENT, r"named_sync\(3, 256\);", ";"),
    Defect("the other columns are not rescaled", LATENT,
           r"float const decay = own == .*;", "float const decay = 1.f;"),
    Defect("keys are not waited for", DECODE, r"wait\(0 \+ slot, .*\);", ";", LOOP),
    Defect("a panel of Q is another one", LATENT, r"rows_at = smem_at \+ 65536",
           "rows_at = smem_at"),
)  # fmt: skip

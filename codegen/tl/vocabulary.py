"""The words of TL: operators, their spellings in the wild, and the names every program shares."""

from __future__ import annotations

import difflib
import re

from codegen.tl.ast import Call, Expr, Memory, Name

ARITH_OPS = ("Add", "Subtract", "Multiply", "Divide")

#: Elementwise operators of one tile.
ELEMENTWISE = ("Scale", "Softcap", "Relu", "Sigmoid", "Tanh", "Gelu", "Exp", "Exp2", "Log", "Neg")
#: Operators that reduce each row of a tile to a row vector.
ROW_OPS = ("RowMax", "RowSum", "LogSumExp")
#: Elementwise operators of two tiles, the second an argument.
PAIRWISE = ("Max", "Min")
#: The rest of the operators.
OTHER_OPS = ("Softmax", "Mask", "Rescale", "Normalize", "Fill", "Cast")
OPS = (*ELEMENTWISE, *ROW_OPS, *PAIRWISE, *OTHER_OPS)

MASK_KINDS = ("causal", "window", "bias", "alibi", "padding")
ALIBI_EXPONENT = 8  #: of `alibi`: head h of H has the slope 2^(-8 (h + 1) / H)

#: Other spellings of an operator, lower case without underscores, and the arguments they imply.
_SPELLINGS: dict[str, tuple[str, tuple[Expr, ...]]] = {
    "causalmask": ("Mask", (Name("causal"),)),
    "maskcausal": ("Mask", (Name("causal"),)),
    "slidingwindowmask": ("Mask", (Call("window", ()),)),
    "windowmask": ("Mask", (Call("window", ()),)),
    "localmask": ("Mask", (Call("window", ()),)),
    "lengthmask": ("Mask", (Name("padding"),)),
    "paddingmask": ("Mask", (Name("padding"),)),
    "boundmask": ("Mask", (Name("padding"),)),
    "tailmask": ("Mask", (Name("padding"),)),
    "onlinesoftmax": ("Softmax", ()),
    "streamingsoftmax": ("Softmax", ()),
    "safesoftmax": ("Softmax", ()),
    "logitsoftcap": ("Softcap", ()),
    "logitcap": ("Softcap", ()),
    "rescaleaccumulator": ("Rescale", ()),
    "maximum": ("Max", ()),
    "minimum": ("Min", ()),
    "rowmaximum": ("RowMax", ()),
    "reducemax": ("RowMax", ()),
    "reducesum": ("RowSum", ()),
    "lse": ("LogSumExp", ()),
    "exponential": ("Exp", ()),
    "ln": ("Log", ()),
    "negate": ("Neg", ()),
    "negative": ("Neg", ()),
    "castfp16": ("Cast", ()),
    "castf16": ("Cast", ()),
    "castbf16": ("Cast", ()),
    "casthalf": ("Cast", ()),
    "convert": ("Cast", ()),
    "zero": ("Fill", ()),
    "normalise": ("Normalize", ()),
}
_SPELLINGS |= {op.lower(): (op, ()) for op in OPS}
_ARITH_SPELLINGS = {op.lower(): op for op in ARITH_OPS} | {
    "sub": "Subtract",
    "mul": "Multiply",
    "div": "Divide",
}


def operator(word: str) -> tuple[str, tuple[Expr, ...]] | None:
    """Return the canonical operator and the arguments that `word` implies, or None if unknown."""
    return _SPELLINGS.get(word.replace("_", "").lower())


def arith_operator(word: str) -> str | None:
    """Return Add, Subtract, Multiply or Divide for `word`, or None."""
    return _ARITH_SPELLINGS.get(word.lower())


def nearest_operator(word: str) -> str:
    """Return the known operator whose spelling is closest to `word`."""
    key = word.replace("_", "").lower()
    spellings = [*_SPELLINGS, *_ARITH_SPELLINGS, "gemm"]
    close = difflib.get_close_matches(key, spellings, n=1, cutoff=0.75)
    contained = sorted((s for s in spellings if len(s) > 2 and s in key), key=len)
    found = (close or contained[-1:] or difflib.get_close_matches(key, spellings, 1, 0.0))[0]
    if found == "gemm":
        return "GEMM"
    return _SPELLINGS[found][0] if found in _SPELLINGS else _ARITH_SPELLINGS[found]


MEMORIES = {
    "global": Memory.GLOBAL,
    "gmem": Memory.GLOBAL,
    "HBM": Memory.GLOBAL,
    "shared": Memory.SHARED,
    "smem": Memory.SHARED,
    "register": Memory.REGISTER,
    "registers": Memory.REGISTER,
    "rmem": Memory.REGISTER,
}

#: First words of statements about pipelines and roles, which are the translator's.
SCHEDULE_WORDS = frozenset(
    {
        "TMA",
        "Wait",
        "Arrive",
        "Barrier",
        "SetMaxNReg",
        "WGMMA",
        "Sync",
        "Signal",
        "Fence",
        "Commit",
        "Expect",
        "Init",
        "Acquire",
        "Release",
        "NamedBarrier",
        "Prefetch",
        "Async",
        "__syncthreads",
        "__syncwarp",
        "syncthreads",
        "wait",
        "arrive",
        "mbarrier",
    }
)

STATEMENT_WORDS = ("Param", "Allocate", "Copy", "Compute", "Reshape", "for", "if", "else", "end")

#: Words that cannot name a tile or parameter.
RESERVED = frozenset(
    {
        *STATEMENT_WORDS,
        "in",
        "from",
        "to",
        "and",
        "get",
        "accumulate",
        "new",
        "as",
        "with",
        "inf",
        "GEMM",
        *MEMORIES,
    }
)

# ---- names that mean the same in every program ---------------------------------------------------

BLOCK_ROW = "block_idx"
BLOCK_COLUMN = "block_n"
SPLIT = "split"
SPLIT_BOUNDS = ("split_start", "split_end")
#: how many splits there are: a run-time length where no Param of that name gives a number
SPLIT_COUNT = "num_splits"

_BLOCK_ROW = re.compile(
    r"(block_?(idx|id|row|m|q|index)?|[mq]_?block(_?(idx|id|index))?|row_?(block|tile)(_?idx)?"
    r"|head_?block|b(id)?x|bidx?|pid(_m)?|blockIdx(\.[xyz])?|(q|m)_?tile(_?idx)?|tile_?(m|q|idx)"
    r"|block_?(start_?)?m|start_?m|cta_?(id|m|idx)|q_?idx|m_?idx|q_block_idx|block_row_idx"
    r"|query_?block(_?idx)?)$"
)
_BLOCK_COLUMN = re.compile(r"(block_?n|n_?block|by|pid_n|col(umn)?_?block|block_?col|tile_?n)$")
_SCALE = re.compile(
    r"((softmax|sm|qk|attn|attention|logit)_?)?scal(e|ing)(_?(factor|log2|log2e|softmax|qk))?$",
    re.IGNORECASE,
)
_ROOT = re.compile(r"sqrt_?(d|dk|d_k|dqk|head_?dim|dim)?$", re.IGNORECASE)
_LOG2 = re.compile(r"log2e?$", re.IGNORECASE)
_HEADS = re.compile(r"(num_?|n_?|h_?)?(q|kv|query|key)?_?(heads?|group_?size|groups?)$", re.I)


def is_block_row(name: str) -> bool:
    """Whether `name` is one of the usual names of the block's row index."""
    return _BLOCK_ROW.match(name) is not None


def is_block_column(name: str) -> bool:
    """Whether `name` is one of the usual names of the block's column index."""
    return _BLOCK_COLUMN.match(name) is not None


def is_scale(name: str) -> bool:
    """Whether `name` is the softmax scale under one of its usual names."""
    return _SCALE.match(name) is not None


def is_log2_scale(name: str) -> bool:
    """Whether `name` is the softmax scale times log2(e)."""
    return is_scale(name) and _LOG2.search(name) is not None


def is_root_of_dim(name: str) -> bool:
    """Whether `name` is the square root of the head dim, by which scores are divided."""
    return _ROOT.match(name) is not None


def is_head_count(name: str) -> bool:
    """Whether `name` counts heads, which are the launch's and not the program's."""
    return _HEADS.match(name) is not None


#: Tile and schedule parameters of the search, by lower-case spelling without underscores.
_PARAMS = {
    "bm": "BM", "blockm": "BM", "tilem": "BM", "br": "BM", "blockq": "BM", "kblockm": "BM",
    "bn": "BN", "blockn": "BN", "tilen": "BN", "bc": "BN", "blockk": "BN", "kblockn": "BN",
    "bk": "BK", "tilek": "BK",
    "warps": "warps", "numwarps": "warps", "nwarps": "warps",
    "stages": "stages", "numstages": "stages", "kvstages": "stages",
    "swizzle": "swizzle", "qinregisters": "q_in_registers", "pinregisters": "p_in_registers",
    "rescalethreshold": "rescale_threshold", "peel": "peel", "blockspersm": "blocks_per_sm",
    "raster": "head_group", "headgroup": "head_group", "causallongestfirst": "causal_longest_first",
    "consumerwarpgroups": "consumer_warpgroups", "numconsumerwg": "consumer_warpgroups",
    "overlap": "overlap", "pingpong": "pingpong", "persistent": "persistent",
    "cluster": "cluster", "kvsplits": "num_splits", "numsplits": "num_splits",
    "splits": "num_splits", "packgqa": "pack_gqa",
}  # fmt: skip


def canonical_param(name: str) -> str | None:
    """Return the search's name of a tile or schedule parameter, or None if it is neither."""
    return _PARAMS.get(name.replace("_", "").lower())

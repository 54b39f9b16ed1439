"""Texts that try to get out of their place: names, numbers, comments, strings."""

from __future__ import annotations

MARK = "PWNED"

#: what a model might write where a name is wanted
NAMES = (
    f"S); asm(\"{MARK}\"); float(x",
    f"S;{MARK}",
    f"S\n#include \"/etc/{MARK}\"\n",
    f"S\r#define {MARK}",
    f"S\u2028{MARK}",
    f"S\x0b{MARK}",
    f"S\\\n{MARK}",
    f"S??/\n{MARK}",
    f"S*/ {MARK} /*",
    f"S\"{MARK}\"",
    f"S'{MARK}'",
    f"S`{MARK}`",
    f"S{{{MARK}}}",
    f"S<{MARK}>",
    f"S::{MARK}",
    f"S.{MARK}",
    f"S->{MARK}",
    f"S${MARK}",
    f"S\u00e9{MARK}",
    f"\uff33{MARK}",  # a letter that looks like S
    f"S\u202e{MARK}",  # right-to-left override
    f"S\0{MARK}",
    "__device__", "__syncthreads", f"__{MARK}", f"_{MARK}", f"S__{MARK}",
    "int", "float", "auto", "asm", "template", "return", "operator", "co_await", "INFINITY",
    "NULL", "CUTE_HOST_DEVICE", "CUTLASS_PRAGMA_UNROLL",
    "S" * 65, "S" * 5000,
)  # fmt: skip

#: programs with a place for a name; each is right when the name is
PLACES = {
    "tile": """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get {}
  Compute Softmax {}
  Copy V from global to shared
  Reshape {} from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM {}, V and accumulate O
end
Copy O from register to global
""",
    "loop variable": """\
Copy Q from global to shared
for {} = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
""",
    "scalar": """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Softcap S, {}
  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
""",
    "factor": """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Multiply S, {} and get new S
  Compute Sigmoid S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
""",
    "parameter": """\
Param {} = 1
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
""",
    "dtype": """\
Param BM in {64, 128}
Param BN in {32, 64}
Allocate Q in global (M, D) as {} with offset q_offset
Allocate K in global (N, D) with offset k_offset
Allocate V in global (N, D) with offset v_offset
Allocate O in global (M, D) with offset o_offset
Allocate Q in shared (BM, D)
Allocate K in shared (BN, D)
Allocate V in shared (BN, D)
Allocate S in register (BM, BN) as f32
Allocate O in register (BM, D) as f32
Copy Q (BM, D) in coordinate [L = block_idx] from global to shared
for i = 0:N / BN
  Copy K (BN, D) in coordinate [L = i] from global to shared
  Compute GEMM Q, K.T and get S
  Compute Softmax S
  Copy V (BN, D) in coordinate [L = i] from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O (BM, D) in coordinate [L = block_idx] from register to global
""",
    "offset": """\
Param BM in {64, 128}
Param BN in {32, 64}
Allocate Q in global (M, D) as f16 with offset {}
Allocate K in global (N, D) with offset k_offset
Allocate V in global (N, D) with offset v_offset
Allocate O in global (M, D) with offset o_offset
Allocate Q in shared (BM, D)
Allocate K in shared (BN, D)
Allocate V in shared (BN, D)
Allocate S in register (BM, BN) as f32
Allocate O in register (BM, D) as f32
Copy Q (BM, D) in coordinate [L = block_idx] from global to shared
for i = 0:N / BN
  Copy K (BN, D) in coordinate [L = i] from global to shared
  Compute GEMM Q, K.T and get S
  Compute Softmax S
  Copy V (BN, D) in coordinate [L = i] from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O (BM, D) in coordinate [L = block_idx] from register to global
""",
    "mask": """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Mask S, {}
  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
""",
    "comment": """\
Copy Q from global to shared  # {}
for i = 0:N  // {}
  Copy K from global to shared
  Compute GEMM Q, K.T and get S  # {}
  Compute Softmax S  /* {} */
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
""",
}

#: numbers that are no size of anything
NUMBERS = (
    "9" * 40, "9" * 5000, "-" + "9" * 40, "2147483648", "1e39", "1e999", "-1e999", "0x41", "1_000",
    "\u0663", "\u00b2", "1;2", "1)", "1e", "1.2.3", "0/0", "1/0", "inf", "-inf", "nan",
    "2147483647 * 2147483647 * 2147483647", "1 % 0", "sqrt(-1)", "exp(1e30)", "ceil(inf)",
)  # fmt: skip

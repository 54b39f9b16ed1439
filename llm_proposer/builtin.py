"""Hand-written TL programs: the offline default, and one of every kind the language speaks of."""

from __future__ import annotations

from space.variant import Phase, variant_named

_CAUSAL = "  Compute Mask S, causal\n"

_FORWARD = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{mask}  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""

_Q_IN_REGISTERS = """\
Copy Q from global to shared
Copy Q from shared to register
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{mask}  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""

_V_EARLY = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Copy V from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{mask}  Compute Softmax S
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""

_EXPLICIT_SOFTMAX = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Multiply S, scale and get new S
{mask}  Compute RowMax S and get m_cur
  Compute Max m, m_cur and get m_new
  Compute Subtract m, m_new and get alpha
  Compute Exp alpha
  Compute Subtract S, m_new and get P
  Compute Exp P
  Compute RowSum P and get l_cur
  Compute Multiply l, alpha and get new l
  Compute Add l, l_cur and get new l
  Compute Multiply O, alpha and get new O
  Copy V from global to shared
  Reshape P from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM P, V and accumulate O
  Copy m_new to m
end
Compute Divide O, l and get new O
Copy O from register to global
"""

_ELEMENTWISE = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{middle}  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""

_GEMM_EPILOGUE = """\
# C = relu(A . B^T), A (M, D) and B (N, D)
for k = 0:D / BK
  Copy A in coordinate [L = block_idx, D = k] from global to shared
  Copy B in coordinate [L = block_n, D = k] from global to shared
  Compute GEMM A, B.T and accumulate C
end
Compute Relu C
Copy C in coordinate [L = block_idx, D = block_n] from register to global
"""

_SPLIT_KV = """\
Param num_splits in {2, 4, 8}

# Kernel 1: attention over one split of the keys
Copy Q from global to shared
for i = split_start:split_end
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{mask}  Compute RowMax S and get m_cur
  Compute Max m, m_cur and get m_new
  Compute Subtract m, m_new and get alpha
  Compute Exp alpha
  Compute Subtract S, m_new and get new S
  Compute Exp S
  Compute RowSum S and get l_cur
  Compute Multiply l, alpha and get new l
  Compute Add l, l_cur and get new l
  Compute Multiply O, alpha and get new O
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
  Copy m_new to m
end
Compute Divide O, l and get new O
Compute Log l and get lse
Compute Add lse, m and get new lse
Copy O from register to global
Copy lse from register to global

# Kernel 2: combine the splits by their log-sum-exp
for s = 0:num_splits
  Copy lse_s from global to register
  Compute Max lse_max, lse_s and get new lse_max
end
for s = 0:num_splits
  Copy O_s from global to register
  Copy lse_s from global to register
  Compute Subtract lse_s, lse_max and get w
  Compute Exp w
  Compute Multiply O_s, w and get new O_s
  Compute Add O, O_s and get new O
  Compute Add w_sum, w and get new w_sum
end
Compute Divide O, w_sum and get new O
Copy O from register to global
"""


_DECODE = """\
# Kernel 1: attention over one split of the keys
Copy Q from global to shared
for i = split_start:split_end
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{mask}  Compute Softmax S
{values}end
Compute LogSumExp S and get lse
Copy O from register to global
Copy lse from register to global

# Kernel 2: combine the splits by their log-sum-exp
for s = 0:num_splits
  Copy lse_s from global to register
  Compute Max top, lse_s and get new top
end
for s = 0:num_splits
  Copy O_s from global to register
  Copy lse_s from global to register
  Compute Subtract lse_s, top and get w
  Compute Exp w
  Compute Multiply O_s, w and get new O_s
  Compute Add O, O_s and get new O
  Compute Add total, w and get new total
end
Compute Divide O, total and get new O
Copy O from register to global
"""

_OWN_VALUES = """\
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
"""

_LATENT_VALUES = """\
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, K[:, 0:Dv] and accumulate O
"""


def sketches(variant: str, causal: bool, phase: Phase = Phase.PREFILL) -> dict[str, str]:
    """Return the attention sketches of `variant` by name, the default first.

    All of a phase compute the same thing by different dataflow. Raises SpaceError on an unknown
    variant: heads and head dims are the problem's, so the variants share their texts, but for
    absorbed MLA decode, whose V is part of K.
    """
    variant_named(variant)
    mask = _CAUSAL if causal else ""
    if phase is Phase.DECODE:
        values = _LATENT_VALUES if variant == "mla" else _OWN_VALUES
        return {"decode": _DECODE.format(mask=mask, values=values)}
    return {
        "forward": _FORWARD.format(mask=mask),
        "q_in_registers": _Q_IN_REGISTERS.format(mask=mask),
        "v_early": _V_EARLY.format(mask=mask),
    }


def functions(causal: bool = False) -> dict[str, str]:
    """Return one program of every function of Q, K and V that is built in, by name.

    Run-time numbers have their usual names: softcap, window_left, window_right, sinks, bias.
    """
    mask = _CAUSAL if causal else ""
    cap, alibi = "  Compute Softcap S, softcap\n", "  Compute Mask S, alibi\n"
    biased = "  Compute Add S, bias and get new S\n"
    found = {
        "forward": _FORWARD.format(mask=mask),
        "softcap": _FORWARD.format(mask=cap + mask),
        "alibi": _FORWARD.format(mask=alibi + mask),
        "sigmoid": _ELEMENTWISE.format(middle=mask + "  Compute Sigmoid S\n"),
        "sigmoid_bias": _ELEMENTWISE.format(middle=biased + mask + "  Compute Sigmoid S\n"),
        "relu": _ELEMENTWISE.format(middle=mask + "  Compute Relu S\n"),
        "linear": _ELEMENTWISE.format(middle=mask),
    }
    if causal:
        return found
    windows = {
        "window": "window(window_left, 0)",
        "window_both": "window(window_left, window_right)",
        "window_sinks": "window(window_left, 0, sinks)",
    }
    for name, window in windows.items():
        masked = f"  Compute Mask S, {window}\n"
        found[name] = _FORWARD.format(mask=masked)
        found[f"softcap_{name}"] = _FORWARD.format(mask=cap + masked)
    return found


def programs(causal: bool = False) -> dict[str, str]:
    """Return one program of every kind by name: other dataflow, other functions, other shapes."""
    mask = _CAUSAL if causal else ""
    window = "  Compute Softcap S, softcap\n  Compute Mask S, window(window_left, window_right)\n"
    if causal:
        window = "  Compute Softcap S, softcap\n  Compute Mask S, window(window_left, 0)\n"
    return {
        **sketches("mha", causal),
        "explicit_softmax": _EXPLICIT_SOFTMAX.format(mask=mask),
        "relu": _ELEMENTWISE.format(middle=mask + "  Compute Relu S\n"),
        "sigmoid": _ELEMENTWISE.format(middle=mask + "  Compute Sigmoid S\n"),
        "linear": _ELEMENTWISE.format(middle=mask),
        "softcap_window": _FORWARD.format(mask=window),
        "gemm_epilogue": _GEMM_EPILOGUE,
        "split_kv": _SPLIT_KV.replace("{mask}", mask),
    }

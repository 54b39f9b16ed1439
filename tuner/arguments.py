"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Gpu = Annotated[str | None, typer.Option(help="t4, rtx8000, a100, l40s, h100 or h200.")]
Dtype = Annotated[str | None, typer.Option(help="fp16 or bf16.")]
Causal = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="One mask only; default: both.")
]
PhaseName = Annotated[str | None, typer.Option(help="prefill (default) or decode.")]
PageSize = Annotated[
    int | None,
    typer.Option(help="Decode: keys in a page of the cache: 16, 64 or 128; 0 = not paged."),
]

Function = Annotated[
    str | None,
    typer.Option(help="FILE.py:function of q, k, v that kernels must agree with."),
]
Scalars = Annotated[
    list[str] | None, typer.Option(help="NAME=NUMBER of the reference, compiled in.")
]

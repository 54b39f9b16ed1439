"""Along what the rows and columns of global tensors run, by their coordinates."""

from __future__ import annotations

from codegen.tl.ast import (
    Copy,
    Memory,
    Name,
    walk,
)
from codegen.tl.flow import (
    Block,
    is_key_name,
    is_query_name,
    places,
)
from codegen.tl.kinds import Kind
from codegen.tl.vocabulary import BLOCK_COLUMN, BLOCK_ROW


def loop_kinds(block: Block) -> dict[str, str]:
    """Return for each loop variable what it steps along: query, key, chunk, feature or split."""
    seen: dict[str, set[str]] = {}
    for place in places(block):
        if not isinstance(place.stmt, Copy):
            continue
        for coord in place.stmt.coords:
            if not isinstance(coord.index, Name) or coord.index.id not in place.loops:
                continue
            var = coord.index.id
            if coord.axis != "L":
                seen.setdefault(var, set()).add("feature" if coord.axis == "D" else "split")
            elif is_query_name(place.stmt.name) or place.stmt.dst is Memory.GLOBAL:
                seen.setdefault(var, set()).add("query")
            elif is_key_name(place.stmt.name):
                seen.setdefault(var, set()).add("key")
            else:
                seen.setdefault(var, set()).add("other")
    kinds: dict[str, str] = {}
    for var, uses in seen.items():
        if "split" in uses:
            kinds[var] = "split"
        elif {"query", "key"} <= uses:
            kinds[var] = "chunk"
        elif "query" in uses:
            kinds[var] = "query"
        elif "key" in uses or "other" in uses:
            kinds[var] = "key"
        else:
            kinds[var] = "feature"
    return kinds


def row_kinds(block: Block) -> dict[str, Kind]:
    """Return along what the rows of each global tensor run, by its coordinates."""
    loops = loop_kinds(block)
    found: dict[str, Kind] = {}
    for stmt in walk(block):
        if not isinstance(stmt, Copy) or Memory.GLOBAL not in (stmt.src, stmt.dst):
            continue
        index = next((c.index for c in stmt.coords if c.axis == "L"), Name(BLOCK_ROW))
        var = index.id if isinstance(index, Name) else ""
        if var == BLOCK_COLUMN:
            kind = Kind.KEY
        elif loops.get(var) == "chunk":
            kind = Kind.QUERY if is_query_name(stmt.name) else Kind.KEY
        elif var == BLOCK_ROW or loops.get(var) == "query":
            kind = Kind.QUERY
        else:
            kind = Kind.KEY
        found.setdefault(stmt.name, kind)
    return found


def column_kind(block: Block, name: str) -> Kind | None:
    """Return along what the columns of a global tensor run: keys where a key index tiles them."""
    loops = loop_kinds(block)
    for stmt in walk(block):
        if not isinstance(stmt, Copy) or stmt.name != name:
            continue
        for coord in stmt.coords:
            var = coord.index.id if isinstance(coord.index, Name) else ""
            if coord.axis == "D" and (var == BLOCK_COLUMN or loops.get(var) == "key"):
                return Kind.KEY
    return Kind.FEATURE

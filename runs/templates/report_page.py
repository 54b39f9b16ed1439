"""The frame of an HTML page that opens offline: its style sheet, head and foot."""

from __future__ import annotations

from html import escape

STYLE = """
:root{--ink:#1c2330;--quiet:#5c6675;--line:#dde2ea;--paper:#fff;--ground:#f4f6f9;--accent:#2458c5;
--warn-ink:#6f4a00;--warn:#fff3d6;--good:#0d7a4f;--bad:#b3261e;
--c0:#2458c5;--c1:#d9662b;--c2:#1e8c6a;--c3:#a03fa0;--c4:#b58a00;--c5:#3aa0c9;--c6:#8a5a44;
--c7:#6b7280}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--quiet:#9aa5b5;--line:#333c4a;
--paper:#1a202b;--ground:#11151d;--accent:#86a9ff;--warn-ink:#ffd98a;--warn:#3a2d10;--good:#5ed3a2;
--bad:#ff8a80;--c0:#86a9ff;--c1:#ff9f6b;--c2:#5ed3a2;--c3:#dd8fdd;--c4:#e6c24a;--c5:#7dcfee;
--c6:#caa08c;--c7:#aab2bf}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.5;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.2rem;margin:0 0 12px}
h3{font-size:1rem;margin:16px 0 6px}
p{margin:0 0 10px;max-width:78ch}
.quiet,.sub{color:var(--quiet)}
.sub{margin-bottom:18px;overflow-wrap:anywhere}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:20px 22px;margin:18px 0}
.banner{background:var(--warn);color:var(--warn-ink);border-radius:10px;padding:12px 16px;
margin:14px 0;font-weight:600}
.tag{background:var(--warn);color:var(--warn-ink);border-radius:4px;padding:0 5px;
font-size:.75rem;font-weight:600;white-space:nowrap}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:14px;margin:18px 0}
.fact{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.fact b{display:block;font-size:1.45rem;line-height:1.25}
.fact span{color:var(--quiet);font-size:.85rem}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:24px}
.pair>*{min-width:0}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--quiet);font:11.5px system-ui,sans-serif}
.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--quiet);stroke-width:1}
.line{fill:none;stroke-width:2.2;stroke:currentColor;stroke-linejoin:round}
.after{stroke-dasharray:2 4;opacity:.7}
.dot{fill:currentColor}
.band{fill:currentColor;opacity:.16;stroke:none}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
rect.bar{fill:var(--c0);opacity:.8}
.whisker{stroke:var(--ink);stroke-width:1.2;fill:none;opacity:.7}
.roof{stroke:var(--bad);stroke-width:2}
.mark{stroke:currentColor;stroke-width:3;fill:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.85rem;margin:6px 0 0}
.key{display:inline-flex;align-items:center;gap:6px;overflow-wrap:anywhere}
.swatch{width:14px;height:4px;background:currentColor;border-radius:2px;flex:none}
.swatch.bar{background:var(--c0);height:10px}
.swatch.roof{background:var(--bad);width:3px;height:14px}
table{border-collapse:collapse;width:100%;font-size:.88rem}
.scroll{overflow-x:auto}
th{font-weight:600;color:var(--quiet);text-align:left;border-bottom:2px solid var(--line);
padding:6px 10px 6px 0;vertical-align:bottom}
td{border-bottom:1px solid var(--line);padding:6px 10px 6px 0;vertical-align:top}
th.n,td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.k,td.shape{white-space:nowrap}
td small{color:var(--quiet);font-size:.92em}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.heat{background:color-mix(in srgb,var(--c0) var(--h),transparent)}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{margin:0;padding:12px;background:var(--ground);border:1px solid var(--line);border-radius:6px;
overflow:auto;max-height:560px;tab-size:2}
.wrap{white-space:pre-wrap;overflow-wrap:anywhere}
a{color:var(--accent)}
details{border-top:1px solid var(--line);padding:8px 0}
details>summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}
details[open]>summary{margin-bottom:10px}
summary small{font-weight:400;color:var(--quiet)}
.source{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr);gap:14px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0;font-size:.88rem}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere}
.verdict{font-size:1.08rem;font-weight:600}
@media(max-width:760px){
main{padding:18px 12px 40px}h1{font-size:1.4rem}section{padding:16px 14px}
.pair,.source{grid-template-columns:minmax(0,1fr)}
.facts{grid-template-columns:1fr 1fr;gap:8px}.fact{padding:10px 12px}.fact b{font-size:1.2rem}
dl{grid-template-columns:1fr}dd{margin-bottom:6px}
table.cards thead{display:none}
table.cards,table.cards tbody,table.cards tr,table.cards td{display:block;width:100%}
table.cards tr{border:1px solid var(--line);border-radius:8px;padding:8px 12px;margin-bottom:10px}
table.cards tr:has(td.shape){display:grid;grid-template-columns:1fr 1fr;gap:2px 16px}
table.cards td.shape{grid-column:1/-1}
table.cards td{border:0;padding:2px 0;display:flex;justify-content:space-between;gap:6px;
text-align:right;white-space:normal}
table.cards td::before{content:attr(data-l);color:var(--quiet);text-align:left;flex:none}
table.cards td.shape,table.cards td.head{font-weight:600;text-align:left;display:block}
table.cards td.shape::before,table.cards td.head::before{content:none}
pre{max-height:420px}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""


def page(title: str, body: str) -> str:
    """Return a whole HTML document that asks nothing of any network."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def section(title: str, body: str, name: str = "") -> str:
    """Return a titled part of the page."""
    mark = f' id="{escape(name, quote=True)}"' if name else ""
    return f"<section{mark}><h2>{escape(title)}</h2>{body}</section>\n"


def table(head: list[tuple[str, str]], rows: list[list[str]], cards: bool = True) -> str:
    """Return a table; `head` holds (title, class), cells are HTML already.

    With `cards` each row becomes a card on a narrow screen, with the titles inside.
    """
    titles = "".join(f'<th class="{kind}">{escape(text)}</th>' for text, kind in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-l="{escape(text, quote=True)}">{cell}</td>'
            for (text, kind), cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    kind = ' class="cards"' if cards else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(pairs: list[tuple[str, str]]) -> str:
    """Return a row of figures with what they mean; both are HTML already."""
    cells = "".join(f'<div class="fact"><b>{v}</b><span>{k}</span></div>' for k, v in pairs)
    return f'<div class="facts">{cells}</div>'


def definitions(pairs: list[tuple[str, str]]) -> str:
    """Return names with their values, as plain text."""
    body = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)
    return f"<dl>{body}</dl>"


def folded(summary: str, body: str, opened: bool = False) -> str:
    """Return a part that opens on a click; both are HTML already."""
    return f"<details{' open' if opened else ''}><summary>{summary}</summary>{body}</details>"

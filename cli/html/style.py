"""How a page looks: one sheet, light and dark, narrow and on paper. Entry: `STYLE`."""

from typing import Final

from cli.html.palette import FATES, SERIES, STEPS, variables


def _fills() -> str:
    steps = [(f"f-{name}", name) for name in STEPS["light"]]
    fates = [(f"fate-{name}", f"fate-{name.replace('_', '-')}") for name in FATES["light"]]
    series = [(f"s{place}", f"s{place}") for place in range(len(SERIES["light"]))]
    rules = [f".{kind}{{fill:var(--{name});stroke:var(--{name})}}" for kind, name in steps + fates + series]
    rules += [
        f".dot.open.{kind}{{fill:var(--page);stroke:var(--{name});stroke-width:2}}" for kind, name in series
    ]
    return "\n".join(rules)


STYLE: Final = f"""
:root{{color-scheme:light dark;{variables("light")}}}
@media (prefers-color-scheme:dark){{:root{{{variables("dark")}}}}}
@media print{{:root{{color-scheme:light;{variables("light")}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--page);color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
main,header,footer{{max-width:1080px;margin:0 auto;padding:0 20px}}
header{{padding-top:36px}}
h1{{font-size:1.9rem;line-height:1.2;margin:0 0 .3em;letter-spacing:-.01em}}
h2{{font-size:1.35rem;line-height:1.25;margin:0 0 .4em}}
h3{{font-size:1.02rem;margin:1.6em 0 .3em}}
p{{max-width:74ch;margin:.4em 0}}
.under{{color:var(--soft)}}
a{{color:inherit;text-underline-offset:3px}}
nav ul{{display:flex;flex-wrap:wrap;gap:6px 18px;list-style:none;padding:0;margin:14px 0 0}}
section{{border-top:1px solid var(--rule);margin-top:44px;padding-top:26px}}
.notice{{border-left:4px solid var(--wait);background:var(--tint);padding:10px 14px;margin:16px 0;
  max-width:none}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:24px 0 0}}
.tiles div{{background:var(--tint);border-radius:8px;padding:12px 16px;
  display:flex;flex-direction:column;justify-content:space-between}}
.tiles dt{{color:var(--soft);font-size:.85rem;line-height:1.35}}
.tiles dd{{margin:2px 0 0;font-size:1.5rem;font-weight:650;letter-spacing:-.01em;
  font-variant-numeric:tabular-nums}}
figure{{margin:20px 0 8px}}
figcaption{{color:var(--soft);font-size:.88rem;max-width:74ch;margin-top:6px}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:0 0 14px;padding:0;font-size:.88rem}}
.legend li{{display:flex;gap:7px;align-items:baseline}}
.swatch{{flex:none;overflow:visible;align-self:center}}
.plot svg[role=img]{{display:block;overflow:visible}}
.plot.chart,.plot.waterfall{{padding-left:52px;padding-right:14px}}
.plot.waterfall{{padding-left:92px}}
.plot.bars{{padding-right:14px}}
.plot.ended{{padding-right:168px}}
.plot text{{fill:var(--ink);font-size:13px}}
.plot .tick,.plot .axis{{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}}
.plot .group{{font-weight:650}}
.plot .end{{font-size:12.5px}}
{_fills()}
.plot rect{{stroke-width:.5}}
.plot .mark,.swatch .mark{{overflow:visible}}
.line{{fill:none;stroke-width:2;stroke-linecap:round}}
.dot{{stroke:var(--page);stroke-width:1}}
.grid{{stroke:var(--rule);stroke-width:1}}
.queued{{stroke-width:1;opacity:.75}}
.halo{{stroke:var(--page);stroke-width:6}}
.whisker,.bound{{stroke:var(--ink);stroke-width:2;fill:var(--ink)}}
.storage{{stroke:var(--exact);stroke-width:3;fill:var(--exact)}}
rect.f-bound{{fill:var(--ink)}} rect.f-storage{{fill:var(--exact)}}
rect.hollow{{fill:var(--page);stroke-width:1}}
rect.fate-unread{{stroke:var(--soft);stroke-width:1}}
.scroll{{overflow-x:auto;margin:14px 0;border:1px solid var(--rule);border-radius:8px}}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{{outline:3px solid var(--exact);
  outline-offset:2px}}
table{{border-collapse:collapse;font-size:.86rem;width:100%}}
caption{{text-align:left;color:var(--soft);padding:10px 14px;line-height:1.4;max-width:90ch}}
th,td{{padding:5px 12px;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
thead th{{font-weight:600;color:var(--soft);border-bottom:1px solid var(--rule);vertical-align:bottom;
  white-space:normal;line-height:1.25}}
th:first-child,.text{{text-align:left}}
tbody th{{font-weight:500}}
tbody tr:nth-child(even){{background:var(--tint)}}
.bars td{{background:linear-gradient(var(--exact),var(--exact)) left 12px bottom 2px/
  calc((100% - 24px)*var(--share,0)) 3px no-repeat}}
details{{margin:14px 0}}
summary{{cursor:pointer;padding:4px 0;color:var(--soft)}}
dl.facts{{display:grid;grid-template-columns:minmax(140px,max-content) 1fr;gap:4px 18px;
  font-size:.9rem;margin:0}}
dl.facts dt{{color:var(--soft)}}
dl.facts dd{{margin:0;overflow-wrap:anywhere}}
footer{{padding-bottom:60px;color:var(--soft);font-size:.88rem;margin-top:40px}}
@media (max-width:640px){{
  body{{font-size:15px}} main,header,footer{{padding:0 14px}}
  header{{padding-top:22px}} h1{{font-size:1.5rem}}
  .plot.ended{{padding-right:14px}} .plot .end{{display:none}} .plot.waterfall{{padding-left:82px}}
  caption{{max-width:calc(100vw - 30px)}}
  tbody th span{{display:block;white-space:normal;width:max-content;max-width:13em}}
  dl.facts{{grid-template-columns:1fr}} dl.facts dd{{margin-bottom:6px}}
}}
@media print{{
  body{{font-size:10.5pt}} main,header,footer{{max-width:none;padding:0}} nav{{display:none}}
  section{{break-inside:auto}} figure,.tiles{{break-inside:avoid}} tr{{break-inside:avoid}}
  .scroll{{overflow:visible;border:0}} th,td{{white-space:normal;padding:3px 6px}} table{{font-size:7.5pt}}
  details::details-content{{content-visibility:visible;block-size:auto;opacity:1}}
  *{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
}}
"""

"""The page's style: the look's colours by theme, one typeface, few borders, numbers to the right."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root{--ground:#fff;--raised:#f6f7f8;--ink:#16181a;--quiet:#5c6268;--rule:#dfe2e5;
--computation:#0072B2;--communication:#E69F00;--memory:#009E73;--idle:#9AA0A6;--fault:#D55E00;--backward:#CC79A7;--weight:#D6C400}
@media(prefers-color-scheme:dark){:root{--ground:#121416;--raised:#1b1e21;--ink:#e8eaec;--quiet:#9aa1a8;--rule:#2c3136;
--computation:#56B4E9;--communication:#F0C05A;--memory:#4FC3A1;--idle:#6B7075;--fault:#FF7F50;--backward:#E3A6C9;--weight:#F0E442}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 24px 60px}
header{display:flex;gap:28px;align-items:flex-start}
header>div{flex:1;min-width:0}
header figure{margin:0;width:190px;flex:none}
h1{font-size:21px;line-height:1.35;margin:4px 0 8px;font-weight:600;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px;font-weight:600}
h3{font-size:15px;margin:18px 0 6px;font-weight:600;overflow-wrap:anywhere}
p{margin:6px 0;overflow-wrap:anywhere}
.quiet,.note,figcaption,summary,footer,.label{color:var(--quiet)}
.notice{margin:0 0 6px;overflow-wrap:anywhere}
.note{font-size:13px}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:18px 0 0;padding:10px 0;border-bottom:1px solid var(--rule)}
nav a{color:var(--quiet);text-decoration:none}nav a:hover{color:var(--ink)}
ul{list-style:none;margin:0;padding:0}
.sides{font-size:13px;margin-top:4px}.key{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:7px}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:8px 0;font-size:14px}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere}
.finding{background:var(--raised);border-left:4px solid var(--computation);border-radius:3px;padding:12px 18px 14px;margin:14px 0}
.finding.fault{border-color:var(--fault)}
.finding h3{font-size:17px;margin:0 0 6px}
.kind{font-size:13px;color:var(--computation);margin:0 0 2px}.fault .kind{color:var(--fault)}
pre,code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--ground);border:1px solid var(--rule);border-radius:3px;padding:8px 12px;margin:8px 0;overflow-x:auto}
.items li{display:flex;gap:10px;padding:5px 0}.mark{min-width:18px;flex:none;color:var(--quiet)}
.good .mark{color:var(--memory)}.bad .mark{color:var(--fault)}
figure.wide{margin:14px 0 0}figcaption{font-size:14px;margin-bottom:4px}
svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:var(--ink)}svg .label{fill:var(--quiet)}
.side-computation{fill:var(--computation);background:var(--computation)}
.side-communication{fill:var(--communication);background:var(--communication)}
.side-memory{fill:var(--memory);background:var(--memory)}
.side-idle{fill:var(--idle);background:var(--idle)}
.side-backward{fill:var(--backward);background:var(--backward)}
.side-weight{fill:var(--weight);background:var(--weight)}
.span{stroke:var(--ground);stroke-width:.6}
.side-fault{fill:var(--fault);background:var(--fault)}
polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
.line-computation{stroke:var(--computation)}.line-memory{stroke:var(--memory)}.line-communication{stroke:var(--communication)}
.line-idle{stroke:var(--idle)}.line-fault{stroke:var(--fault)}
.grid{stroke:var(--rule)}.cell{stroke:var(--rule);stroke-width:.5}
.ground{fill:none;stroke:var(--rule);stroke-width:1.5}
.hull{fill:var(--ink);fill-opacity:.12;stroke:var(--ink);stroke-opacity:.35}
.dot{fill:var(--ink)}
summary{cursor:pointer;font-size:13px;margin:6px 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%}
th{font-weight:500;color:var(--quiet);text-align:left;border-bottom:1px solid var(--rule)}
th,td{padding:4px 12px 4px 0;vertical-align:top}td{border-bottom:1px solid var(--rule)}
th.right,td.right{text-align:right;white-space:nowrap}th{white-space:nowrap}
td.left{overflow-wrap:break-word}td.flexible{overflow-wrap:anywhere;min-width:110px}
footer{margin-top:40px;font-size:13px}
@media(max-width:700px){header{flex-direction:column}}
@media print{nav{display:none}details{display:block}.finding{break-inside:avoid}}
"""

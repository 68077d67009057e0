"""The style sheet of the HTML report: two palettes, one column on a phone."""

from typing import Final

__all__ = ["STYLE"]

STYLE: Final = """
:root{--page:#fcfcfb;--ink:#1d1f21;--soft:#5d6166;--line:#d9dbde;--card:#fff;--bad:#b3261e;
--badbg:#fdeceb;--warn:#8a5a00;--warnbg:#fdf3dc;--info:#0b5a8f;--infobg:#e6f1f9;--ok:#24693a;
--okbg:#e7f4ea;--bar:#33658a;--z-flush:#f6c6c1;--z-sub:#fbe7bd;--z-win:#e0efe3;--z-sat:#f6c6c1;
--h0:#eef3f7;--h1:#d3e3ee;--h2:#aecde0;--h3:#f7e3a1;--h4:#f5bf6a;--h5:#e8894a;--h6:#c94f35;
--h7:#8a1c1c;--never:#b3261e;--promoted:#24693a;--s0:#b3261e;--s1:#0b5a8f;--s2:#8a5a00;
--s3:#24693a;--s4:#7a3e9d;--s5:#5d6166}
@media (prefers-color-scheme:dark){:root{--page:#16181a;--ink:#e8e9ea;--soft:#a3a8ad;
--line:#3a3e42;--card:#1e2124;--bad:#ff8a80;--badbg:#3a1d1c;--warn:#f4c430;--warnbg:#352b12;
--info:#7cc4f5;--infobg:#15293a;--ok:#7ed492;--okbg:#17301e;--bar:#7fb2d9;--z-flush:#54241f;
--z-sub:#4a3a14;--z-win:#1d3524;--z-sat:#54241f;--h0:#22303a;--h1:#2c4a5e;--h2:#3f6f8c;
--h3:#8d7a2c;--h4:#b07a26;--h5:#c8662c;--h6:#dd4b39;--h7:#ff6f61;--never:#ff8a80;
--promoted:#7ed492;--s0:#ff8a80;--s1:#7cc4f5;--s2:#f4c430;--s3:#7ed492;--s4:#d0a2ea;
--s5:#a3a8ad}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:76rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;margin:.2rem 0}h2{font-size:1.2rem;margin:2rem 0 .3rem}
h3{font-size:1.05rem;margin:.1rem 0;overflow-wrap:anywhere}
p{margin:.3rem 0}.help,.also,figcaption,.legend{color:var(--soft);font-size:.92rem}
.verdicts{display:grid;gap:.7rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}
.verdicts .card:first-child{grid-column:1/-1}
.card{background:var(--card);border:1px solid var(--line);border-left:.4rem solid;
border-radius:.4rem;padding:.6rem .9rem}
.card.bad{border-left-color:var(--bad);background:var(--badbg)}
.card.warn{border-left-color:var(--warn);background:var(--warnbg)}
.card.info{border-left-color:var(--info);background:var(--infobg)}
.card.ok{border-left-color:var(--ok);background:var(--okbg)}
.tag{font-size:.8rem;font-weight:700;letter-spacing:.03em;text-transform:uppercase;margin:0}
.bad .tag,td.bad{color:var(--bad)}.warn .tag,td.warn{color:var(--warn)}.info .tag{color:var(--info)}
.ok .tag{color:var(--ok)}td.bad{font-weight:700}
.remedy{font-weight:600}
ol{padding-left:1.4rem;margin:.3rem 0}ol li{margin:.5rem 0}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.4rem}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--line);text-align:right;
vertical-align:top;white-space:nowrap}
thead th{white-space:normal;vertical-align:bottom;color:var(--soft);min-width:4.2rem}
th:first-child{text-align:left;position:sticky;left:0;background:var(--card);white-space:normal;
min-width:8.5rem;max-width:16rem;overflow-wrap:anywhere;font-weight:600}
tbody tr:last-child>*{border-bottom:0}.chosen>*{background:var(--okbg)!important}
table.map{width:auto}table.map td{min-width:4.2rem;text-align:center}
table.map thead th+th{text-align:center}
table.map.steps td,table.map.steps thead th{min-width:2.6rem;padding:.2rem .3rem}
figure{margin:.6rem 0;background:var(--card);border:1px solid var(--line);border-radius:.4rem;
padding:.6rem;min-width:0}
figcaption{margin-bottom:.3rem;overflow-wrap:anywhere}figcaption strong{color:var(--ink)}
.pair{display:grid;gap:.6rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr))}
svg{width:100%;height:auto;max-width:34rem;display:block}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--line);stroke-width:.7}.mark{stroke:var(--ink);stroke-dasharray:3 3}
.bar{fill:var(--bar)}.flush{fill:var(--z-flush)}.subnormal{fill:var(--z-sub)}
.window{fill:var(--z-win)}.saturated{fill:var(--z-sat)}
polyline,.key line{fill:none;stroke-width:2}.never{stroke:var(--never)}
.promoted{stroke:var(--promoted);stroke-dasharray:6 3}
circle.never{fill:var(--never)}circle.promoted{fill:var(--promoted);stroke-dasharray:none}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1);stroke-dasharray:7 3}
.s2{stroke:var(--s2);stroke-dasharray:2 2}.s3{stroke:var(--s3);stroke-dasharray:10 3 2 3}
.s4{stroke:var(--s4);stroke-dasharray:4 2}.s5{stroke:var(--s5);stroke-dasharray:1 3}
.h0{fill:var(--h0)}.h1{fill:var(--h1)}.h2{fill:var(--h2)}.h3{fill:var(--h3)}.h4{fill:var(--h4)}
.h5{fill:var(--h5)}.h6{fill:var(--h6)}.h7{fill:var(--h7)}
.heat.h0{background:var(--h0)}.heat.h1{background:var(--h1)}.heat.h2{background:var(--h2)}
.heat.h3{background:var(--h3);color:#1d1f21}.heat.h4{background:var(--h4);color:#1d1f21}
.heat.h5{background:var(--h5);color:#1d1f21}.heat.h6{background:var(--h6);color:#fff}
.heat.h7{background:var(--h7);color:#fff}
.legend .heat{display:inline-block;padding:.05rem .45rem;min-width:2.2rem;text-align:center}
.keys{list-style:none;padding:0;margin:.3rem 0;font-size:.85rem;display:flex;flex-wrap:wrap;
gap:.1rem 1rem}.keys li{overflow-wrap:anywhere}
.key{width:1.6rem;height:.55rem;display:inline-block;margin-right:.4rem;vertical-align:middle}
"""

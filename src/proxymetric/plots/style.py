"""The style sheet of the report: light and dark mode, wide and narrow screens, and print."""

CSS = """
:root { --page: #f6f7f9; --card: #ffffff; --ink: #16181d; --soft: #5b6270; --line: #e3e6eb; --accent: #3157d5;
  --tint: #eef2ff; --bar: #dfe6fb; --right: #147a4b; --wrong: #c2293d;
  --series-0: #3157d5; --series-1: #b4530a; --series-2: #0f7f86; --second: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --page: #101216; --card: #191c22; --ink: #eceef2; --soft: #a3abba;
  --line: #2c313a; --accent: #8ea6ff; --tint: #1f2740; --bar: #2a3761; --right: #45c58a; --wrong: #ff7485;
  --series-0: #8ea6ff; --series-1: #f0a35e; --series-2: #4fc3ca; --second: #a3abba; } }
* { box-sizing: border-box; }
html { color-scheme: light dark; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", sans-serif; }
header, main { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 40px; }
h1 { font-size: clamp(1.5rem, 4vw, 2.2rem); line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 20px; }
h2 { font-size: 1.15rem; margin: 0 0 4px; letter-spacing: -0.01em; }
.hint { color: var(--soft); margin: 0 0 18px; max-width: 72ch; font-size: .94rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 14px 28px;
  margin: 0 0 28px; }
.facts dt { color: var(--soft); font-size: .8rem; }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 22px 24px;
  margin: 0 0 20px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { --side: 14px; padding: 11px var(--side); text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: .88rem; }
tbody th { text-align: left; font-weight: 500; }
td.number { font-size: 1.08rem; padding-bottom: 17px; background:
  linear-gradient(var(--second), var(--second)) no-repeat left var(--side) bottom 9px /
    calc((100% - 2 * var(--side)) * var(--share)) 4px,
  linear-gradient(var(--line), var(--line)) no-repeat left var(--side) bottom 9px /
    calc(100% - 2 * var(--side)) 4px; }
tr.best td.number { background-image: linear-gradient(var(--accent), var(--accent)),
  linear-gradient(var(--bar), var(--bar)); }
tr.best { background: var(--tint); }
tr.best th { font-weight: 700; }
.badge { background: var(--accent); color: var(--card); border-radius: 99px; padding: 2px 9px; font-size: .72rem;
  font-weight: 700; margin-left: 8px; vertical-align: 2px; }
.chart { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px 24px; }
.chart svg, svg.map { display: block; width: 100%; height: auto; }
.swatch { vertical-align: -3px; }
.chart svg text, svg.map text { font-family: inherit; }
svg.map text { font-size: 14px; font-weight: 500; text-anchor: middle; fill: var(--ink); stroke: var(--card);
  stroke-width: 5px; paint-order: stroke; stroke-linejoin: round; }
.key { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0 0 18px; font-size: .88rem; color: var(--soft); }
.mark { display: inline-grid; place-items: center; width: 20px; height: 20px; border-radius: 50%; color: var(--card);
  font-size: .8rem; font-weight: 700; line-height: 1; }
.right .mark { background: var(--right); }
.wrong .mark { background: var(--wrong); }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 18px; }
.pairs.five { grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); margin-bottom: 18px; }
.pair { margin: 0; display: grid; align-content: start; grid-template-columns: 1fr 1fr; gap: 6px; min-width: 0; }
.pair figcaption { grid-column: 1 / -1; min-width: 0; }
.find { display: grid; grid-template-columns: 104px 1fr; gap: 22px; padding: 16px 0;
  border-top: 1px solid var(--line); }
.find figure { margin: 0; min-width: 0; }
.hits { list-style: none; margin: 0; padding: 0; display: grid; grid-template-columns: repeat(8, minmax(0, 1fr));
  gap: 12px; }
.hits li { min-width: 0; }
.frame { position: relative; aspect-ratio: 1; border: 3px solid var(--line); border-radius: 10px; background: #fff;
  display: grid; place-items: center; overflow: hidden; }
.frame img { width: 100%; height: 100%; object-fit: contain; display: block; }
.query .frame { border-color: var(--accent); }
.right .frame { border-color: var(--right); }
.wrong .frame { border-color: var(--wrong); border-style: dashed; }
.frame .mark { position: absolute; right: 3px; bottom: 3px; box-shadow: 0 0 0 2px var(--card); }
figcaption { font-size: .8rem; margin-top: 5px; line-height: 1.3; }
.name { display: block; overflow-wrap: anywhere; }
.range { display: block; font-size: .72rem; font-weight: 400; color: var(--soft); }
.under { color: var(--soft); margin: 10px 0 0; font-size: .85rem; }
.remark { margin: 0 0 10px; max-width: 72ch; border-left: 3px solid var(--accent); padding-left: 12px; }
.swipe { display: none; color: var(--soft); font-size: .8rem; margin: 0 0 6px; }
.query .name { font-weight: 700; }
.score { color: var(--soft); font-variant-numeric: tabular-nums; }
.notes { margin: 8px 0 0; padding-left: 1.2em; }
.notes li { margin: 4px 0; }
@media (max-width: 960px) { th, td { --side: 9px; } }
@media (max-width: 720px) {
  header, main { padding: 0 12px; } header { padding-top: 24px; }
  section { padding: 18px 14px; border-radius: 12px; }
  th, td { --side: 7px; }
  tbody th { white-space: normal; line-height: 1.3; }
  td.number { font-size: 1rem; }
  .badge { margin-left: 0; display: inline-block; vertical-align: 0; }
  .facts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px 20px; }
  .find { grid-template-columns: 76px 1fr; gap: 14px; }
  .hits { grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 8px; }
  svg.map { min-width: 640px; }
  .swipe { display: block; }
}
@media print { body { background: #fff; } section { break-inside: avoid-page; } .find { break-inside: avoid; } }
"""

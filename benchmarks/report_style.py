"""The style of the report's page: for wide windows and phones, light and dark, and for paper.

No fonts and no pictures come from elsewhere. Tables scroll within their own box, so that the page itself never does to
the side; their first column stays in sight.
"""

STYLE = """
:root {
  --paper: #fbfaf8; --card: #ffffff; --ink: #1c1b19; --quiet: #65615a; --rule: #dedad2; --stripe: #f5f3ee;
  --accent: #0a5a8a; --code: #f0ede6;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #161719; --card: #1e2023; --ink: #e8e6e1; --quiet: #a39f96; --rule: #383a3e; --stripe: #232529;
    --accent: #7cc0ee; --code: #2a2c30;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header { max-width: 92rem; margin: 0 auto; padding: 2.2rem 1.5rem 0.4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
.page { max-width: 92rem; margin: 0 auto; padding: 0 1.5rem 4rem; display: grid; gap: 2.5rem;
  grid-template-columns: 15rem minmax(0, 1fr); }
main { min-width: 0; }
nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: 1.6rem 0.6rem 2rem 0;
  font-size: 0.88rem; line-height: 1.4; }
nav p { margin: 0 0 0.5rem; color: var(--quiet); font-weight: 600; }
nav ol { list-style: none; margin: 0; padding: 0; }
nav li { margin: 0.3rem 0; overflow-wrap: anywhere; }
nav ol ol { margin: 0.1rem 0 0.5rem 0.2rem; padding-left: 0.7rem; border-left: 1px solid var(--rule);
  font-size: 0.93em; }
nav ol ol a { color: var(--quiet); }
a { color: var(--accent); text-decoration: none; overflow-wrap: anywhere; }
a:hover, a:focus-visible { text-decoration: underline; }
section { padding-top: 0.6rem; scroll-margin-top: 0.5rem; }
section + section { border-top: 1px solid var(--rule); margin-top: 2.4rem; }
h2 { font-size: 1.45rem; margin: 1rem 0 0.7rem; letter-spacing: -0.005em; }
h3 { font-size: 1.12rem; margin: 1.9rem 0 0.5rem; }
h4, h5, h6 { font-size: 0.98rem; margin: 1.4rem 0 0.4rem; color: var(--quiet); }
h2, h3, h4, h5, h6 { line-height: 1.3; scroll-margin-top: 0.8rem; }
p, ul { max-width: 78ch; margin: 0.6rem 0; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
li { margin: 0.2rem 0; }
code { font: 0.88em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--code);
  padding: 0.08em 0.3em; border-radius: 0.25em; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--code); padding: 0.8rem 1rem; border-radius: 0.4rem; }
pre code { padding: 0; background: none; overflow-wrap: normal; }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; margin: 0.7rem 0 1.2rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 0.45rem; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
table { width: max-content; border-collapse: separate; border-spacing: 0; font-size: 0.87rem; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.34rem 0.75rem; text-align: left; vertical-align: top; white-space: nowrap; }
th { font-weight: 500; }
thead th { font-weight: 600; color: var(--quiet); border-bottom: 1px solid var(--rule); vertical-align: bottom; }
.number { text-align: right; }
tbody tr:nth-child(even) > * { background: var(--stripe); }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--card); max-width: min(26rem, 40vw);
  white-space: normal; }
#parts table { width: auto; }
#parts td:not(.number) { white-space: normal; min-width: 5rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
figure { margin: 0; max-width: 100%; background: #ffffff; border: 1px solid var(--rule); border-radius: 0.45rem;
  padding: 0.6rem; }
figure img { display: block; max-width: 100%; max-height: 21rem; height: auto; }
figcaption { color: #5d5a54; font-size: 0.8rem; padding-top: 0.3rem; overflow-wrap: anywhere; }
@media (max-width: 60rem) {
  header { padding: 1.3rem 1rem 0; }
  h1 { font-size: 1.5rem; }
  .page { display: block; padding: 0 1rem 3rem; }
  nav { position: static; max-height: none; padding: 0.8rem 0; border-bottom: 1px solid var(--rule); }
  nav ol ol { display: none; }
  th, td { padding: 0.32rem 0.55rem; }
}
@media print {
  :root { --paper: #ffffff; --card: #ffffff; --ink: #000000; --quiet: #444444; --rule: #bbbbbb; --stripe: #f4f4f4;
    --accent: #000000; --code: #f4f4f4; color-scheme: light; }
  body { font-size: 9.5pt; }
  header { padding: 0; }
  .page { display: block; padding: 0; }
  nav { position: static; max-height: none; overflow: visible; }
  .scroll { overflow: visible; border: none; max-width: none; }
  table { width: auto; font-size: 7pt; }
  th, td { white-space: normal; padding: 0.12rem 0.3rem; overflow-wrap: break-word; }
  tbody th, thead th:first-child { position: static; max-width: none; }
  thead { display: table-header-group; }
  tr, figure { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
}
"""

"""The look of the HTML report."""

CSS = """
:root {
  color-scheme: light dark;
  --ink: #24292f; --faint: #6e7781; --grid: #d8dee4; --paper: #ffffff; --card: #f6f8fa; --accent: #0072b2;
  --warn-ink: #7a2e00; --warn: #fff1e5; --warn-line: #d55e00;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --faint: #9198a1; --grid: #343b44; --paper: #14181d; --card: #1c2128; --accent: #56b4e9;
    --warn-ink: #ffc9a3; --warn: #33200f; --warn-line: #d55e00;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.8rem 0 0.8rem; font-size: 1.25rem; }
h3 { margin: 1.6rem 0 0.6rem; font-size: 1.05rem; overflow-wrap: anywhere; }
.subtitle, figcaption, .note { color: var(--faint); }
.subtitle { margin: 0.3rem 0 0; }
.verdict { margin: 1.4rem 0 0; padding-left: 1rem; border-left: 4px solid var(--accent); font-size: 1.2rem; }
.trouble {
  margin: 1.4rem 0 0; padding: 0.7rem 1rem 0.7rem 2.2rem; border-left: 4px solid var(--warn-line);
  background: var(--warn); color: var(--warn-ink);
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
.results { width: 100%; }
th, td {
  padding: 0.45rem 0.5rem; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top;
  white-space: nowrap;
}
th:first-child, .words { text-align: left; }
thead th { color: var(--faint); font-weight: 600; vertical-align: bottom; white-space: normal; }
small { display: block; color: var(--faint); font-weight: 400; }
tbody th { font-weight: 500; }
tbody th .note { margin: 0 0 0 1.25rem; max-width: 13rem; white-space: normal; color: var(--warn-line); }
.best { font-weight: 700; color: var(--accent); }
.out td { color: var(--faint); }
.swatch { display: inline-block; width: 0.75em; height: 0.75em; margin-right: 0.5em; border-radius: 50%; }
.note { margin: 0.7rem 0; font-size: 0.85rem; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.2rem;
}
.setting { grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); }
@media (max-width: 700px) { .setting { grid-template-columns: 1fr; } }
figure { margin: 0; padding: 0.9rem; border: 1px solid var(--grid); border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; max-height: 640px; }
svg text { font-family: inherit !important; }
figcaption { margin-top: 0.5rem; font-size: 0.85rem; }
.facts {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 0.8rem; margin: 0;
}
.facts div { padding: 0.6rem 0.8rem; border-radius: 8px; background: var(--card); }
.facts dt { color: var(--faint); font-size: 0.8rem; }
.facts dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
pre {
  padding: 0.9rem 1rem; border-radius: 8px; background: var(--card); overflow-x: auto; font-size: 0.85rem;
}
details { margin-top: 0.8rem; }
summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 3rem; color: var(--faint); font-size: 0.8rem; }
@page { margin: 12mm; }
@media print {
  body { max-width: none; padding: 0 1px; font-size: 9pt; line-height: 1.35; }
  h1 { font-size: 15pt; }
  h2 { margin: 0.8rem 0 0.3rem; font-size: 11pt; }
  h1, h2, h3, h2 + .note { break-after: avoid; }
  .verdict { margin-top: 0.6rem; font-size: 10pt; }
  .trouble { margin-top: 0.6rem; padding-block: 0.3rem; }
  .note, figcaption { font-size: 7pt; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  .results { font-size: min(7pt, 92pt / var(--columns)); }
  th, td { padding: 0.2rem 0.25em; }
  tbody th { min-width: 8em; white-space: normal; overflow-wrap: break-word; }
  tbody th .note { margin-left: 0; font-size: inherit; }
  tr, figure, .facts div { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; gap: 0.4rem; }
  figure { padding: 0.3rem; }
  .setting svg { max-height: 44mm; }
  figcaption { margin-top: 0.2rem; }
  .facts { grid-template-columns: repeat(5, 1fr); gap: 0.3rem; }
  .facts div { padding: 0.2rem 0.4rem; border: 1px solid var(--grid); }
  .facts dt { font-size: 7pt; }
  .facts dd { font-size: 9pt; }
  p, pre { margin-block: 0.3rem; }
  pre, footer { break-before: avoid; }
  pre { padding: 0.4rem 0.6rem; white-space: pre-wrap; font-size: 8pt; }
  details { display: none; }
  footer { margin-top: 0.6rem; }
}
"""

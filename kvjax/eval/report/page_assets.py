"""Style and script of the report page, inlined so that the page is one file that needs no network."""

STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #fff; --ink: #1b1f24; --muted: #5d6773;
  --line: #e3e7ec; --accent: #0072b2; --bar: #9cc9e6; --kept: #8ec9f5; --need: #d55e00; --good: #00674b;
  --fair: #8a5a00; --poor: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --card: #161b22; --ink: #e6edf3;
  --muted: #9aa5b1; --line: #2a313a; --accent: #6cb6ff; --bar: #2f6f9f; --kept: #1f5f96; --need: #ff9d5c;
  --good: #4cc9a0; --fair: #e3b341; --poor: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1440px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; }
.muted { color: var(--muted); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px;
  margin-top: 20px; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 36px; margin: 0; }
.facts div { min-width: 70px; }
.facts dt, .label { color: var(--muted); font-size: 12px; }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--accent); }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 0 32px;
  margin: 8px 0 0; font-size: 13px; }
.pairs div { display: flex; justify-content: space-between; gap: 16px;
  border-bottom: 1px solid var(--line); padding: 2px 0; }
.pairs dt { color: var(--muted); }
.pairs dd { margin: 0; overflow-wrap: anywhere; text-align: right; }
img { max-width: 100%; height: auto; display: block; margin: 8px auto 0; }
.controls { display: flex; flex-wrap: wrap; align-items: end; gap: 10px 24px; margin: 10px 0 14px; }
fieldset { border: 0; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: 4px; }
fieldset label { cursor: pointer; }
fieldset input { position: absolute; opacity: 0; }
fieldset span { display: block; padding: 4px 14px; border: 1px solid var(--line); border-radius: 999px; }
fieldset input:checked + span { background: var(--accent); border-color: var(--accent);
  color: var(--card); }
fieldset input:focus-visible + span { outline: 2px solid var(--ink); outline-offset: 1px; }
select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 8px; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; position: relative; }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; text-align: inherit; white-space: nowrap; }
th button small { display: block; font-weight: 400; color: var(--muted); }
th[aria-sort=ascending], th[aria-sort=descending] { box-shadow: inset 0 -2px var(--accent); }
th[aria-sort=ascending] button small::after { content: " \\2191"; color: var(--accent); }
th[aria-sort=descending] button small::after { content: " \\2193"; color: var(--accent); }
td.text, th.text { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background-color: var(--card);
  font-weight: 600; z-index: 1; }
tbody tr:hover td { background-color: color-mix(in srgb, var(--accent) 9%, var(--card)); }
tr.first td { border-top: 1px solid color-mix(in srgb, var(--muted) 45%, var(--line)); }
tr.reference td { background-color: color-mix(in srgb, var(--muted) 8%, var(--card)); }
td small { color: var(--muted); font-size: 11.5px; }
td.score small { display: inline-block; min-width: 3.1em; }
table.one .protocol { display: none; }
td.score, td.size { background-image: linear-gradient(var(--bar), var(--bar));
  background-repeat: no-repeat; background-position: 7px 100%;
  background-size: calc((100% - 14px) * var(--share)) 3px; }
.good { color: var(--good); } .fair { color: var(--fair); } .poor { color: var(--poor); }
.ramp { display: inline-block; vertical-align: middle; width: 110px; height: 12px;
  border-radius: 3px; border: 1px solid var(--line);
  background: linear-gradient(to right, transparent, var(--kept)); }
.needed { text-decoration: underline 3px var(--need); text-underline-offset: 4px;
  text-decoration-skip-ink: none; }
#text { font: 13.5px/2 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px;
  max-height: 460px; overflow-y: auto; }
#text i { font-style: normal; border-radius: 3px; padding: 1px 2px;
  background: color-mix(in srgb, var(--kept) calc(var(--k) * 1%), transparent); }
#text i.gone { color: var(--muted); opacity: 0.62; }
#text i.needed { opacity: 1; }
#strips { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px 12px;
  align-items: center; margin-top: 8px; font-size: 12.5px; }
#strips button { font: inherit; color: inherit; background: none; border: 0; padding: 0 4px;
  text-align: left; cursor: pointer; border-radius: 4px; }
#strips button[aria-pressed=true] { background: var(--accent); color: var(--card); }
#strips canvas { width: 100%; height: 13px; image-rendering: pixelated; border-radius: 2px;
  background: var(--paper); }
#strips canvas.ruler { height: 6px; background: none; }
#strips span { text-align: right; color: var(--muted); font-variant-numeric: tabular-nums; }
h3 { font-size: 14px; margin: 22px 0 0; }
#matrix { width: auto; }
#matrix thead th { writing-mode: vertical-rl; transform: rotate(180deg); padding: 7px 5px; font-weight: 600;
  text-align: left; box-shadow: none; }
#matrix tbody th { text-align: left; position: sticky; left: 0; background-color: var(--card); }
#matrix td.self { background: var(--line); }
a { color: inherit; text-decoration-color: var(--muted); text-underline-offset: 3px; }
nav.controls { position: sticky; top: 0; z-index: 2; margin: 20px 0 0; padding: 10px 0; gap: 8px 28px;
  background: var(--paper); }
.gone-by-filter { display: none !important; }
.plots { display: grid; gap: 8px 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.plots.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); gap: 16px 20px; }
figure { margin: 0; min-width: 0; }
.plot { display: block; width: 100%; max-width: 760px; margin: 0 auto; font-size: 12px; }
.small .plot { font-size: 11px; max-width: 420px; }
.plot text { fill: var(--muted); }
.plot text.title { fill: var(--ink); font-weight: 600; font-size: 13.5px; }
.plot .mid { text-anchor: middle; } .plot .end { text-anchor: end; }
.grid { stroke: var(--line); } .zero { stroke: var(--muted); stroke-width: 0.8; }
.pareto { fill: none; stroke: var(--muted); stroke-opacity: 0.25; stroke-width: 8; stroke-linejoin: round;
  stroke-linecap: round; }
.pareto-sign { display: inline-block; width: 28px; height: 8px; border-radius: 4px; background: var(--muted);
  opacity: 0.3; }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .thin { fill: none; stroke: var(--c); }
.bar { stroke: var(--c); stroke-opacity: 0.45; }
.mark { fill: var(--c); stroke: var(--card); stroke-width: 0.18; }
.hollow { fill: var(--card); stroke: var(--c); stroke-width: 0.35; }
.plain { opacity: 0.3; }
.stressed .series { opacity: 0.12; } .stressed .series.hot { opacity: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 12px 0 0;
  font-size: 13px; justify-content: center; }
.legend li { overflow-wrap: anywhere; }
.sign { width: 30px; height: 14px; vertical-align: -2px; margin-right: 6px; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; background: var(--c);
  margin-right: 7px; }
#csv { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 6px;
  padding: 4px 12px; cursor: pointer; }
.prompt { font: 13px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; margin-top: 8px;
  overflow-wrap: anywhere; border-left: 3px solid var(--line); padding-left: 12px; }
.cut { color: var(--muted); background: var(--paper); border-radius: 4px; padding: 0 6px; }
.question { color: var(--accent); }
.said { display: flex; flex-wrap: wrap; gap: 6px 36px; margin: 0 0 8px; }
.said dt { color: var(--muted); font-size: 12px; } .said dd { margin: 0; overflow-wrap: anywhere; }
summary { overflow-wrap: anywhere; }
td.wrap { white-space: normal; min-width: 300px; }
td.wrap > span { display: inline-block; margin-right: 18px; }
.heat td.score { background: color-mix(in srgb, var(--accent) calc(var(--share) * 100%), var(--card)); }
.heat td.top { color: var(--card); }
@media (prefers-color-scheme: dark) { .heat td.high { color: var(--card); } }
.cards { display: grid; gap: 4px 32px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
.cards h3 { margin-top: 14px; overflow-wrap: anywhere; } .cards p { margin: 0 0 4px; font-size: 13.5px; }
article { scroll-margin-top: 90px; } article:target h3 { color: var(--accent); }
@media (max-width: 700px) { main { padding: 16px 10px 40px; } section { padding: 14px 12px; }
  nav.controls { position: static; } .plot { font-size: 16px; } .plot text.title { font-size: 17px; }
  .small .plot { font-size: 12px; } .small .plot text.title { font-size: 13.5px; }
  .best thead { display: none; } .best tr { display: flex; flex-wrap: wrap; padding: 6px 0; }
  .best tr[hidden] { display: none; } .best td { border: 0; padding: 0 8px 0 0; white-space: normal; }
  .best tr { border-bottom: 1px solid var(--line); } .best td.wrap { flex: 1 1 100%; min-width: 0; }
  #strips { grid-template-columns: minmax(70px, 34%) 1fr max-content; }
  #strips button { overflow-wrap: anywhere; } }
"""

SCRIPT = """
"use strict";
(() => {
  const $ = id => document.getElementById(id);
  const body = $("cells").tBodies[0], rows = [...body.rows];

  const regroup = () => {
    let last = null;
    for (const row of body.rows) {
      if (row.hidden || row.classList.contains("gone-by-filter")) continue;
      row.classList.toggle("first", row.dataset.group !== last);
      last = row.dataset.group;
    }
  };
  const shown = element => {
    const families = document.querySelectorAll("input[name=family]");
    if (!families.length || !element.dataset.families) return true;
    const wanted = element.dataset.families.split(" ");
    return [...families].some(box => box.checked && wanted.includes(box.value));
  };
  const filter = () => {
    const wanted = document.querySelector("input[name=protocol]:checked").value;
    $("cells").classList.toggle("one", wanted !== "");
    for (const element of document.querySelectorAll("[data-protocol]")) {
      element.hidden = wanted !== "" && element.dataset.protocol !== wanted;
    }
    for (const element of document.querySelectorAll("[data-families]")) {
      element.classList.toggle("gone-by-filter", !shown(element));
    }
    regroup();
  };
  for (const input of document.querySelectorAll("input[name=protocol], input[name=family]")) {
    input.addEventListener("change", filter);
  }
  filter();

  $("csv").addEventListener("click", () => {
    const file = new Blob([$("csv").dataset.csv], { type: "text/csv" });
    const link = Object.assign(document.createElement("a"), { download: "kvjax-compare.csv" });
    link.href = URL.createObjectURL(file);
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  for (const item of document.querySelectorAll(".legend [data-method]")) {
    const stress = on => {
      document.body.classList.toggle("stressed", on);
      for (const series of document.querySelectorAll(`.series[data-method="${item.dataset.method}"]`)) {
        series.classList.toggle("hot", on);
      }
    };
    item.addEventListener("pointerenter", () => stress(true));
    item.addEventListener("pointerleave", () => stress(false));
  }

  const value = (row, column) => {
    const raw = row.cells[column].dataset.sort, number = Number(raw);
    return raw === "" ? null : Number.isNaN(number) ? raw : number;
  };
  const compare = (a, b) =>
    typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b;
  const headers = [...$("cells").tHead.rows[0].cells];
  headers.forEach((header, column) => header.firstElementChild.addEventListener("click", () => {
    const start = header.dataset.start;
    const other = start === "ascending" ? "descending" : "ascending";
    const order = header.getAttribute("aria-sort") === start ? other : start;
    for (const each of headers) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    body.append(...rows.slice().sort((first, second) => {
      const a = value(first, column), b = value(second, column);
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * compare(a, b);
    }));
    regroup();
  }));

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const fill = (select, names) => select.replaceChildren(...names.map((name, i) => new Option(name, i)));
  const duels = JSON.parse($("duels").textContent);
  if (duels.length) {
    const { unit, better, scale: text } = $("duel").dataset, scale = Number(text);
    const digits = scale === 1 ? 3 : 0;
    const signed = x => {
      const size = Math.abs(scale * x).toFixed(digits);
      return (Number(size) === 0 ? "" : x < 0 ? "−" : "+") + size;
    };
    const against = (mean, low, high, p, samples, words) => {
      const few = low === null, found = few ? "" : `95% ${signed(low)} to ${signed(high)}, p = ${p}`;
      const none = p === null ? "n too small for an interval" : `all differ alike, p = ${p}`;
      const ends = few ? none : found;
      const title = `${words}: ${signed(mean)} ${unit}, ${ends}; ${samples} samples`;
      const sure = p !== null && p < 0.05;
      const className = sure ? ((mean > 0) === (better === "more") ? "good" : "poor") : "";
      return make("td", { title }, make(sure ? "b" : "span", { className, textContent: signed(mean) }));
    };
    const showDuels = () => {
      const { names, found } = duels[$("duel").value];
      const cells = names.map(() => names.map(() => make("td", { className: "self" })));
      for (const [i, j, mean, low, high, p, samples] of found) {
        const words = (a, b) => `${names[a]} minus ${names[b]}`;
        const turn = x => x === null ? null : -x;
        cells[i][j] = against(mean, low, high, p, samples, words(i, j));
        cells[j][i] = against(-mean, turn(high), turn(low), p, samples, words(j, i));
      }
      const heads = ["", ...names].map(textContent => make("th", { textContent }));
      const body = names.map((name, i) => make("tr", {}, make("th", { textContent: name }), ...cells[i]));
      $("matrix").replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
    };
    fill($("duel"), duels.map(one => one.title));
    $("duel").addEventListener("change", showDuels);
    showDuels();
  }

  if ($("needles")) {
    const maps = JSON.parse($("needles").dataset.maps);
    const heat = ([mean, n]) => {
      const cell = make("td", { className: "score" });
      cell.classList.toggle("high", mean > 0.6);
      cell.classList.toggle("top", mean > 0.85);
      cell.textContent = (100 * mean).toFixed(0);
      cell.title = `${n} sample${n === 1 ? "" : "s"}`;
      cell.style.setProperty("--share", mean);
      return cell;
    };
    const showNeedles = () => {
      $("heat").replaceChildren(...maps[$("needle").value].rows.map(row => {
        const texts = [row.name, row.budget, row.length];
        const heads = texts.map((textContent, i) => make("td", { textContent, className: i ? "" : "text" }));
        const cells = row.cells.map(found => found ? heat(found) : make("td", { textContent: "–" }));
        const line = make("tr", {}, ...heads, ...cells);
        line.dataset.families = row.families;
        return line;
      }));
      filter();
    };
    fill($("needle"), maps.map(one => one.title));
    $("needle").addEventListener("change", showNeedles);
    showNeedles();
  }

  const prompts = JSON.parse($("examples").textContent);
  if (!prompts.length) return;
  const mean = numbers => numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
  const percent = number => number === null ? "–" : number.toFixed(0) + "%";
  const spanKept = (prompt, run) => mean(run.kept.filter((_, i) => prompt.needed[i]));

  const paint = (canvas, length, alpha, colour) => {
    canvas.width = length; canvas.height = 1;
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(colour);
    for (let i = 0; i < length; i++) { context.globalAlpha = alpha(i); context.fillRect(i, 0, 1, 1); }
    return canvas;
  };
  const showText = (prompt, run) => {
    $("text").replaceChildren(...prompt.tokens.flatMap((token, i) => {
      const title = `token ${i}: kept by ${run.kept[i]}% of the (layer, head) pairs`;
      const word = make("i", { textContent: token, title });
      word.style.setProperty("--k", run.kept[i]);
      if (run.kept[i] === 0) word.classList.add("gone");
      if (prompt.needed[i]) word.classList.add("needed");
      return [word, prompt.joiner];
    }));
    const ratio = percent(mean(run.kept)), span = percent(spanKept(prompt, run));
    const grade = run.score >= 1 ? "good" : run.score > 0 ? "fair" : "poor";
    $("verdict").replaceChildren(
      make("b", { textContent: run.name }),
      `: kept ${ratio} of the slots, ${span} of the needed span. Expected `,
      make("b", { textContent: prompt.answer }), ", answered ",
      make("b", { textContent: run.prediction || "nothing", className: grade }),
      ` (score ${(100 * run.score).toFixed(0)}%).`);
  };
  const showStrips = (prompt, chosen) => {
    const length = prompt.tokens.length;
    const ruler = paint(document.createElement("canvas"), length, i => prompt.needed[i], "--need");
    ruler.className = "ruler";
    const heading = make("span", { textContent: "needed span" });
    heading.style.textAlign = "left";
    $("strips").replaceChildren(heading, ruler, make("span", { textContent: "span kept" }));
    prompt.runs.forEach((run, i) => {
      const name = make("button", { type: "button", textContent: run.name });
      name.setAttribute("aria-pressed", i === chosen);
      name.addEventListener("click", () => { $("run").value = i; show(); });
      const strip = paint(document.createElement("canvas"), length, j => run.kept[j] / 100, "--accent");
      $("strips").append(name, strip, make("span", { textContent: percent(spanKept(prompt, run)) }));
    });
  };
  const show = () => {
    const prompt = prompts[$("prompt").value], chosen = Number($("run").value);
    showText(prompt, prompt.runs[chosen]);
    showStrips(prompt, chosen);
  };
  const switchPrompt = () => {
    const previous = $("run").selectedOptions[0]?.textContent;
    const names = prompts[$("prompt").value].runs.map(run => run.name);
    fill($("run"), names);
    $("run").value = Math.max(0, names.indexOf(previous));
    show();
  };
  fill($("prompt"), prompts.map(prompt => prompt.title));
  $("prompt").addEventListener("change", switchPrompt);
  $("run").addEventListener("change", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  switchPrompt();
})();
"""

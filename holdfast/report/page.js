"use strict";
// Curves, sweeps, networks and partitions of runs, drawn from the data in the page: all at once in a report,
// as they come in a live page. Text goes in as text, never as markup. Nothing is fetched but a live page's data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = (() => {
    const template = document.createElement("template");
    template.innerHTML = "<svg></svg>";
    return template.content.firstChild.namespaceURI;
  })();
  const html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => filled(document.createElementNS(NS, tag), attributes, children);

  function filled(element, attributes = {}, children = []) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }

  // --- numbers as people read them, like format.py ----------------------------------------------------------

  const commas = (value, decimals) =>
    value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  const decimals = (value, digits) =>
    commas(value, Math.max(0, Math.min(2, digits - String(Math.trunc(value)).length)));

  function numberText(value, digits = 4) {
    const size = Math.abs(value);
    if (value === 0 || (size >= 1e-3 && size < 1e4)) return String(Number(value.toPrecision(digits)));
    return value.toExponential(digits - 2).replace(/e([+-])(\d)$/, "e$10$2");
  }

  function byteUnit(value) {
    let [size, name] = [1, "B"];
    for (const larger of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
      if (value < size * 1024) break;
      [size, name] = [size * 1024, larger];
    }
    return [size, name];
  }

  function countText(value) {
    for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]])
      if (value >= size) return `${decimals(value / size, 3)} ${name}`;
    return commas(value, 0);
  }

  function secondsText(value) {
    if (value < 59.95) return `${value.toFixed(1)} s`;
    const [minutes, seconds] = [Math.floor(Math.round(value) / 60), Math.round(value) % 60];
    return minutes < 60 ? `${minutes} min ${seconds} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  function valueText(kind, value) {
    if (value == null) return "–";
    if (kind === "accuracy") return `${(100 * value).toFixed(1)} %`;
    if (kind === "bytes") {
      const [size, name] = byteUnit(value);
      return size === 1 ? `${commas(value, 0)} B` : `${decimals(value / size, 4)} ${name}`;
    }
    return { count: countText, seconds: secondsText }[kind]?.(value) ?? numberText(value);
  }

  // What values of a kind are divided by along an axis, and what is said of it.
  function unitOf(kind, largest) {
    if (kind === "accuracy") return [0.01, "%"];
    if (kind === "bytes") return byteUnit(largest);
    if (kind === "seconds") return largest < 120 ? [1, "s"] : largest < 7200 ? [60, "min"] : [3600, "h"];
    return [1, ""];
  }

  // --- rows to curves ---------------------------------------------------------------------------------------

  let jobs = new Map(); // number of the job -> round -> row
  let cache = new Map();

  function takeRows(rows) {
    for (const [job, ...values] of rows) {
      if (!jobs.has(job)) jobs.set(job, new Map());
      jobs.get(job).set(values[0], values);
    }
    cache = new Map();
  }

  // A metric against an axis, over the rounds that all seeds of a curve reached.
  function series(curve, metric, axis) {
    const key = [curve.jobs, metric, axis].join();
    if (cache.has(key)) return cache.get(key);
    const [x, y] = [data.columns.indexOf(axis), data.columns.indexOf(metric)];
    const seeds = curve.jobs.map((job) => jobs.get(job) ?? new Map());
    const line = { x: [], mean: [], low: [], high: [], seeds: seeds.length };
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const rounds = seeds.length ? [...seeds[0].keys()].sort((a, b) => a - b) : [];
    for (const round of rounds) {
      if (!seeds.every((seed) => seed.has(round))) continue;
      const [at, values] = [x, y].map((column) =>
        seeds.map((seed) => seed.get(round)[column]).filter((value) => value != null));
      if (values.length < seeds.length || at.length < seeds.length) continue; // undefined for a seed
      line.x.push(mean(at));
      line.mean.push(mean(values));
      line.low.push(Math.min(...values));
      line.high.push(Math.max(...values));
    }
    cache.set(key, line);
    return line;
  }

  // --- scales and ticks -------------------------------------------------------------------------------------

  function niceStep(span, count) {
    const rough = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  }

  function linear(low, high, from, to, count, whole) {
    const step = Math.max(niceStep(high - low, count), whole ? 1 : 0);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      const value = i * step;
      const text = Math.abs(value) >= 1e6 || (step < 1e-4 && value) ? numberText(value) : commas(value, places);
      ticks.push({ value, text: text.replace(/^-(0(\.0+)?)$/, "$1") });
    }
    return { at: (value) => from + ((value - low) / (high - low)) * (to - from), ticks };
  }

  function logarithmic(low, high, from, to, count) {
    const [bottom, top] = [Math.log10(low), Math.log10(high)];
    const every = Math.max(1, Math.ceil((top - bottom) / count));
    const ticks = [];
    for (let power = Math.floor(bottom); power <= top; power++) {
      for (const factor of top - bottom < 2 ? [1, 2, 5] : [1]) {
        const value = factor * 10 ** power;
        if (value < low || value > high || (factor === 1 && power % every)) continue;
        ticks.push({ value, text: numberText(value, 3).replace(/^(\d)\.0e/, "$1e") });
      }
    }
    return { at: (value) => from + ((Math.log10(value) - bottom) / (top - bottom)) * (to - from), ticks };
  }

  // The scale of the y axis: that of the curves that did not diverge, as in figures.py.
  function yRange(lines, decades, scale) {
    const steady = lines.some((line) => !line.diverged) ? lines.filter((line) => !line.diverged) : lines;
    let [low, high, settled, negative, late] = [Infinity, -Infinity, Infinity, false, false];
    for (const line of steady)
      line.x.forEach((x, i) => {
        [low, high] = [Math.min(low, line.low[i]), Math.max(high, line.high[i])];
        if (line.low[i] < 0) negative = true;
        if (x > 0 && line.low[i] === 0) late = true;
        if (x > 0 && line.low[i] > 0) settled = Math.min(settled, line.low[i]);
      });
    if (low > high) return { low: 0, high: 1, log: false, note: "" };
    const floor = settled < Infinity ? 1e-3 * settled : 0; // all nodes start alike, but for rounding errors
    let [least, hidden] = [Infinity, low <= floor];
    for (const line of steady)
      for (const value of line.low) if (value > floor) least = Math.min(least, value);
    const log = high > 0 && least < Infinity &&
      (scale === "log" || (scale === "auto" && decades && !negative && high > 10 * least));
    if (log) {
      const margin = (high / least) ** 0.05 || 1.1;
      const note = hidden ? (late || negative ? "zeros not shown" : "start not shown") : "";
      return { low: least / Math.max(margin, 1.02), high: high * Math.max(margin, 1.02), log, note };
    }
    const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
    return { low: low - margin, high: high + margin, log, note: "" };
  }

  // --- one chart --------------------------------------------------------------------------------------------

  const state = { axis: "round", scale: "auto", view: "metrics", metric: "", hidden: new Set(), focus: null };
  const drawn = new Set(); // all charts on the page
  let printing = false;
  // Curves that share a colour go from pale (shade 0) over the colour itself to dark (shade 1).
  const colourOf = ({ colour, shade }) => {
    const [part, other] = shade < 0.5 ? [50 + 100 * shade, "paper"] : [140 - 80 * shade, "ink"];
    return `color-mix(in oklab, var(--c${colour}) ${Math.round(Math.min(100, part))}%, var(--${other}))`;
  };
  const widthOf = (line) => Math.max(1.8, line.width) * (printing ? 0.7 : 1);
  const dashOf = (line) => (line.dash ?? []).map((length) => length * widthOf(line)).join(" ");
  const sample = (line) =>
    svg("svg", { class: "sample", viewBox: "0 0 26 8", "aria-hidden": "true" },
      svg("line", { x1: 1, x2: 25, y1: 4, y2: 4, style: `stroke:${colourOf(line)}`, "stroke-width": widthOf(line),
        "stroke-dasharray": dashOf(line) }));

  // spec(): {title, caption, x: {title, kind, log}, y: {kind, decades, scale}, lines, marks}; called at every drawing.
  function chart(spec) {
    const picture = svg("svg", { class: "chart", tabindex: 0, role: "img" });
    const [heading, caption] = [html("h3"), html("figcaption")];
    const tip = html("div", { class: "tip", role: "status", hidden: true });
    const wide = html("button", { class: "wide-button", type: "button", title: "Wider or narrower",
      "aria-label": "Wider or narrower", onclick: () => {
        figure.classList.toggle("full");
        self.draw();
      } }, "⤢");
    const figure = html("figure", { class: "live-figure" }, wide, heading, picture, caption, tip);
    const self = { figure, draw, cross };
    let [frame, now, at] = [null, null, null];

    function draw() {
      now = spec();
      const width = printing ? 340 : Math.max(240, Math.round(picture.clientWidth || 520));
      const height = printing ? 172 : Math.round(Math.max(190, Math.min(0.56 * width, 400)));
      const lines = now.lines.filter((line) => line.x.length);
      heading.textContent = now.title;
      caption.textContent = now.caption ?? "";
      const shown = lines.filter((line) => !line.backdrop);
      const range = yRange(lines, now.y.decades, now.y.scale);
      const [yUnit, yName] = unitOf(now.y.kind, range.high);
      const xs = lines.flatMap((line) => [line.x[0], line.x.at(-1), ...(line.lost ?? [])]).filter((x) => x != null);
      let [left, right] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
      if (now.x.log) [left, right] = [left / (right / left) ** 0.06, right * (right / left) ** 0.06];
      if (left === right) right = left + 1;
      const [xUnit, xName] = unitOf(now.x.kind, right);
      const ySide = (from, to) => range.log
        ? logarithmic(range.low / yUnit, range.high / yUnit, from, to, height / 38)
        : linear(range.low / yUnit, range.high / yUnit, from, to, height / 38, false);
      const widest = Math.max(2, ...ySide(1, 0).ticks.map((tick) => tick.text.length));
      frame = { left: 10 + 6.4 * widest, right: width - 14, top: 8, bottom: height - 38, width, height };
      const y = ySide(frame.bottom, frame.top);
      const x = (now.x.log ? logarithmic : linear)(left / xUnit, right / xUnit, frame.left, frame.right,
        (frame.right - frame.left) / 80, now.x.kind === "count");
      Object.assign(frame, { x: (value) => x.at(value / xUnit), y: (value) => y.at(value / yUnit), log: range.log });
      const notes = [now.unit, yName, range.log && "log scale", range.note].filter(Boolean).join(", ").replace(", %", " (%)");
      if (notes) heading.append(html("span", { class: "unit" }, ` ${notes}`));
      const grid = svg("g", { class: "grid" });
      for (const tick of y.ticks) {
        const place = y.at(tick.value);
        grid.append(svg("line", { x1: frame.left, x2: frame.right, y1: place, y2: place }),
          svg("text", { x: frame.left - 7, y: place, dy: "0.35em", "text-anchor": "end" }, tick.text));
      }
      const xTicks = now.x.log && now.x.values ? now.x.values.map((value) => ({ value, text: numberText(value) })) : x.ticks;
      for (const tick of xTicks)
        grid.append(svg("line", { class: "tick", x1: x.at(tick.value), x2: x.at(tick.value), y1: frame.bottom,
          y2: frame.bottom + 4 }),
          svg("text", { x: x.at(tick.value), y: frame.bottom + 17, "text-anchor": "middle" }, tick.text));
      grid.append(svg("text", { class: "axis", x: frame.right, y: height - 5, "text-anchor": "end" },
        now.x.title + (xName ? ` (${xName})` : "")));
      const window = [frame.left, frame.top - 4, frame.right - frame.left + 6, frame.bottom - frame.top + 8];
      const inside = svg("svg", { x: window[0], y: window[1], width: window[2], height: window[3],
        viewBox: window.join(" ") }); // what lies outside is not shown
      const ordered = [...lines].sort((a, b) => (b.backdrop ?? 0) - (a.backdrop ?? 0));
      for (const line of ordered) inside.append(curveOf(line));
      picture.replaceChildren(grid, inside, svg("g", { class: "cross" }));
      picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
      picture.setAttribute("aria-label", `${now.title} against ${now.x.title}. ${shown.map((line) =>
        `${line.label}: ${valueText(now.y.kind, line.mean.at(-1))} at the end`).join("; ")}. Arrow keys read values.`);
      if (at !== null && !tip.hidden) point(at);
    }

    function curveOf(line) {
      const group = svg("g", { class: `curve${line.backdrop ? " backdrop" : ""}`, "data-label": line.label,
        style: `--line:${colourOf(line)}` });
      if (line.seeds > 1 && !line.backdrop)
        group.append(svg("path", { class: "band", d: bandOf(line) }));
      group.append(svg("path", { class: "line", d: pathOf(line), "stroke-width": line.backdrop ? 1 : widthOf(line),
        "stroke-dasharray": line.backdrop ? "" : dashOf(line) }));
      if (line.backdrop) return group;
      if (line.std) line.x.forEach((value, i) => {
        const [low, high] = [line.mean[i] - line.std[i], line.mean[i] + line.std[i]].map((v) => frame.y(v));
        if (line.std[i] && Number.isFinite(low)) group.append(svg("path", { class: "line",
          "stroke-width": 1.2, d: `M${frame.x(value)},${low}V${high}` }));
      });
      if (line.x.length <= 12) line.x.forEach((value, i) => {
        const y = frame.y(line.mean[i]);
        if (Number.isFinite(y)) group.append(svg("circle", { cx: frame.x(value), cy: y,
          r: line.best === value ? 6 : 2.5, class: line.best === value ? "best-dot" : "dot" }));
      });
      for (const value of line.lost ?? [])
        group.append(svg("path", { class: "line lost", "stroke-width": 2,
          d: `M${frame.x(value) - 4},${frame.bottom - 10}l8,8m0,-8l-8,8` }));
      return group;
    }

    // Thousands of points are thinned to what pixels show: the first, lowest, highest and last of every column.
    function thinned(line, values) {
      const points = line.x.map((x, i) => [frame.x(x), frame.y(values[i])]);
      if (points.length < 3 * frame.width) return points;
      const kept = [];
      let column = [];
      const close = () => {
        const ys = column.map((index) => points[index][1]);
        const extreme = [column[ys.indexOf(Math.min(...ys))], column[ys.indexOf(Math.max(...ys))]];
        kept.push(...[...new Set([column[0], ...extreme, column.at(-1)])].filter((i) => i != null).sort((a, b) => a - b));
      };
      points.forEach(([x], i) => {
        if (column.length && Math.floor(x) !== Math.floor(points[column[0]][0])) {
          close();
          column = [];
        }
        column.push(i);
      });
      close();
      return kept.map((i) => points[i]);
    }

    const joined = (points) => {
      let [path, pen] = ["", "M"];
      for (const [x, y] of points) {
        if (Number.isFinite(y)) path += `${pen}${x.toFixed(1)},${y.toFixed(1)}`;
        pen = Number.isFinite(y) ? "L" : "M"; // a logarithmic axis cannot show zero
      }
      return path;
    };
    const pathOf = (line) => joined(thinned(line, line.mean));
    const bandOf = (line) => {
      const finite = (points) => points.filter(([, y]) => Number.isFinite(y));
      const edge = [...finite(thinned(line, line.high)), ...finite(thinned(line, line.low)).reverse()];
      return edge.length ? `${joined(edge)}Z` : "";
    };

    // The values nearest to x, in the picture and in words.
    function point(x) {
      at = x;
      for (const other of drawn) if (other !== self && now.synced) other.cross(x);
      const rows = [];
      for (const line of now.lines) {
        if (line.backdrop || !line.x.length) continue;
        const i = nearest(line.x, x);
        const apart = Math.abs(frame.x(line.x[i]) - frame.x(x));
        if (apart > 12 && (x > line.x.at(-1) || x < line.x[0])) continue;
        rows.push({ line, i });
      }
      rows.sort((a, b) => b.line.mean[b.i] - a.line.mean[a.i]);
      const most = 14;
      const cells = rows.slice(0, most).map(({ line, i }) => html("tr",
        { class: state.focus === line.label ? "focused" : null },
        html("td", {}, sample(line)), html("th", { scope: "row" }, line.label),
        html("td", {}, valueText(now.y.kind, line.mean[i])),
        html("td", { class: "extent" }, line.std?.[i] ? `± ${valueText(now.y.kind, line.std[i])}`
          : line.seeds > 1 ? `${valueText(now.y.kind, line.low[i])} to ${valueText(now.y.kind, line.high[i])}` : "")));
      if (rows.length > most) cells.push(html("tr", {}, html("td"), html("th", {}, `and ${rows.length - most} more`)));
      const where = `${now.x.title}: ${valueText(now.x.kind, x)}`;
      tip.replaceChildren(html("p", {}, where), html("table", {}, html("tbody", {}, ...cells)));
      tip.hidden = rows.length === 0;
      cross(x, rows);
      const box = picture.getBoundingClientRect();
      const host = figure.getBoundingClientRect();
      const place = box.left - host.left + (frame.x(x) / frame.width) * box.width;
      const room = host.width - tip.offsetWidth - 4;
      const beside = place + 16 > room ? place - tip.offsetWidth - 16 : place + 16;
      tip.style.left = `${Math.max(4, Math.min(beside, room))}px`;
      tip.style.top = `${box.top - host.top + 6}px`;
    }

    function cross(x, rows = []) {
      const layer = picture.querySelector(".cross");
      layer?.replaceChildren();
      if (x === null || !frame) return;
      const place = frame.x(x);
      if (!(place >= frame.left - 1 && place <= frame.right + 1)) return;
      layer.append(svg("line", { x1: place, x2: place, y1: frame.top, y2: frame.bottom }));
      for (const { line, i } of rows) {
        const y = frame.y(line.mean[i]);
        if (y >= frame.top - 4 && y <= frame.bottom + 4)
          layer.append(svg("circle", { cx: frame.x(line.x[i]), cy: y, r: 3.5, style: `--line:${colourOf(line)}` }));
      }
    }

    function leave() {
      tip.hidden = true;
      at = null;
      for (const other of drawn) other.cross(null);
    }

    const stops = () => { // every x with a value; kept until the next drawing
      const all = () => now.lines.filter((line) => !line.backdrop).flatMap((line) => line.x);
      frame.stops ??= [...new Set(all())].sort((a, b) => a - b);
      return frame.stops;
    };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * frame.width;
      const all = stops();
      if (!all.length) return;
      point(all[nearest(all.map((x) => frame.x(x)), place)]);
    });
    picture.addEventListener("pointerleave", leave);
    picture.addEventListener("blur", leave);
    picture.addEventListener("keydown", (event) => {
      const all = stops();
      const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") return leave();
      if (!(event.key in moves) || !all.length) return;
      event.preventDefault();
      const from = at === null ? (moves[event.key] > 0 ? -1 : all.length) : nearest(all, at);
      point(all[Math.max(0, Math.min(all.length - 1, from + moves[event.key]))]);
    });
    drawn.add(self);
    return self;
  }

  // The place of the value nearest to x; values rise.
  function nearest(values, x) {
    let [low, high] = [0, values.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] <= x) low = middle;
      else high = middle;
    }
    return Math.abs(values[high] - x) < Math.abs(values[low] - x) ? high : low;
  }

  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

  // --- all curves: controls, legend, figures ------------------------------------------------------------------

  function focusOn(label) {
    state.focus = label;
    document.querySelectorAll("[data-label]").forEach((element) => {
      element.classList.toggle("dimmed", label !== null && element.dataset.label !== label);
      element.classList.toggle("raised", label !== null && element.dataset.label === label);
    });
  }

  const pointed = (label) => ({ onpointerenter: () => focusOn(label), onpointerleave: () => focusOn(null),
    onfocus: () => focusOn(label), onblur: () => focusOn(null) });

  function curvesSection(host) {
    const controls = html("form", { class: "controls", onsubmit: (event) => event.preventDefault() });
    const legend = html("div", { class: "legend", role: "group", "aria-label": "Curves" });
    const figures = html("div", { class: "figures" });
    host.append(controls, legend, figures);
    let charts = [];
    let before = "";

    const choice = (name, title, options) => html("fieldset", {}, html("legend", {}, title),
      ...options.map(([value, text]) => html("label", {}, html("input", { type: "radio", name, value,
        checked: state[name] === value, onchange: () => {
          state[name] = value;
          arrange();
        } }), html("span", {}, text))));

    const words = { round: "rounds", payload_bytes: "bytes", gradient_evaluations: "gradients", seconds: "time" };

    function lineOf(curve, metric) {
      return { ...series(curve, metric, state.axis), ...curve, jobs: undefined };
    }

    function entry(curve) {
      const on = !state.hidden.has(curve.label);
      return html("button", { type: "button", class: "entry", "aria-pressed": String(on), "data-label": curve.label,
        title: "Click: show or hide. Shift and click: show this curve alone.", ...pointed(curve.label),
        onclick: (event) => {
          const alone = data.curves.every((other) => (other.label === curve.label) !== state.hidden.has(other.label));
          if (event.shiftKey) state.hidden = new Set(alone ? [] : data.curves.map((other) => other.label)
            .filter((label) => label !== curve.label));
          else if (!state.hidden.delete(curve.label)) state.hidden.add(curve.label);
          arrange();
        } }, sample(curve), html("span", {}, curve.label), ...(curve.note ? [html("small", {}, curve.note)] : []));
    }

    function arrange() {
      const methods = [...new Set(data.curves.map((curve) => curve.method))];
      const metric = (name) => data.metrics.find((one) => one.name === name) ?? data.metrics[0];
      const focused = document.activeElement?.closest?.(".legend .entry")?.dataset.label;
      const signature = JSON.stringify([data.metrics, data.axes, data.curves, state.view, state.metric,
        [...state.hidden]]);
      const now = JSON.stringify([data.metrics.length, methods, state.view, state.metric]);
      if (signature !== legend.dataset.signature) {
        legend.dataset.signature = signature;
        const groups = data.curves.length > 8 ? methods.map((method) => data.curves.filter((c) => c.method === method))
          : [data.curves];
        legend.replaceChildren(...groups.map((group) => html("div", {}, ...group.map(entry))));
        if (state.hidden.size) legend.append(html("button", { type: "button", class: "all", onclick: () => {
          state.hidden.clear();
          arrange();
        } }, "Show all"));
        if (focused) [...legend.querySelectorAll(".entry")].find((e) => e.dataset.label === focused)?.focus();
      }
      if (now !== before) {
        before = now;
        charts.forEach((one) => drawn.delete(one));
        const selected = metric(state.metric);
        const x = () => ({ ...data.axes.find((axis) => axis.name === state.axis), log: false });
        const visible = () => data.curves.filter((curve) => !state.hidden.has(curve.label));
        charts = state.view === "metrics"
          ? data.metrics.map((one) => chart(() => ({ title: capital(one.title), caption: one.reading, x: x(), synced: true,
            y: { ...one, scale: state.scale }, lines: visible().map((curve) => lineOf(curve, one.name)) })))
          : methods.map((method) => chart(() => ({ title: method, unit: selected.title, x: x(), synced: true,
            y: { ...selected, scale: state.scale }, lines: visible().map((curve) =>
              ({ ...lineOf(curve, selected.name), backdrop: curve.method !== method })) })));
        figures.replaceChildren(...charts.map((one) => one.figure));
        figures.classList.toggle("small", state.view === "methods");
        const views = methods.length > 1 ? [choice("view", "Figures", [["metrics", "by metric"], ["methods", "by method"]])] : [];
        const select = html("select", { name: "metric", onchange: (event) => {
          state.metric = event.target.value;
          arrange();
        } }, ...data.metrics.map((one) => html("option", { value: one.name, selected: one === selected }, one.title)));
        const which = state.view === "methods" ? [html("label", { class: "which" }, html("span", {}, "Metric"), select)] : [];
        const active = document.activeElement?.name;
        controls.replaceChildren(
          choice("axis", "Against", data.axes.map((axis) => [axis.name, words[axis.name] ?? axis.title])),
          choice("scale", "Scale", [["auto", "auto"], ["linear", "linear"], ["log", "log"]]), ...views, ...which);
        if (active) (controls.querySelector(`[name="${active}"]:checked`) ?? controls.querySelector(`select[name="${active}"]`))?.focus();
      }
      charts.forEach((one) => one.draw());
      focusOn(state.focus);
    }
    return arrange;
  }

  // --- sweeps, networks, partitions ---------------------------------------------------------------------------

  function sweepSection(host, sweep) {
    const lines = sweep.lines.map((line) => ({ ...line, low: line.mean.map((m, k) => m - line.std[k]),
      high: line.mean.map((m, k) => m + line.std[k]), seeds: 1 }));
    const values = [...new Set(lines.flatMap((line) => [...line.x, ...line.lost]))].sort((a, b) => a - b);
    const shown = new Set(lines.map((line) => line.label));
    const one = chart(() => ({ title: capital(sweep.title), caption: "A ring marks the best value "
      + "of each line, a cross one that diverged or failed; bars are standard deviations over seeds.",
      x: { title: sweep.parameter, kind: "number", log: values.at(-1) > 5 * values[0], values },
      y: { ...sweep, scale: "auto" }, lines: lines.filter((line) => shown.has(line.label)) }));
    const entries = lines.map((line) => html("button", { type: "button", class: "entry", "aria-pressed": "true",
      "data-label": line.label, ...pointed(line.label), onclick: (event) => {
        if (!shown.delete(line.label)) shown.add(line.label);
        event.currentTarget.setAttribute("aria-pressed", String(shown.has(line.label)));
        one.draw();
      } }, sample(line), html("span", {}, line.label), html("small", { class: line.edge ? "flag" : null },
      line.best === null ? "nothing converged" : `best ${numberText(line.best)}${line.edge ? ", at the edge" : ""}`)));
    host.prepend(html("div", { class: "legend" }, html("div", {}, ...entries)), html("div", { class: "figures" }, one.figure));
    one.draw();
  }

  const mixed = (share) => `color-mix(in oklab, var(--ramp-high) ${Math.round(100 * share)}%, var(--ramp-low))`;

  // What hovering and arrow keys say of one of many places; words(i) gives lines of text.
  function reader(picture, figure, find, count, words, mark) {
    const tip = html("div", { class: "tip", role: "status", hidden: true });
    figure.append(tip);
    let at = -1;
    const show = (i, event) => {
      at = i;
      mark(i);
      tip.hidden = i < 0;
      if (i < 0) return;
      tip.replaceChildren(...words(i).map((line) => html("p", {}, line)));
      const host = figure.getBoundingClientRect();
      const x = event ? event.clientX - host.left : host.width / 2;
      tip.style.left = `${Math.max(4, Math.min(x + 14, host.width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${event ? Math.max(4, event.clientY - host.top - tip.offsetHeight - 10) : 8}px`;
    };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const view = picture.viewBox.baseVal;
      show(find((event.clientX - box.left) * view.width / box.width, (event.clientY - box.top) * view.height / box.height), event);
    });
    picture.addEventListener("pointerleave", () => show(-1));
    picture.addEventListener("blur", () => show(-1));
    picture.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") return show(-1);
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(Math.max(0, Math.min(count - 1, at + moves[event.key])));
    });
  }

  const brief = (name, most = 14) => name.length > most ? `${name.slice(0, most - 1)}…` : name;
  const called = (name) => /^\d+$/.test(name) ? `node ${name}` : name;

  function networkFigure(setting, order) {
    const [n, size] = [setting.names.length, 400];
    const scattered = setting.places.length === 0; // too many for a drawing: a wall of squares, node after node
    const columns = Math.ceil(Math.sqrt(n));
    const spread = scattered ? 0 : Math.max(...setting.places.flat().map(Math.abs));
    const crowd = Math.sqrt(10 / Math.max(n, 10));
    const beside = setting.names.some((name) => name.length > 4); // names that fit no circle stand below it
    const radius = scattered ? (size - 20) / columns / 2 : 19 * crowd;
    const place = (i) => scattered
      ? [10 + (2 * (i % columns) + 1) * radius, 10 + (2 * Math.floor(i / columns) + 1) * radius]
      : setting.places[i].map((v, k) => size / 2 + (k ? -1 : 1) * (v / spread) * (size / 2 - radius - (beside ? 28 : 6)));
    const places = setting.names.map((_, i) => place(i));
    const links = svg("g", { class: "links" });
    const heaviest = Math.max(...setting.links.map(([, , w]) => w), 1e-12);
    const opacity = Math.min(0.8, 6 / Math.sqrt(Math.max(1, setting.server ? n : setting.links.length)));
    const link = (from, to, weight) => svg("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1],
      "stroke-width": 0.6 + 2 * crowd * weight, opacity });
    if (setting.server && !scattered) links.append(...places.map((at) => link([size / 2, size / 2], at, 0.5)));
    links.append(...setting.links.map(([i, j, w]) => link(places[i], places[j], w / heaviest)));
    const dots = places.map(([x, y]) => scattered
      ? svg("rect", { x: x - radius + 0.5, y: y - radius + 0.5, width: 2 * radius - 1, height: 2 * radius - 1 })
      : svg("circle", { cx: x, cy: y, r: radius }));
    const labels = n <= 60 ? places.map(([x, y], i) => svg("text", { x, y: beside ? y + radius + 12 : y,
      dy: beside ? 0 : "0.35em", "text-anchor": "middle", style: `font-size:${(beside ? 11 : 13) * crowd ** 0.65}px;${beside ? "stroke:var(--paper);stroke-width:3;paint-order:stroke" : ""}` },
    brief(setting.names[i]))) : [];
    const hub = setting.server && !scattered ? [svg("rect", { class: "hub", x: size / 2 - 30, y: size / 2 - 15, width: 60,
      height: 30, rx: 5 }), svg("text", { x: size / 2, y: size / 2, dy: "0.35em", "text-anchor": "middle" }, "server")] : [];
    const picture = svg("svg", { class: "network", viewBox: `0 0 ${size} ${size}`, tabindex: 0, role: "img",
      "aria-label": `Network of ${n} nodes. Arrow keys read them.` }, links, svg("g", { class: "nodes" }, ...dots), ...labels, ...hub);
    const select = html("select", { "aria-label": "Colour of the nodes", onchange: paint });
    const ramp = html("div", { class: "ramp" });
    const words = setting.server ? "All nodes talk to the server only."
      : scattered || setting.links.length < setting.link_count
        ? `${countText(n)} nodes and ${countText(setting.link_count)} links: too many links to draw.`
        : "Nodes and the links between them; the thicker, the larger the mixing weight.";
    const figure = html("figure", { class: "live-figure" }, html("h3", {}, "Network"), picture,
      html("div", { class: "colouring" }, html("label", {}, html("span", {}, "Colour"), select), ramp),
      html("figcaption", {}, words));
    let chosen = null;
    const options = () => [
      ...(setting.samples ? [{ title: "samples", kind: "count", values: setting.samples }] : []),
      ...(data.node_figures ?? []).filter((one) => one.record === order),
    ];

    function paint() {
      const all = options();
      if (!all.length) return figure.querySelector(".colouring").remove();
      const before = select.value || (all[1] ?? all[0]).title;
      if (select.options.length !== all.length)
        select.replaceChildren(...all.map((one) => html("option", { value: one.title, selected: one.title === before }, one.title)));
      chosen = all.find((one) => one.title === select.value) ?? all[0];
      const known = chosen.values.filter((value) => value != null);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      dots.forEach((dot, i) => {
        const value = chosen.values[i];
        const share = value == null ? null : high > low ? (value - low) / (high - low) : 1;
        dot.setAttribute("style", share === null ? "fill:var(--grid)" : `fill:${mixed(share)}`);
        labels[i]?.setAttribute("class", beside || share === null || share < 0.45 ? "on-light" : "on-dark");
      });
      ramp.replaceChildren(html("span", {}, valueText(chosen.kind, low)), html("i"), html("span", {}, valueText(chosen.kind, high)));
    }

    reader(picture, figure, (x, y) => {
      const apart = places.map((at) => Math.hypot(at[0] - x, at[1] - y));
      const best = apart.indexOf(Math.min(...apart));
      return apart[best] < Math.max(12, 1.5 * radius) ? best : -1;
    }, n, (i) => [called(setting.names[i]), ...options().map((one) => `${one.title}: ${valueText(one.kind, one.values[i])}`)],
    (i) => dots.forEach((dot, k) => dot.classList.toggle("marked", k === i)));
    paint();
    return { figure, paint };
  }

  function partitionFigure(setting) {
    const [nodes, classes] = [setting.counts.length, setting.classes.length];
    const top = setting.counts.reduce((most, row) => Math.max(most, ...row), 1);
    const most = classes <= 10 ? 28 : 14; // letters of a name, where few columns leave room for it
    const left = nodes <= 40 ? 14 + 6.4 * Math.max(...setting.names.map((name) => brief(called(name), most).length)) : 34;
    const width = 560;
    const cell = [(width - left - 6) / classes, Math.max(nodes > 200 ? 0.4 : 2, Math.min(31, 460 / nodes))];
    const slanted = Math.max(...setting.classes.map((name) => name.length)) > Math.max(3, cell[0] / 7);
    const [above, height] = [slanted ? 70 : 22, (slanted ? 70 : 22) + cell[1] * nodes + 6];
    const picture = svg("svg", { class: "partition", viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img",
      "aria-label": `Samples of ${classes} classes at ${nodes} nodes. Arrow keys read the nodes.` });
    const share = (count) => Math.sqrt(count / top); // so that a few samples differ from none
    if (nodes * classes > 3000) { // as one picture
      const canvas = html("canvas", { width: classes, height: nodes });
      const pen = canvas.getContext("2d");
      setting.counts.forEach((row, i) => row.forEach((count, c) => {
        pen.fillStyle = `rgba(0, 114, 178, ${count ? 0.08 + 0.92 * share(count) : 0})`;
        pen.fillRect(c, i, 1, 1);
      }));
      picture.append(svg("image", { x: left, y: above, width: width - left - 6, height: cell[1] * nodes,
        preserveAspectRatio: "none", href: canvas.toDataURL() }));
    } else setting.counts.forEach((row, i) => row.forEach((count, c) => {
      if (!count) return;
      const [x, y] = [left + c * cell[0], above + i * cell[1]];
      picture.append(svg("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(0.5, cell[0] - 1), height: Math.max(0.5, cell[1] - 1),
        rx: Math.min(2, cell[1] / 5), style: `fill:${mixed(share(count))}` }));
      if (cell[1] >= 12 && cell[0] >= 22) picture.append(svg("text", { class: share(count) < 0.45 ? "on-light" : "on-dark",
        x: x + cell[0] / 2, y: y + cell[1] / 2, dy: "0.35em", "text-anchor": "middle" }, String(count)));
    }));
    const everyClass = Math.ceil(12 / cell[0]);
    setting.classes.forEach((name, c) => {
      const x = left + (c + 0.5) * cell[0];
      if (c % everyClass === 0) picture.append(svg("text", slanted ? { x, y: above - 6, transform: `rotate(-35 ${x} ${above - 6})` }
        : { x, y: above - 8, "text-anchor": "middle" }, brief(name)));
    });
    const everyNode = Math.ceil(12 / cell[1]);
    setting.names.forEach((name, i) => {
      if (i % everyNode === 0) picture.append(svg("text", { x: left - 8, y: above + (i + 0.5) * cell[1], dy: "0.35em",
        "text-anchor": "end" }, nodes <= 40 ? brief(called(name), most) : name));
    });
    const mark = svg("rect", { class: "mark", x: left, width: width - left - 6, height: cell[1], visibility: "hidden" });
    picture.append(mark);
    const figure = html("figure", { class: "live-figure" }, html("h3", {}, "Who holds what"), picture,
      html("figcaption", {}, "How many samples of each class every node owns; an empty cell is none."));
    reader(picture, figure, (x, y) => {
      const i = Math.floor((y - above) / cell[1]);
      return i >= 0 && i < nodes ? i : -1;
    }, nodes, (i) => {
      const owned = setting.counts[i].map((count, c) => [count, setting.classes[c]]).filter(([count]) => count)
        .sort((a, b) => b[0] - a[0]);
      return [`${called(setting.names[i])}: ${countText(setting.samples[i])} samples`, owned.slice(0, 8).map(([count, name]) =>
        `${name}: ${countText(count)}`).join(", ") + (owned.length > 8 ? " …" : "")];
    }, (i) => {
      mark.setAttribute("y", above + Math.max(0, i) * cell[1]);
      mark.setAttribute("visibility", i < 0 ? "hidden" : "visible");
    });
    return figure;
  }

  // --- a run under way ------------------------------------------------------------------------------------------

  const byId = (id) => document.getElementById(id);

  function showParts(parts) {
    for (const [id, text] of Object.entries(parts)) { // markup that the server has escaped
      const host = byId(id);
      if (host && host.dataset.text !== text) {
        host.innerHTML = text;
        host.dataset.text = text;
      }
    }
    focusOn(state.focus);
  }

  function showProgress(progress) {
    const host = byId("progress");
    const share = progress.rounds ? progress.done / progress.rounds : 0;
    host.dataset.status = progress.status;
    const said = { running: "running", complete: "complete", interrupted: "interrupted" }[progress.status] ?? progress.status;
    const bar = html("progress", { max: 1, value: share, "aria-label": "Rounds done" });
    host.replaceChildren(html("strong", { class: "state" }, said), bar,
      html("span", { id: "round" }, progress.text), html("span", { class: "age" }, progress.status === "running" && progress.age > 5
        ? `last news ${secondsText(progress.age)} ago` : ""));
    document.title = `${Math.floor(100 * share)} % ${progress.title}`;
  }

  function showLog(entries) {
    const host = byId("log");
    const low = host.scrollTop + host.clientHeight > host.scrollHeight - 8;
    if (entries.length === Number(host.dataset.count)) return;
    host.dataset.count = entries.length;
    if (!entries.length) entries = [["", "info", "Nothing has happened yet."]];
    host.replaceChildren(...entries.map(([time, level, text]) => html("li", { class: level },
      html("time", {}, time), html("span", {}, text))));
    if (low) host.scrollTop = host.scrollHeight;
  }

  async function follow(arrange, networks) {
    let since = data.since;
    for (;;) {
      const began = performance.now();
      let quiet = document.hidden;
      try {
        const answer = await fetch(`data?since=${since}`);
        byId("lost").hidden = answer.ok;
        if (answer.ok) {
          const news = await answer.json();
          if (news.reset) jobs = new Map();
          Object.assign(data, news.about);
          takeRows(news.rows);
          showParts(news.parts);
          showProgress(news.progress);
          if (news.log) showLog(news.log);
          if (news.reset || news.since !== since) {
            arrange();
            networks.forEach((one) => one.paint());
          }
          since = news.since;
          quiet ||= news.progress.status !== "running";
        }
      } catch (error) {
        if (!(error instanceof TypeError)) throw error; // fetch says so when nobody answers
        byId("lost").hidden = false;
      }
      const pause = Math.max(quiet ? 4000 : 1000, 10 * (performance.now() - began));
      await new Promise((done) => setTimeout(done, pause));
    }
  }

  // --- the page -------------------------------------------------------------------------------------------------

  function themeButton() {
    const root = document.documentElement;
    const dark = () => root.dataset.theme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    const button = html("button", { type: "button", class: "theme", onclick: () => {
      root.dataset.theme = dark() ? "light" : "dark";
      name();
    } });
    const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
    name();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
    return button;
  }

  takeRows(data.rows);
  document.querySelectorAll(".static").forEach((element) => element.remove());
  document.querySelector("header").prepend(themeButton());
  state.metric = data.metrics[0]?.name ?? "";
  if (data.curves.length > 8 && new Set(data.curves.map((curve) => curve.method)).size > 1) state.view = "methods";
  const arrange = curvesSection(byId("curves"));
  arrange();
  (data.sweeps ?? []).forEach((sweep, i) => sweepSection(byId(`sweep${i}`), sweep));
  const networks = [];
  (data.settings ?? []).forEach((setting, i) => {
    if (!setting) return;
    const one = networkFigure(setting, i);
    networks.push(one);
    byId(`setting${i}`).append(one.figure, ...(setting.counts?.length ? [partitionFigure(setting)] : []));
  });
  document.addEventListener("pointerover", (event) => {
    const row = event.target.closest?.("tr[data-curve]");
    if (row) focusOn(data.curves[row.dataset.curve]?.label ?? null);
    else if (state.focus !== null && !event.target.closest?.("[data-label]")) focusOn(null);
  });
  const redraw = () => drawn.forEach((one) => one.draw());
  let resizing = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(redraw);
  });
  window.addEventListener("beforeprint", () => {
    printing = true;
    drawn.forEach((one) => one.cross(null));
    redraw();
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    redraw();
  });
  window.holdfast = { data, series, valueText }; // for tests, and for the curious
  if (data.since !== undefined) { // a live page
    showProgress(data.progress);
    showLog(data.log);
    follow(arrange, networks);
  }
})();

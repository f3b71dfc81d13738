/*
 * The Training tab of Spark's UI: the list of runs and the page of a run, drawn from the JSON that
 * jars/README.md describes and kept up to date while a run lasts.
 *
 * Names, causes and tracebacks are whatever a user's program says: they become text nodes and
 * attributes only, never markup. Spark's pages bring Bootstrap and set `data-bs-theme`; colours are
 * CSS variables, so a switch between light and dark redraws nothing.
 */
(function () {
"use strict";

// ---- elements -----------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const html = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Sets only what differs, so that a selection or a focus inside survives an update. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes `parent` hold one element for each item, reusing those that it already has. */
function keepRows(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let row = old.get(key);
    old.delete(key);
    if (!row) {
      row = make(item);
      row.dataset.key = key;
    }
    if (row === place) place = place.nextElementSibling;
    else parent.insertBefore(row, place);
    update(row, item);
  }
  old.forEach((row) => row.remove());
}

/** What the user chose (log scale, smoothing, …) outlasts a reload, where storage is allowed. */
const choices = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`sparkdml-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`sparkdml-${name}`, JSON.stringify(value));
    } catch {
      // Private windows and full storage: the choice lasts as long as the page.
    }
  },
};

// ---- numbers as text ----------------------------------------------------------------------------

const known = (value) => typeof value === "number" && Number.isFinite(value);
const DASH = "\u2013";

function formatCount(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : DASH;
}

function formatValue(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e7) return value.toExponential(3);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
  return String(Number(value.toPrecision(4)));
}

/** An axis label: as short as it can be told apart from its neighbours, which are `gap` away. */
function formatTick(value, gap) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(0);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit * 10 || (size >= unit && gap >= unit / 10)) {
      return `${Number((value / unit).toFixed(decimals(gap / unit)))}${letter}`;
    }
  }
  return String(Number(value.toFixed(decimals(gap))));
}

const decimals = (gap) => Math.min(12, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9)));

/** As in Spark's own tables: 35 ms, 12 s, 2.1 min, 1.3 h. */
function formatDuration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 0.01) return `${Number((seconds * 1000).toFixed(1))} ms`;
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function formatBytes(bytes) {
  if (!known(bytes)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toFixed(1)} ${units[unit]}`;
}

function formatTime(seconds) {
  if (!known(seconds)) return DASH;
  const at = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}/${two(at.getMonth() + 1)}/${two(at.getDate())} ` +
    `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

const plural = (count, one) => `${formatCount(count)} ${one}${count === 1 ? "" : "s"}`;

// ---- scales -------------------------------------------------------------------------------------

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return evenTicks(low, high, power * [1, 2, 5, 10].find((some) => some * power >= rough * 0.7));
}

/** Round numbers of seconds, minutes or hours. */
function timeTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (rough < 1) return linearTicks(low, high, count);
  const gaps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200,
    86400];
  return evenTicks(low, high, gaps.find((some) => some >= rough * 0.7) ??
    86400 * Math.ceil(rough / 86400));
}

function evenTicks(low, high, gap) {
  const ticks = [];
  for (let index = Math.ceil(low / gap - 1e-9); index * gap <= high + gap * 1e-9; index += 1) {
    ticks.push(index * gap);
  }
  return { ticks, gap };
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / count));
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of last - first <= 2 ? [1, 2, 5] : [1]) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) ticks.push(value);
    }
  }
  // Less than a decade may hold one round number or none: then the linear ones say more.
  return ticks.length >= 2 ? { ticks, gap: null } : linearTicks(low, high, count);
}

/** A running mean that forgets; `weight` is what is kept of it over the mean distance of points. */
function smoothed(points, weight) {
  if (weight <= 0 || points.length < 3) return points;
  const spacing = (points[points.length - 1][0] - points[0][0]) / (points.length - 1) || 1;
  let sum = 0, mass = 0, before = points[0][0];
  return points.map(([x, y]) => {
    if (!known(y)) return [x, y];
    // Thinned points aren't evenly spaced: a wide gap forgets more.
    const kept = weight ** (Math.max(0, x - before) / spacing);
    sum = sum * kept + y;
    mass = mass * kept + 1;
    before = x;
    return [x, sum / mass];
  });
}

/** The index of the point nearest to `x`; points are in order of x. */
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? low - 1 : low;
}

// ---- line charts --------------------------------------------------------------------------------

const MARGIN = { left: 54, right: 14, top: 10, bottom: 24 };
const NEAR_PIXELS = 28;

/** Charts of one group share the hovered place, the zoom and the x axis. */
class ChartGroup {
  constructor(formatX, ticks = linearTicks) {
    this.formatX = formatX;
    this.ticks = ticks;
    this.charts = [];
    this.zoom = null;
    this.onzoom = () => {};
  }

  hover(x, owner) {
    for (const chart of this.charts) chart.showHover(x, chart === owner);
  }

  setZoom(range) {
    this.zoom = range;
    for (const chart of this.charts) chart.draw();
    this.onzoom(range !== null);
  }

  /** Where the x axis begins and ends: the same for all charts of the group. */
  domain() {
    if (this.zoom) return this.zoom;
    let low = Infinity, high = -Infinity;
    for (const chart of this.charts) {
      for (const { points } of chart.series) {
        if (points.length === 0) continue;
        low = Math.min(low, points[0][0]);
        high = Math.max(high, points[points.length - 1][0]);
      }
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }
}

/**
 * One chart. A series is {name, color, points: [[x, y], …], style}, style being a set of
 * "smooth" (the slider applies), "dots", "dashed", "thin", "gaps" (null only parts the line).
 */
class LineChart {
  constructor(title, group, { height = 190, fromZero = false } = {}) {
    this.title = title;
    this.fromZero = fromZero;
    this.group = group;
    this.height = height;
    this.series = [];
    this.hidden = new Set();
    this.log = false;
    this.smoothing = 0;
    this.pointer = null; // in pixels, while a mouse is over the plot
    this.hovered = null; // the place on the x axis that the crosshair marks
    this.tells = false; // this chart shows the values: others of the group only the crosshair
    this.legend = html("div", { class: "training-legend" });
    this.layers = {
      axes: svg("g", { "aria-hidden": "true" }),
      lines: svg("g"),
      hover: svg("g", { "aria-hidden": "true" }),
    };
    this.plot = svg("svg", {
      class: "training-plot", height, tabindex: "0", role: "img", "aria-label": title,
    }, ...Object.values(this.layers));
    this.tip = html("div", { class: "training-tip", hidden: true });
    this.spoken = html("div", { class: "visually-hidden", "aria-live": "polite" });
    this.none = html("div", { class: "training-no-data" }, "No data yet");
    this.element = html("figure", { class: "training-chart" },
      html("figcaption", {}, html("strong", {}, title), this.legend),
      this.plot, this.none, this.tip, this.spoken);
    this.listen();
    group.charts.push(this);
    new ResizeObserver(() => {
      if (this.plot.clientWidth !== this.drawnWidth) this.draw();
    }).observe(this.plot);
  }

  remove() {
    this.group.charts = this.group.charts.filter((chart) => chart !== this);
    this.element.remove();
  }

  setSeries(series) {
    this.series = series;
    setText(this.none, series.some(({ points }) => points.length > 0) ? "Hidden" : "No data yet");
    keepRows(this.legend, series, (one) => one.name, (one) => {
      const button = html("button", {
        type: "button", "aria-pressed": "true", title: "Show or hide",
        onclick: () => this.toggle(one.name),
      }, html("span", { class: "training-key", style: `color: ${one.color}` }), one.name);
      return button;
    }, (button, one) => {
      button.setAttribute("aria-pressed", String(!this.hidden.has(one.name)));
    });
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.setSeries(this.series);
    this.draw();
  }

  shown() {
    return this.series.filter((one) => one.points.length > 0 && !this.hidden.has(one.name));
  }

  draw() {
    const width = this.plot.clientWidth;
    this.drawnWidth = width;
    if (width < 80) return; // folded away: the observer calls again once there is room
    this.none.hidden = this.shown().length > 0;
    this.plot.style.visibility = this.none.hidden ? "visible" : "hidden";
    const [x0, x1] = this.group.domain();
    this.right = width - MARGIN.right;
    this.bottom = this.height - MARGIN.bottom;
    const perX = (this.right - MARGIN.left) / (x1 - x0);
    this.toX = (x) => MARGIN.left + (x - x0) * perX;
    this.fromX = (pixel) => x0 + (pixel - MARGIN.left) / perX;
    const lines = this.shown().map((one) => {
      const bend = one.style.has("smooth") && this.smoothing > 0;
      return { one, bend, drawn: bend ? smoothed(one.points, this.smoothing) : one.points };
    });
    this.lines = lines;
    this.scaleY(lines.map(({ one }) => one.points), x0, x1);
    this.drawAxes(x0, x1);
    this.drawLines(lines, x0, x1);
    this.describe(lines);
    // New points move the axis under a resting mouse, but not a place that was chosen with keys.
    this.showHover(this.pointer === null ? this.hovered : this.fromX(this.pointer), this.tells);
  }

  scaleY(all, x0, x1) {
    let low = this.fromZero ? 0 : Infinity, high = -Infinity;
    for (const points of all) {
      for (const [x, y] of points) {
        if (x < x0 || x > x1 || !known(y) || (this.log && y <= 0)) continue;
        if (y < low) low = y;
        if (y > high) high = y;
      }
    }
    if (low > high) [low, high] = this.log ? [0.1, 1] : [0, 1];
    const to = this.log ? Math.log10 : (value) => value;
    let from = to(low), until = to(high);
    const room = (until - from) * 0.06 || Math.abs(until) * 0.1 || 0.5;
    // A quantity that is never negative gets no axis below zero.
    from = !this.log && low >= 0 ? Math.max(0, from - room) : from - room;
    until += room;
    const perY = (this.bottom - MARGIN.top) / (until - from);
    this.toY = (y) => this.bottom - (to(y) - from) * perY;
    const count = Math.max(2, Math.floor(this.height / 40));
    this.ticksY = this.log ? logTicks(10 ** from, 10 ** until, count)
      : linearTicks(from, until, count);
  }

  drawAxes(x0, x1) {
    const marks = [];
    const { ticks, gap } = this.ticksY;
    for (const tick of ticks) {
      const y = Math.round(this.toY(tick));
      marks.push(svg("line", { class: "grid", x1: MARGIN.left, x2: this.right, y1: y, y2: y }));
      marks.push(svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" },
        formatTick(tick, gap ?? tick)));
    }
    const count = Math.max(2, Math.floor((this.right - MARGIN.left) / 90));
    const across = this.group.ticks(x0, x1, count);
    for (const tick of across.ticks) {
      const x = this.toX(tick);
      marks.push(svg("text", { x, y: this.height - 6, "text-anchor": "middle" },
        this.group.formatX(tick, across.gap)));
    }
    marks.push(svg("line", {
      class: "grid", x1: MARGIN.left, x2: this.right, y1: this.bottom, y2: this.bottom,
    }));
    this.layers.axes.replaceChildren(...marks);
  }

  drawLines(lines, x0, x1) {
    const marks = [];
    for (const { one, bend, drawn } of lines) {
      const style = ["line", ...["dashed", "thin"].filter((name) => one.style.has(name))].join(" ");
      if (bend) marks.push(this.path(one.points, `${style} raw`, one.color, x0, x1));
      marks.push(this.path(drawn, style, one.color, x0, x1));
      const inside = one.points.filter(([x]) => x >= x0 && x <= x1);
      if ((one.style.has("dots") && inside.length <= 60) || inside.length === 1) {
        for (const [x, y] of inside) {
          if (!this.visible(y)) continue;
          marks.push(svg("circle", {
            class: "dot", style: `color: ${one.color}`, r: 3, cx: this.toX(x), cy: this.toY(y),
          }));
        }
      }
      if (!one.style.has("gaps")) marks.push(...this.notFinite(inside));
    }
    this.layers.lines.replaceChildren(...marks);
  }

  visible(y) {
    return known(y) && (!this.log || y > 0);
  }

  /** A loss that is NaN or infinite is null in the JSON: a mark on the upper edge says where. */
  notFinite(points) {
    const marks = [];
    let last = -Infinity;
    for (const [x, y] of points) {
      if (known(y)) continue;
      const at = this.toX(x);
      if (at - last < 8) continue;
      last = at;
      marks.push(svg("path", {
        class: "not-finite", d: `M${at - 4},${MARGIN.top - 8}h8l-4,7z`,
      }, svg("title", {}, "not a finite number")));
    }
    return marks;
  }

  path(points, style, color, x0, x1) {
    const parts = [];
    let pen = "M";
    for (let index = 0; index < points.length; index += 1) {
      const [x, y] = points[index];
      // One point beyond either edge, or a zoomed line would end before it.
      if (index + 1 < points.length && points[index + 1][0] < x0) continue;
      if (index > 0 && points[index - 1][0] > x1) break;
      if (!this.visible(y)) {
        pen = "M";
        continue;
      }
      parts.push(pen, this.toX(x).toFixed(1), ",", this.toY(y).toFixed(1));
      pen = "L";
    }
    return svg("path", {
      class: style, style: `color: ${color}`, d: parts.join(""),
      "clip-path": `inset(-8px ${-MARGIN.right}px 0px 0px)`,
    });
  }

  describe(lines) {
    const last = lines.map(({ one }) => {
      const [, y] = one.points[one.points.length - 1];
      return `${one.name} ${formatValue(y)}`;
    });
    this.plot.setAttribute("aria-label",
      `${this.title}. ${last.length ? `Last: ${last.join(", ")}. ` : ""}` +
      "Arrow keys read values, Escape shows all.");
  }

  // -- hover, keys and zoom

  listen() {
    const place = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    const plot = this.plot;
    plot.addEventListener("pointermove", (event) => {
      if (!this.toX) return;
      this.pointer = place(event);
      this.group.hover(this.fromX(this.pointer), this);
      if (this.dragFrom !== undefined) this.drawSelection();
    });
    plot.addEventListener("pointerleave", () => {
      if (this.dragFrom !== undefined) return;
      this.pointer = null;
      this.group.hover(null, this);
    });
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      this.dragFrom = place(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => {
      if (this.dragFrom === undefined) return;
      const [from, to] = [this.dragFrom, place(event)].sort((a, b) => a - b);
      this.dragFrom = undefined;
      this.selection?.remove();
      const ends = [this.fromX(Math.max(from, MARGIN.left)), this.fromX(Math.min(to, this.right))];
      if (to - from > 6 && ends[1] > ends[0]) this.group.setZoom(ends);
    });
    plot.addEventListener("pointercancel", () => {
      this.dragFrom = undefined;
      this.selection?.remove();
    });
    plot.addEventListener("dblclick", () => this.group.setZoom(null));
    plot.addEventListener("blur", () => this.group.hover(null, this));
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  drawSelection() {
    this.selection?.remove();
    const from = Math.max(MARGIN.left, Math.min(this.dragFrom, this.pointer));
    const to = Math.min(this.right, Math.max(this.dragFrom, this.pointer));
    this.selection = svg("rect", {
      class: "selection", x: from, y: MARGIN.top,
      width: Math.max(0, to - from), height: this.bottom - MARGIN.top,
    });
    this.plot.append(this.selection);
  }

  key(event) {
    const points = this.lines?.[0]?.drawn;
    if (event.key === "Escape") {
      this.group.hover(null, this);
      this.group.setZoom(null);
    } else if (points && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
      const stride = event.shiftKey ? Math.max(1, Math.round(points.length / 20)) : 1;
      const at = this.hovered === null ? points.length - 1 : nearest(points, this.hovered);
      const next = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0,
        End: points.length - 1 }[event.key];
      const [x] = points[Math.max(0, Math.min(points.length - 1, next))];
      this.pointer = null;
      this.group.hover(x, this);
      setText(this.spoken, this.tip.innerText.replace(/\n+/g, ", "));
    } else {
      return;
    }
    event.preventDefault();
  }

  showHover(x, tells) {
    this.hovered = x;
    this.tells = tells;
    if (x === null || !this.lines || this.lines.length === 0) {
      this.layers.hover.replaceChildren();
      this.tip.hidden = true;
      return;
    }
    const found = [];
    for (const { one, drawn } of this.lines) {
      const index = nearest(drawn, x);
      const [at, y] = drawn[index];
      if (!known(y) && one.style.has("gaps")) continue;
      const pixel = this.toX(at);
      if (Math.abs(pixel - this.toX(x)) > NEAR_PIXELS || pixel < MARGIN.left - 1 ||
          pixel > this.right + 1) continue;
      found.push({ one, at, y, raw: one.points[index][1] });
    }
    const near = found.reduce((best, point) =>
      best === null || Math.abs(point.at - x) < Math.abs(best.at - x) ? point : best, null);
    const line = near ? near.at : x;
    const place = this.toX(line);
    if (place < MARGIN.left - 1 || place > this.right + 1) {
      this.layers.hover.replaceChildren();
      this.tip.hidden = true;
      return;
    }
    this.layers.hover.replaceChildren(
      svg("line", {
        class: "crosshair", x1: place, x2: place, y1: MARGIN.top, y2: this.bottom,
      }),
      ...found.filter(({ y }) => this.visible(y)).map(({ one, at, y }) => svg("circle", {
        class: "dot", style: `color: ${one.color}`, r: 3.5, cx: this.toX(at), cy: this.toY(y),
      })));
    this.tip.hidden = !tells || found.length === 0;
    if (!this.tip.hidden) this.fillTip(line, place, found);
  }

  fillTip(line, place, found) {
    const many = found.length > 12;
    const listed = many ? found.slice(0, 12) : found;
    this.tip.replaceChildren(
      html("div", { class: "training-quiet" }, this.group.formatX(line, null)),
      ...listed.map(({ one, y, raw }) => html("div", { class: "training-tip-row" },
        html("span", {}, html("span", { class: "training-key", style: `color: ${one.color}` }),
          one.name),
        html("span", {}, known(raw) ? formatValue(raw) +
          (raw !== y ? ` (smoothed ${formatValue(y)})` : "") : "not finite"))),
      ...(many ? [html("div", { class: "training-quiet" }, `and ${found.length - 12} more`)] : []));
    const box = this.element.getBoundingClientRect(), plot = this.plot.getBoundingClientRect();
    const width = this.tip.offsetWidth, left = plot.left - box.left + place;
    const beside = left + 14 + width <= box.width ? left + 14 : left - 14 - width;
    this.tip.style.transform =
      `translate(${Math.max(0, beside)}px, ${plot.top - box.top + MARGIN.top}px)`;
  }
}

// ---- polling ------------------------------------------------------------------------------------

const POLL_MS = 2000, IDLE_MS = 10000, HIDDEN_MS = 30000, SLOWEST_MS = 30000, TIMEOUT_MS = 15000;

/**
 * Fetches the page's JSON again and again and shows each answer in `page`, which takes the place of
 * the server's own table at the first one. `show(data)` says how soon the next is wanted: in
 * milliseconds, or null for never. A request that fails is tried again, ever later; what is on the
 * page stays.
 */
function follow(root, page, show) {
  const connection = html("p", { class: "training-quiet", role: "status" });
  root.prepend(connection);
  const live = root.dataset.live !== "false";
  let timer = null, failures = 0, wanted = POLL_MS, over = false;
  const later = () => {
    clearTimeout(timer);
    if (over) return;
    const wait = failures ? Math.min(SLOWEST_MS, wanted * 2 ** failures) : wanted;
    timer = setTimeout(ask, document.hidden ? Math.max(wait, HIDDEN_MS) : wait);
  };
  const ask = async () => {
    let data;
    try {
      const answer = await fetch(root.dataset.json, {
        cache: "no-store", headers: { Accept: "application/json" },
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      data = await answer.json();
    } catch (error) {
      failures += 1;
      setText(connection, `Spark doesn't answer (${error.message}). ` +
        "What you see is the last that it told; trying again.");
      later();
      return;
    }
    failures = 0;
    setText(connection, "");
    if (!page.isConnected) root.replaceChildren(connection, page);
    const next = show(data);
    over = next === null || !live;
    wanted = next ?? POLL_MS;
    later();
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !over) {
      clearTimeout(timer);
      ask();
    }
  });
  ask();
}

// ---- parts that both pages show -----------------------------------------------------------------

const STATES = {
  starting: ["secondary", "Starting"],
  running: ["primary", "Running"],
  restarting: ["warning", "Restarting"],
  finished: ["success", "Finished"],
  failed: ["danger", "Failed"],
  interrupted: ["secondary", "Interrupted"],
  unfinished: ["secondary", "Unfinished"],
};
const lasts = (run) => ["starting", "running", "restarting"].includes(run.state);

/** In the History Server a run without an end is one whose application died: nothing is running. */
const asTold = (run, root) =>
  root.dataset.live === "false" && lasts(run) ? { ...run, state: "unfinished" } : run;

function showState(badge, run) {
  const [color, text] = STATES[run.state] ?? ["secondary", String(run.state)];
  badge.className = `badge text-bg-${color}`;
  setText(badge, text);
  badge.title = run.cause ?? "";
}

function makeProgress() {
  return html("div", { class: "training-progress", role: "progressbar", "aria-valuemin": "0",
    "aria-valuemax": "100" },
  html("div", { class: "training-progress-done" }),
  html("div", { class: "training-progress-text" }));
}

/** `brief`: the time left rather than the step, where there is no room for both. */
function showProgress(bar, run, brief = false) {
  const share = known(run.progress) ? Math.max(0, Math.min(1, run.progress)) : null;
  const parts = [];
  const begun = run.state !== "starting" && run.step > 0;
  if (begun && known(run.epoch)) {
    parts.push(`epoch ${run.epoch}${known(run.epochs) ? `/${run.epochs}` : ""}`);
  }
  if (begun) parts.push(`step ${formatCount(run.step)}`);
  const left = lasts(run) && known(run.secondsLeft);
  if (left) parts.push(`${formatDuration(run.secondsLeft)} left`);
  const text = parts.join(" \u00b7 ") || (lasts(run) ? "waiting for the first step" : DASH);
  const shown = brief && left ? parts.filter((part) => !part.startsWith("step")) : [text];
  bar.firstElementChild.style.width = `${(share ?? 0) * 100}%`;
  setText(bar.lastElementChild, shown.join(" \u00b7 "));
  bar.title = text;
  bar.setAttribute("aria-valuetext", text);
  if (share === null) bar.removeAttribute("aria-valuenow");
  else bar.setAttribute("aria-valuenow", String(Math.round(share * 100)));
}

/** A part of the page that folds, and remembers that it was folded. */
function section(title, name, ...children) {
  const heading = html("h4", {}, title);
  const element = html("details", { class: "training-section", open: choices.get(name, true) },
    html("summary", {}, heading), ...children);
  element.addEventListener("toggle", () => choices.set(name, element.open));
  return { element, heading };
}

const TABLE = "table table-striped table-sm table-bordered table-hover";

// ---- the list of runs ---------------------------------------------------------------------------

function runsPage(root) {
  const columns = [
    { title: "Run", by: (run) => run.name || run.id, text: true },
    { title: "State", by: (run) => run.state, text: true },
    { title: "Strategy", by: (run) => run.strategy, text: true },
    { title: "Workers", by: (run) => run.workers, number: true },
    { title: "Started", by: (run) => run.started },
    { title: "Duration", by: (run) => run.seconds, number: true },
    { title: "Progress", by: (run) => run.progress },
    { title: "Loss", by: (run) => run.loss, number: true },
    { title: "Samples/s", by: (run) => run.rowsPerSecond, number: true },
    { title: "Restarts", by: (run) => run.restarts, number: true },
  ];
  let runs = [], order = null, filter = "";

  const summary = html("ul", { class: "list-unstyled" });
  const search = html("input", { type: "search", class: "form-control form-control-sm",
    placeholder: "Name, strategy or state", "aria-label": "Show only runs that contain",
    style: "max-width: 18rem", oninput: () => {
      filter = search.value.trim().toLowerCase();
      show();
    } });
  const headers = columns.map((column, index) => html("th",
    { scope: "col", class: column.number ? "number" : null, "aria-sort": "none" },
    html("button", { type: "button", class: "training-sort", onclick: () => sortBy(index) },
      column.title)));
  const body = html("tbody");
  const none = html("p", { class: "training-quiet" });
  const table = html("table", { class: TABLE },
    html("thead", {}, html("tr", {}, ...headers)), body);
  const listed = section("Runs", "runs", html("div", { class: "training-toolbar" }, search),
    html("div", { class: "table-responsive" }, table), none);
  const page = html("div", { class: "training-page" }, summary, listed.element);

  function sortBy(index) {
    const column = columns[index];
    // Text is first wanted from A to Z, numbers from the largest; the third click undoes it.
    const first = column.text ? 1 : -1;
    if (!order || order.index !== index) order = { index, sign: first };
    else order = order.sign === first ? { index, sign: -first } : null;
    headers.forEach((header, at) => header.setAttribute("aria-sort",
      !order || order.index !== at ? "none" : order.sign > 0 ? "ascending" : "descending"));
    show();
  }

  function sorted(some) {
    if (!order) return some;
    const { by } = columns[order.index];
    return [...some].sort((one, other) => {
      const a = by(one), b = by(other);
      if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
      if (b === null || b === undefined) return -1;
      return order.sign * (typeof a === "string" ? a.localeCompare(String(b)) : a - b);
    });
  }

  function makeRow(run) {
    const link = html("a", { class: "name-link",
      href: `${root.dataset.runPage}?id=${encodeURIComponent(run.id)}` });
    return html("tr", {},
      html("td", { class: "long-text" }, link),
      html("td", {}, html("span")),
      html("td", { class: "long-text" }),
      html("td", { class: "number" }),
      html("td", { class: "text-nowrap" }),
      html("td", { class: "number text-nowrap" }),
      html("td", {}, makeProgress()),
      html("td", { class: "number" }),
      html("td", { class: "number" }),
      html("td", { class: "number" }));
  }

  function showRow(row, run) {
    const cells = row.children;
    setText(cells[0].firstElementChild, run.name || run.id);
    cells[0].firstElementChild.title = run.id;
    showState(cells[1].firstElementChild, run);
    setText(cells[2], run.strategy ?? DASH);
    setText(cells[3], formatCount(run.workers));
    setText(cells[4], formatTime(run.started));
    setText(cells[5], formatDuration(run.seconds));
    showProgress(cells[6].firstElementChild, run, true);
    setText(cells[7], formatValue(run.loss));
    setText(cells[8], formatCount(run.rowsPerSecond));
    setText(cells[9], formatCount(run.restarts));
  }

  function show() {
    const words = (run) => [run.name, run.id, run.strategy, run.state].join(" ").toLowerCase();
    const shown = sorted(runs.filter((run) => words(run).includes(filter)));
    keepRows(body, shown, (run) => run.id, makeRow, showRow);
    setText(listed.heading, `Runs (${shown.length})`);
    table.hidden = shown.length === 0;
    none.hidden = shown.length > 0;
    search.hidden = runs.length < 2;
    setText(none, runs.length ? "No run contains that." :
      "No run yet. A run appears here as soon as TorchEstimator.fit starts one.");
    const counts = [["Running", runs.filter(lasts).length],
      ["Finished", runs.filter((run) => run.state === "finished").length],
      ["Failed", runs.filter((run) => run.state === "failed").length],
      ["Interrupted", runs.filter((run) => run.state === "interrupted").length]];
    keepRows(summary, counts.filter(([, count]) => count > 0), ([name]) => name,
      ([name]) => html("li", {}, html("strong", {}, `${name}: `),
        html("span", { class: "number" })),
      (item, [, count]) => setText(item.lastElementChild, formatCount(count)));
  }

  follow(root, page, (data) => {
    runs = data.runs.map((run) => asTold(run, root));
    show();
    return runs.some(lasts) ? POLL_MS : IDLE_MS; // another run may start any time
  });
}

// ---- the page of a run: curves ------------------------------------------------------------------

const NOT_METRICS = new Set(["epoch", "step", "rows", "steps", "seconds", "rows_per_second"]);
const TRAIN = "var(--training-train)", VALIDATION = "var(--training-validation)";

/** From steps to epochs as a broken line through the ends of epochs, and on at the last slope. */
function epochOfStep(run) {
  const ends = [[0, 0]];
  for (const row of run.series.epochs) {
    if (known(row.step) && row.step > ends[ends.length - 1][0]) ends.push([row.step, row.epoch]);
  }
  if (ends.length === 1) {
    // Within the first epoch: the progress over all epochs tells how far it is.
    const done = known(run.progress) && known(run.epochs) ? run.progress * run.epochs : 0;
    if (!(done > 0 && run.step > 0)) return null;
    ends.push([run.step, done]);
  }
  return (step) => {
    let at = 1;
    while (at < ends.length - 1 && ends[at][0] < step) at += 1;
    const [[s0, e0], [s1, e1]] = [ends[at - 1], ends[at]];
    return e0 + (step - s0) * (e1 - e0) / (s1 - s0);
  };
}

class Curves {
  constructor() {
    this.axis = choices.get("axis", "step");
    this.log = choices.get("log", false);
    this.smoothing = choices.get("smoothing", 0.6);
    this.group = new ChartGroup((x, gap) => this.formatX(x, gap));
    this.loss = new LineChart("Loss", this.group, { height: 270 });
    this.metrics = new Map();
    this.charts = html("div", { class: "training-charts mt-3" });
    this.part = section("Loss and metrics", "curves", this.toolbar(), this.loss.element,
      this.charts);
    this.element = this.part.element;
    this.group.onzoom = (zoomed) => { this.reset.hidden = !zoomed; };
  }

  formatX(x, gap) {
    if (gap !== null) return formatTick(x, gap);
    return this.axis === "step" ? `step ${formatCount(x)}` : `epoch ${Number(x.toFixed(2))}`;
  }

  toolbar() {
    this.axes = ["step", "epoch"].map((name) => html("button", {
      type: "button", class: "btn btn-outline-secondary btn-sm", "data-axis": name,
      onclick: () => this.setAxis(name),
    }, name === "step" ? "Steps" : "Epochs"));
    const log = html("input", { type: "checkbox", class: "form-check-input m-0", name: "log",
      onchange: () => {
        this.log = log.checked;
        choices.set("log", this.log);
        this.draw();
      } });
    log.checked = this.log;
    const shown = html("output", {}, this.smoothing.toFixed(2));
    const slider = html("input", { type: "range", class: "form-range", name: "smoothing", min: "0",
      max: "0.99", step: "0.01", oninput: () => {
        this.smoothing = Number(slider.value);
        setText(shown, this.smoothing.toFixed(2));
        choices.set("smoothing", this.smoothing);
        this.draw();
      } });
    slider.value = String(this.smoothing);
    this.reset = html("button", { type: "button", class: "btn btn-outline-secondary btn-sm",
      hidden: true, onclick: () => this.group.setZoom(null) }, "Show all");
    return html("div", { class: "training-toolbar" },
      html("div", { class: "btn-group", role: "group", "aria-label": "Horizontal axis" },
        ...this.axes),
      html("label", {}, log, "Log scale"),
      html("label", {}, "Smoothing", slider, shown),
      this.reset,
      html("span", { class: "training-quiet" }, "Drag to zoom, double-click to show all"));
  }

  setAxis(name) {
    this.axis = name;
    choices.set("axis", name);
    this.group.setZoom(null);
    this.show(this.run);
  }

  show(run) {
    this.run = run;
    const toEpoch = epochOfStep(run);
    // The choice is kept for when the size of an epoch is known.
    const axis = toEpoch ? this.axis : "step";
    const place = axis === "step" ? (step) => step : toEpoch;
    for (const button of this.axes) {
      const on = button.dataset.axis === axis;
      button.classList.toggle("active", on);
      button.setAttribute("aria-pressed", String(on));
      button.disabled = button.dataset.axis === "epoch" && !toEpoch;
    }
    const moved = (points) => points.map(([step, value]) => [place(step), value]);
    const ofEpochs = (key) => moved(run.series.epochs.filter((row) => key in row && known(row.step))
      .map((row) => [row.step, row[key]]));
    this.showLoss(moved(run.series.loss), ofEpochs);
    this.showMetrics(run, moved, ofEpochs);
    this.draw();
  }

  showLoss(steps, ofEpochs) {
    const series = [{ name: "training", color: TRAIN, points: steps, style: new Set(["smooth"]) }];
    const means = ofEpochs("loss"), validation = ofEpochs("val_loss");
    if (means.length) {
      series.push({ name: "training, mean of the epoch", color: "var(--training-checkpoint)",
        points: means, style: new Set(["dots", "dashed"]) });
    }
    if (validation.length) {
      series.push({ name: "validation", color: VALIDATION, points: validation,
        style: new Set(["dots"]) });
    }
    this.loss.setSeries(series);
  }

  showMetrics(run, moved, ofEpochs) {
    const wanted = new Map();
    const chart = (name) => wanted.get(name) ?? wanted.set(name, []).get(name);
    for (const row of run.series.epochs) {
      for (const key of Object.keys(row)) {
        if (!NOT_METRICS.has(key)) chart(key.replace(/^val_/, ""));
      }
    }
    wanted.delete("loss");
    for (const [name, series] of wanted) {
      const train = ofEpochs(name), validation = ofEpochs(`val_${name}`);
      if (train.length) {
        series.push({ name: "training", color: TRAIN, points: train,
          style: new Set(["dots", "dashed"]) });
      }
      if (validation.length) {
        series.push({ name: "validation", color: VALIDATION, points: validation,
          style: new Set(["dots"]) });
      }
    }
    for (const [name, points] of Object.entries(run.series.logged ?? {})) {
      chart(name).push({ name: "logged", color: "var(--training-series-7)", points: moved(points),
        style: new Set(["smooth"]) });
    }
    for (const [name, old] of this.metrics) {
      if (!wanted.has(name)) {
        old.remove();
        this.metrics.delete(name);
      }
    }
    for (const [name, series] of wanted) {
      if (!this.metrics.has(name)) {
        const made = new LineChart(name, this.group);
        this.metrics.set(name, made);
        this.charts.append(made.element);
      }
      this.metrics.get(name).setSeries(series);
    }
  }

  draw() {
    for (const chart of this.group.charts) {
      chart.log = this.log;
      chart.smoothing = this.smoothing;
      chart.draw();
    }
  }
}

// ---- the page of a run: speed and ranks ---------------------------------------------------------

const PARTS = [["data", "data wait"], ["compute", "compute"], ["communication", "communication"],
  ["checkpoint", "checkpoint"], ["other", "other"]];
const LINES_OF_RANKS = 8;

class Speed {
  constructor() {
    const group = new ChartGroup((x, gap) =>
      gap === null ? `after ${formatDuration(x)}` : this.formatTick(x, gap), timeTicks);
    this.all = new LineChart("In all", group, { fromZero: true });
    this.each = new LineChart("Per rank", group, { fromZero: true });
    this.part = section("Samples per second", "speed",
      html("div", { class: "training-charts" }, this.all.element, this.each.element));
    this.element = this.part.element;
  }

  formatTick(seconds, gap) {
    if (gap >= 3600) return `${seconds / 3600} h`;
    if (gap >= 60) return `${Number((seconds / 60).toFixed(1))} min`;
    return `${formatTick(seconds, gap)} s`;
  }

  show(run) {
    // Between a failure and the next submission nothing runs: the lines stop there.
    const stops = run.restartEvents.map(({ time }) => [time, null]);
    const since = (points) => (points.length ? [...points, ...stops] : [])
      .sort(([one], [other]) => one - other)
      .map(([time, value]) => [time - run.started, value]);
    this.all.setSeries([{ name: "all ranks", color: "var(--training-total)",
      points: since(run.series.rowsPerSecond), style: new Set(["gaps"]) }]);
    const ranks = Object.entries(run.series.rankRowsPerSecond)
      .sort(([one], [other]) => Number(one) - Number(other));
    const late = new Set(run.ranks.filter((one) => one.straggler).map((one) => String(one.rank)));
    this.each.setSeries(pickRanks(ranks, run.ranks).map(([rank, points], at) => ({
      name: `rank ${rank}`, color: `var(--training-series-${at})`,
      points: since(points), style: new Set(late.has(rank) ? ["gaps"] : ["gaps", "thin"]),
    })));
    this.all.draw();
    this.each.draw();
  }
}

/** More lines than colours can't be told apart: stragglers and then the slowest are shown. */
function pickRanks(lines, ranks) {
  if (lines.length <= LINES_OF_RANKS) return lines;
  const speed = new Map(ranks.map((one) =>
    [String(one.rank), [one.straggler ? 0 : 1, one.rowsPerSecond ?? Infinity]]));
  const of = ([rank]) => speed.get(rank) ?? [1, Infinity];
  return [...lines].sort((one, other) => of(one)[0] - of(other)[0] || of(one)[1] - of(other)[1])
    .slice(0, LINES_OF_RANKS).sort(([one], [other]) => Number(one) - Number(other));
}

class Ranks {
  constructor() {
    this.body = html("tbody");
    const legend = html("div", { class: "training-legend mb-1" }, ...PARTS.map(([name, text]) =>
      html("span", {}, html("span", { class: `training-key training-key-${name}` }), text)));
    const titles = [["Rank", "number"], ["Host"], ["Samples/s", "number"], ["Step time", "number"],
      ["Where its time went"]];
    this.part = section("Ranks", "ranks", legend,
      html("div", { class: "table-responsive training-scroll" }, html("table", { class: TABLE },
        html("thead", {}, html("tr", {}, ...titles.map(([title, style]) =>
          html("th", { scope: "col", class: style }, title)))), this.body)));
    this.element = this.part.element;
  }

  show(run) {
    const late = run.ranks.filter((one) => one.straggler).length;
    setText(this.part.heading, `Ranks (${run.ranks.length}` +
      `${late ? `, ${plural(late, "straggler")}` : ""})`);
    this.element.hidden = run.ranks.length === 0;
    keepRows(this.body, run.ranks, (one) => one.rank, () => html("tr", {},
      html("td", { class: "number" }), html("td", { class: "long-text" }, html("span"), " ",
        html("span", { class: "badge text-bg-warning", hidden: true })),
      html("td", { class: "number" }), html("td", { class: "number text-nowrap" }),
      html("td", { style: "width: 55%" }, html("div", { class: "training-shares", role: "img" }))),
    (row, one) => this.showRank(row, one));
  }

  showRank(row, one) {
    const cells = row.children;
    setText(cells[0], String(one.rank));
    const [host, badge] = cells[1].children;
    setText(host, one.host ?? DASH);
    row.classList.toggle("training-straggler", Boolean(one.straggler));
    badge.hidden = !one.straggler;
    const times = known(one.slower) ? `, ${one.slower.toFixed(1)}\u00d7` : "";
    setText(badge, `\u25b2 straggler${times}${one.why ? `: ${one.why}` : ""}`);
    setText(cells[2], formatCount(one.rowsPerSecond));
    setText(cells[3], one.stepSeconds ? formatDuration(one.stepSeconds) : DASH);
    this.showShares(cells[4].firstElementChild, one.seconds ?? {});
  }

  showShares(bar, seconds) {
    const total = PARTS.reduce((sum, [name]) => sum + (seconds[name] ?? 0), 0);
    const parts = PARTS.map(([name, text]) => ({ name, text, seconds: seconds[name] ?? 0,
      share: total ? (seconds[name] ?? 0) / total : 0 })).filter(({ share }) => share > 0);
    keepRows(bar, parts, ({ name }) => name,
      ({ name }) => html("div", { class: `training-share training-share-${name}` }),
      (element, part) => {
        const percent = `${Math.round(part.share * 100)} %`;
        element.style.width = `${part.share * 100}%`;
        setText(element, part.share >= 0.06 ? percent : "");
        element.title = `${part.text}: ${formatDuration(part.seconds)}, ${percent}`;
      });
    bar.setAttribute("aria-label", parts.map((part) =>
      `${part.text} ${Math.round(part.share * 100)} %`).join(", ") || "nothing yet");
  }
}

// ---- the page of a run: checkpoints and lineage -------------------------------------------------

const ROW = 26, LABELS = 128;

class Lineage {
  constructor() {
    this.strip = svg("svg", { class: "training-strip", role: "img" });
    this.box = html("div", { class: "training-strip-box" }, this.strip);
    this.body = html("tbody");
    this.note = html("p", { class: "training-quiet mb-1" });
    const titles = [["Checkpoint"], ["Kind"], ["Step", "number"], ["Size", "number"],
      ["Copy", "number"], ["Write", "number"], ["Parent"], ["Time"]];
    this.table = html("details", { class: "mt-2" }, html("summary", {}, "Checkpoints as a table"),
      this.note, html("div", { class: "table-responsive training-scroll" },
        html("table", { class: TABLE }, html("thead", {}, html("tr", {}, ...titles.map(
          ([title, style]) => html("th", { scope: "col", class: style }, title)))), this.body)));
    this.part = section("Checkpoints and lineage", "lineage", this.box, this.table);
    this.element = this.part.element;
    new ResizeObserver(() => {
      if (this.run && this.strip.clientWidth !== this.drawnWidth) this.draw();
    }).observe(this.strip);
  }

  show(run) {
    this.run = run;
    const count = run.checkpointCount ?? run.checkpoints.length;
    setText(this.part.heading, `Checkpoints and lineage (${plural(count, "checkpoint")}, ` +
      `${plural(run.restarts ?? 0, "restart")})`);
    this.element.hidden = count === 0 && run.submissions.length === 0;
    this.table.hidden = count === 0;
    this.note.hidden = count <= run.checkpoints.length;
    setText(this.note, `The newest ${run.checkpoints.length} of ${formatCount(count)}.`);
    keepRows(this.body, [...run.checkpoints].reverse(), (one) => one.id,
      () => html("tr", {}, ...["long-text", "", "number", "number", "number", "number", "long-text",
        "text-nowrap"].map((style) => html("td", { class: style }))),
      (row, one) => [one.id, one.kind, formatCount(one.step), formatBytes(one.bytes),
        formatDuration(one.copySeconds), formatDuration(one.writeSeconds), one.parent,
        formatTime(one.time)].forEach((text, at) => setText(row.children[at], text ?? DASH)));
    this.draw();
  }

  /** Each submission with the steps it went through, and the failure that ended it. */
  rows() {
    const { submissions, failures, checkpoints, step } = this.run;
    const inside = (time, from, until) => time >= from && time < until;
    return submissions.map((one, index) => {
      const next = submissions[index + 1];
      const from = index === 0 ? -Infinity : one.time, until = next ? next.time : Infinity;
      const failed = failures.filter((failure) => inside(failure.time, from, until));
      const saved = checkpoints.filter((checkpoint) => inside(checkpoint.time, from, until));
      const start = one.fromStep ?? 0;
      const seen = [...failed, ...saved].map((event) => event.step).filter(known);
      const reached = Math.max(start, ...seen, next ? start : step ?? start);
      return { one, start, reached, failed, saved };
    });
  }

  draw() {
    const width = this.strip.clientWidth;
    this.drawnWidth = width;
    if (width < 80) return;
    const rows = this.rows();
    const most = Math.max(1, ...rows.map((row) => row.reached), this.run.step ?? 0);
    const left = LABELS, right = width - 16, height = rows.length * ROW + 24;
    const toX = (step) => left + step / most * (right - left);
    const marks = [];
    const { ticks, gap } = linearTicks(0, most, Math.max(2, Math.floor((right - left) / 90)));
    for (const tick of ticks) {
      const x = Math.round(toX(tick));
      marks.push(svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height - 18 }));
      marks.push(svg("text", { x, y: height - 4, "text-anchor": "middle" }, formatTick(tick, gap)));
    }
    marks.push(svg("text", { x: 0, y: height - 4 }, "step"));
    rows.forEach((row, index) => marks.push(...this.drawRow(row, index, rows[index + 1], toX)));
    this.strip.setAttribute("height", height);
    this.strip.setAttribute("aria-label", `Lineage: ${plural(rows.length, "submission")}, ` +
      `${plural(this.run.checkpoints.length, "checkpoint")}, ` +
      `${plural(this.run.failures.length, "failure")}.`);
    this.strip.replaceChildren(...marks);
    this.box.hidden = rows.length === 0;
  }

  drawRow({ one, start, reached, failed, saved }, index, next, toX) {
    const middle = index * ROW + ROW / 2;
    const marks = [
      svg("text", { x: 0, y: middle + 4 }, `#${one.number}`,
        svg("tspan", { dx: 6 }, plural(one.workers ?? 0, "worker")),
        svg("title", {}, (one.hosts ?? []).join(", "))),
      svg("rect", { class: "reached", x: toX(start), y: middle - 5, height: 10, rx: 2,
        width: Math.max(2, toX(reached) - toX(start)) }, svg("title", {},
        `Submission ${one.number}: from step ${formatCount(start)} to ${formatCount(reached)}`)),
    ];
    if (next) {
      const from = toX(reached), to = toX(next.start), y = middle + ROW;
      marks.push(svg("path", { class: "back",
        d: `M${from},${middle + 7}C${from},${y - 4} ${to},${middle + 4} ${to},${y - 7}` }));
    }
    for (const checkpoint of saved) {
      const x = toX(checkpoint.step), size = checkpoint.kind === "step" ? 4 : 5.5;
      marks.push(svg("path", {
        class: `checkpoint checkpoint-${checkpoint.kind === "final" ? "final" : "other"}`,
        d: `M${x},${middle - size}l${size},${size}l${-size},${size}l${-size},${-size}z`,
      }, svg("title", {}, `Checkpoint ${checkpoint.id} (${checkpoint.kind}), step ` +
        `${formatCount(checkpoint.step)}, ${formatBytes(checkpoint.bytes)}, written in ` +
        `${formatDuration(checkpoint.writeSeconds)}, parent ${checkpoint.parent ?? "none"}`)));
    }
    for (const failure of failed) {
      const x = toX(failure.step ?? reached);
      marks.push(svg("path", { class: "failure",
        d: `M${x - 5},${middle - 5}l10,10m0,-10l-10,10` },
      svg("title", {}, failureTitle(failure))));
    }
    return marks;
  }
}

// ---- the page of a run: failures, plan ----------------------------------------------------------

function failureTitle(failure) {
  const who = known(failure.rank) && failure.rank >= 0 ? `Rank ${failure.rank}` : "The run";
  // The driver's sentence begins with the same rank and host.
  const cause = (failure.cause ?? "").replace(/^rank \d+ on \S+ failed: /, "");
  return `${who}${failure.host ? ` on ${failure.host}` : ""}` +
    `${known(failure.step) ? `, step ${formatCount(failure.step)}` : ""}: ${cause}`;
}

class Failures {
  constructor() {
    this.list = html("div");
    this.part = section("Failures", "failures", this.list);
    this.element = this.part.element;
  }

  show(run) {
    const count = run.failureCount ?? run.failures.length;
    this.element.hidden = count === 0;
    setText(this.part.heading, count > run.failures.length
      ? `Failures (the newest ${run.failures.length} of ${formatCount(count)})`
      : `Failures (${count})`);
    keepRows(this.list, [...run.failures].reverse(), (one) => `${one.time} ${one.rank} ${one.step}`,
      (one) => html("div", { class: "training-failure" },
        html("div", {}, html("strong", { class: "long-text" }, failureTitle(one))),
        html("div", { class: "training-quiet" }, formatTime(one.time)),
        one.traceback ? html("details", {}, html("summary", {}, "Traceback"),
          html("pre", { tabindex: "0" }, one.traceback)) : null),
      () => {});
  }
}

class Plan {
  constructor() {
    this.body = html("tbody");
    this.part = section("Plan", "plan", html("div", { class: "table-responsive" },
      html("table", { class: `${TABLE} training-plan` }, this.body)));
    this.element = this.part.element;
  }

  show(run) {
    const own = Object.entries({ run: run.id, backend: run.backend, batchSize: run.batchSize,
      globalBatch: run.globalBatch, seed: run.seed });
    const plan = new Map(own.concat(Object.entries(run.plan ?? {}))); // the plan's word counts
    const rows = [...plan].filter(([, value]) => value !== null && value !== undefined);
    keepRows(this.body, rows, ([name]) => name,
      ([name]) => html("tr", {}, html("th", { scope: "row" }, name), html("td")),
      (row, [, value]) => setText(row.lastElementChild, String(value)));
  }
}

// ---- the page of a run --------------------------------------------------------------------------

class Facts {
  constructor() {
    this.badge = html("span");
    this.bar = makeProgress();
    this.texts = {};
    const fact = (name, child, style) => html("div", { class: style ?? null },
      html("dt", {}, name), html("dd", {}, child));
    const text = (name) => {
      this.texts[name] = html("span", { class: "number" });
      return fact(name, this.texts[name]);
    };
    this.element = html("dl", { class: "training-facts" },
      fact("State", this.badge), fact("Progress", this.bar, "training-fact-wide"),
      ...["Loss", "Samples/s", "Workers", "Strategy", "Started", "Duration", "Restarts"].map(text));
  }

  show(run) {
    showState(this.badge, run);
    showProgress(this.bar, run);
    const texts = { "Loss": formatValue(run.loss), "Samples/s": formatCount(run.rowsPerSecond),
      "Workers": formatCount(run.workers), "Strategy": run.strategy ?? DASH,
      "Started": formatTime(run.started), "Duration": formatDuration(run.seconds),
      "Restarts": formatCount(run.restarts) };
    for (const [name, text] of Object.entries(texts)) setText(this.texts[name], text);
  }
}

function runPage(root) {
  const back = html("a", { href: root.dataset.runsPage }, "\u2190 All runs");
  const notice = html("div", { class: "alert py-2", hidden: true });
  const parts = [new Facts(), new Curves(), new Speed(), new Ranks(), new Lineage(), new Failures(),
    new Plan()];
  const [facts, ...rest] = parts;
  const gone = html("p", { hidden: true });
  const content = html("div", {}, facts.element, notice, ...rest.map((part) => part.element));
  const page = html("div", { class: "training-page" }, back, gone, content);

  follow(root, page, (told) => {
    // A run may go while its page is open: only the newest are kept.
    gone.hidden = !told.error;
    content.hidden = Boolean(told.error);
    if (told.error) {
      setText(gone, told.error);
      return null;
    }
    const run = asTold(told, root);
    // Why a run failed, or ended before its last epoch, is the first thing that one asks.
    const why = run.state === "failed" || run.state === "interrupted" ? run.cause : run.stopped;
    notice.hidden = !why;
    notice.className = `alert py-2 alert-${run.state === "failed" ? "danger" : "secondary"}`;
    setText(notice, why ? String(why) : "");
    for (const part of parts) part.show(run);
    return lasts(run) ? POLL_MS : null;
  });
}

const root = document.getElementById("sparkdml-training");
const page = { run: runPage, runs: runsPage }[root?.dataset.page];
if (page) page(root);
})();

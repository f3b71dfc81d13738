// Line charts: drawn in SVG, with hover, keys and zoom; a group shares its cursor.

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

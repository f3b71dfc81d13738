// The page of a run: checkpoints and their lineage.

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
    this.element.hidden = count === 0 && run.submissions.length < 2;
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

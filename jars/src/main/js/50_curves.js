// The page of a run: loss and metrics.

const NOT_METRICS = new Set(["epoch", "step", "rows", "steps", "seconds", "rows_per_second"]);
const EVALUATOR = "evaluator/";
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

/** What an evaluator measured while the workers trained: by metric, without the prefix. */
const evaluated = (run) => new Map(Object.entries(run.series.logged ?? {})
  .filter(([name]) => name.startsWith(EVALUATOR))
  .map(([name, points]) => [name.slice(EVALUATOR.length).replace(/^val_/, ""), points]));
const evaluatorSeries = (points) => ({ name: "evaluator, on validation rows",
  color: "var(--training-series-7)", points, style: new Set(["dots"]) });

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
    this.showLoss(moved(run.series.loss), ofEpochs, moved(evaluated(run).get("loss") ?? []));
    this.showMetrics(run, moved, ofEpochs);
    this.draw();
  }

  showLoss(steps, ofEpochs, evaluations) {
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
    if (evaluations.length) series.push(evaluatorSeries(evaluations));
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
    const measured = evaluated(run);
    for (const name of measured.keys()) chart(name);
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
      if (measured.has(name)) series.push(evaluatorSeries(moved(measured.get(name))));
    }
    for (const [name, points] of Object.entries(run.series.logged ?? {})) {
      if (!name.startsWith(EVALUATOR)) chart(name).push({ name: "logged", color: "var(--training-series-7)", points: moved(points),
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

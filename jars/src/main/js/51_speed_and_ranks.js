// The page of a run: speed, and where each rank spends its time.

const PARTS = [["data", "data wait"], ["compute", "compute"], ["communication", "communication"],
  ["checkpoint", "checkpoint"], ["other", "other"]];
const LINES_OF_RANKS = 8;

class Speed {
  constructor() {
    const group = new ChartGroup((x, gap) =>
      gap === null ? `after ${formatDuration(x)}` : this.formatTick(x, gap), timeTicks);
    this.all = new LineChart("Total", group, { fromZero: true });
    this.each = new LineChart("Per worker", group, { fromZero: true });
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
      ["Sent", "number"], ["Time breakdown"]];
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
      html("td", { class: "number text-nowrap" }),
      html("td", { style: "width: 50%" }, html("div", { class: "training-shares", role: "img" }))),
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
    setText(cells[4], formatBytes(one.bytes));
    cells[4].title = known(one.messages) ? plural(one.messages, "message") : "";
    this.showShares(cells[5].firstElementChild, one.seconds ?? {});
  }

  showShares(bar, seconds) {
    const total = PARTS.reduce((sum, [name]) => sum + (seconds[name] ?? 0), 0);
    const parts = PARTS.map(([name, text]) => ({ name, text, seconds: seconds[name] ?? 0,
      share: total ? (seconds[name] ?? 0) / total : 0 })).filter(({ share }) => share > 0);
    keepRows(bar, parts, ({ name }) => name,
      ({ name }) => html("div", { class: `training-share training-share-${name}` }),
      (element, part) => {
        const percent = `${Math.round(part.share * 100)}%`;
        element.style.width = `${part.share * 100}%`;
        setText(element, part.share >= 0.06 ? percent : "");
        element.title = `${part.text}: ${formatDuration(part.seconds)}, ${percent}`;
      });
    bar.setAttribute("aria-label", parts.map((part) =>
      `${part.text} ${Math.round(part.share * 100)}%`).join(", ") || "nothing yet");
  }
}

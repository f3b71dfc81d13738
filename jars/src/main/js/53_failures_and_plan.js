// The page of a run: failures, notes, the plan.

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

class Notes {
  constructor() {
    this.body = html("tbody");
    this.part = section("Notes", "notes", html("div", { class: "table-responsive training-scroll" },
      html("table", { class: TABLE }, this.body)));
    this.element = this.part.element;
  }

  show(run) {
    const notes = run.notes ?? [];
    this.element.hidden = notes.length === 0;
    setText(this.part.heading, `Notes (${notes.length})`);
    keepRows(this.body, [...notes].reverse(), (one) => `${one.time} ${one.rank} ${one.text}`,
      (one) => html("tr", {}, html("td", { class: "text-nowrap" }, formatTime(one.time)),
        html("td", { class: "long-text" }, one.text)), () => {});
  }
}

const EMPTY = new Set([null, undefined, "", "None"]); // of what was not asked for

class Plan {
  constructor() {
    this.body = html("tbody");
    this.part = section("Plan", "plan", html("div", { class: "table-responsive" },
      html("table", { class: `${TABLE} training-plan` }, this.body)));
    this.element = this.part.element;
  }

  show(run) {
    const own = Object.entries({ run: run.id, backend: run.backend, topology: run.topology, batchSize: run.batchSize,
      globalBatch: run.globalBatch, seed: run.seed });
    const plan = new Map(own.concat(Object.entries(run.plan ?? {}))); // the plan's word counts
    const rows = [...plan].filter(([, value]) => !EMPTY.has(value));
    keepRows(this.body, rows, ([name]) => name,
      ([name]) => html("tr", {}, html("th", { scope: "row" }, name), html("td")),
      (row, [, value]) => setText(row.lastElementChild, String(value)));
  }
}

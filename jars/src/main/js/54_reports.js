// The page of a run: what servers, clients and others reported last, a table for each kind.

const REPORT_TITLES = { server: "Parameter servers", client: "Parameter server clients, last epoch",
  communicator: "Communicators" };

class Reports {
  constructor() {
    this.element = html("div");
    this.shown = new Map();
  }

  show(run) {
    const kinds = Object.entries(run.reports ?? {});
    keepRows(this.element, kinds, ([kind]) => kind, ([kind]) => this.make(kind),
      (element, [kind, reports]) => this.fillTable(this.shown.get(kind), kind, reports));
  }

  make(kind) {
    const head = html("tr"), body = html("tbody");
    const part = section("", `report-${kind}`, html("div",
      { class: "table-responsive training-scroll" },
      html("table", { class: TABLE }, html("thead", {}, head), body)));
    this.shown.set(kind, { head, body, part });
    return part.element;
  }

  fillTable({ head, body, part }, kind, reports) {
    const names = [...new Set(reports.flatMap((one) => Object.keys(one)))];
    const isNumber = (name) => reports.every((one) => typeof (one[name] ?? 0) === "number");
    setText(part.heading, `${REPORT_TITLES[kind] ?? kind} (${reports.length})`);
    keepRows(head, names, (name) => name, (name) => html("th", { scope: "col",
      class: isNumber(name) ? "number" : null }, capitalized(name)), () => {});
    keepRows(body, reports, (one) => one.rank, () => html("tr"), (row, one) =>
      keepRows(row, names, (name) => name, (name) => html("td", {
        class: isNumber(name) ? "number text-nowrap" : "long-text" }),
      (cell, name) => setText(cell, formatField(name, one[name]))));
  }
}

const capitalized = (name) => {
  const words = name.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
};

/** By the units that fields carry in their names. */
function formatField(name, value) {
  if (!known(value)) return value || DASH;
  if (/(^|_)bytes(_|$)/.test(name)) return formatBytes(value);
  if (/(^|_)seconds$/.test(name)) return formatDuration(value);
  return formatValue(value);
}

// The list of runs.

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
    { title: "Validation loss", by: (run) => run.valLoss, number: true },
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
      html("td", { class: "number" }),
      html("td", { class: "number" }));
  }

  function showRow(row, run) {
    const cells = row.children;
    setText(cells[0].firstElementChild, run.name || run.id);
    cells[0].firstElementChild.title = run.id;
    showState(cells[1].firstElementChild, run);
    setText(cells[2], strategyName(run));
    cells[2].title = run.strategy ?? "";
    setText(cells[3], formatCount(run.workers));
    setText(cells[4], formatTime(run.started));
    setText(cells[5], formatDuration(run.seconds));
    showProgress(cells[6].firstElementChild, run, true);
    setText(cells[7], formatValue(run.loss));
    setText(cells[8], formatValue(run.valLoss));
    setText(cells[9], formatCount(run.rowsPerSecond));
    setText(cells[10], formatCount(run.restarts));
  }

  function show() {
    const words = (run) => [run.name, run.id, run.strategy, run.state].join(" ").toLowerCase();
    const shown = sorted(runs.filter((run) => words(run).includes(filter)));
    keepRows(body, shown, (run) => run.id, makeRow, showRow);
    setText(listed.heading, `Runs (${shown.length})`);
    table.hidden = shown.length === 0;
    none.hidden = shown.length > 0;
    search.hidden = runs.length < 2;
    setText(none, runs.length ? "No matching runs." :
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

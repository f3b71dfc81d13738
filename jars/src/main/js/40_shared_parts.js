// What both pages show.

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

/** A strategy without its arguments, which fill a line; the plan has them. */
const strategyName = (run) => run.strategy?.replace(/\(.*$/s, "") ?? DASH;

const TABLE = "table table-striped table-sm table-bordered table-hover";

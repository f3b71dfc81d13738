// The page of a run, and the start of whichever page this is.

const OPTIONAL = new Set(["Validation loss", "Backend", "Topology"]); // not of every run

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
      ...["Loss", "Validation loss", "Samples/s", "Workers", "Strategy", "Backend", "Topology",
        "Started", "Duration", "Restarts"].map(text));
  }

  show(run) {
    showState(this.badge, run);
    showProgress(this.bar, run);
    const texts = { "Loss": formatValue(run.loss), "Validation loss": formatValue(run.valLoss),
      "Samples/s": formatCount(run.rowsPerSecond), "Workers": formatCount(run.workers),
      "Strategy": strategyName(run), "Backend": run.backend ?? DASH,
      "Topology": run.topology ?? DASH,
      "Started": formatTime(run.started), "Duration": formatDuration(run.seconds),
      "Restarts": formatCount(run.restarts) };
    for (const [name, text] of Object.entries(texts)) {
      setText(this.texts[name], text);
      this.texts[name].parentElement.parentElement.hidden = text === DASH && OPTIONAL.has(name);
    }
  }
}

function runPage(root) {
  const back = html("a", { href: root.dataset.runsPage }, "\u2190 All runs");
  const notice = html("div", { class: "alert py-2", hidden: true });
  const parts = [new Facts(), new Curves(), new Speed(), new Ranks(), new Reports(), new Lineage(),
    new Failures(), new Notes(), new Plan()];
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
    const early = run.stopped ? `Stopped after epoch ${run.epoch}: ${run.stopped}` : null;
    const why = run.state === "failed" || run.state === "interrupted" ? run.cause : early;
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

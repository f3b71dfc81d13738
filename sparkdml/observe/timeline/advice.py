"""The summary of a trace as text: the largest costs, and what to do about each."""

from __future__ import annotations

from sparkdml.observe.timeline.summary import (
    COMMUNICATION_LAP,
    ENDING,
    OTHER,
    RESTARTS,
    STARTUP,
    WAITING,
    Summary,
)

ADVICE = {
    "feed wait": "The rows come too slowly. In the first epoch it is Spark that computes them: "
    "persist() the DataFrame, or read fewer columns. Later epochs read the executor's local disk: "
    "put spark.local.dir on a fast one, or use a larger batchSize.",
    "forward": "This is the work itself. More workers share it, cpusPerWorker gives each more "
    "threads, gpusPerWorker=1 a GPU; a larger batchSize often costs less a row.",
    "backward": "This is the work itself. More workers share it, cpusPerWorker gives each more "
    "threads, gpusPerWorker=1 a GPU; parameters that need no training can be frozen.",
    COMMUNICATION_LAP: "A larger batchSize or gradientAccumulation needs fewer agreements an "
    "epoch; fewer workers, or workers on fewer hosts, make each one cheaper.",
    WAITING: "The others wait for this rank in every step. Look at its other costs: a slow feed, "
    "a busy host, or fewer cores than the others have.",
    "optimizer": "Its foreach or fused variant takes all parameters at once: "
    "partial(torch.optim.Adam, fused=True). A larger batchSize needs fewer steps.",
    "checkpoint copy": "Copy less often: Checkpoints(path, every='auto') weighs the cost against "
    "the failures seen. A copy that waits for the last one's write needs a faster store.",
    "validation": "Validate on fewer rows: a smaller fraction in validation=.",
    "merge buffers": "Buffers such as BatchNorm's are averaged after each epoch; longer epochs do "
    "it less often.",
    "callbacks": "on_step_end runs after every step on every rank: do less in it, or do it at the "
    "end of the epoch.",
    "end of epoch": "Ranks that run out of rows wait for the others here. Rows are spread by a "
    "hash of their content: many equal rows all go to one rank.",
    "open communicator": "The ranks find one another and connect, once a run. It takes as long as "
    "the last of them is late: see the other ranks' start-up.",
    STARTUP: "Spark computes and shuffles the rows, and starts the workers' Python, before the "
    "first span. persist() the DataFrame; dml.session_builder() makes Python start with torch "
    "already imported.",
    RESTARTS: "Time from a failure to the next step. Look at the failure marks for its cause.",
    ENDING: "The model goes to the driver, and Spark ends the job. If it failed, this is "
    "how long it took to give it up.",
    OTHER: "Between the recorded parts: the loop itself, and what callbacks do at an epoch's end.",
}
UNKNOWN = "A span of your own: ctx.spans.span(…) within it would show its parts."


def as_text(summary: Summary, title: str, largest: int = 5, notes: tuple[str, ...] = ()) -> str:
    ranks = len(summary.ranks)
    lines = [
        f"{title}: {ranks} rank{'s' * (ranks != 1)}, {summary.wall_seconds:,.1f} s, up to step "
        f"{summary.last_step:,} ({summary.num_steps:,} in the trace), {summary.outcome}",
        *notes,
    ]
    if summary.num_failures or summary.num_restarts:
        lines.append(f"failures: {summary.num_failures}, restarts: {summary.num_restarts}")
    if not summary.costs:
        return "\n".join([*lines, "", "No rank has recorded a span: the run ended before that."])
    for place, cost in enumerate(summary.costs[:largest], start=1):
        worst = ""
        if ranks > 1 and cost.name == WAITING:
            worst = f"; the slowest is {summary.ranks[cost.worst_rank]}"
        elif ranks > 1:
            worst = f"; most on {summary.ranks[cost.worst_rank]}: {cost.worst_share:.1%}"
        lines += [
            "",
            f"{place}. {cost.share:6.1%}  {cost.name} ({cost.seconds:,.2f} s a rank{worst})",
            *wrap(ADVICE.get(cost.name, UNKNOWN)),
        ]
    return "\n".join(lines)


def wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 96, initial_indent="   ", subsequent_indent="   ")

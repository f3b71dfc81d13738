"""Draws docs/images/architecture.svg: `python scripts/draw_architecture.py`.

The processes of a run, the threads in each, and the wires between them. The numbers are those of
the table in docs/architecture.md.
"""

from __future__ import annotations

from pathlib import Path

from draw_strategies import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    Parts,
    box,
    document,
    line,
    words,
)

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT = 1000, 790
LINE = 15  # from one line of text to the next
ROW, TALL = 54, 48  # from one thread to the next, and how high it is
TOP = 44  # of the first processes
DRIVER, WORKER, OTHER = (30, 250), (560, 240), (830, 145)  # columns: x and width

# Each thread's name, its task, and the module of its code.
DRIVER_THREADS = [
    ("the caller's", "checks, launches, watches", "fitting/ runtime/driver/"),
    ("one for each Spark job", "submits it, waits for it", "runtime/driver/jobs.py"),
    ("rendezvous", "key-value server, TCPStore", "comm/rendezvous.py"),
    ("control server", "listens; one thread for each task", "runtime/driver/ network/"),
    ("blob server, relay", "listen; one for each request", "runtime/driver/ checkpoint/"),
    ("commit, beat", "manifests, the run's lock", "checkpoint/committer.py"),
    ("observers", "progress, tab, timeline, trackers", "observe/"),
]
WORKER_THREADS = [
    ("main: the task", "the strategy's loop, torch", "runtime/worker/ strategies/"),
    ("prefetch", "reads and shuffles the next batches", "feed/"),
    ("the communicator's", "Horovod's, gloo's, a topology's", "comm/"),
    ("control: send, receive", "beats, events, questions", "runtime/worker/"),
    ("checkpoint", "writes a snapshot behind the loop", "checkpoint/writer.py"),
    ("rows", "listens, where workers read others'", "feed/shared_spool.py"),
]
SERVER_THREADS = [
    ("server", "messages, shards, answers", "parameter_server/server/"),
    ("talk", "membership, over 4", "parameter_server/server/"),
]


def process(
    column: tuple[int, int], y: float, title: str, threads: list[tuple[str, str, str]], colour: str
) -> Parts:
    x, width = column
    parts = [box(x, y, width, 40 + len(threads) * ROW), words(x + 12, y + 20, title, "t")]
    for row, (name, work, folder) in enumerate(threads):
        top = y + 32 + row * ROW
        parts += [
            box(x + 10, top, width - 20, TALL, colour),
            words(x + 18, top + LINE, name, "t"),
            words(x + 18, top + 2 * LINE - 1, work),
            code(x + 18, top + 3 * LINE - 3, folder),
        ]
    return parts


def plain(x: float, y: float, width: float, height: float, lines: list[str]) -> Parts:
    """A process or a store without threads of ours, or with those of another process."""
    first, *rest = lines
    return [
        box(x, y, width, height),
        words(x + 12, y + 20, first, "t"),
        *(words(x + 12, y + 20 + LINE * (n + 1), each) for n, each in enumerate(rest)),
    ]


def host(x: float, width: float, name: str) -> Parts:
    return [
        f'<rect x="{x:g}" y="8" width="{width:g}" height="{HEIGHT - 16}" rx="10" stroke="{GREY}" '
        'stroke-dasharray="4 4"/>',
        words(x + 20, 28, name),
    ]


def code(x: float, y: float, said: str) -> str:
    return words(x, y, said).replace("<text", '<text font-family="ui-monospace,monospace"')


def wire(way: str, colour: str) -> str:
    """A wire with messages in both directions."""
    drawn = line(way, colour)
    return drawn.replace(" marker-end", f' marker-start="url(#{colour})" marker-end')


def label(x: float, y: float, number: int, said: str, colour: str) -> Parts:
    """The number of a wire, followed by its description."""
    return [
        f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{COLOURS[colour]}"/>',
        words(x, y + 4, str(number), "w m"),
        words(x + 14, y + 4, said),
    ]


def middle_of(row: int, top: float = TOP) -> float:
    return top + 32 + row * ROW + TALL / 2


def wires() -> Parts:
    """Draw from left to right, then from top to bottom."""
    rendezvous, control, blobs = (middle_of(row) for row in (2, 3, 4))
    talk = middle_of(1, 462)
    return [
        wire(f"M280 {rendezvous}H560", "green"),
        *label(318, rendezvous - 14, 5, "rendezvous: HTTP, TCPStore", "green"),
        wire(f"M280 {control}H560", "blue"),
        wire(f"M520 {control}V{talk}H560", "blue"),
        *label(318, control - 14, 4, "control: JSON lines over TCP", "blue"),
        wire(f"M280 {blobs}H560", "blue"),
        *label(318, blobs - 14, 6, "blobs, relay: bytes over TCP", "blue"),
        wire(f"M280 {middle_of(5)}H310Q320 {middle_of(5)} 320 {middle_of(5) + 10}V424", "grey"),
        wire(f"M560 {blobs + 16}H500Q490 {blobs + 16} 490 {blobs + 26}V424", "grey"),
        *label(336, 408, 10, "manifests, parts", "grey"),
        wire(f"M800 {rendezvous}H830", "green"),
        *label(848, rendezvous, 7, "sums: Horovod,", "green"),
        words(842, rendezvous + 4 + LINE, "gloo, MPI, or memory"),
        words(842, rendezvous + 4 + 2 * LINE, "shared on a host"),
        wire(f"M800 {middle_of(5)}H830", "green"),
        *label(848, middle_of(5), 8, "others' rows", "green"),
        wire("M584 408V462", "orange"),
        wire("M830 518H800", "orange"),
        *label(604, 435, 9, "parameter server: ZeroMQ", "orange"),
        wire("M90 462V520", "grey"),
        *label(108, 491, 1, "py4j: jobs, events", "grey"),
        wire("M280 600H430Q440 600 440 610V720Q440 730 450 730H560", "grey"),
        *label(330, 622, 2, "Spark's own:", "grey"),
        words(344, 641, "tasks, closures,"),
        words(344, 656, "results"),
        wire("M680 700V660H815V300H830", "grey"),
        line("M815 300H800", "grey"),
        line("M815 570H800", "grey"),
        line("M815 570H830", "grey"),
        *label(700, 678, 3, "rows as Arrow, results", "grey"),
        line("M900 700V618", "grey", dashed=True),
        words(910, 660, "forks"),
    ]


def draw() -> Parts:
    x, width = DRIVER
    return [
        *host(10, 290, "the driver's host"),
        *host(540, 450, "the executors' hosts"),
        *process(DRIVER, TOP, "driver: Python", DRIVER_THREADS, BLUE),
        *plain(x, 520, width, 160, ["driver: JVM", "SparkContext, scheduler"]),
        *plain(x + 10, 590, width - 20, 80, ["Training tab", "listener and pages in Spark's UI,"]),
        words(x + 22, 640, "attached to the running session"),
        code(x + 22, 656, "jars/"),
        *process(WORKER, TOP, "Python worker: rank 0", WORKER_THREADS, GREEN),
        *plain(
            *OTHER[:1],
            TOP,
            OTHER[1],
            364,
            ["Python worker:", "rank 1, and so on,", "each the same"],
        ),
        *process(WORKER, 462, "Python worker: a server", SERVER_THREADS, ORANGE),
        *plain(
            OTHER[0],
            462,
            OTHER[1],
            148,
            ["Python worker:", "an evaluator, which", "validates snapshots"],
        ),
        *plain(560, 700, 220, 62, ["executor: JVM", "runs the tasks, shuffles the rows"]),
        *plain(800, 700, 175, 62, ["Python daemon", "has torch imported already:"]),
        code(812, 752, "daemon.py"),
        *plain(320, 424, 180, 62, ["storage", "a shared disk, S3, HDFS, …"]),
        code(332, 476, "checkpoint/stores/"),
        *wires(),
    ]


def main() -> None:
    picture = document("the processes of a run", draw(), WIDTH, HEIGHT)
    # Wires have a head at both ends.
    PICTURE.write_text(picture.replace('orient="auto"', 'orient="auto-start-reverse"'))
    print(PICTURE)


if __name__ == "__main__":
    main()

"""The graph of a run's states: its main line, and what is printed and drawn of it."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.checkpoint.drawing import round_unit
from sparkdml.checkpoint.lineage import Lineage
from sparkdml.checkpoint.listing import SCREEN_LINES, metric, moment, size
from sparkdml.checkpoint.manifest import Manifest, Part, Submission, checkpoint_id
from sparkdml.observe import svg

NAMESPACE = "{http://www.w3.org/2000/svg}"
START = 1_767_622_931.0


def node(step, submission=1, parent=None, kind="step", pruned=False, **metrics):
    return Manifest(
        id=checkpoint_id(step, submission, kind),
        parent=parent,
        submission=submission,
        step=step,
        epoch=step // 100,
        kind=kind,
        num_workers=3,
        global_batch=192,
        plan={},
        plan_hash="",
        data={},
        parts=(Part("state.safetensors", None, 1_200_000, ""),),
        metrics=metrics,
        created=START + step,
        pruned=pruned,
    )


def chain(submission, start, steps, **fields):
    """Checkpoints one after the other; the first one's parent is `start`."""
    found = []
    for step in steps:
        found.append(node(step, submission, found[-1].id if found else start, **fields))
    return found


def submission(number, start=None, outcome="failed", **fields):
    reason = fields.pop("reason", "restart" if start else "start")
    return Submission(number, reason, start, 2, START + number, outcome=outcome, **fields)


@pytest.fixture
def forked():
    """Failed at 131 and resumed from 120; resumed by hand from 200, although 240 existed."""
    root = node(0, kind="root")
    first = chain(1, root.id, [40, 80, 120])
    second = chain(2, first[-1].id, [160, 200, 240], loss=0.5)
    third = chain(3, second[1].id, [240, 280], val_loss=0.25, loss=0.3)
    first[0] = dataclasses.replace(first[0], pruned=True)
    third[-1] = dataclasses.replace(third[-1], kind="final")
    return Lineage(
        [*third, root, *second, *first],
        [
            submission(3, second[1].id, "finished", reason="resume"),
            submission(1, cause="rank 1 on b failed: killed", failed_at_step=131),
            submission(2, first[-1].id, "lost", failed_at_step=262),
        ],
    )


def steps(manifests):
    return [(manifest.step, manifest.submission) for manifest in manifests]


# -- the main line -------------------------------------------------------------------------------


def test_the_main_line_leads_from_the_root_to_the_newest(forked):
    assert steps(forked.line()) == [
        *((0, 1), (40, 1), (80, 1), (120, 1), (160, 2), (200, 2), (240, 3), (280, 3)),
    ]


def test_the_nearest_is_on_the_main_line_and_still_there(forked):
    found = {step: forked.nearest(step) for step in (0, 45, 79, 80, 250, 10**9)}
    assert steps(found.values()) == [(0, 1), (0, 1), (0, 1), (80, 1), (240, 3), (280, 3)]
    assert forked.nearest(-1) is None


def test_the_next_on_the_main_line(forked):
    by_place = dict(zip(steps(forked.manifests), forked.manifests, strict=True))
    assert steps([forked.after(by_place[200, 2])]) == [(240, 3)]
    assert forked.after(by_place[280, 3]) is None
    assert forked.after(by_place[240, 2]) is None, "given up: nothing came after it"


def test_a_submission_without_checkpoints_leaves_the_line_where_it_resumed():
    run = chain(1, None, [0, 50, 100])
    again = submission(2, run[1].id, cause="ValueError", failed_at_step=60)
    assert steps(Lineage(run, [submission(1), again]).line()) == [(0, 1), (50, 1)]


def test_nothing_is_a_lineage_too():
    nothing = Lineage([], [])
    assert nothing.line() == []
    assert nothing.nearest(5) is None
    assert nothing.text() == "no checkpoints yet"
    ElementTree.fromstring(nothing.svg())


def test_a_lost_parent_and_a_circle_end_the_line():
    run = [node(50, parent="gone"), node(100, parent=checkpoint_id(50, 1, "step"))]
    lineage = Lineage(run, [submission(1)])
    assert steps(lineage.line()) == [(50, 1), (100, 1)]
    assert "its parent gone is missing or unreadable" in lineage.text()
    circle = Lineage([node(50, parent=checkpoint_id(100, 1, "step")), run[1]], [submission(1)])
    assert steps(circle.line()) == [(50, 1), (100, 1)]


@st.composite
def lineages(draw):
    """Any run: each submission resumes from any earlier checkpoint, and takes a few, or none."""
    manifests, submissions = [node(0, kind="root")], []
    words = st.none() | st.text(max_size=60)
    for number in range(1, draw(st.integers(1, 7)) + 1):
        start = draw(st.sampled_from(manifests)) if number > 1 else manifests[0]
        step, parent = start.step, start.id
        for _ in range(draw(st.integers(0, 12))):
            step += draw(st.integers(1, 40))
            taken = node(step, number, parent, pruned=draw(st.booleans()), loss=draw(st.floats()))
            manifests.append(taken)
            parent = taken.id
        submissions.append(
            submission(
                number,
                start.id if number > 1 else None,
                draw(st.sampled_from(["finished", "failed", "lost", "running"])),
                cause=draw(words),
                failed_at_step=draw(st.none() | st.just(step + 3)),
            )
        )
    return Lineage(draw(st.permutations(manifests)), draw(st.permutations(submissions)))


@given(lineages())
def test_the_line_follows_parents(lineage):
    line = lineage.line()
    assert line[0].kind == "root"
    assert [m.id for m in line[:-1]] == [m.parent for m in line[1:]]
    assert [lineage.after(m) for m in line] == [*line[1:], None]
    last = lineage.submissions[-1]
    assert line[-1].submission == last.number or line[-1].id == (last.resumed_from or line[0].id)


@given(lineages(), st.integers(0, 600))
def test_the_nearest_has_nothing_between_it_and_the_step(lineage, step):
    nearest = lineage.nearest(step)
    usable = [m.step for m in lineage.line() if not m.pruned and m.step <= step]
    assert nearest.step == max(usable)
    assert not nearest.pruned


# -- as text -------------------------------------------------------------------------------------


def test_the_text_tells_the_story(forked):
    assert forked.text().splitlines() == [
        "3 submissions, 9 checkpoints (1 pruned), 9.6 MB; finished at step 280",
        f"▸    submission 1: started with 2 workers, {moment(START + 1)}",
        f"◎    step   0  epoch 0  root   1.2 MB  {moment(START)}",
        f"○    step  40  epoch 0  step   1.2 MB  {moment(START + 40)}                 (pruned)",
        f"●    step  80  epoch 0  step   1.2 MB  {moment(START + 80)}",
        f"●    step 120  epoch 1  step   1.2 MB  {moment(START + 120)}",
        "✕    submission 1 failed at step 131: rank 1 on b failed: killed",
        f"▸    submission 2: resumed from step 120 with 2 workers (restart), {moment(START + 2)}",
        f"●    step 160  epoch 1  step   1.2 MB  {moment(START + 160)}  loss 0.5",
        f"●    step 200  epoch 2  step   1.2 MB  {moment(START + 200)}  loss 0.5",
        "├─╮",
        f"│ ●  step 240  epoch 2  step   1.2 MB  {moment(START + 240)}  loss 0.5",
        "│ ✕  submission 2 was lost with its driver at step 262",
        f"▸    submission 3: resumed from step 200 with 2 workers (resume), {moment(START + 3)}",
        f"●    step 240  epoch 2  step   1.2 MB  {moment(START + 240)}  val_loss 0.25",
        f"■    step 280  epoch 2  final  1.2 MB  {moment(START + 280)}  val_loss 0.25",
        "✓    submission 3 finished",
    ]
    assert str(forked) == repr(forked) == forked.text()


def test_a_restart_that_gets_nowhere_is_told_of():
    run = chain(1, None, [0, 50])
    restarts = [submission(n, run[1].id, cause="ValueError", failed_at_step=60) for n in (2, 3)]
    text = Lineage(run, [submission(1, failed_at_step=60), *restarts]).text()
    assert "failed, last checkpoint at step 50" in text
    assert text.count("resumed from step 50") == 2
    assert text.index("submission 2 failed at step 60: ValueError") < text.index("submission 3:")


def test_ten_thousand_checkpoints_fit_on_a_screen():
    run = [node(0, kind="root"), *chain(1, checkpoint_id(0, 1, "root"), range(10, 100_001, 10))]
    lineage = Lineage(run, [submission(1, outcome="running")])
    text = lineage.text()
    assert "⋮  9,996 checkpoints, steps 30 to 99,980" in text
    assert len(text.splitlines()) < SCREEN_LINES
    assert len(lineage.text(full=True).splitlines()) == 10_001 + 3
    assert len(lineage.svg()) < 10_000


def test_folding_says_how_many_are_pruned():
    run = chain(1, None, range(0, 90, 10))
    one = [dataclasses.replace(m, pruned=m.step == 40) for m in run]
    every = [dataclasses.replace(m, pruned=True) for m in run]
    assert "5 checkpoints, steps 20 to 60 (1 pruned)" in Lineage(one, []).text()
    assert "5 checkpoints, steps 20 to 60 (pruned)" in Lineage(every, []).text()
    assert re.search(r"5 checkpoints, steps 20 to 60$", Lineage(run, []).text(), re.M)


def test_a_cause_can_not_write_to_the_terminal():
    long = "ValueError\n\x1b[31m" + "x" * 500
    lineage = Lineage(chain(1, None, [0]), [submission(1, cause=long)])
    assert "\x1b" not in lineage.text(full=True)
    assert "x" * 500 in lineage.text(full=True)
    assert max(map(len, lineage.text().splitlines())) < 140
    assert lineage.text().splitlines()[-1].endswith("x…")


@given(lineages())
def test_each_checkpoint_and_each_end_is_told_once(lineage):
    rows = lineage.text(full=True).splitlines()[1:]
    told = [
        int(m[1].replace(",", ""))
        for m in (re.search(r"[◎○●■]  +step +([\d,]+)  ", r) for r in rows)
        if m
    ]
    assert sorted(told) == sorted(m.step for m in lineage.manifests)
    ends = [row for row in rows if re.match(r"[│ ]*[✕✓▹] ", row)]
    assert len(ends) == len(lineage.submissions)
    assert len(lineage.text().splitlines()) <= len(rows) + 1


def test_sizes_and_metrics_are_short():
    sizes = [0, 999, 1000, 12_345, 999_999, 123_456_789, 5 * 10**15]
    assert [size(n) for n in sizes] == [
        *("0 B", "999 B", "1.0 kB", "12.3 kB", "1.0 MB", "123 MB", "5,000 TB"),
    ]
    assert metric(node(1, accuracy=0.9, loss=0.123456)) == "loss 0.1235"
    assert metric(node(1, accuracy=0.9)) == "accuracy 0.9"
    assert metric(node(1)) == ""


# -- as a drawing --------------------------------------------------------------------------------


def drawn(lineage):
    return ElementTree.fromstring(lineage.svg())


def boxes(root):
    """Where each text is, by the estimate of its width."""
    for text in root.iter(f"{NAMESPACE}text"):
        words, pixels = "".join(text.itertext()), int(text.get("font-size"))
        width = svg.text_width(words, pixels) * 0.98
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor")]
        left, base = float(text.get("x")) - shift * width, float(text.get("y"))
        yield words, left, base - 0.8 * pixels, left + width, base + 0.2 * pixels


def assert_labels_are_apart(root):
    found = list(boxes(root))
    width, height = float(root.get("width")), float(root.get("height"))
    for words, left, top, right, bottom in found:
        assert left >= 0, words
        assert right <= width, words
        assert top >= 0, words
        assert bottom <= height, words
    for place, (words, left, top, right, bottom) in enumerate(found):
        for other, *box in found[place + 1 :]:
            apart = left >= box[2] or box[0] >= right or top >= box[3] or box[1] >= bottom
            assert apart, f"{words!r} and {other!r} overlap"


def crowded(num_submissions, each, stride):
    manifests, submissions = [node(0, kind="root")], []
    for number in range(1, num_submissions + 1):
        start = manifests[-1 if number % 3 else -each // 2]
        first = start.step + stride
        manifests += chain(number, start.id, range(first, first + each * stride, stride))
        cause = f"rank 0 on host-{number} failed: lost its executor, and much more to say"
        end = manifests[-1].step + 1
        submissions.append(submission(number, start.id, cause=cause, failed_at_step=end))
    return Lineage(manifests, submissions)


@pytest.mark.parametrize("stride", [1, 50, 1_000_000])
@pytest.mark.parametrize("num_submissions", [1, 4, 12, 20, 60])
def test_labels_never_overlap(num_submissions, stride):
    assert_labels_are_apart(drawn(crowded(num_submissions, 200 // num_submissions, stride)))


@settings(max_examples=60)
@given(lineages())
def test_any_lineage_is_drawn(lineage):
    root = drawn(lineage)  # so it is well-formed, whatever the causes hold
    assert_labels_are_apart(root)
    titles = [title.text for title in root.iter(f"{NAMESPACE}title")]
    marked = [t for t in titles if re.match(r"submission \d+ (failed|was lost|is running)", t)]
    assert len(marked) == sum(s.outcome != "finished" for s in lineage.submissions)


def test_the_drawing_explains_what_it_shows_and_nothing_else(forked):
    words = [words for words, *_ in boxes(drawn(forked))]
    legend = ["checkpoint", "pruned", "root", "final", "failure", "main line", "given up"]
    assert [word for word in words if word in legend] == legend
    assert "running" not in words
    assert "failed at step 131" in words
    assert "rank 1 on b failed: killed" in words


def test_all_checkpoints_answer_to_the_pointer(forked):
    titles = [title.text for title in drawn(forked).iter(f"{NAMESPACE}title")]
    assert sum(title.startswith("step ") for title in titles) == 9
    assert any(t.startswith("step 240, epoch 2, step, 1.2 MB, val_loss 0.25") for t in titles)
    assert any(t.startswith("submission 1 failed at step 131: rank 1 on b") for t in titles)


def test_what_users_wrote_is_escaped():
    hostile = '</title><script>alert("1")</script>&'
    lineage = Lineage(
        [node(0, **{hostile: 1.0})], [submission(1, cause=hostile), submission(2, hostile)]
    )
    assert "<script" not in lineage.svg()
    assert hostile in "".join(drawn(lineage).itertext())


def test_colours_follow_the_page_or_the_reader(forked):
    text = forked.svg()
    assert "currentColor" in text
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r'<rect[^>]*width="920"', text), "the background stays the page's"
    # A style inside a page holds for all of the page: it must name this drawing.
    rules = re.search(r"<style>(.*)</style>", text)[1]
    assert all("svg.sparkdml-lineage:root" in rule for rule in re.findall(r"[^{}]*\{color", rules))


def test_a_notebook_gets_the_drawing_and_the_text(forked):
    bundle = forked._repr_mimebundle_()
    assert bundle["text/plain"] == forked.text()
    assert bundle["image/svg+xml"] == forked._repr_svg_() == forked.svg() == bundle["text/html"]
    assert set(forked._repr_mimebundle_(include={"text/plain"})) == {"text/plain"}
    assert "text/html" not in forked._repr_mimebundle_(exclude={"text/html"})


@given(st.integers(1, 10**12), st.integers(2, 12))
def test_steps_of_the_axis_are_round(last, most):
    unit = round_unit(last, most)
    assert str(unit).rstrip("0") in ("1", "2", "5")
    assert last / unit <= most
    assert unit == 1 or last / unit > most / 3

"""The Training tab, live and in the History Server, and a run that must not notice its absence."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import warnings
import zipfile
from pathlib import Path

import pytest

from sparkdml.observe import spark_ui
from sparkdml.observe.spark_ui import NoTrainingTab, SparkUi, jar_path

REPOSITORY = Path(__file__).parents[2]
APPLICATION = Path(__file__).with_name("training_application.py")
EVIL = "<script>alert('x')</script>"
RUN = "run-1 <&>"


def manifest(jar: Path) -> dict[str, str]:
    text = zipfile.ZipFile(jar).read("META-INF/MANIFEST.MF").decode().replace("\r\n ", "")
    return dict(line.split(": ", 1) for line in text.splitlines() if line)


def test_the_committed_jar_is_built_from_the_sources():
    root = REPOSITORY / "jars/src/main"
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\n".encode())
        digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    built_from = manifest(REPOSITORY / "jars/sparkdml-ui.jar")["Source-SHA256"]
    assert built_from == digest.hexdigest(), "run `gradle --offline jar` and commit the jar"


def test_an_installed_package_carries_the_jar(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=60, capture_output=True)
    carried = tmp_path / "sparkdml" / "jars" / "sparkdml-ui.jar"
    assert carried.read_bytes() == jar_path().read_bytes()


@pytest.fixture(scope="module")
def event_log(tmp_path_factory):
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def served(event_log):
    """What the UI of a real application served."""
    finished = subprocess.run(
        [sys.executable, str(APPLICATION), str(event_log)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


class TestLive:
    def test_the_list(self, served):
        (run,) = served["list"]["runs"]
        assert run["id"] == RUN
        assert run["name"] == run["strategy"] == EVIL
        assert (run["state"], run["progress"], run["secondsLeft"]) == ("finished", 1, None)
        assert (run["workers"], run["epoch"], run["epochs"], run["step"]) == (2, 1, 1, 200)
        assert run["loss"] == 0.25, "the epoch's mean, not the last batch"
        assert run["seconds"] == 1.5
        assert run["started"] <= run["ended"] <= time.time()

    def test_the_run(self, served):
        run = served["detail"]
        losses = dict(map(tuple, run["series"]["loss"]))
        assert losses[1] == 1.0
        assert losses[200] == pytest.approx(1 / 200)
        assert losses[50] is None, "a loss that was not finite must be seen"
        assert run["series"]["epochs"] == [
            {"epoch": 1, "step": 200, "loss": 0.25, "val_loss": None, "rows": 3200, "steps": 200}
        ]
        assert run["series"]["logged"] == {EVIL: [[7, 2.5]]}
        assert [rank["rows"] for rank in run["ranks"]] == [1600, 1600]
        assert run["ranks"][1]["seconds"]["compute"] == pytest.approx(8.0)
        assert [rank["straggler"] for rank in run["ranks"]] == [False, True]
        assert run["failures"][0]["traceback"] == EVIL
        assert run["submissions"][0]["hosts"] == [EVIL, EVIL], "as the ranks themselves told"
        assert run["plan"] == {f"plan{EVIL}": EVIL}
        assert "none" in served["unknown"]["error"]

    @pytest.mark.parametrize("page", ["runs page", "run page", "unknown page"])
    def test_what_a_user_named_is_escaped(self, served, page):
        answer = served[page]
        assert answer["status"] == 200
        assert "<script>alert" not in answer["text"]
        assert "&lt;script&gt;alert" in answer["text"]

    def test_pages_say_something_without_a_script(self, served):
        assert "Training" in served["jobs page"]["text"], "no tab beside Spark's own"
        assert re.search(r"<td>finished</td>", served["runs page"]["text"])
        assert "/training/run/?id=run-1+%3C%26%3E" in served["runs page"]["text"]
        assert re.search(r"<td>0\.25000</td>", served["run page"]["text"])

    def test_the_script_and_the_style_come_out_of_the_jar_and_nothing_else(self, served):
        static = REPOSITORY / "jars/src/main/resources/io/sparkdml/ui/static"
        script = served["script"]["text"]
        assert script.startswith("(function () {")
        for source in (REPOSITORY / "jars/src/main/js").glob("*.js"):
            assert source.read_text() in script, source.name
        assert served["style"]["text"] == (static / "training.css").read_text()
        assert served["no file"]["status"] == 404
        assert served["other file"]["status"] in (400, 404)

    @pytest.mark.parametrize(
        ("metric", "value"),
        [
            ("loss", 0.25),
            ("restarts", 0),
            ("staleness", 0),
            ("stepSeconds", 0.05),
            ("rank_1_rowsPerSecond", 8 / 0.06),
            ("run_second_rank_0_stepSeconds", 0.04),
            ("run_run-1_____loss".replace("-", "_"), 0.25),
        ],
    )
    def test_metrics_reach_the_prometheus_servlet(self, served, metric, value):
        pattern = rf"_driver_sparkdml_{metric}_Value\{{[^}}]*\}} (\S+)"
        found = re.search(pattern, served["metrics"]["text"])
        assert found, [each for each in served["metrics"]["text"].split() if "sparkdml" in each]
        assert float(found[1]) == pytest.approx(value)

    def test_a_second_application_in_the_same_jvm_has_its_own_runs(self, served):
        assert [run["id"] for run in served["other application"]["runs"]] == ["other"]

    def test_nothing_was_complained_of(self, served):
        assert served["warnings"] == []


def wait_for_json(address, accept, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found = json.loads(answer.read())
                if accept(found):
                    return found
        except (OSError, ValueError):
            pass  # not up yet
        time.sleep(0.3)
    raise TimeoutError(address)


def spark_class(*arguments, **environment):
    import pyspark

    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    return subprocess.Popen(
        [str(script), *arguments],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("disk", [False, True], ids=["in memory", "on disk"])
def test_the_history_server_shows_the_same(served, event_log, tmp_path, disk):
    lost = event_log / "local-lost.inprogress"  # as a driver leaves it that is killed
    log = (
        (event_log / served["application"]).read_text().replace(served["application"], "local-lost")
    )
    lines = [line for line in log.splitlines(keepends=True) if "ListenerApplicationEnd" not in line]
    lost.write_text("".join(lines))
    port = "18431"
    options = f"-Dspark.history.fs.logDirectory=file://{event_log} -Dspark.history.ui.port={port}"
    if disk:
        options += f" -Dspark.history.store.path={tmp_path}"
    server = spark_class(
        "org.apache.spark.deploy.history.HistoryServer",
        SPARK_DAEMON_CLASSPATH=str(jar_path()),
        SPARK_HISTORY_OPTS=options,
    )
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for_json(f"{base}/api/v1/applications", lambda found: len(found) == 3)
        tab = f"{base}/history/{served['application']}/training"
        runs = wait_for_json(f"{tab}/json/", lambda found: len(found["runs"]) == 3)["runs"]
        assert [run["state"] for run in runs] == ["interrupted", "failed", "finished"]
        lost_tab = f"{base}/history/local-lost/training"
        runs = wait_for_json(f"{lost_tab}/json/", lambda found: len(found["runs"]) == 3)["runs"]
        assert [run["state"] for run in runs] == ["running", "failed", "finished"]
        query = urllib.parse.quote(RUN)
        detail = wait_for_json(f"{tab}/run/json/?id={query}", lambda found: "series" in found)
        assert detail == served["detail"]
        page = urllib.request.urlopen(f"{tab}/", timeout=10).read().decode()
        assert 'data-live="false"' in page
        script = re.search(r'src="([^"]*training\.js[^"]*)"', page)
        assert script
        assert urllib.request.urlopen(base + script[1], timeout=10).status == 200
    finally:
        server.terminate()
        server.communicate(timeout=20)


@pytest.mark.slow
def test_the_plugin_attaches_the_tab_from_the_start(tmp_path):
    program = tmp_path / "application.py"
    program.write_text(
        "import urllib.request\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.getOrCreate()\n"
        "base = spark.sparkContext.uiWebUrl\n"
        "print('RUNS', urllib.request.urlopen(base + '/training/json/').read().split())\n"
        "from sparkdml.observe.spark_ui import attach\n"
        "print('ADDRESS', attach(spark).address() == base + '/training/')\n"
        "print('TABS', urllib.request.urlopen(base + '/jobs/').read().count(b'/training/'))\n"
        "spark.stop()\n"
    )
    submit = spark_class(
        *("org.apache.spark.deploy.SparkSubmit", "--master", "local[1]"),
        *("--jars", str(jar_path()), "--conf", "spark.plugins=io.sparkdml.ui.TrainingPlugin"),
        *("--conf", "spark.ui.port=0", str(program)),
        PYSPARK_PYTHON=sys.executable,
        PYTHONPATH=str(REPOSITORY),
    )
    output, _ = submit.communicate(timeout=90)
    assert submit.returncode == 0, output
    assert "RUNS [b'{', b'\"runs\"', b':', b'[', b']', b'}']" in output, output
    assert "ADDRESS True" in output
    assert "TABS 1" in output


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(spark_ui, "_said", set())


def watch(spark, runs=1):
    """The warnings of some runs that are told to the UI."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(runs):
            ui = SparkUi(spark)
            for step in range(100):
                losses = [[step, 0.5]]
                event = {"kind": "steps", "run": f"r{number}", "time": 1.0, "losses": losses}
                ui.handle(0, event)
            ui.close()
            assert not ui._thread.is_alive()
    return [str(each.message) for each in caught]


class _Conf:
    def get(self, name, default):
        return default


class _ConnectSession:
    conf = _Conf()


_ConnectSession.__module__ = "pyspark.sql.connect.session"


@pytest.mark.usefixtures("nothing_said")
class TestWithoutATab:
    def test_spark_connect_gets_one_line_however_many_runs(self):
        (line,) = watch(_ConnectSession(), runs=3)
        assert "training continues" in line
        assert "Spark Connect" in line

    @pytest.mark.spark
    def test_without_the_jar_one_line_says_where_it_should_be(self, spark, monkeypatch):
        monkeypatch.setattr(spark_ui, "_is_loaded", lambda jvm: False)
        monkeypatch.setattr(spark_ui, "__file__", "/nowhere/sparkdml/observe/spark_ui.py")
        (line,) = watch(spark, runs=2)
        assert "/nowhere/sparkdml/jars/sparkdml-ui.jar is missing" in line

    @pytest.mark.spark
    def test_another_spark_gets_one_line(self, spark, monkeypatch):
        def refuse(jvm, jar):
            jvm.java.lang.Class.forName("org.apache.spark.ui.NoLongerThere")

        monkeypatch.setattr(spark_ui, "_is_loaded", lambda jvm: False)
        monkeypatch.setattr(spark_ui, "_add_to_class_path", refuse)
        (line,) = watch(spark)
        assert f"does not fit Spark {spark.version}" in line
        assert "NoLongerThere" in line

    @pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("py4j")])
    def test_a_jvm_that_goes_away_gets_one_line(self, monkeypatch, error):
        class Bridge:
            def post(self, events):
                raise error

        monkeypatch.setattr(spark_ui, "attach", lambda spark: Bridge())
        (line,) = watch(_ConnectSession(), runs=2)
        assert f"{type(error).__name__}: {error}" in line

    def test_a_jvm_that_hangs_does_not_hold_up_the_end(self, monkeypatch):
        import threading

        release = threading.Event()

        class Bridge:
            def post(self, events):
                release.wait(30)

        monkeypatch.setattr(spark_ui, "attach", lambda spark: Bridge())
        monkeypatch.setattr(spark_ui, "CLOSE_SECONDS", 0.2)
        ui = SparkUi(_ConnectSession())
        ui.handle(0, {"kind": "epoch"})
        began = time.monotonic()
        with pytest.warns(UserWarning, match="has not answered"):
            ui.close()
        assert time.monotonic() - began < 5
        release.set()

    def test_switched_off_by_a_setting_it_is_silent(self, monkeypatch):
        class Conf:
            def get(self, name, default):
                return "false" if name == "spark.sparkdml.ui.enabled" else default

        session = _ConnectSession()
        session.conf = Conf()
        monkeypatch.setattr(spark_ui, "attach", lambda spark: pytest.fail("attached"))
        assert watch(session) == []

    @pytest.mark.spark
    def test_without_a_ui_events_are_still_taken(self, spark):
        assert watch(spark) == []
        assert spark_ui.attach(spark).address() is None
        assert spark_ui.attach(spark).equals(spark_ui.attach(spark)), "attached twice"

    def test_a_loader_that_takes_no_jar_is_told_how_else(self):
        class Java:
            def __getattr__(self, name):
                return self

            def __call__(self, *arguments):
                return self

        class Loader(Java):
            def getParent(self):
                return None

        java = Java()
        java.getContextClassLoader = Loader
        java.isInstance = lambda loader: False
        with pytest.raises(NoTrainingTab, match=r"spark\.plugins=io\.sparkdml\.ui\.TrainingPlugin"):
            spark_ui._add_to_class_path(java, jar_path())

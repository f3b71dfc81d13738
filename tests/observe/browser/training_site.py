"""The Training tab without its JVM: Spark's own page frame, style sheets and headers, with our
script, and JSON that a test sets."""

from __future__ import annotations

import html
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

SOURCES = Path(__file__).parents[3] / "jars" / "src" / "main"
STATIC = SOURCES / "resources" / "io/sparkdml/ui/static"
# What Spark 4.3 sends with every page: a script that breaks this policy would not run there either.
POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-n'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; object-src 'none'; base-uri 'self'; frame-ancestors 'self';"
)
FRAME = """<!DOCTYPE html><html data-bs-theme="light"><head>
<meta http-equiv="Content-type" content="text/html; charset=utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<link rel="stylesheet" href="/static/bootstrap.min.css"/>
<link rel="stylesheet" href="/static/webui.css"/>
<script src="/static/sorttable.js"></script><script src="/static/jquery.min.js"></script>
<script src="/static/bootstrap.bundle.min.js"></script><script src="/static/webui.js"></script>
<script nonce="n">document.documentElement.setAttribute('data-bs-theme',
localStorage.getItem('spark-theme')||
(matchMedia('(prefers-color-scheme:dark)').matches?'dark':'light'))</script>
<link rel="shortcut icon" href="/static/spark-logo.svg"/><title>app - {title}</title></head>
<body class="d-flex flex-column min-vh-100">
<nav class="navbar navbar-expand-md navbar-light bg-light mb-4">
<div class="navbar-header"><div class="navbar-brand"><a href="/">
<img class="spark-logo" src="/static/spark-logo.svg" alt="Spark Logo" height="36"/></a></div></div>
<div class="collapse navbar-collapse"><ul class="navbar-nav me-auto">
<li class="nav-item"><a class="nav-link" href="/jobs/">Jobs</a></li>
<li class="nav-item"><a class="nav-link" href="/stages/">Stages</a></li>
<li class="nav-item active"><a class="nav-link" href="/training/">Training</a></li></ul>
<span class="navbar-text navbar-right d-none d-md-block"><strong class="text-nowrap">app</strong>
<span class="text-nowrap">application UI</span></span>
<button id="theme-toggle" class="btn btn-sm btn-link text-decoration-none fs-5 ms-2 p-0"
 type="button" title="Toggle dark mode"></button></div></nav>
<div class="container-fluid flex-fill"><div class="row"><div class="col-12">
<h3 class="align-bottom text-nowrap overflow-hidden text-truncate">{title}</h3></div></div>
<div class="row"><div class="col-12">
<div id="sparkdml-training" data-page="{page}" data-json="{json}" data-run-page="/training/run/"
 data-runs-page="/training/" data-run-id="{run}" data-live="{live}">Loading</div>
<link rel="stylesheet" href="/training/static/training.css"/>
<script src="/training/static/training.js" defer></script>
</div></div></div></body></html>"""
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class TrainingSite:
    """What the server answers with, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runs: list[dict[str, Any]] = []
        self.details: dict[str, dict[str, Any]] = {}
        self.live = True
        self.failing = False
        self.asked: list[str] = []

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[str, bytes]:
        run = query.get("id", [""])[0]
        if path == "/training/":
            return "text/html", self._page("runs", "Training Runs", "/training/json/", "")
        if path == "/training/run/":
            address = f"/training/run/json/?id={run}"
            title = f"Training Run: {self.details.get(run, {}).get('name', '')}"
            return "text/html", self._page("run", title, address, run)
        if path.endswith("/json/"):
            self.asked.append(path)
            if self.failing:
                raise ConnectionError("the test wants no answer")
            unknown = {"error": f"No run has the id {run}."}
            told = {"runs": self.runs} if not run else self.details.get(run, unknown)
            return "application/json", json.dumps(told).encode()
        if path == "/training/static/training.js":
            return TYPES[".js"], script()
        if path.startswith("/training/static/"):
            return TYPES[Path(path).suffix], (STATIC / Path(path).name).read_bytes()
        return TYPES[Path(path).suffix], _of_spark(Path(path).name)

    def _page(self, page: str, title: str, address: str, run: str) -> bytes:
        live = "true" if self.live else "false"
        values = {"page": page, "title": title, "json": address, "run": run, "live": live}
        text = FRAME
        for name, value in values.items():
            text = text.replace("{" + name + "}", html.escape(value))
        return text.encode()


def script() -> bytes:
    """As build.gradle joins it."""
    texts = [file.read_text() for file in sorted((SOURCES / "js").glob("*.js"))]
    return ('(function () {\n"use strict";\n' + "\n".join(texts) + "})();\n").encode()


def _of_spark(name: str) -> bytes:
    import pyspark

    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-core_*.jar")
    with zipfile.ZipFile(jar) as archive:
        return archive.read(f"org/apache/spark/ui/static/{name}")


@contextmanager
def serve() -> Iterator[TrainingSite]:
    """The site on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            try:
                kind, body = site.answer(address.path, parse_qs(address.query))
            except (KeyError, FileNotFoundError):
                self.send_error(404)
                return
            except ConnectionError:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: tests read `asked`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site = TrainingSite(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, name="training-site")
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

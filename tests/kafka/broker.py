"""A real Kafka broker: one process of Java, a folder of its own, gone without a trace at the end. Used by the tests, and by
``make kafka`` for trying things out.

Its jars come from Maven once and are kept in the user's cache, by hash of ``pom.xml``. One node is broker and controller.
It has two doors on loopback: an open one, whose clients may do everything, and one with TLS and passwords.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import platformdirs

from benchmarks.ports import free_ports

HERE = Path(__file__).parent
POM = HERE / "pom.xml"
JAVA_MIN = 17
#: Limit of a broker's start, which takes 3 s on a free machine, and took 43 s on one with ten times the work that it can do.
START_S = 120.0
STOP_S = 10.0
FETCH_JARS_S = 300.0
CLUSTER = "Zmx1eC10ZXN0cy1jbHVzdGVy"[:22]
#: Users of the door with passwords: ADMIN and SCRAM_ADMIN, who logs in by SCRAM, may do everything; GUEST may only connect.
ADMIN, GUEST, SCRAM_ADMIN = "admin", "guest", "scram-admin"
PASSWORD = "not-a-secret"

_LOGIN = "org.apache.kafka.common.security"
PROPERTIES = f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{{controller}}
listeners=OPEN://{{host}}:{{port}},SECURE://localhost:{{secure}},CONTROLLER://127.0.0.1:{{controller}}
advertised.listeners=OPEN://{{host}}:{{port}},SECURE://localhost:{{secure}}
listener.security.protocol.map=OPEN:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT
inter.broker.listener.name=OPEN
controller.listener.names=CONTROLLER
log.dirs={{data}}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
num.network.threads=2
num.io.threads=2
background.threads=1
num.recovery.threads.per.data.dir=1
log.cleaner.threads=1
log.cleaner.dedupe.buffer.size=4194304
log.cleaner.backoff.ms=200
log.segment.bytes=134217728
log.retention.ms=-1
message.max.bytes=67108864
socket.request.max.bytes=134217728
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{ADMIN};User:{SCRAM_ADMIN}
ssl.keystore.location={{keystore}}
ssl.keystore.password={PASSWORD}
ssl.keystore.type=PKCS12
listener.name.secure.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
listener.name.secure.plain.sasl.jaas.config={_LOGIN}.plain.PlainLoginModule required \\
  user_{ADMIN}="{PASSWORD}" user_{GUEST}="{PASSWORD}";
listener.name.secure.scram-sha-256.sasl.jaas.config={_LOGIN}.scram.ScramLoginModule required;
"""


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    return os.path.join(home, "bin", "java") if home else "java"


@functools.cache
def missing() -> str:
    """Why there can be no broker here; "" if there can."""
    if not shutil.which("mvn"):
        return "Maven is missing (mvn), which fetches the broker"
    try:
        said = subprocess.run([java(), "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return f"Java is missing; Kafka needs Java {JAVA_MIN} or newer"
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < JAVA_MIN:
        return f"Kafka needs Java {JAVA_MIN} or newer, found {said.splitlines()[0] if said else 'nothing'}"
    return ""


def jars(pom: Path = POM) -> Path:
    """Find the folder with the jars that a pom names, by default the broker's; fetch them if they are not there."""
    name = hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    kept = Path(platformdirs.user_cache_dir("flux-kafka-broker")) / name
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=kept.parent))
    command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
    done = subprocess.run(
        [*command, f"-DoutputDirectory={fresh}"], capture_output=True, text=True, timeout=FETCH_JARS_S, check=False
    )
    if done.returncode:
        shutil.rmtree(fresh, ignore_errors=True)
        raise RuntimeError(f"Maven could not fetch what {pom.name} names:\n{(done.stdout + done.stderr)[-2000:]}")
    try:
        fresh.rename(kept)
    except OSError:  # another process was quicker
        shutil.rmtree(fresh, ignore_errors=True)
    return kept


class Broker:
    """One broker in a process of its own.

    ``address``: the open door. ``secure``: the door with passwords. ``certificate``: the file by which clients check it.
    quick: start sooner, at the price of a slower broker. host: the host of the open door."""

    def __init__(self, port: int = 0, heap: str = "512m", quick: bool = False, host: str = "127.0.0.1") -> None:
        self._port, self._heap, self._quick, self._host = port, heap, quick, host
        self.address = self.secure = ""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Broker:
        self._libs = jars()
        self._folder = Path(tempfile.mkdtemp(prefix="flux-kafka-"))
        port, secure, controller = free_ports(3)
        self._port = self._port or port
        self.address, self.secure = f"{self._host}:{self._port}", f"localhost:{secure}"
        self.certificate = self._folder / "broker.pem"
        try:
            keystore = self._certify()
            self._properties = self._folder / "server.properties"
            self._properties.write_text(
                PROPERTIES.format(
                    host=self._host,
                    port=self._port,
                    secure=secure,
                    controller=controller,
                    data=self._folder / "data",
                    keystore=keystore,
                )
            )
            scram = f"SCRAM-SHA-256=[name={SCRAM_ADMIN},password={PASSWORD}]"
            self._run(
                [*self._java("128m", quick=True), "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(self._properties),
                 "--add-scram", scram]
            )  # fmt: skip
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """On the same data, also after ``stop`` or ``kill``."""
        with open(self._folder / "broker.log", "ab") as log:
            # A session of its own: Ctrl-C is for us, and we end it.
            self.process = subprocess.Popen(
                [*self._java(self._heap, self._quick), "kafka.Kafka", str(self._properties)],
                stdout=log, stderr=log, env=_environment(), start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + START_S
        while not self._open():
            if self.process.poll() is not None or time.monotonic() > end:
                said = (self._folder / "broker.log").read_text()[-3000:]
                raise RuntimeError(f"the broker does not start (exit code {self.process.poll()}):\n{said}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _open(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), 0.2).close()
        except OSError:
            return False
        return True

    def _java(self, heap: str, quick: bool = False) -> list[str]:
        return [
            java(), f"-Xmx{heap}", "-XX:+UseSerialGC", f"-XX:TieredStopAtLevel={1 if quick else 4}",
            f"-Djava.io.tmpdir={self._folder}", f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}",
            "-cp", f"{self._libs}/*",
        ]  # fmt: skip

    def _certify(self) -> Path:
        keystore = self._folder / "broker.p12"
        tool = str(Path(java()).with_name("keytool")) if os.sep in java() else "keytool"
        store = ["-keystore", str(keystore), "-storetype", "PKCS12", "-storepass", PASSWORD, "-alias", "broker"]
        self._run(
            [tool, "-genkeypair", *store, "-keyalg", "EC", "-groupname", "secp256r1", "-dname", "CN=localhost",
             "-ext", "san=dns:localhost,ip:127.0.0.1", "-validity", "30"]
        )  # fmt: skip
        self._run([tool, "-exportcert", "-rfc", *store, "-file", str(self.certificate)])
        return keystore

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=START_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _environment() -> dict[str, str]:
    """Copy the environment without the options for JVMs of Spark, which live for seconds: a broker lives for a whole session."""
    return {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make kafka", description="One Kafka broker on this machine, until Ctrl-C.")
    parser.add_argument("--port", type=int, default=9092, help="of the open door (default 9092)")
    parser.add_argument("--topic", action="append", default=[], help="create it: NAME or NAME:PARTITIONS")
    given = parser.parse_args(arguments)
    if why := missing():
        print(why)
        return 1
    signal.signal(signal.SIGTERM, _ended)
    with Broker(given.port) as broker:
        for topic in given.topic:
            name, _, partitions = topic.partition(":")
            create_topic(broker.address, name, int(partitions or 1))
        print(f"with TLS, user {ADMIN}, password {PASSWORD}: {broker.secure}, certificate {broker.certificate}")
        print(f"Kafka at {broker.address}; Ctrl-C ends it and removes its data", flush=True)
        try:
            assert broker.process is not None
            broker.process.wait()
        except KeyboardInterrupt:
            print()
    return 0


def create_topic(address: str, name: str, partitions: int = 1, **settings: Any) -> None:
    """Create a topic. ``settings``: its settings, with underscores for dots."""
    from confluent_kafka.admin import AdminClient, NewTopic

    config = {key.replace("_", "."): str(value) for key, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)])
    made[name].result(30)


def _ended(*_: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

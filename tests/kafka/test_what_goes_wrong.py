"""Brokers that are away, refuse, or have lost records: a typed error in time, or reading that goes on."""

from __future__ import annotations

import logging
import re
import signal
import time
from typing import Any

import cloudpickle
import pytest

import flux
from benchmarks.ports import free_ports
from flux.connectors.kafka.client import cluster as client
from flux.connectors.kafka.errors import BrokerUnreachable, DataLost, NotPermitted
from flux.connectors.kafka.read import partition_reader
from flux.dataflow.source_reader import SourceSettings
from flux.errors import UsageError
from tests.kafka.broker import ADMIN, GUEST, PASSWORD, SCRAM_ADMIN, Broker
from tests.kafka.topics import read_all, reader, reading, send, until


def delete_before(broker: Broker, topic: str, offset: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    place = TopicPartition(topic, 0, offset)
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.delete_records([place])[place].result(30)


def secured(broker: Broker, user: str = ADMIN, password: str = PASSWORD, mechanism: str = "PLAIN") -> dict[str, Any]:
    return {
        "security_protocol": "SASL_SSL", "ssl_cafile": str(broker.certificate), "sasl_mechanism": mechanism,
        "sasl_plain_username": user, "sasl_plain_password": password, "timeout": "10s",
    }  # fmt: skip


def test_nobody_at_the_address_is_an_error_within_the_time_given() -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    with pytest.raises(BrokerUnreachable) as error:
        flux.kafka("clicks", f"127.0.0.1:{port}", timeout="1s")
    assert 0.9 < time.monotonic() - began < 4
    for part in ("'clicks'", f"127.0.0.1:{port}", "1 s", "refused", "Check the addresses"):
        assert part in str(error.value)


def test_a_topic_that_is_not_there_is_an_error(broker: Broker, topic: str) -> None:
    with pytest.raises(UsageError, match=f"{broker.address} has no topic 'no-such-topic'"):
        flux.kafka([topic, "no-such-topic"], broker.address)


@pytest.mark.parametrize(("mechanism", "user"), [("PLAIN", ADMIN), ("SCRAM-SHA-256", SCRAM_ADMIN)])
def test_a_login_over_tls_reads(broker: Broker, topic: str, mechanism: str, user: str) -> None:
    send(broker.address, topic, [b"x" * 50_000] * 100)
    read = reader(topic, broker.secure, **secured(broker, user, mechanism=mechanism))
    assert PASSWORD not in repr(read.how)
    assert (
        read_all(cloudpickle.loads(cloudpickle.dumps(read)), 100).column("value").to_pylist() == [b"x" * 50_000] * 100
    )


@pytest.mark.parametrize(("mechanism", "user"), [("PLAIN", ADMIN), ("SCRAM-SHA-256", SCRAM_ADMIN)])
def test_a_wrong_password_is_an_error_at_once(broker: Broker, topic: str, mechanism: str, user: str) -> None:
    began = time.monotonic()
    with pytest.raises(NotPermitted, match=f"'{user}' by {mechanism}") as error:
        flux.kafka(topic, broker.secure, **secured(broker, user, "guessed-it", mechanism))
    assert time.monotonic() - began < 5
    assert "guessed-it" not in str(error.value)


def test_a_login_without_permission_is_an_error_that_names_both(broker: Broker, topic: str) -> None:
    """Brokers hide topics from logins that may not see them."""
    with pytest.raises((UsageError, NotPermitted), match=f"'{topic}'.*'{GUEST}' by PLAIN"):
        flux.kafka(topic, broker.secure, **secured(broker, GUEST))


def test_a_permission_that_is_taken_away_ends_the_reading(broker: Broker, topic: str) -> None:
    send(broker.address, topic, [b"x"])
    read = reader(topic, broker.secure, **secured(broker))
    guest = cloudpickle.loads(cloudpickle.dumps(read))
    guest.how.security.options["sasl_plain_username"] = GUEST
    with reading(guest) as batches, pytest.raises(NotPermitted, match=f"does not permit reading '{topic}'.*'{GUEST}'"):
        until(batches, 1)


def test_a_certificate_that_nobody_vouches_for_is_an_error_at_once(broker: Broker, topic: str) -> None:
    options = {**secured(broker), "ssl_cafile": None}
    began = time.monotonic()
    with pytest.raises(NotPermitted, match="ssl_cafile"):
        flux.kafka(topic, broker.secure, **options)
    assert time.monotonic() - began < 5


def test_the_wrong_door_is_an_error(broker: Broker, topic: str) -> None:
    with pytest.raises((BrokerUnreachable, NotPermitted), match="security_protocol"):
        flux.kafka(topic, broker.address, **{**secured(broker), "timeout": "1s"})
    from flux.connectors.kafka.errors import KafkaError

    with pytest.raises(KafkaError, match="security_protocol"):
        flux.kafka(topic, broker.secure, timeout="1s")


def test_records_that_are_gone_end_the_reading(broker: Broker, topic: str) -> None:
    send(broker.address, topic, [b"%d" % i for i in range(10)])
    read = reader(topic, broker.address)
    delete_before(broker, topic, 6)
    with (
        reading(read) as batches,
        pytest.raises(DataLost, match="offset 0 was to be read next, but the broker begins with 6"),
    ):
        until(batches, 1)


def test_reading_goes_on_behind_records_that_are_gone_if_asked_to(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(broker.address, topic, [b"%d" % i for i in range(10)])
    read = reader(topic, broker.address, fail_on_data_loss=False)
    delete_before(broker, topic, 6)
    with caplog.at_level(logging.WARNING, "flux.kafka"):
        assert read_all(read, 4).column("offset").to_pylist() == [6, 7, 8, 9]
    assert "reading goes on with offset 6" in caplog.text


def test_a_log_that_ends_before_a_position_is_data_loss_too(broker: Broker, topic: str) -> None:
    send(broker.address, topic, [b"x"] * 3)
    read = reader(topic, broker.address)
    with (
        reading(read, start=17) as batches,
        pytest.raises(DataLost, match="offset 17 was to be read next, but the log ends at 3"),
    ):
        until(batches, 1)


def test_reading_goes_on_after_a_broker_was_killed(broker: Broker, topic: str) -> None:
    send(broker.address, topic, [b"%d" % i for i in range(100)])
    with reading(reader(topic, broker.address, retry_timeout="120s")) as batches:
        got = until(batches, 100)
        broker.kill()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert next(batches) in (None, flux.SILENT)
            time.sleep(0.01)
        broker.start()
        send(broker.address, topic, [b"%d" % i for i in range(100, 200)])
        got += until(batches, 100)
    assert [value for each in got for value in each.batch.column("value").to_pylist()] == [
        b"%d" % i for i in range(200)
    ]


def test_a_broker_that_stays_silent_ends_the_reading(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPT_S", 0.5)
    send(broker.address, topic, [b"x"])
    assert broker.process is not None
    with reading(reader(topic, broker.address, retry_timeout="1s")) as batches:
        until(batches, 1)
        broker.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(BrokerUnreachable, match=f"partition 0 of topic '{topic}' from offset 1 failed for . s"):
                until(batches, 1)
        finally:
            broker.process.send_signal(signal.SIGCONT)


def test_a_broker_that_stays_silent_is_waited_for_where_results_go_on_without(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later lives of the reader wait, too, though they have had no answer themselves."""
    monkeypatch.setattr(client, "ATTEMPT_S", 0.3)
    monkeypatch.setattr(partition_reader, "OVERDUE_S", 0.6)
    send(broker.address, topic, [b"x"])
    assert broker.process is not None
    read = reader(topic, broker.address, retry_timeout="300ms")
    read.configure(SourceSettings(may_be_silent=True))
    with reading(read) as batches:
        (first,) = until(batches, 1)
        assert batches._asked_in_vain_since() is None
        broker.process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            with reading(read, start=first.position) as later:
                while time.monotonic() < stopped_at + 2.5:
                    assert next(batches) in (None, flux.SILENT)
                    assert next(later) in (None, flux.SILENT)
                    time.sleep(0.01)
                since = batches._asked_in_vain_since()
                assert since is not None
                assert since < stopped_at + 0.6
                assert later._asked_in_vain_since() is not None
                assert batches._silence == "its broker does not answer"
                with reading(read) as fresh, pytest.raises(BrokerUnreachable):  # no answer ever: a start that fails
                    until(fresh, 1)
                broker.process.send_signal(signal.SIGCONT)
                send(broker.address, topic, [b"y"])
                assert [until(each, 1)[0].batch.column("value").to_pylist() for each in (batches, later)] == [
                    [b"y"],
                    [b"y"],
                ]
                assert batches._asked_in_vain_since() is None
        finally:
            broker.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"topics": []}, "name of a topic"),
        ({"topics": [""]}, "name of a topic"),
        ({"topics": None}, "name of a topic, a list of names, or a pattern"),
        ({"pattern": "c.*"}, "topics or a pattern, not both"),
        ({"topics": None, "pattern": "c("}, "regular expression, got 'c\\('.*unterminated"),
        ({"topics": None, "pattern": 5}, "regular expression, got 5"),
        ({"topics": None, "pattern": ""}, "regular expression of text"),
        ({"topics": None, "pattern": re.compile(b"c")}, "regular expression of text"),
        ({"bootstrap": ""}, "name a broker"),
        ({"bootstrap": "host:port"}, "'host:port'"),
        ({"bootstrap": "::1"}, "'host:port'"),
        ({"format": "xml"}, "raw, json, csv, avro"),
        ({"format": "avro"}, "needs a schema in Avro"),
        ({"format": "json"}, "needs a schema"),
        ({"format": "json", "schema": "a BINARY"}, "no binary values"),
        ({"format": "json", "schema": "a MAP<STRING, INT>"}, "no fixed fields"),
        ({"format": "json", "schema": "a INT, a INT"}, "twice"),
        ({"format": "json", "schema": "key STRING", "include": ["key"]}, "both have a column 'key'"),
        ({"format": "csv", "schema": "a ARRAY<INT>"}, "cannot read column 'a'"),
        ({"schema": "a INT"}, "without a format"),
        ({"include": ["key"]}, "without a format"),
        ({"include": ["nothing"]}, "some of key, value"),
        ({"bad_records": "ignore"}, "fail, drop, dead_letter:TOPIC"),
        ({"bad_records": None}, "fail, drop, dead_letter:TOPIC"),
        ({"bad_records": "dead_letter:clicks"}, "'clicks' is read itself"),
        ({"bad_records": "dead_letter:bad"}, "no effect without a format"),
        ({"bad_records": "dead_letter:", "format": "csv", "schema": "a INT"}, "must name a topic"),
        ({"isolation": "serializable"}, "read_committed"),
        ({"max_rows_per_second": 0}, "above zero"),
        ({"fetch_bytes": 1}, "fetch_bytes must be"),
        ({"timeout": 0}, "timeout must be above zero"),
        ({"group": ""}, "consumer group"),
        ({"startingOffsets": "latest"}, "no option 'startingOffsets'"),
        ({"security_protocol": "TLS"}, "PLAINTEXT, SSL"),
        ({"ssl_cafile": "/there"}, "ssl_cafile has no effect"),
        ({"sasl_mechanism": "PLAIN"}, "sasl_mechanism has no effect"),
        ({"security_protocol": "SASL_SSL"}, "sasl_mechanism must be"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}, "needs sasl_plain_username"),
        ({"security_protocol": "SSL", "ssl_cafile": "/not/there"}, "cannot use ssl_cafile='/not/there'"),
    ],
)
def test_a_wrong_call_is_refused(options: dict[str, Any], why: str) -> None:
    (port,) = free_ports(1)
    given = {"topics": "clicks", "bootstrap": f"127.0.0.1:{port}", "timeout": "1s", **options}
    if "/not/there" in why:
        import socket

        with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=why):
            flux.kafka(**given)
        return
    with pytest.raises(UsageError, match=why):
        flux.kafka(**given)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from flux.connectors.kafka.client.kafka_python import library

    library.cache_clear()
    for name in [name for name in sys.modules if name == "kafka" or name.startswith("kafka.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "kafka", None)
    try:
        with pytest.raises(UsageError, match=r"pip install 'flux-exchange\[kafka\]'"):
            flux.kafka("clicks", "127.0.0.1:1")
    finally:
        library.cache_clear()

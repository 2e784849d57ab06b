"""Both benchmarks of topics by both doors of a broker, with few rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import kafka_read, kafka_write
from tests.kafka.broker import Broker

ROWS = "2000"


@pytest.mark.long
@pytest.mark.parametrize(
    ("main", "more"), [(kafka_read.main, []), (kafka_write.main, ["--small", "20", "--partitions", "2"])]
)
def test_plain_and_tls_are_measured_in_the_same_run(
    main: Callable[[list[str]], int], more: list[str], broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    secure = ["--secure", broker.secure, "--cafile", str(broker.certificate)]
    options = [broker.address, "--rows", ROWS, "--runs", "1", *more]
    assert main([*options, *secure, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    sides = [(run["door"], run["who"]) for run in told["runs"]]
    assert len(set(sides)) == len(sides)
    assert {door for door, _ in sides} == {"plain", "TLS"}
    assert all(run["rows_per_s"] > 0 for run in told["runs"])
    with pytest.raises(Exception, match=r"refuses|password|[Aa]uthentication"):
        main([*options, *secure, "--password", "wrong"])
    with pytest.raises(SystemExit):
        main([*options, "--secure", broker.secure])

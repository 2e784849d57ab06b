"""Events that are pushed over HTTP while the gateway is killed, counted by a query: each answered one once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest
from gateway_process import GatewayProcess, kill_while_pushing
from striking import until

import flux
from flux.client import Client

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@flux.stage(key="who", partitions=3)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def rows_there(folder: Path) -> Counter[tuple[int, int]]:
    if not folder.exists():
        return Counter()
    table = pyarrow.dataset.dataset(folder, pa.schema([("who", pa.int64()), ("n", pa.int64())]), "parquet").to_table()
    return Counter(zip(table["who"].to_pylist(), table["n"].to_pylist(), strict=True))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_each_answered_event_is_counted_once_though_the_gateway_is_killed(
    spark: Any, tmp_path: Path, kills: int
) -> None:
    gateway = GatewayProcess(tmp_path / "location")
    try:
        with Client(gateway.url, gateway.token) as client:
            client.register_stream("clicks", "who BIGINT, n BIGINT", partitions=2)
        events = flux.events(str(gateway.folder), "clicks", arrival=None)
        query = flux.start(
            echo(events).to_parquet(tmp_path / "out"), checkpointLocation=str(tmp_path / "checkpoint"), workers=2
        )
        pushers = kill_while_pushing(gateway, "clicks", kills)
        expected = Counter((each.who, n) for each in pushers for n in range(each.pushed))
        until(lambda: sum(rows_there(tmp_path / "out").values()) >= sum(expected.values()), "all rows in the folder")
        query.processAllAvailable()
        assert rows_there(tmp_path / "out") == expected
        (described,) = Client(gateway.url, gateway.token).streams()
        assert len(described["readers"]) == 1
        query.stop()
    finally:
        gateway.close()
    assert rows_there(tmp_path / "out") == expected

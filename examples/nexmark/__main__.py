"""One query of Nexmark on generated events: ``python -m examples.nexmark q11 --events 1000000``."""

from __future__ import annotations

import argparse
import importlib
import sys

from examples.flights import start_spark
from examples.nexmark import sql
from examples.nexmark.flows import Nexmark


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query", choices=[f"q{number}" for number in range(23)], metavar="query", help="q0 to q22")
    parser.add_argument("--sql", action="store_true", help="the query as a text for flux.sql, if it can say it")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=20, help="rows of the answer that are printed")
    parser.add_argument("--master", default="local[4]", help="Spark master")
    arguments = parser.parse_args()
    if arguments.sql and arguments.query not in sql.TEXTS:
        parser.error(f"as a text there are {', '.join(sql.TEXTS)}")
    page = importlib.import_module(f"examples.nexmark.{arguments.query}")
    spark = start_spark(arguments.master)
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    nexmark = Nexmark.generated(arguments.events)
    try:
        flow = sql.query(arguments.query, nexmark) if arguments.sql else page.query(nexmark)
        flow.show(arguments.rows, workers=2, partitions=4)
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

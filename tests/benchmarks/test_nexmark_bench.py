"""``flux bench nexmark`` around its runs: printed lines, kept outputs, files of events, the picture, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

import flux
from benchmarks.nexmark import bench, chaos, origins, picture, spark_peer
from benchmarks.nexmark.bench import QueryFigures
from benchmarks.nexmark.checkout import events
from benchmarks.nexmark.outputs import KeptOutput, kept
from controller.operate.cli import app


def test_a_line_has_the_figures_of_one_query() -> None:
    shown = QueryFigures("q5", 1000, 7, 0.5012, 2000, 3, 0, True, 500, 4.0).shown()
    assert list(shown) == [
        "query", "events", "rows", "seconds", "events_per_s", "late", "kills", "equal", "peer_events_per_s", "ratio",
    ]  # fmt: skip
    assert shown["seconds"] == 0.5


def test_a_batch_that_comes_again_is_kept_once(tmp_path: Path) -> None:
    keep = KeptOutput(tmp_path / "q0")
    for sequence in (0, 1, 1, 0):
        keep(pa.record_batch({"n": [sequence]}), flux.Position(2, sequence))
    assert kept(tmp_path / "q0") == pa.table({"n": [0, 1]})
    schema = pa.schema([("n", pa.int64())])
    assert kept(tmp_path, schema) == schema.empty_table()


def test_files_have_the_events_of_the_generator(tmp_path: Path) -> None:
    source = origins.EventFiles(origins.write(tmp_path, events(25_000, 2)))
    source.asked["bid"] |= {"auction"}
    given = events(25_000, 2)
    for partition in range(2):
        read = [each.batch for each in source.read(partition, None)]
        assert [batch.num_rows for batch in read] == [batch.num_rows for batch in given.batches(partition)]
        for batch, wanted in zip(read, given.batches(partition), strict=True):
            for name in ("kind", "dateTime", "auction"):
                assert batch[name].equals(wanted[name])
            assert batch["price"].null_count == batch.num_rows
        assert next(iter(source.read(partition, 2))).batch.equals(read[2])
    flux.testing.check_source(source)


def test_records_of_a_topic_have_the_events_of_the_generator() -> None:
    for batch in events(5_000, 1).batches(0):
        rows = [json.loads(text) for text in origins.records(batch)]
        assert len(rows) == batch.num_rows
        for name in rows[0].keys() - {"dateTime", "expires"}:
            assert [row[name] for row in rows] == batch[name].to_pylist()
        times = pa.array([row["dateTime"] for row in rows]).cast(pa.timestamp("us", "UTC"))
        assert times.equals(batch["dateTime"])
        assert all(batch[name].null_count == batch.num_rows for name in set(batch.schema.names) - rows[0].keys())


def test_no_row_of_the_peer_is_behind_the_watermark_of_the_files_before(tmp_path: Path) -> None:
    """Structured Streaming leaves out such rows, and a peer with fewer rows has less to do."""
    options = chaos.options(100_000) | {"late": 0.0}
    folder = spark_peer._files(tmp_path / "peer", events(100_000, 1, **options), 6, ends=True)
    *files, last = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    seen = None
    for path in files:
        times = pq.read_table(path, columns=["dateTime"])["dateTime"].cast(pa.int64())
        if seen is not None:
            assert pc.min(times).as_py() > seen - 4_000_000
        seen = pc.max(times).as_py()
    assert sum(pq.read_metadata(path).num_rows for path in files) == 100_000
    assert pq.read_table(last)["dateTime"].to_pylist() == [origins.END] * 3


def reported(lines: list[QueryFigures], *told: str) -> bench.Report:
    run = bench._Run(None, 1000, "generator", 2, True, Path(), Console(quiet=True), list(told))
    return bench._report(lines, run, with_chaos=False)


def test_the_last_line_tells_whether_all_answers_are_equal() -> None:
    good, bad = QueryFigures("q5", 1000, equal=True), QueryFigures("q6", 1000, equal=False)
    assert reported([good]).figures["equal"] is True
    assert reported([good]).failed is None
    report = reported([good, bad], "q6: (1,) is missing")
    assert report.figures["equal"] is False
    assert report.failed == "answers differ from the oracle's: q6; q6: (1,) is missing"


def test_a_peer_with_other_rows_makes_the_run_fail_and_not_the_answers_of_flux() -> None:
    report = reported([QueryFigures("q5", 1000, equal=True)], "Structured Streaming, q5: (1,) is missing")
    assert report.figures["equal"] is True
    assert report.failed == "Structured Streaming, q5: (1,) is missing"


def test_each_query_stands_beside_the_published_figure_of_flink() -> None:
    queries = reported([QueryFigures(f"q{number}", 1, equal=True) for number in range(23)]).figures["queries"]
    assert [line["query"] for line in queries if line["flink_events_per_s_per_core"] is None] == ["q6"]
    assert queries[9]["flink_events_per_s_per_core"] == 13_768


def test_the_picture_has_a_bar_for_each_query_and_system(tmp_path: Path) -> None:
    lines = [
        QueryFigures("q5", 1, events_per_s=10**6, peer_events_per_s=10**5),
        QueryFigures("q6", 1, events_per_s=10**5),
    ]
    picture.drawer([line.shown() for line in lines], cores=2)(tmp_path / "nexmark.png")
    assert (tmp_path / "nexmark.png").stat().st_size > 10_000


def test_the_table_of_the_readme_has_a_line_for_each_query() -> None:
    lines = [
        QueryFigures("q5", 1, events_per_s=1_500_000, peer_events_per_s=100_000),
        QueryFigures("q6", 1, events_per_s=99_600),
    ]
    _, _, *rows = picture.table([line.shown() for line in lines], 2, "80dd9ee").splitlines()
    assert rows == [
        "| q5 | 1,500 k | 100 k | 15.0 | 750 k | 75 k | 10.1 | 80dd9ee |",
        "| q6 | 100 k |  |  | 50 k |  |  | 80dd9ee |",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--queries", "q23"], "there are q0 to q22"),
        (["--chaos", "--peer", "spark"], "takes neither --peer"),
        (["--chaos", "--source", "parquet"], "nor --source"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "nexmark", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())

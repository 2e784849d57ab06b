"""``flux bench nexmark`` around its runs: printed lines, kept outputs, files of events, the picture, and wrong arguments."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import flux
from benchmarks.nexmark import origins, picture
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
    source = origins.EventFiles(origins.write(25_000, 2, tmp_path))
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


def test_the_picture_has_a_bar_for_each_query_and_system(tmp_path: Path) -> None:
    lines = [
        QueryFigures("q5", 1, events_per_s=10**6, peer_events_per_s=10**5),
        QueryFigures("q6", 1, events_per_s=10**5),
    ]
    picture.drawer([line.shown() for line in lines])(tmp_path / "nexmark.png")
    assert (tmp_path / "nexmark.png").stat().st_size > 10_000


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

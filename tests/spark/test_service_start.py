"""Parts of a service's start that cost the processors nothing they need not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flux.eventlog.streams import StreamCatalogue
from flux.outputs.sink import OutputLogSink
from flux.registry.definitions import RegisteredQuery
from flux.vault.location import Folder
from spark_integration.service import command
from spark_integration.service.service_plan import ServicePlan
from spark_integration.tasks.worker_tasks import collect_in_tasks

pytestmark = pytest.mark.spark


def test_workers_load_neither_spark_nor_the_compiler_for_the_plan_of_a_service() -> None:
    program = (
        "import sys; from spark_integration.service import shipped; "
        "print(*[each for each in sys.modules if each.startswith(('pyspark', 'controller', 'spark_integration.query'))])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def parents(_: Iterable[int]) -> Iterator[int]:
    yield os.getppid()


def test_workers_are_forked_by_the_process_that_was_loaded_for_them(spark: Any) -> None:
    """Another one was loaded: Spark has one for each environment of its tasks, and that of workers is that of Spark's SQL."""
    loaded = command._load_workers(spark)
    assert loaded
    assert set(collect_in_tasks(spark, parents, 2)) <= set(loaded)


def test_the_analyser_is_warmed_up_by_a_text_that_is_read_to_its_end(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Folder(tmp_path)

    def sink_of(query: RegisteredQuery) -> OutputLogSink:
        return OutputLogSink(place, query.name)

    with caplog.at_level("INFO", "flux"):
        ServicePlan(spark, str(tmp_path), StreamCatalogue(place), (), sink_of).warm_up()
    assert "not warmed up" not in caplog.text
    assert not list(tmp_path.glob("streams*")), "nothing is registered for it"

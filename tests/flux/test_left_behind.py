"""The look of ``tests/conftest.py`` at objects that a query leaves in Python workers."""

from __future__ import annotations

import pytest

from tests.conftest import contexts_of_queries

REAPER, TRAFFIC, PYTHON = "ZMQbg/Reaper", "ZMQbg/IO/0", "python"
PID = 32_764


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        ({}, 0),
        ({PID: PYTHON}, 0),
        ({PID: PYTHON, 32_765: REAPER, 32_766: TRAFFIC}, 1),
        ({PID: PYTHON, 32_765: PYTHON, 32_766: REAPER, 32_767: TRAFFIC}, 0),
        ({PID: PYTHON, 32_765: REAPER, 32_766: TRAFFIC, 32_767: PYTHON, 311: REAPER, 312: TRAFFIC}, 1),
        ({PID: PYTHON, 310: REAPER, 311: TRAFFIC, 312: PYTHON}, 0),
    ],
    ids=["gone", "idle", "in a query", "with pyzmq's own", "in a query, with pyzmq's own", "behind the highest number"],
)
def test_a_context_of_pyzmq_itself_is_none_of_a_query(threads: dict[int, str], expected: int) -> None:
    """Number threads below and above the process: three tests failed where threads had lower numbers than their
    process."""
    assert contexts_of_queries(PID, threads) == expected

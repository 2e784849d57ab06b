"""The laws of losses of data (``losing_logs.LogFaults``): the rows that count although a log has lost needed records, and the
errors with which a query may end.

every row counted once at the sink   each record that a life could still read, or that was applied everywhere, counts once, and
                                     none counts twice; a record that was lost while it was needed counts once or not at all
lost records are told                without ``goes_on``, a query ends with DataLost or has the record, if retention took it or it
                                     was in committed steps; and the query ends so if its topic was made anew while the query was
                                     down. No step goes on without its rows
no run fails                         a query that goes on ends with DataLost only if it cannot know the numbers of its output
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flux.errors import DataLost
from tests.simulation.stage_kinds import Row
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.flows import Node
    from tests.simulation.losing_logs import Logs
    from tests.simulation.run import Simulation

#: Words of the error of a query that should go on after a loss, and cannot.
UNKNOWN_NUMBERS = "Start with another checkpointLocation to read what the log has"


def _logs(sim: Simulation) -> list[Logs]:
    return [
        source.logs for source in sim.dataflow.sources if source.logs is not None and source.logs.faults is not None
    ]


def explains(sim: Simulation, error: Exception) -> bool:
    """Tell whether a loss of data is a reason for the query to end with this error."""
    if not isinstance(error, DataLost):
        return False
    found = [
        logs.faults
        for logs in _logs(sim)
        if logs.faults is not None and (logs.needed() or logs.made_anew() or logs.taken_soon())
    ]
    return any(not faults.goes_on for faults in found) or (bool(found) and UNKNOWN_NUMBERS in str(error))


def check_told(sim: Simulation) -> None:
    """Check, at the end of a query that went well, that no loss should have ended it."""
    for logs in _logs(sim):
        if logs.faults is not None and not logs.faults.goes_on and logs.made_anew():
            raise Violation("lost records are told", "a topic was made anew, and the query went on")


def sure_rows(sim: Simulation, sink: Node, version: dict[tuple[str, int], int]) -> list[Row]:
    """Compute the rows of a sink that count for sure."""
    logs = _logs(sim)
    for each in logs:
        each.sure = True
    try:
        return sink.model(version)
    finally:
        for each in logs:
            each.sure = False


def sure_totals(
    sim: Simulation,
    sink: Node,
    version: dict[tuple[str, int], int],
    found: dict[int, tuple[int, int]],
    most: dict[int, tuple[int, int]],
) -> bool:
    """Tell whether the counts of a sink lie between the counts of the rows that count for sure and the counts of all rows."""
    least = Counter(key for _, key, _ in sure_rows(sim, sink, version))
    keys = {*found, *least}
    return all(least[key] <= found.get(key, (0, 0))[0] <= most.get(key, (0, 0))[0] for key in keys)

"""The scripted flows. The docstring of each flow is the heading of its transcript."""

from __future__ import annotations

from collections.abc import Callable

from controller.balance.load import Move
from tests.simulation.faults import Faults
from tests.simulation.flows import spark_chain
from tests.simulation.worker_process import WorkerProcess
from tests.transcripts.kit import PATIENT, Flow, flow


def leader(run: Flow, stage: int, partition: int) -> WorkerProcess:
    worker = run.sim.leader_of(stage, partition)
    assert worker is not None
    return run.sim.by_node[worker]


def first_batch() -> Flow:
    """Send the first batch of a stream. The producer greets each worker that has a partition of the consumer; the consumer
    answers with the place to begin and its room; the batch goes out, is applied, acked, and forgotten. Each partition has
    one replica here, so each step is committed at once."""
    run = flow("0/0", "0/1", "0.0", copies=1, slots=2, batches=1)
    run.until_told("of stream 0.0: every replica")
    run.keep("stream 0.1", "of 0.1", "the end", "Stop ")
    return run


def second_replica_follows() -> Flow:
    """Let the second replica of a partition follow the order. The primary writes each step into the order log and applies
    it at once; the output of the step is held back until the secondary has received the entry. The secondary applies the
    same step later, and its output stays in its log: no consumer reads from there."""
    run = flow("0/0", "1.0", batches=3)
    run.until_told("step 3 of watched1/0")
    run.until_told("worker 1                knows step 2 of watched1/0 to be committed")
    run.keep("stream 0.", "Ack ")
    return run


def take_over() -> Flow:
    """Kill the primary of watched1/0. The controller sees the connection close and makes a table without this worker. The
    secondary is primary from then on: it goes on with the step after the last one that it has applied, in the order
    that the dead primary had sent, and consumers read from it."""
    run = flow("0/0", "1.0", slots=2)
    run.until_ms(20)
    run.skip()
    run.sim.crash(leader(run, 0, 0), back=False)
    run.until_told("is primary of watched1/0")
    run.until_more_ms(4)
    run.keep("stream 0.", "Ack ")
    return run


def repair() -> Flow:
    """Lose a worker, after which watched1/0 gets a second replica again. Retain: the new replica is in the table, without
    state, and producers keep the rows that it will need; every process confirms the epoch. Copy: the primary sends its
    state as of the end of a step. Live: the new replica follows the order. Safe: it has received all that is committed,
    and counts."""
    run = flow("0/0", "tables", faults=PATIENT, batches=30)
    run.until_ms(20)
    run.sim.crash(leader(run, 0, 0), back=False)
    run.until_told("Installed")
    run.until_told("repair of watched1/0")
    run.until_more_ms(3)
    run.keep("OrdersSeen", "Data ", "applies step", "Orders ", "to be committed", "reads batch")
    return run


def move() -> Flow:
    """Ask to move the primary of watched1/0. A replica is added at the target as in a repair; then the next epoch leaves the
    source out, and the target is primary by the rules of a take-over. The old primary is not told beforehand."""
    run = flow("0/0", "tables", faults=PATIENT, batches=60)
    run.until_ms(15)
    run.skip()
    sim, table = run.sim, run.sim.controller.table
    assert table is not None
    source, other = (replica.worker for replica in table.stages[0][0])
    (target,) = set(sim.by_node) - {source, other}
    sim.server.perform(sim.controller.move([Move(0, 0, source, target)], "by hand", sim.world.now))
    run.until_told("move of watched1/0")
    run.until_told("has no replica of watched1/0")
    run.until_told(f"worker {target}                is primary")
    run.keep("OrdersSeen", "Data ", "applies step", "Orders ", "to be committed", "reads batch")
    return run


def protect() -> Flow:
    """Ask for one active replica of each partition of watched1 and a standby, in place of two active ones. To the
    controller each partition lacks a standby, which is added as in a repair. When the standbys of all partitions are safe,
    one table drops the active replicas that are too many; the primaries stay."""
    run = flow("0/0", "tables", faults=PATIENT, batches=60)
    run.until_ms(15)
    run.skip()
    sim = run.sim
    number = sim.controller.next_request()
    sim.server.perform(sim.controller.protect(0, None, "standby", sim.world.now, number))
    run.until_told("protected of watched1")
    run.until_told("has no replica of watched1/0")
    run.keep("OrdersSeen", "Data ", "applies step", "Orders ", "to be committed", "reads batch")
    return run


def drain() -> Flow:
    """Ask worker 0 to leave. Its source and its partitions move away stage by stage, by the same steps as in any move.
    Replicas of one stage share tables, and their states are copied one after the other. Then the worker is told to go."""
    run = flow("tables", faults=PATIENT, batches=60, slots=3)
    run.until_ms(15)
    run.skip()
    sim = run.sim
    sim.server.perform(sim.controller.drain(0, sim.world.now))
    run.until_told("worker 0 -> controller  Goodbye")
    run.about = {"tables", *(f"{stage}/{partition}" for stage in (0, 1) for partition in (0, 1)), "0.0", "0.1"}
    run.keep(
        "OrdersSeen", "Data ", "applies step", "Orders ", "committed", "Ack ", "Hello ", "Resume ", "ReadsElsewhere ",
        "TableSeen", "NewTable", "TableChanged", "reads batch", "forgets", "credit", "Install", "ReplicaCaughtUp",
    )  # fmt: skip
    return run


def retry_of_an_ingress_task() -> Flow:
    """Fail the task that reads partition 0 of a DataFrame, and let Spark start it again. The new attempt is a new
    incarnation of the stream's producer: consumers tell it which rows they have, it reads the same rows again from the
    start, sends only the missing ones, and compares the checksums of the rest."""
    run = flow("0.0", "0/0", dataflow=spark_chain, copies=1, slots=1, batches=10, faults=Faults(read_s=0.002))
    run.until_told("applies step 5 of sink0/0")
    attempt = run.sim.spark.jobs[0].running[0][0]
    run.sim.spark.failed(attempt)
    run.until_told("GoodbyeSeen")
    run.keep()
    return run


def source_that_seeks() -> Flow:
    """Kill the worker that reads partition 0 of a source; another worker reads it from then on. Consumers tell the new reader
    how far they have come; it begins in the middle, at a batch that every replica of every consumer has applied."""
    run = flow("0.0", batches=40, faults=PATIENT)
    run.until_ms(25)
    run.skip()
    table = run.sim.controller.table
    assert table is not None
    run.sim.crash(run.sim.by_node[table.sources[0][0]], back=False)
    run.until_told("of stream 0.0: rows")
    run.until_more_ms(6)
    run.keep("Ack ")
    return run


def end_of_input() -> Flow:
    """Reach the end of the input. The last entry of a stream has no rows and goes to every partition. A partition whose
    streams have all ended applies one more step, in which its operator finishes, and ends its own streams. When the
    partitions of the last stage have finished, the query has finished, too."""
    run = flow("0/0", "1/0", "0.0", "0.1", "1.0", "1.1", copies=1, slots=1, batches=2)
    run.until_told("reads batch 1")
    run.skip()
    run.sim.run()
    run.keep("forgets", "Ack ")
    return run


def divergence() -> Flow:
    """Make the second replica of watched1/0 give other output than the primary. Both keep a running checksum of their
    output; the primary compares the two with each answer and reports a difference; the controller then drops the replica and
    has another made from the primary's state."""
    run = flow("0/0", "tables", faults=PATIENT)
    run.until_ms(14)
    run.skip()
    sim, table = run.sim, run.sim.controller.table
    assert table is not None
    second = sim.by_node[table.stages[0][0][1].worker].core
    assert second is not None
    sim.divergences._disturb((0, 0), second.replicas[0, 0])
    run.until_told("divergence")
    run.keep("Data ", "to be committed", "Orders ", "reads batch")
    run.until_told("repair of watched1/0")
    run.keep(
        "Data ",
        "committed",
        "Orders ",
        "reads batch",
        "applies step",
        "OrdersSeen",
        "NewTable",
        "TableChanged",
        "TableSeen",
    )
    return run


def fenced_worker_returns() -> Flow:
    """Stop a worker for longer than the time-out: it is given up alive, and the second replica takes over. When the worker
    goes on, it still believes that it is primary. Its messages have no effect, as its epoch is old. The worker is not in
    the newest table, and ends."""
    run = flow("0/0", faults=PATIENT, batches=600)
    run.until_ms(20)
    run.skip()
    leader(run, 0, 0).pause(0.4)
    run.until_told("was given up meanwhile")
    run.until_more_ms(2)
    run.keep("Data ", "to be committed", "Orders ", "OrdersSeen", "applies step", "reads batch")
    return run


def back_pressure() -> Flow:
    """Stop a worker for 50 ms. The producer sends to this worker until its credit is used up, and goes on for the other one;
    then the log is full, because no batch may be forgotten before all workers have applied it, and the producer stops
    reading. Nothing is dropped, and all goes on by itself."""
    run = flow("0.0", copies=1, slots=2, batches=60, log_max_bytes=6000, credit_max_bytes=4000)
    run.until_ms(10)
    run.skip()
    table = run.sim.controller.table
    assert table is not None
    reader = table.sources[0][0]
    (slow,) = (process for worker, process in run.sim.by_node.items() if worker != reader)
    slow.pause(0.05)
    run.until_told("is open again")
    run.keep()
    return run


def lost_message() -> Flow:
    """Break a connection with batches under way. The next message on the new connection is of a handshake that the
    consumer does not know there: it asks for a greeting, and tells where to go on. Batches that it has had already do not
    come again."""
    run = flow("0.0", copies=1, slots=2, batches=20)
    run.until_ms(24)
    run.skip()
    table = run.sim.controller.table
    assert table is not None
    reader = run.sim.by_node[table.sources[0][0]]
    (other,) = (worker for worker in reader.links if worker != reader.node)
    run.until(lambda: len(reader.links[other]._up) > 1)
    reader.links[other].break_()
    run.until_told("Resume")
    run.until_more_ms(4)
    run.keep()
    return run


FLOWS: dict[str, Callable[[], Flow]] = {
    make.__name__: make
    for make in (
        first_batch, second_replica_follows, take_over, repair, move, protect, drain, retry_of_an_ingress_task,
        source_that_seeks, end_of_input, divergence, fenced_worker_returns, back_pressure, lost_message,
    )
}  # fmt: skip

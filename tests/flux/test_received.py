"""The places of partitions in a stream, against a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flux.exchange.inbound import PartitionProgress

PARTITIONS = st.integers(0, 4)
EVENTS = st.one_of(
    st.tuples(st.just("reach"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("join"), PARTITIONS, st.integers(0, 30)),
    st.tuples(st.just("leave"), PARTITIONS, st.just(0)),
)


@given(st.lists(EVENTS, max_size=40))
def test_it_says_what_a_number_for_each_partition_would(events: list[tuple[str, int, int]]) -> None:
    received, model = PartitionProgress(), {0: 0}
    for kind, which, at in events:
        others = [partition for partition in model if partition != which]
        if kind == "reach":
            if model:
                received.reach(which)
            model = {partition: max(value, which) for partition, value in model.items()}
        elif kind == "join":
            received.join(which, at, others)
            model[which] = at
        elif which in model:
            received.leave(which, others)
            del model[which]
        assert {partition: received[partition] for partition in model} == model
        if model:
            assert (received.least, received.most) == (min(model.values()), max(model.values()))
            for end in range(32):
                assert received.behind(end, model) == [p for p, value in model.items() if value < end]

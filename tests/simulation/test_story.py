"""The story of a run tells its events in order, and changes nothing."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.simulation.faults import Faults
from tests.simulation.flows import chain
from tests.simulation.last_look import last_look
from tests.simulation.run import Simulation, outcome
from tests.simulation.stage_kinds import Watched
from tests.simulation.story import Story
from tests.simulation.variants import sends_before_it_is_committed


def short_run(faults: Faults | None = None) -> Simulation:
    return Simulation(0, faults or Faults(), 2, 3, lambda ledger: chain(ledger, (Watched,), 2, batches=40))


def texts(story: Story, *about: str) -> list[str]:
    return [" ".join(event.text.split()) for event in story.told(set(about) or None)]


def test_a_told_run_is_the_same_run() -> None:
    for seed in range(3):
        plain, told = Simulation(seed), Simulation(seed)
        Story(told)
        assert dataclasses.astuple(outcome(plain)) == dataclasses.astuple(outcome(told))
        assert (plain.world.now, plain.world.events) == (told.world.now, told.world.events)


def test_the_story_of_a_broken_law_ends_where_it_broke_and_leaves_out_other_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sends_before_it_is_committed(monkeypatch)
    law = "nothing is given out before it is committed"
    told_runs = ((sim, Story(sim), outcome(sim)) for sim in map(Simulation, range(40)))
    sim, story, result = next(told for told in told_runs if told[2].law == law)
    concerned = story.concerned(result.detail)
    named = re.search(r"stream (\d+)\.(\d+) was given out, made by step (\d+) of \((\d+), (\d+)\)", result.detail)
    assert named is not None
    edge, producer, step, stage, partition = named.groups()
    assert {f"{edge}.{producer}", f"{stage}/{partition}"} <= concerned
    told = texts(story, *concerned)
    where = f"{sim.plan.stages[int(stage)].name}/{partition}"
    assert any(f"applies step {step} of {where}" in text for text in told)
    assert any(f"{where}: primary on worker" in text for text in told)
    assert 0 < len(told) < len(story.events)


def test_faults_and_the_take_over_that_follows_are_told_whatever_they_concern() -> None:
    sim = short_run()
    story = Story(sim)
    end = sim.world.now + 0.02
    sim.run_until(lambda: sim.world.now >= end)
    leader = sim.leader_of(0, 0)
    assert leader is not None
    victim = sim.by_node[leader]
    next(iter(victim.links.values())).break_()
    victim.control.cut_up(0.1)
    sim.crash(victim)
    sim.run()
    told = texts(story, "nothing of the kind")
    crash = told.index(f"worker {leader} dies")
    assert any("breaks" in text and "messages on it are lost" in text for text in told[:crash])
    assert f"nothing gets from worker {leader} to controller for 100 ms" in told[:crash]
    assert told.index("controller makes the table of epoch 1") > crash
    assert any(re.search(r"is primary of watched1/0 \(epoch [12], ", text) for text in texts(story))


def test_times_only_grow_and_each_event_names_who_it_is_about() -> None:
    sim = short_run()
    story = Story(sim)
    sim.run()
    times = [event.at for event in story.events]
    assert times == sorted(times)
    steps = [event for event in story.events if "applies step" in event.text]
    assert steps
    assert all(event.about for event in steps)


def test_a_lost_message_is_told_as_lost() -> None:
    sim = short_run(Faults(calm_after_s=1.0, loss_probability=0.2))
    story = Story(sim)
    sim.run()
    lost = [text for text in texts(story) if text.endswith("(lost)")]
    assert len(lost) >= sim.counts["messages lost alone"] > 0


def test_a_last_look_says_what_everybody_waits_for_where_a_law_is_concerned() -> None:
    sim = short_run()
    story = Story(sim)
    sim.run_until(
        lambda: any(" has no credit left " in event.text or "OrdersSeen" in event.text for event in story.events)
    )
    leader = sim.leader_of(0, 0)
    lines = [" ".join(line.split()) for line in last_look(sim, story.words, {"0/0"})]
    assert any(re.match(rf"worker {leader} watched1/0: primary, \d+ steps applied", line) for line in lines)
    assert not any("watched1/1" in line for line in lines)
    consumers = [" ".join(line.split()) for line in last_look(sim, story.words, {"1.0"})]
    assert any(f"worker {leader} log of stream 1.0: " in line for line in consumers)
    assert any(" sink" in line for line in consumers), "who reads the stream"

"""Both ends prove the secret, nothing useful is said before, and no message is good a second time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from flux.errors import ProtocolError
from flux.wire.handshake import (
    ACCEPTED,
    CHALLENGE,
    GREETED_MAX,
    GREETING,
    NONCE_BYTES,
    PROOF,
    Caller,
    Gate,
    Tickets,
    mac,
    ticket,
)

SECRET, ENDPOINT = b"of this query", "tcp://10.0.0.1:4711"


def drawing(begin: int = 0) -> Callable[[int], bytes]:
    numbers = itertools.count(begin)
    return lambda size: next(numbers).to_bytes(size, "big")


def caller(secret: bytes = SECRET, endpoint: str = ENDPOINT, begin: int = 1000) -> Caller:
    return Caller(secret, endpoint, drawing(begin))


def gate(secret: bytes = SECRET, endpoint: str = ENDPOINT) -> Gate:
    return Gate(secret, endpoint, drawing())


def meet(one: Caller, other: Gate, connection: str = "c") -> None:
    proof = one.hear([other.hear(connection, [one.greeting()])])
    assert proof is not None
    accepted = other.hear(connection, [proof])
    assert accepted == ACCEPTED
    assert one.hear([accepted]) is None


def test_two_that_know_the_secret_meet_and_understand_each_other() -> None:
    one, other = caller(), gate()
    meet(one, other)
    assert one.session is not None
    there = other.sessions["c"]
    for said in (b"first", b"", b"third"):
        assert bytes(there.open([one.session.seal(said)])) == said
        assert bytes(one.session.open([there.seal(said)])) == said


def test_the_secret_is_in_nothing_that_is_said() -> None:
    one, other = caller(), gate()
    challenge = other.hear("c", [one.greeting()])
    proof = one.hear([challenge])
    assert proof is not None
    assert not any(SECRET in said for said in (one.ticket, one.greeting(), challenge, proof))


# ---- strangers without the secret


def test_who_does_not_know_the_secret_hears_a_challenge_and_no_more() -> None:
    other = gate()
    stranger = caller(b"guess")
    challenge = other.hear("c", [stranger.greeting()])
    with pytest.raises(ProtocolError, match="does not know the secret"):
        stranger.hear([challenge])
    nonce = challenge[len(CHALLENGE) :][:NONCE_BYTES]
    forged = mac(b"guess", b"proof", ENDPOINT.encode(), stranger.greeting()[len(GREETING) :], nonce)
    with pytest.raises(ProtocolError, match="a wrong proof"):
        other.hear("c", [PROOF + forged])
    assert other.sessions == {}
    with pytest.raises(ProtocolError):
        other.hear("c", [PROOF + forged])


def test_whoever_listens_in_place_of_a_dead_process_gets_no_proof() -> None:
    one = caller()
    for said in (ACCEPTED, b"", CHALLENGE, CHALLENGE + bytes(64), gate(b"guess").hear("c", [one.greeting()])):
        with pytest.raises(ProtocolError):
            one.hear([said])
    assert one.session is None


def test_a_handshake_cannot_be_passed_on_to_another_port() -> None:
    """Let a stranger who listens at one address ask the process at another for the answer."""
    one = caller(endpoint="tcp://10.0.0.1:1")
    challenge = gate(endpoint="tcp://10.0.0.2:2").hear("c", [one.greeting()])
    with pytest.raises(ProtocolError, match="does not know the secret"):
        one.hear([challenge])


def test_what_one_end_has_said_is_no_answer_of_the_other() -> None:
    """Send a challenge back as a proof, with the nonces the other way round."""
    other = gate()
    challenge = other.hear("c", [GREETING + bytes(NONCE_BYTES)])
    with pytest.raises(ProtocolError):
        other.hear("c", [PROOF + challenge[len(CHALLENGE) + NONCE_BYTES :]])


# ---- messages that were said before


def test_nothing_that_was_heard_is_good_on_another_connection() -> None:
    one, other = caller(), gate()
    greeting = one.greeting()
    proof = one.hear([other.hear("c", [greeting])])
    assert proof is not None
    other.hear("c", [proof])
    assert one.hear([ACCEPTED]) is None
    assert one.session is not None
    sealed = one.session.seal(b"drop everything")
    other.hear("replay", [greeting])
    with pytest.raises(ProtocolError, match="a wrong proof"):
        other.hear("replay", [proof])
    meet(caller(begin=2000), other, "another")
    with pytest.raises(ProtocolError, match="broken"):
        other.sessions["another"].open([sealed])


def test_a_connection_has_one_greeting_and_one_proof() -> None:
    one, other = caller(), gate()
    other.hear("c", [one.greeting()])
    with pytest.raises(ProtocolError):
        other.hear("c", [one.greeting()])


def test_a_sealed_message_is_good_once_and_as_it_was() -> None:
    one, other = caller(), gate()
    meet(one, other)
    assert one.session is not None
    there = other.sessions["c"]
    first, second = one.session.seal(b"first"), one.session.seal(b"second")
    for at in range(len(second)):
        spoilt = bytearray(second)
        spoilt[at] ^= 1
        with pytest.raises(ProtocolError):
            there.open([bytes(spoilt)])
    for wrong in ([], [b""], [b"first"], [second, b""], [second[:-1]], [there.seal(b"its own")]):
        with pytest.raises(ProtocolError):
            there.open(wrong)
    assert bytes(there.open([second])) == b"second", "what was lost is left out"
    for late in (first, second):
        with pytest.raises(ProtocolError, match="comes again"):
            there.open([late])


def test_a_ticket_is_good_once_for_one_port() -> None:
    tickets = Tickets(SECRET, ENDPOINT)
    shown = caller().ticket
    assert tickets.take(shown)
    assert not tickets.take(shown)
    other = ticket(SECRET, "tcp://10.0.0.9:9", bytes(NONCE_BYTES))
    assert not any(tickets.take(wrong) for wrong in (b"", bytes(64), other, ticket(b"guess", ENDPOINT, bytes(32))))
    assert tickets.take(caller(begin=5).ticket)


def test_greetings_without_end_do_not_pile_up() -> None:
    other = gate()
    for number in range(2 * GREETED_MAX):
        other.hear(number, [GREETING + bytes(NONCE_BYTES)])
    assert len(other._greeted) == GREETED_MAX


def test_a_connection_that_has_closed_is_forgotten() -> None:
    other = gate()
    meet(caller(), other)
    other.forget("c")
    other.forget("never heard of")
    assert other.sessions == {}

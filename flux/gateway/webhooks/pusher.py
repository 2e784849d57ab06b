"""One webhook of this gateway: results in, deliveries out (design: webhook-deliveries)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec

from flux.errors import FluxError
from flux.eventlog.log_store import LogStore, open_log
from flux.gateway.log_writer import OwnedElsewhere, OwnerLock
from flux.gateway.reads.follower import BYTES_MAX, ResultFollower
from flux.gateway.reads.tails import OutputTails
from flux.gateway.webhooks.catalogue import WebhookCatalogue, WebhookDefinition
from flux.gateway.webhooks.deliveries import DeliveryCourse, WebhookDelivery, WebhookStatus
from flux.gateway.webhooks.delivery_log import DeliveryLog
from flux.gateway.webhooks.message import DeliveryMessage, headers_of, message_of
from flux.gateway.webhooks.target import Network, chosen_address, target_of
from flux.outputs.catalogue import OutputDefinition
from flux.outputs.cursor import OLDEST
from flux.outputs.reader import MissedRows, OutputPiece, rows_between, start_of
from flux.vault.location import Folder

T = TypeVar("T")
logger = logging.getLogger("flux.gateway")
#: Seconds that an attempt may take as a whole, and those for its connection.
ATTEMPT_S, CONNECT_S = 30.0, 10.0
#: Seconds for which a pusher waits for results before it looks whether it is still wanted.
_LOOK_S = 1.0
#: In an object store, where no lock tells: seconds after which a gateway that has written no status is given up, and between two.
_SILENT_S, _STATUS_S = 15.0, 5.0
_STATUS = "status"
_OK, _GONE = range(200, 300), 410
_statuses = msgspec.json.Decoder(WebhookStatus)


class AttemptFailed(FluxError):
    """Failure of an attempt, which the receiver has not confirmed. ``after_s``: the seconds that it asks for; ``for_good``: it
    wants no more."""

    def __init__(self, reason: str, after_s: float | None = None, for_good: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.for_good = after_s, for_good


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as the system has them. AttemptFailed: it has none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AttemptFailed(f"{host} has no address: {error}") from error
    return [str(address[0]) for *_, address in found]


class ReceiverNet(NamedTuple):
    """The way to receivers."""

    #: Networks that they may be in besides public ones.
    allowed: Sequence[Network] = ()
    #: Certificates to trust, as httpx takes them.
    verify: Any = True
    #: The function that finds the addresses of a host.
    resolve: Callable[[str, int], Awaitable[list[str]]] = resolved


async def attempt(of: WebhookDefinition, message: DeliveryMessage, net: ReceiverNet) -> None:
    """Send a delivery once. AttemptFailed: it is not known that the receiver has it. The body of an answer is not read."""
    target = target_of(of.url)
    headers = {
        **headers_of(message, of.secret, int(time.time())),
        "Host": target.authority,
        "User-Agent": "flux-webhook",
    }
    try:
        async with asyncio.timeout(ATTEMPT_S):
            address = chosen_address(target.host, await net.resolve(target.host, target.port), net.allowed)
            # A connection of its own, without proxies of the environment: it goes to the address that was checked.
            async with (
                httpx.AsyncClient(verify=net.verify, timeout=CONNECT_S, trust_env=False) as client,
                client.stream(
                    "POST", target.url_of(address), content=message.body, headers=headers,
                    extensions={"sni_hostname": target.host}, timeout=httpx.Timeout(ATTEMPT_S, connect=CONNECT_S),
                ) as answer,
            ):  # fmt: skip
                _check(answer)
    except TimeoutError:
        raise AttemptFailed(f"the receiver has not answered for {ATTEMPT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AttemptFailed(f"the receiver cannot be reached: {type(error).__name__}: {error}") from error
    except AttemptFailed:
        raise
    except FluxError as error:
        raise AttemptFailed(str(error)) from error


def _check(answer: httpx.Response) -> None:
    status = answer.status_code
    if status in _OK:
        return
    if 300 <= status < 400:
        raise AttemptFailed(f"the receiver answered {status}, a redirect, which is not followed: register its target")
    if status == _GONE:
        raise AttemptFailed("the receiver answered 410: it wants no more", for_good=True)
    after = answer.headers.get("retry-after", "")
    raise AttemptFailed(
        f"the receiver answered {status}", float(after) if after.isascii() and after.isdigit() else None
    )


class WebhookPusher:
    """The deliveries of one webhook, as long as this gateway owns it."""

    def __init__(
        self, catalogue: WebhookCatalogue, of: WebhookDefinition, tails: OutputTails, pool: Executor, address: str,
        net: ReceiverNet,
    ) -> None:  # fmt: skip
        self.of = of
        self._catalogue, self._tails, self._pool = catalogue, tails, pool
        self._address, self._net = address, net
        self._course = DeliveryCourse(of.output, of.start, of.retry_s)
        self._status_at = 0.0

    async def run(self) -> None:
        """Own the webhook and make its deliveries, until it is paused, removed, taken over or cancelled. Returns at once if
        another gateway owns it."""
        where = f"webhook {self.of.name!r}"
        async with contextlib.AsyncExitStack() as stack:
            try:
                log = await self._in_thread(self._opened, where, stack)
            except OwnedElsewhere:
                return
            if log is None:
                return
            output = await self._in_thread(self._tails.output, self.of.query)
            start = self.of.start
            if output.id != self.of.output:
                start = await self._in_thread(start_of, self._tails.place, output, OLDEST)
            self._course = DeliveryCourse(output.id, start, self.of.retry_s, log.newest)
            tail = stack.enter_context(self._tails.reading(output))
            follower = ResultFollower(tail, self._course.place, self._pool)
            stack.callback(follower.close)
            going = await self._send_pending(log, output)
            while going:
                going = await self._deliver(log, follower)

    def _opened(self, where: str, stack: contextlib.AsyncExitStack) -> DeliveryLog | None:
        """Take the webhook over; None: another gateway has it."""
        place = self._catalogue.log_place(self.of)
        if not isinstance(place, Folder):
            status = status_of(self._catalogue, self.of)
            if status.gateway != self._address and time.time() - status.at < _SILENT_S:
                return None
        lock = OwnerLock(place, where, self._address)
        stack.callback(lock.close)
        store: LogStore = open_log(place, writes=True)
        stack.callback(store.close)
        log = DeliveryLog(store, where)
        for _ in log.open():
            pass
        return log

    async def _deliver(self, log: DeliveryLog, follower: ResultFollower) -> bool:
        """Gather results, and deliver them until the receiver has them. Return whether there may be more."""
        pieces, missed, first = await self._gathered(follower)
        if not pieces and not missed:
            await self._in_thread(log.check)
            await self._tell(log)
            return True
        delivery = self._course.plan(first, follower.positions)
        message = await self._in_thread(message_of, self.of, delivery, pieces, missed)
        await self._in_thread(_noted, log, delivery)
        self._course.planned(delivery)
        return await self._send(log, message)

    async def _gathered(self, follower: ResultFollower) -> tuple[list[OutputPiece], list[MissedRows], tuple[int, ...]]:
        """Return results for one delivery, those that were missed before them, and the place before them."""
        first, batch = follower.positions, self.of.batch
        pieces: list[OutputPiece] = []
        missed: list[MissedRows] = []
        left, until = batch.rows, time.monotonic() + _LOOK_S
        while left > 0 and sum(piece.rows.nbytes for piece in pieces) < BYTES_MAX:
            found = await follower.read(left, max(until - time.monotonic(), 0.0))
            if not found.entries and not found.missed:
                break
            if not pieces:
                until = time.monotonic() + self.of.batch_s
            pieces += [entry.piece for entry in found.entries]
            missed += found.missed
            left -= sum(entry.piece.rows.num_rows for entry in found.entries)
        return pieces, missed, first

    async def _send_pending(self, log: DeliveryLog, output: OutputDefinition) -> bool:
        """Send the delivery again that an earlier owner has planned and not seen confirmed, with the same rows. Return whether
        there may be more."""
        pending = self._course.pending
        if pending is None:
            return True
        pieces, missed = await self._in_thread(rows_between, self._tails.place, output, pending.first, pending.next)
        return await self._send(log, await self._in_thread(message_of, self.of, pending, pieces, missed))

    async def _send(self, log: DeliveryLog, message: DeliveryMessage) -> bool:
        """Send a delivery that is on disk until it is confirmed. Return False if the webhook was paused instead. TakenOver:
        another gateway sends it."""
        failed_before = False
        while self._course.pending is not None:
            await asyncio.sleep(max(self._course.due - time.time(), 0.0))
            await self._in_thread(log.check)
            try:
                await attempt(self.of, message, self._net)
            except AttemptFailed as failed:
                failed_before = True
                paused = self._course.failed(str(failed), time.time(), failed.after_s) or failed.for_good
                await self._in_thread(self._write_status)
                logger.warning("webhook %s, delivery %d: %s", self.of.name, message.number, failed)
                if paused:
                    reason = str(failed) if failed.for_good else f"no success for {self.of.retry}: {failed}"
                    await self._in_thread(self._catalogue.pause, self.of, reason)
                    return False
            else:
                self._course.taken()
        if failed_before or self._status_at == 0.0:  # the owner before may have left it as failing
            await self._in_thread(self._write_status)
        return True

    async def _tell(self, log: DeliveryLog) -> None:
        """Write down, while nothing comes, that the newest delivery is confirmed, and the state for people."""
        newest = self._course.newest
        if newest is not None and log.newest != newest:
            await self._in_thread(_noted, log, newest)
        if self._status_at == 0.0 or (self._tails.place.flush_s and time.time() - self._status_at > _STATUS_S):
            await self._in_thread(self._write_status)

    def tell_error(self, reason: str) -> None:
        """Write down, for people, why no deliveries are made."""
        self._course.failed(reason, time.time())
        self._write_status()

    def _write_status(self) -> None:
        self._status_at = time.time()
        status = msgspec.structs.replace(self._course.status, gateway=self._address, at=self._status_at)
        self._catalogue.status_place(self.of).write(_STATUS, msgspec.json.encode(status))

    async def _in_thread(self, call: Callable[..., T], *given: Any) -> T:
        """Return the result of a call in a thread. The end of this webhook waits for it, because files are closed
        then."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, call, *given)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            if not future.cancelled():
                future.exception()  # which comes too late for this webhook, and is no defect
            raise


def _noted(log: DeliveryLog, delivery: WebhookDelivery) -> None:
    for _ in log.note(delivery, int(time.time() * 1_000_000)):
        pass


def status_of(catalogue: WebhookCatalogue, of: WebhookDefinition) -> WebhookStatus:
    """Return the newest state that a gateway has written down."""
    try:
        return _statuses.decode(catalogue.status_place(of).read(_STATUS))
    except (FileNotFoundError, msgspec.MsgspecError):
        return WebhookStatus()

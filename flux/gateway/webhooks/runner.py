"""All webhooks that this gateway owns, in a thread with a loop of its own (design: webhook-owners)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from flux.errors import FluxError
from flux.gateway.problems import described
from flux.gateway.reads.tails import OutputTails
from flux.gateway.webhooks.catalogue import WebhookCatalogue, WebhookDefinition
from flux.gateway.webhooks.pusher import ReceiverNet, WebhookPusher
from flux.outputs.catalogue import NoSuchOutput
from flux.vault.directory_store import TakenOver
from flux.vault.location import Place

logger = logging.getLogger("flux.gateway")
#: Seconds between two looks for webhooks that were registered, resumed or left by a gateway that has died.
LOOK_S, LOOK_REMOTE_S = 1.0, 5.0
#: Seconds for which a webhook rests after an error of the disk, or after another gateway has taken it over.
REST_S = 10.0
#: Threads that read and write for webhooks.
THREADS = 4
#: Seconds that the end waits for attempts under way, which are cancelled.
CLOSE_S = 5.0

#: A registration that runs: id of the webhook, and the number of times that it was resumed.
Registration = tuple[str, int]


class WebhookRunner:
    """The webhooks of a gateway."""

    def __init__(self, place: Place, tails: OutputTails, address: str, net: ReceiverNet) -> None:
        self._catalogue = WebhookCatalogue(place)
        self._tails, self._address, self._net = tails, address, net
        self._look_s = LOOK_REMOTE_S if place.flush_s else LOOK_S
        self._pool = ThreadPoolExecutor(THREADS, "flux-webhooks")
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._go, name="flux-webhooks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all deliveries. An attempt under way may be sent again by the next owner, under its number."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=CLOSE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _go(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        tasks: dict[Registration, asyncio.Task[None]] = {}
        while not self._ended.is_set():
            try:
                wanted = await self._loop.run_in_executor(self._pool, self._catalogue.all)
                self._follow(tasks, {(of.id, of.resumed): of for of in wanted.values() if not of.paused})
            except (FluxError, OSError) as error:
                logger.warning("webhooks cannot be read: %s", error)
            try:
                async with asyncio.timeout(self._look_s):
                    await self._ended.wait()
            except TimeoutError:
                continue
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _follow(
        self, tasks: dict[Registration, asyncio.Task[None]], wanted: dict[Registration, WebhookDefinition]
    ) -> None:
        """Begin webhooks that are wanted and not there, and end the others."""
        for key, task in list(tasks.items()):
            if key not in wanted:
                task.cancel()
            if task.done():
                del tasks[key]
        for key, of in wanted.items():
            if key not in tasks:
                tasks[key] = self._loop.create_task(self._pushed(of))

    async def _pushed(self, of: WebhookDefinition) -> None:
        pusher = WebhookPusher(self._catalogue, of, self._tails, self._pool, self._address, self._net)
        try:
            await pusher.run()
        except TakenOver as error:
            logger.info("webhook %s rests: %s", of.name, error)
            await asyncio.sleep(REST_S)
        except (FluxError, OSError) as error:  # also while a service starts, and its query has no output yet
            if await self._loop.run_in_executor(self._pool, self._is_removed, of):
                return  # its place went while it was opened
            logger.warning("webhook %s rests: %s", of.name, error)
            reason = described(error) if isinstance(error, OSError) else str(error)
            with contextlib.suppress(OSError):
                await self._loop.run_in_executor(self._pool, pusher.tell_error, reason)
            await asyncio.sleep(self._look_s if isinstance(error, NoSuchOutput) else REST_S)
        except Exception:
            logger.exception("webhook %s rests", of.name)
            await asyncio.sleep(REST_S)

    def _is_removed(self, of: WebhookDefinition) -> bool:
        """Return whether a webhook is known to be registered no longer."""
        try:
            return all(each.id != of.id for each in self._catalogue.all().values())
        except (FluxError, OSError):
            return False

"""The thread that writes versions of a running query's plan, and births of streams, into its checkpoint location (design:
kept-versions, kept-births)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from controller.course.plan_requests import BirthsToKeep, LocationOrder
from flux.operators.user_code import text_of
from flux.vault.location import Place
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.query.source_setup import Kept

log = logging.getLogger("flux")

_PUT_BACK = "put back"


class PlanKeeper:
    """The plan of a running query in its location. Orders of the controller are carried out one after the other, in a thread of
    their own: a disk or an object store may be slow."""

    def __init__(self, location: CheckpointLocation) -> None:
        self.place: Place = location.place
        self._location = self._began = location
        #: The births that the location has at the start.
        self.births = location.births
        #: Facts of sources and sinks of additions, some of which may be refused yet.
        self._facts: Kept = {"sources": {}, "sinks": {}}
        #: Orders, a look at a location that the vault has written again (``_PUT_BACK``), and the end (None).
        self._orders: queue.SimpleQueue[LocationOrder | str | None] = queue.SimpleQueue()
        self._done: Callable[[LocationOrder, str], None] = lambda order, error: None
        self._thread = threading.Thread(target=self._run, name="flux-versions", daemon=True)

    def start(self, done: Callable[[LocationOrder, str], None]) -> None:
        """Begin to carry out orders. ``done`` is called with each, and an error or ""."""
        self._done = done
        self._thread.start()

    def settle(self, facts: Kept) -> None:
        """Take the facts of an addition, which are kept with its version."""
        self._facts = {kind: {**self._facts[kind], **facts.get(kind, {})} for kind in self._facts}

    def keep(self, order: LocationOrder) -> None:
        self._orders.put(order)

    def put_back(self) -> None:
        """Write the newest version again, if the location was removed and the vault has written it as it was at the start."""
        self._orders.put(_PUT_BACK)

    def end(self, limit_s: float) -> None:
        """Wait for the order under way at the end of the query."""
        if self._thread.ident is None:
            return
        self._orders.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning("the checkpoint location %s has not answered within %g s: a version of the plan was to be written there",
                        self.place, limit_s)  # fmt: skip

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            error = ""
            try:
                if isinstance(order, str):
                    self._location.put_back(self._began)
                elif isinstance(order, BirthsToKeep):
                    self._location = self._location.keep_births(order.births)
                else:
                    self._location = self._location.keep(order.plan, self._facts, order.failed, order.births)
            except Exception as failed:
                error = text_of(failed)
            if not isinstance(order, str):
                self._done(order, error)
            elif error:
                log.warning("the newest version of the plan cannot be written to %s again: %s", self.place, error)

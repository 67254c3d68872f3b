"""The prefill link of one router: its commands go to the core; back go the events of its prompts and what this rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import HeadraceError, InvalidRequest
from headrace.protocol.prefill import CancelPrefillCommand, PrefillCommand
from headrace.rpc.links import Link
from services.prefill.core import Prefiller
from services.prefill.held import Held, changes, snapshot
from services.prefill.leg import Answer


class RouterLink:
    """The handler of one PREFILL_LINK. It owns the attempts that came over it."""

    def __init__(self, core: Prefiller, held: Held, link: Link):
        self._core = core
        self._held = held
        self._link = link
        self._was_open = False

    def on_item(self, link: Link, number: int, body: object) -> None:
        """A command. What it raises is its answer."""
        if isinstance(body, PrefillCommand):
            self._core.prefill(body, self, self._answer_to(number))
        elif isinstance(body, CancelPrefillCommand):
            self._core.cancel(self, body.request_id, body.attempt)
        else:
            raise InvalidRequest(f"{type(body).__name__} is no command of the prefill link")

    def on_open(self, link: Link) -> None:
        """The first time, the whole list of what is held. A link that was resumed has heard everything."""
        if self._was_open:
            return
        self._was_open = True
        for item in snapshot(self._held.listen(self._tell)):
            link.send(item)

    def on_broken(self, link: Link) -> None:
        """It may come back; its prompts run on."""

    def on_progress(self, link: Link) -> None:
        """Routers tell none."""

    def on_lost(self, link: Link, error: HeadraceError) -> None:
        """Nobody waits for its prompts any more."""
        self._held.leave(self._tell)
        self._core.leave(self)

    def _tell(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for item in changes(added, removed):
            if not self._link.is_lost:
                self._link.send(item)

    def _answer_to(self, number: int) -> Answer:
        def answer(event) -> None:
            if not self._link.is_lost:
                self._link.answer(number, event)

        return answer

# SPDX-License-Identifier: Apache-2.0
"""Connections that wait for nothing: how long one may take to send the head of a request, and how many there may be.

uvicorn closes a connection that is idle behind a reply, but waits for the first request, and for the rest of any, as long as it takes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0
"""From the first byte, or from the connection's begin, to the end of a request's head."""


def protocol(most: int, seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """Return the protocol of a server with at most so many connections.

    One too many takes the place of that which has been without a request for longest; where all have one, it is closed itself.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        waits_since: float | None = None
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()
            opened = [each for each in self.connections if not each.transport.is_closing()]
            if len(opened) > most:
                waiting = [each for each in opened if each.waits_since is not None and each is not self]
                min(waiting, key=lambda each: each.waits_since, default=self).transport.close()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._has_request:
                self._end_wait()
            elif self._timer is None:
                self._wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._has_request:
                self.waits_since = self.loop.time()  # uvicorn's own timer closes it

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_wait()
            super().connection_lost(exc)

        @property
        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self.waits_since = self.loop.time()
            self._timer = self.loop.call_later(seconds, self.transport.close)

        def _end_wait(self) -> None:
            self.waits_since = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection

"""A server that drains: what runs at SIGTERM has some seconds to finish, and then ends with an error."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from kvjax.serve.http.service import Service

# Seconds in which the errors are sent, before connections are closed.
LAST = 5


class Draining(uvicorn.Server):
    """A uvicorn server of one service, whose requests have `seconds` to finish after SIGTERM."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float):
        config.timeout_graceful_shutdown = int(seconds) + LAST
        super().__init__(config)
        self.service, self.seconds = service, seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until requests have ended, `seconds` at most."""
        self.service.source.close()
        timer = asyncio.get_running_loop().call_later(self.seconds, self.service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

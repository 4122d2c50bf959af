"""Serves the page on the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from uniquery.errors import UserError
from uniquery.explore.app import build_app
from uniquery.explore.exploration import Exploration
from uniquery.explore.security import new_token

HOST = "127.0.0.1"


def serve(exploration: Exploration, port: int, announce: Callable[[str], object]) -> None:
    """Serves until interrupted.

    Args:
        exploration: what the page shows.
        port: 0 takes any that is free.
        announce: called with the address as soon as the server listens.

    Raises:
        UserError: the port is taken.
    """
    token = new_token()
    listener = listen(port)
    config = uvicorn.Config(
        build_app(exploration, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
    )
    exploration.start()
    announce(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        exploration.stop()
        listener.close()


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface.

    Raises:
        UserError: the port is taken.
    """
    # Named as TCP, or asyncio leaves TCP_NODELAY off, and every answer is 40 ms late.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"Port {port} cannot be used ({reason}): give another, or --port 0 for any.") from None
    listener.listen(128)
    return listener

"""The web server around the application: threads, loopback by default, quiet."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from werkzeug.serving import make_server

from trine.dashboard.application import create
from trine.dashboard.service import Service
from trine.record.errors import UsageError

__all__ = ["Server"]

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Server:
    """Bound when made; ``run()`` serves until ``close()`` or Ctrl-C."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        """Raises ``UsageError`` when the address cannot be bound."""
        self.service = service
        hosts = (_LOCAL_NAMES | {host}) if is_local(host) else None
        app = create(self.service, hosts)
        # One line a request would bury the one line that matters, the address.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        # Our own socket: werkzeug prints two lines and exits when the port is taken.
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            self.service.close()
            raise UsageError(_why_not_bound(error, host, port)) from error
        self._server = make_server(host, port, app.server, threaded=True, fd=self._socket.fileno())
        self.port = int(self._socket.getsockname()[1])
        self.open_to_others = hosts is None
        shown = f"[{host}]" if ":" in host else "127.0.0.1" if host in ("0.0.0.0", "") else host
        self.address = f"http://{shown}:{self.port}/"

    def run(self) -> None:
        """Serve until closed."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving and end the background process."""
        self._server.shutdown()
        self.stop_background()

    def stop_background(self) -> None:
        """End the background process and free the port after :meth:`run` returned by itself."""
        self._server.server_close()
        self._socket.close()
        self.service.close()


def is_local(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _why_not_bound(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; choose another with --port, or --port 0 for any"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023 with --port"
    return f"cannot serve on {host}:{port}: {error.strerror or error}; give --host an address of this machine"

"""What every server of this library asks before it listens and before it answers: addresses, ports, Host headers."""

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from operant.types import OperantError


def listening_error(error: OSError, host: str, port: int) -> OperantError:
    reason = {
        errno.EADDRINUSE: "the port is in use; choose another --port, or 0 for any",
        errno.EACCES: "permission denied; choose a --port above 1023",
    }.get(error.errno or 0)
    reason = reason or f"{(error.strerror or str(error)).lower()}; --host must be an address of this machine"
    return OperantError(f"cannot serve at {host}, port {port}: {reason}")


def url_of(host: str, port: int) -> str:
    host = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/"


def is_known_host(header: str | None, listening: str) -> bool:
    """Whether a request's Host header names the server that listens on the address `listening`."""
    try:
        name = urlsplit(f"//{header or ''}").hostname or ""
    except ValueError:
        return False
    if listening in ("0.0.0.0", "::") and (_address(name) or name == socket.gethostname().lower()):
        return True
    return name == listening.lower() or is_local(name)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)

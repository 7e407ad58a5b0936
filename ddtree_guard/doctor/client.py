"""A small HTTP client for a server that may be anything: standard library, bounded in every way.

No redirect is followed (an API key would go with it), no proxy is used, and at most MOST bytes are
read within one deadline, however slowly they come.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ddtree_guard.errors import IncompatibleError, UsageError

MOST = 8 << 20  # bytes of an answer
_CHUNK = 1 << 16


class NoAnswer(IncompatibleError):
    """The server cannot be asked: unreachable, not SGLang, or it will not talk to us."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `base` is a path that every request starts with, or empty."""

    scheme: str
    host: str
    port: int
    base: str = ""

    @property
    def text(self) -> str:
        """As a user would write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"


def address_of(url: str) -> Address:
    """The address in a URL. Raises UsageError for what is none."""
    wanted = "give the server's address as http://HOST:PORT"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise UsageError(f"--url {url!r} is not a URL; {wanted}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url!r} is not an http or https URL; {wanted}.")
    if parts.username or parts.password:
        raise UsageError(f"--url holds a user name or a password; {wanted} and use --api-key.")
    if parts.query or parts.fragment or any(c.isspace() for c in url):
        raise UsageError(f"--url {url!r} holds more than an address; {wanted}.")
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))


class Client:
    """Asks one server. `timeout_s` bounds each request as a whole."""

    def __init__(
        self, address: Address, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._sockets: dict[Any, Any] = {}  # http.client forgets its socket before the body ends
        self._headers = {"Accept": "application/json", "User-Agent": "ddtree-guard-doctor"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises NoAnswer."""
        return self._json(path, *self._ask("GET", path, None))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to JSON. Raises NoAnswer."""
        return self._json(path, *self._ask("POST", path, json.dumps(body).encode()))

    def text(self, path: str, timeout_s: float = 5.0) -> str | None:
        """The text at a path, or None where there is none soon. Never raises NoAnswer."""
        try:
            status, _, data = self._ask("GET", path, None, min(timeout_s, self.timeout_s))
        except NoAnswer:
            return None
        return data.decode(errors="replace") if status == 200 else None

    def _ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None = None
    ) -> tuple[int, str, bytes]:
        """(status, content type, body). A timer ends a request whose bytes come one by one."""
        where, seconds = self.address, timeout_s or self.timeout_s
        connection = self._connection(seconds)
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        late = threading.Event()
        timer = threading.Timer(seconds, self._give_up, (connection, late))
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            self._sockets[connection] = connection.sock
            connection.request(method, where.base + path, body, headers)
            answer = connection.getresponse()
            data = self._read(answer, path)
            if late.is_set():  # what came before the timer may look whole
                raise self._silent(path)
            return answer.status, answer.getheader("Content-Type") or "", data
        except NoAnswer:
            raise
        except TimeoutError:
            raise self._silent(path) from None
        except ssl.SSLCertVerificationError as error:
            raise NoAnswer(
                f"{where.text} has a certificate that is not trusted ({error.verify_message}); set "
                "SSL_CERT_FILE to your authority's file, or use http:// from inside the network."
            ) from None
        except ssl.SSLError as error:
            raise NoAnswer(
                f"{where.text} does not speak TLS as expected ({error.reason}); try http://."
            ) from None
        except socket.gaierror as error:
            raise NoAnswer(
                f"the host name {where.host!r} is not known here ({error.strerror}); check --url."
            ) from None
        except ConnectionRefusedError:
            raise NoAnswer(
                f"nothing listens at {where.text} (connection refused); is the server up, and is "
                "that its --port?"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if late.is_set():
                raise self._silent(path) from None
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise NoAnswer(
                f"{where.text}{path} gave no HTTP answer ({why}); is that an SGLang server's port?"
            ) from None
        finally:
            timer.cancel()
            self._sockets.pop(connection, None)
            connection.close()

    def _give_up(self, connection: Any, late: threading.Event) -> None:
        late.set()
        sock = self._sockets.get(connection)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        where = self.address
        if where.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                where.host, where.port, timeout=seconds, context=context
            )
        return http.client.HTTPConnection(where.host, where.port, timeout=seconds)

    def _read(self, answer: Any, path: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size <= MOST:
            part = answer.read1(_CHUNK)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
        raise NoAnswer(
            f"{self.address.text}{path} answers with more than {MOST >> 20} MiB; an SGLang server "
            "sends some kilobytes there; check --url."
        )

    def _silent(self, path: str) -> NoAnswer:
        return NoAnswer(
            f"{self.address.text}{path} did not answer within {self.timeout_s:.0f} s; the server "
            "hangs, is overloaded or still loading; try again with a larger --timeout."
        )

    def _json(self, path: str, status: int, kind: str, data: bytes) -> Any:
        where = f"{self.address.text}{path}"
        if status in (401, 403):
            raise NoAnswer(
                f"{where} wants a key (HTTP {status}); pass the server's with --api-key."
            )
        if 300 <= status < 400:
            raise NoAnswer(f"{where} redirects (HTTP {status}); give the server's own address.")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if status != 200:
            raise Refused(where, status, _message(found))
        if found is None:
            what = "HTML" if b"<html" in data[:500].lower() or "html" in kind else "no JSON"
            raise NoAnswer(
                f"{where} answers with {what}; that is not an SGLang server; check host and port."
            )
        return found


class Refused(NoAnswer):
    """An HTTP status that is not 200, with what the server said."""

    def __init__(self, where: str, status: int, said: str) -> None:
        self.status = status
        words = f": {said}" if said else ""
        super().__init__(f"{where} answers with HTTP {status}{words}.")


def _message(found: Any) -> str:
    """The words in an error answer of SGLang or of a gateway."""
    for key in ("error", "message", "detail"):
        value = found.get(key) if isinstance(found, dict) else None
        if isinstance(value, dict):
            return _message(value)
        if isinstance(value, str):
            return value[:200].rstrip(".")
    return ""

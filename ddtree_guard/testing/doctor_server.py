"""An HTTP server that answers like SGLang's, with a made-up model: for tests of `doctor --url`.

The model's next token is a hash of everything before it, so that a prefix has one right answer.
`kind` says what is wrong with it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SOUND, GARBLED, TIES, LOOPS, TEXT_ONLY, BROKEN_TEXT = (
    "sound", "garbled", "ties", "loops", "text-only", "broken-text",
)  # fmt: skip
_WORDS = [f" w{n}" for n in range(500)]


class Model:
    """Greedy continuations. Tokens are small whole numbers; token 0 reads `!`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.prompts = 0

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens; more than one come from verify steps, where the fault is."""
        out: list[int] = []
        while len(out) < count:
            out.append(self._token([*prompt, *out], len(out), count))
        return out

    def _token(self, before: list[int], place: int, count: int) -> int:
        right = 7 if self.kind == LOOPS else self._right(before)
        if self.kind in (GARBLED, BROKEN_TEXT) and count > 1 and place >= 3:
            return 0 if self.kind == GARBLED or place % 2 else right
        if self.kind == TIES and count > 1 and place % 20 == 19:
            return (right + 1) % 500
        return right

    def _right(self, before: list[int]) -> int:
        digest = hashlib.blake2b(repr(before).encode(), digest_size=4).digest()
        return 1 + int.from_bytes(digest, "big") % 499

    def text(self, ids: Sequence[int]) -> str:
        """The tokens as text."""
        broken = self.kind == BROKEN_TEXT
        return "".join(("\ufffd " if broken else "!") if n == 0 else _WORDS[n] for n in ids)


class Handler(BaseHTTPRequestHandler):
    """Routes of SGLang's HTTP server, as far as the doctor uses them."""

    server: DoctorServer

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """Information."""
        if self.server.act(self):
            return
        if self._refused():
            return
        path = self.path.removeprefix(self.server.base)
        if path in self.server.info_paths:
            self.answer(200, self.server.info)
        elif path == "/metrics" and self.server.metrics:
            self.answer(200, self.server.metrics.encode(), "text/plain")
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Generation and tokenization."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refused():
            return
        asked = json.loads(body)
        path = self.path.removeprefix(self.server.base)
        if path == "/tokenize" and self.server.tokenizes:
            self.answer(200, {"tokens": list(asked["prompt"].encode()), "count": 1})
        elif path == "/generate":
            self.server.asked.append(asked)
            self.answer(*self.server.generate(asked))
        else:
            self.answer(404, {"detail": "Not Found"})

    def _refused(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.answer(401, {"error": "Unauthorized"})
        return True

    def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        """Send an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class DoctorServer(ThreadingHTTPServer):
    """A server on a free port. `info` is its /server_info; `hostile` an act in the place of it."""

    daemon_threads = True

    def __init__(self, info: Any, kind: str = SOUND, **changes: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.info, self.model = info, Model(kind)
        self.info_paths: tuple[str, ...] = changes.get("info_paths", ("/server_info",))
        self.api_key: str | None = changes.get("api_key")
        self.metrics: str = changes.get("metrics", "")
        self.hostile: str = changes.get("hostile", "")
        self.base: str = changes.get("base", "")
        self.tokenizes = kind != TEXT_ONLY and changes.get("tokenizes", True)
        self.generates: bool = changes.get("generates", True)
        self.asked: list[dict[str, Any]] = []
        self.seen: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}{self.base}"

    def generate(self, asked: dict[str, Any]) -> tuple[int, Any]:
        """SGLang's /generate: one prompt or several, as text or ids."""
        if not self.generates:
            return 400, {"error": {"message": "This model does not support generation."}}
        given = asked.get("input_ids") or asked["text"]
        many = isinstance(given, list) and not isinstance(given[0], int)
        count = int(asked["sampling_params"]["max_new_tokens"])
        outs = [self._one(one, count) for one in (given if many else [given])]
        return 200, outs if many else outs[0]

    def _one(self, prompt: Any, count: int) -> dict[str, Any]:
        ids = self.model.generate(
            list(prompt.encode()) if isinstance(prompt, str) else prompt, count
        )
        out = {"text": self.model.text(ids), "meta_info": {"finish_reason": {"type": "length"}}}
        return out if self.model.kind == TEXT_ONLY else {**out, "output_ids": ids}

    def act(self, handler: Handler) -> bool:
        """Do the hostile thing in the place of an answer; False where there is none."""
        self.seen.append(dict(handler.headers))
        act = getattr(self, f"_{self.hostile}", None)
        if act is None:
            return False
        act(handler)
        return True

    def _html(self, handler: Handler) -> None:
        handler.answer(200, b"<!DOCTYPE html><html><body>nginx</body></html>", "text/html")

    def _huge(self, handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with _closed():
            for _ in range(400):
                handler.wfile.write(b"[" * (1 << 16))

    def _slow(self, handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with _closed():
            for _ in range(100):
                handler.wfile.write(b" ")
                handler.wfile.flush()
                time.sleep(0.05)

    def _silent(self, handler: Handler) -> None:
        time.sleep(3)

    def _drip(self, handler: Handler) -> None:
        with _closed():
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            for _ in range(60):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(0.05)

    def _nested(self, handler: Handler) -> None:
        handler.answer(200, b"[" * 200_000 + b"]" * 200_000)

    def _list(self, handler: Handler) -> None:
        handler.answer(200, [1, 2])

    def _foreign(self, handler: Handler) -> None:
        handler.answer(200, {"version": "0.9.1", "model": "other"})

    def _redirect(self, handler: Handler) -> None:
        handler.send_response(307)
        handler.send_header("Location", "http://127.0.0.1:9/server_info")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _fails(self, handler: Handler) -> None:
        handler.answer(500, {"error": {"message": "scheduler died\x1b[31m"}})

    def _garbage(self, handler: Handler) -> None:
        handler.wfile.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")


@contextmanager
def _closed() -> Iterator[None]:
    """The client hangs up while something is sent to it."""
    try:
        yield
    except OSError:
        return


@contextmanager
def serving(info: Any, kind: str = SOUND, **changes: Any) -> Iterator[DoctorServer]:
    """The server, running in a thread."""
    with DoctorServer(info, kind, **changes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""A server of a built site on the loopback interface, for pages that use WebGPU and precise timers.

Every answer has cross-origin isolation (COOP, COEP, CORP), the right type for modules, wasm, wheels and models, and
``Cache-Control: no-cache`` with an ETag, so that a rebuilt site is seen at once and an unchanged one costs a 304.
Byte ranges (RFC 9110, section 14) let the page read a model's header without its body.
"""

import os
import posixpath
import sys
import threading
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from harness import SetupError

HOST = "127.0.0.1"
"""The loopback interface."""
ISOLATION = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of cross-origin isolation."""
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".gguf": "application/octet-stream",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".py": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".whl": "application/zip",
    ".woff2": "font/woff2",
    ".zip": "application/zip",
}
"""The media type of each suffix."""
_BLOCK = 1 << 20


class ByteRange(NamedTuple):
    """The bytes from ``start`` to ``stop`` (exclusive) of a file."""

    start: int
    stop: int


class UnsatisfiableRangeError(Exception):
    """A well-formed range that no byte of the file lies in."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The single byte range that ``header`` asks for in a file of ``size`` bytes, or None, which means the whole file.

    The RFC allows None for a header that is not understood: another unit, several ranges, nonsense.
    UnsatisfiableRangeError when no byte lies in the range.
    """
    if not header or not header.startswith("bytes=") or "," in header:
        return None
    first, dash, last = header.removeprefix("bytes=").strip().partition("-")
    if not dash or not all(part == "" or (part.isascii() and part.isdigit()) for part in (first, last)):
        return None
    if first == "":
        if last == "":
            return None
        start, stop = max(0, size - int(last)), size
    else:
        if last and int(last) < int(first):
            return None
        start, stop = int(first), min(size, int(last) + 1) if last else size
    if start >= stop:
        raise UnsatisfiableRangeError
    return ByteRange(start, stop)


def resolve(root: Path, target: str) -> Path | None:
    """The file that the request ``target`` names; None: missing, hidden, or outside ``root`` after links."""
    try:
        path = unquote(urlsplit(target).path, errors="strict")
    except ValueError:  # not UTF-8, or no URL at all
        return None
    if "\0" in path or "\\" in path or not path.startswith("/"):
        return None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if any(part.startswith(".") or ":" in part for part in parts):
        return None
    found = root.joinpath(*parts)
    if path.endswith("/"):
        found /= "index.html"
    try:
        real = found.resolve(strict=True)
    except (OSError, ValueError):
        return None
    return real if real.is_file() and real.is_relative_to(root) else None


class Handler(BaseHTTPRequestHandler):
    """The answers to GET and HEAD requests for files under ``root``; requests are printed unless ``quiet``."""

    protocol_version = "HTTP/1.1"
    server_version = "stepwell"
    sys_version = ""
    timeout = 60  # a browser's idle connection must not hold a thread for ever

    def __init__(self, *args: object, root: Path, quiet: bool) -> None:
        self.root, self.quiet = root, quiet
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with a file, or the part of it that is asked for."""
        self._serve(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the headers of GET alone."""
        self._serve(with_body=False)

    def end_headers(self) -> None:
        """Add the headers of cross-origin isolation, and end the headers."""
        for name, value in ISOLATION.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print a request, unless ``quiet``."""
        if not self.quiet:
            super().log_message(format, *args)

    def _serve(self, *, with_body: bool) -> None:
        path = resolve(self.root, self.path)
        if path is None:
            if not self._redirect_to_folder():
                self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            file = path.open("rb")
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            stat = os.fstat(file.fileno())
            etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
            if self._unchanged(etag, stat.st_mtime):
                self.send_response(HTTPStatus.NOT_MODIFIED)
                self._validators(etag, stat.st_mtime)
                self.end_headers()
                return
            condition = self.headers.get("If-Range")
            asked = self.headers.get("Range") if condition in (None, etag) else None
            try:
                part = parse_range(asked, stat.st_size)
            except UnsatisfiableRangeError:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{stat.st_size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._send_head(path, part, stat, etag)
            if with_body:
                self._send_body(file, part or ByteRange(0, stat.st_size))

    def _send_head(self, path: Path, part: ByteRange | None, stat: os.stat_result, etag: str) -> None:
        self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
        if part:
            self.send_header("Content-Range", f"bytes {part.start}-{part.stop - 1}/{stat.st_size}")
        length = part.stop - part.start if part else stat.st_size
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", TYPES.get(path.suffix.lower(), "application/octet-stream"))
        self.send_header("Accept-Ranges", "bytes")
        self._validators(etag, stat.st_mtime)
        self.end_headers()

    def _validators(self, etag: str, mtime: float) -> None:
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", formatdate(mtime, usegmt=True))
        self.send_header("Cache-Control", "no-cache")

    def _unchanged(self, etag: str, mtime: float) -> bool:
        if (tags := self.headers.get("If-None-Match")) is not None:
            return "*" in tags or etag in [tag.strip().removeprefix("W/") for tag in tags.split(",")]
        try:
            since = parsedate_to_datetime(self.headers.get("If-Modified-Since", ""))
        except ValueError:
            return False
        return int(mtime) <= since.timestamp()

    def _redirect_to_folder(self) -> bool:
        """Send the browser from ``/panels``, a folder with a page, to ``/panels/``, so that relative links hold."""
        path = self.path.partition("?")[0]
        if path.endswith("/") or resolve(self.root, path + "/") is None:
            return False
        self.send_response(HTTPStatus.MOVED_PERMANENTLY)
        self.send_header("Location", posixpath.basename(path) + "/")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def _send_body(self, file: BinaryIO, part: ByteRange) -> None:
        file.seek(part.start)
        left = part.stop - part.start
        try:
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:  # the file was cut short meanwhile: the promised length cannot be kept
                    self.close_connection = True
                    return
                self.wfile.write(block)
                left -= len(block)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page went away or cancelled the stream


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the error, unless a browser closed its connection in the middle of a request."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class SiteServer:
    """A server of ``root`` in a background thread, from ``with`` to its end; ``url`` ends in a slash."""

    def __init__(self, root: Path, port: int = 0, *, quiet: bool = True) -> None:
        handler = partial(Handler, root=root.resolve(), quiet=quiet)
        try:
            self._http = _Server((HOST, port), handler)
        except (OSError, OverflowError) as error:
            raise SetupError(
                f"port {port} on {HOST} cannot be used ({error}). Choose another with --port, or 0 for any."
            ) from error
        self.port: int = self._http.server_address[1]
        self.url = f"http://{HOST}:{self.port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="site", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Block until interrupted."""
        self._thread.join()

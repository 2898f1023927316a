"""The site's server: headers, types, ranges, revalidation, and nothing outside its root."""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import SetupError
from harness.site.server import ISOLATION, ByteRange, SiteServer, UnsatisfiableRangeError, parse_range, resolve

BODY = bytes(range(256)) * 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("site")
    root = base / "dist"
    (root / "panels").mkdir(parents=True)
    (base / "secret.txt").write_text("secret")
    (base / "dist2").mkdir()
    (base / "dist2" / "secret.txt").write_text("secret")
    (root / "index.html").write_text("<!doctype html>")
    (root / "panels" / "index.html").write_text("<!doctype html>")
    (root / "model.gguf").write_bytes(BODY)
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden").write_text("hidden")
    (root / "ünï codé.txt").write_text("name")
    for name in ("a.mjs", "a.js", "a.wasm", "a.whl", "a.css", "a.json"):
        (root / name).write_text("x")
    (root / "link.txt").symlink_to(base / "secret.txt")
    (root / "inside.gguf").symlink_to(root / "model.gguf")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[SiteServer]:
    with SiteServer(root) as server:
        yield server


def ask(
    server: SiteServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_serves_the_index_with_isolation(server: SiteServer) -> None:
    status, headers, body = ask(server, "/")
    assert (status, body) == (200, b"<!doctype html>")
    assert {name: headers[name] for name in ISOLATION} == ISOLATION
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert server.url == f"http://127.0.0.1:{server.port}/"


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("a.mjs", "text/javascript; charset=utf-8"),
        ("a.js", "text/javascript; charset=utf-8"),
        ("a.wasm", "application/wasm"),
        ("a.whl", "application/zip"),
        ("a.css", "text/css; charset=utf-8"),
        ("a.json", "application/json"),
        ("model.gguf", "application/octet-stream"),
    ],
)
def test_types(server: SiteServer, name: str, type_: str) -> None:
    assert ask(server, f"/{name}")[1]["Content-Type"] == type_


@pytest.mark.parametrize(
    "path",
    [
        "/missing",
        "/.hidden",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/panels/../../secret.txt",
        "/..%5csecret.txt",
        "/link.txt",
        "/../dist2/secret.txt",
        "/%00",
        "//etc/passwd",
        "/index.html/",
        "/%ff",
    ],
)
def test_nothing_else_is_served(server: SiteServer, path: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 404
    assert b"secret" not in body
    assert {name: headers[name] for name in ISOLATION} == ISOLATION


def test_absolute_form_and_odd_names(server: SiteServer, root: Path) -> None:
    assert ask(server, "/%C3%BCn%C3%AF%20cod%C3%A9.txt?x=1#y")[2] == b"name"
    assert ask(server, f"{server.url}a.js")[2] == b"x"
    assert resolve(root, "no-slash") is None
    assert resolve(root, "http://[/a.js") is None


def test_a_link_inside_the_root_is_followed(server: SiteServer) -> None:
    assert ask(server, "/inside.gguf")[2] == BODY


def test_a_folder_is_redirected_to_its_page(server: SiteServer) -> None:
    status, headers, _ = ask(server, "/panels")
    assert (status, headers["Location"]) == (301, "panels/")
    assert ask(server, "/panels/")[0] == 200


def test_head_has_the_headers_and_no_body(server: SiteServer) -> None:
    status, headers, body = ask(server, "/model.gguf", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(BODY)), b"")


def test_other_methods_are_refused_in_isolation(server: SiteServer) -> None:
    status, headers, _ = ask(server, "/", "POST")
    assert status == 501
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-3", slice(0, 4)),
        ("bytes=5-", slice(5, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=2040-9999", slice(2040, None)),
    ],
)
def test_a_single_range(server: SiteServer, header: str, part: slice) -> None:
    status, headers, body = ask(server, "/model.gguf", Range=header)
    assert (status, body) == (206, BODY[part])
    first = len(BODY) - len(body) if part.stop is None else part.start
    assert headers["Content-Range"] == f"bytes {first}-{first + len(body) - 1}/{len(BODY)}"
    assert headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("header", ["bytes=2048-", "bytes=9999-10000", "bytes=-0"])
def test_a_range_beyond_the_end(server: SiteServer, header: str) -> None:
    status, headers, body = ask(server, "/model.gguf", Range=header)
    assert (status, headers["Content-Range"], body) == (416, f"bytes */{len(BODY)}", b"")


@pytest.mark.parametrize("header", ["bytes=3-1", "bytes=-", "items=0-1", "bytes=0-1,4-5", "bytes=a-b", "bytes=٣-٤"])
def test_a_range_that_is_not_understood_is_ignored(header: str) -> None:
    assert parse_range(header, 100) is None


def test_ranges_of_an_empty_file(server: SiteServer) -> None:
    assert ask(server, "/empty.txt")[::2] == (200, b"")
    with pytest.raises(UnsatisfiableRangeError):
        parse_range("bytes=0-", 0)
    assert parse_range("bytes=-500", 100) == ByteRange(0, 100)


def test_head_with_a_range(server: SiteServer) -> None:
    status, headers, body = ask(server, "/model.gguf", "HEAD", Range="bytes=0-3")
    assert (status, headers["Content-Length"], body) == (206, "4", b"")


def test_revalidation(server: SiteServer, root: Path) -> None:
    _, headers, _ = ask(server, "/a.js")
    assert ask(server, "/a.js", If_None_Match=headers["ETag"])[::2] == (304, b"")
    assert ask(server, "/a.js", If_None_Match=f'"other", W/{headers["ETag"]}')[0] == 304
    assert ask(server, "/a.js", If_None_Match='"other"')[0] == 200
    assert ask(server, "/a.js", If_Modified_Since=headers["Last-Modified"])[0] == 304
    assert ask(server, "/a.js", If_Modified_Since="Thu, 01 Jan 1970 00:00:00 GMT")[0] == 200
    assert ask(server, "/a.js", If_Modified_Since="yesterday")[0] == 200
    (root / "a.js").write_text("changed")
    assert ask(server, "/a.js", If_None_Match=headers["ETag"])[::2] == (200, b"changed")
    (root / "a.js").write_text("x")


def test_if_range(server: SiteServer) -> None:
    etag = ask(server, "/model.gguf", "HEAD")[1]["ETag"]
    assert ask(server, "/model.gguf", Range="bytes=0-0", If_Range=etag)[0] == 206
    assert ask(server, "/model.gguf", Range="bytes=0-0", If_Range='"old"')[0] == 200


def test_one_connection_serves_many_requests(server: SiteServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    bodies = []
    for path in ("/a.js", "/missing", "/model.gguf", "/a.css"):
        connection.request("GET", path)
        bodies.append(connection.getresponse().read())
    connection.close()
    assert (bodies[0], bodies[2], bodies[3]) == (b"x", BODY, b"x")


def test_a_port_in_use_is_an_error_with_advice(server: SiteServer, root: Path) -> None:
    with pytest.raises(SetupError, match=rf"{server.port}.*--port"):
        SiteServer(root, server.port)

"""Whom the server answers, and what it refuses: one test for each point."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

import uniquery.explore
from helpers.coco_files import sound, write_json, write_set
from uniquery.errors import DataError, UserError
from uniquery.explore import uploads
from uniquery.explore.server import listen

from .conftest import serve

STATIC = Path(uniquery.explore.__file__).parent / "static"


def test_answers_are_sent_at_once():
    async def accepted() -> int:
        with listen(0) as listener:
            options = asyncio.get_running_loop().create_future()

            async def answer(_, writer):
                options.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                writer.close()

            async with await asyncio.start_server(answer, sock=listener):
                await asyncio.open_connection(*listener.getsockname())
                return await options

    assert asyncio.run(accepted()), "TCP_NODELAY is off: each answer would be 40 ms late"


def test_binds_to_loopback_only():
    with listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} cannot be used"):
            listen(port)
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
        for address in others:
            with socket.socket() as client:
                client.settimeout(1)
                assert client.connect_ex((address, port)) != 0


@pytest.mark.parametrize(
    "path", ["/", "/api/start", "/wrong/api/start", "/static/main.js", "/secret-toke/", "//api/start"]
)
def test_without_the_token(page, path):
    answer = page.client.get(path)
    assert answer.status_code == 403
    assert "token" in answer.json()["error"]


def test_with_the_token(page):
    assert page.get("").status_code == 200
    assert page.get("api/start").status_code == 200
    assert page.get("static/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "192.168.0.7:8000"]
)
def test_foreign_host(page, host):
    answer = page.get("api/start", headers={"Host": host})
    assert answer.status_code == 421
    assert "127.0.0.1" in answer.json()["error"]


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:8000", "localhost", "[::1]:8000"])
def test_names_of_this_machine(page, host):
    """Another port is what a tunnel to another machine has."""
    assert page.get("api/start", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:8000"])
def test_foreign_origin(page, origin):
    assert page.get("api/start", headers={"Origin": origin}).status_code == 403
    assert (
        page.client.post("/secret-token/api/uploads?run=0", content=b"x", headers={"Origin": origin}).status_code == 403
    )


def test_own_origin(page):
    assert page.get("api/start", headers={"Origin": "http://127.0.0.1:8000"}).status_code == 200


def test_no_websocket(page):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(page.client.app({"type": "websocket", "path": "/secret-token/", "headers": []}, None, send))
    assert sent == []  # not accepted


@pytest.mark.parametrize(
    "path",
    [
        "static/../app.py", "static/%2e%2e/app.py", "static/..%2fapp.py", "static//etc/passwd", "static/",
        "api/images/../../../etc/passwd", "api/images/a.png", "api/images/%2Fetc%2Fpasswd", "api/images/-1",
        "api/images/99999",
    ],
)  # fmt: skip
def test_path_outside_the_data(page, path):
    answer = page.get(path)
    assert answer.status_code in (403, 404, 422)  # the client may resolve the dots, and the token is lost
    assert set(answer.json()) == {"error"}


def test_annotations_that_reach_out_of_the_image_folder(tmp_path):
    content = sound()
    write_set(tmp_path)
    content["images"][0]["file_name"] = "../annotations.json"
    with pytest.raises(DataError, match="does not name a file inside"):
        serve([], (write_json(tmp_path, content), tmp_path / "images"))


def test_upload_above_the_limit(page, monkeypatch):
    monkeypatch.setattr("uniquery.explore.app.MAX_BYTES", 1000)
    answer = page.client.post("/secret-token/api/uploads?run=0", content=b"x" * 1001)
    assert answer.status_code == 413
    assert "at most" in answer.json()["error"]


def test_upload_above_the_limit_without_a_length(page, monkeypatch):
    monkeypatch.setattr("uniquery.explore.app.MAX_BYTES", 1000)
    read = []

    def endless():
        for _ in range(100):
            read.append(1)
            yield b"x" * 500

    assert page.client.post("/secret-token/api/uploads?run=0", content=endless()).status_code == 413


@pytest.mark.parametrize(
    "content", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF", b"\x89PNG\r\n\x1a\n" + b"\0" * 64, b"<svg/>"]
)
def test_upload_that_is_no_image(page, content):
    answer = page.client.post("/secret-token/api/uploads?run=0", content=content)
    assert answer.status_code == 422
    assert "no picture" in answer.json()["error"]


def test_upload_with_too_many_pixels(page, monkeypatch, scenes):
    monkeypatch.setattr(uploads, "MAX_PIXELS", 64 * 64 - 1)
    photo = next(scenes.images("val").iterdir()).read_bytes()
    answer = page.client.post("/secret-token/api/uploads?run=0", content=photo)
    assert answer.status_code == 422
    assert "pixels" in answer.json()["error"]


@pytest.mark.parametrize("path", ["", "api/start", "static/main.js", "nothing"])
def test_headers_of_every_answer(page, path):
    headers = page.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "no-store" in headers["cache-control"]
    assert "access-control-allow-origin" not in headers


def test_no_inline_script_or_style_and_no_other_host():
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|(?<!:)//[a-z0-9.-]+\.[a-z]{2,}/", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file.name
        )


def test_names_are_sent_as_they_are(tmp_path):
    name = "<img src=x onerror=alert(1)>.png"
    content = sound()
    content["images"][0]["file_name"] = name
    served = serve([], write_set(tmp_path, content))
    answer = served.get("api/start")
    assert answer.headers["content-type"] == "application/json"
    assert name in answer.json()["images"]["name"]

"""A server on this machine that speaks the part of the Hugging Face Hub's protocol that is used."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    """What the server was asked and what it stores.

    Attributes:
        url: its address.
        requests: method and path of each request.
        sent: every byte that came in: request lines, headers and bodies.
        commits: by repository, the files of each commit, oldest first.
        objects: large files by their SHA-256.
        refuse: a status code with which every request is refused.
    """

    url: str = ""
    requests: list[str] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    commits: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    refuse: int | None = None

    def files(self, repository: str) -> dict[str, bytes]:
        return self.commits[repository][-1]

    def commit(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The id and the files of a commit or of the branch main."""
        commits = {commit_id(n): files for n, files in enumerate(self.commits.get(repository, []))}
        key = commit_id(len(commits) - 1) if revision == "main" else revision
        return (key, commits[key]) if key in commits else None


def commit_id(number: int) -> str:
    return hashlib.sha1(str(number).encode()).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    state = HubServer()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunks()
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        self.state.sent.append(f"{self.requestline}\n{self.headers}".encode() + body)
        if self.state.refuse:
            self._answer(self.state.refuse, {"error": "refused"})
            return
        for method, pattern, answer in _ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                answer(self, body, **match.groupdict())
                return
        self._answer(404, {"error": f"no route: {self.command} {path}"}, {"X-Error-Code": "RepoNotFound"})

    def _chunks(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in self.state.commits:
            self._answer(409, {"url": f"{self.state.url}/{name}"})
            return
        self.state.commits[name] = []
        self._answer(200, {"url": f"{self.state.url}/{name}"})

    def validate_card(self, body: bytes) -> None:
        self._answer(200, {"warnings": [], "errors": []})

    def preupload(self, body: bytes, repository: str) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": modes})

    def batch(self, body: bytes, repository: str) -> None:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.state.url}/lfs/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.state.objects[oid] = body
        self._answer(200, {})

    def add_commit(self, body: bytes, repository: str) -> None:
        files = dict(self.state.commits[repository][-1]) if self.state.commits[repository] else {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
        self.state.commits[repository].append(files)
        oid = commit_id(len(self.state.commits[repository]) - 1)
        self._answer(
            200, {"success": True, "commitOid": oid, "commitUrl": f"{self.state.url}/{repository}/commit/{oid}"}
        )

    def info(self, body: bytes, repository: str, revision: str = "main") -> None:
        if repository not in self.state.commits:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        elif (found := self.state.commit(repository, revision)) is None:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": name} for name in found[1]]
            self._answer(200, {"id": repository, "sha": found[0], "siblings": siblings})

    def tree(self, body: bytes, repository: str, revision: str) -> None:
        found = self.state.commit(repository, revision)
        assert found is not None
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in found[1].items()
        ]
        self._answer(200, entries)

    def resolve(self, body: bytes, repository: str, revision: str, file: str) -> None:
        found = self.state.commit(repository, revision)
        if found is None or file not in found[1]:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        key, files = found
        etag = hashlib.sha1(files[file]).hexdigest()
        self._answer(200, files[file], {"ETag": f'"{etag}"', "X-Repo-Commit": key, "Accept-Ranges": "bytes"})


_REPOSITORY = r"(?P<repository>[^/]+/[^/]+)"
_FILE = f"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
_ROUTES = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate_card),
    ("POST", f"/api/models/{_REPOSITORY}/preupload/main", _Handler.preupload),
    ("POST", f"/api/models/{_REPOSITORY}/commit/main", _Handler.add_commit),
    ("POST", rf"/{_REPOSITORY}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", _Handler.store),
    ("GET", f"/api/models/{_REPOSITORY}/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", f"/api/models/{_REPOSITORY}", _Handler.info),
    ("GET", f"/api/models/{_REPOSITORY}/tree/(?P<revision>[^/]+)", _Handler.tree),
    *(
        (method, f"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", _Handler.resolve)
        for method in ("GET", "HEAD")
    ),
]

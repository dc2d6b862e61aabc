"""A Hub on the loopback interface: the three requests that `pull` makes, and everything that can go wrong.

Shapes of the answers are those of the Hub's public API (`/api/models/R/revision/V`, `/api/models/R/tree/C`,
`/R/resolve/C/F`, the last with a redirect to another host for large files, and with `Range`).
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote, urlsplit


@dataclass
class Fault:
    """What a request gets instead of its answer.

    Attributes:
        status: an error, without a body.
        headers: with it.
        cut_after: bytes of the body that are sent before the connection is closed.
        change: what becomes of the body.
        body: sent as it is with status 200.
        ignores_range: send all, though a part was asked for.
        hold: wait for this before each further MiB of the body.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    change: Callable[[bytes], bytes] | None = None
    body: bytes | None = None
    ignores_range: bool = False
    hold: threading.Event | None = None


@dataclass(frozen=True)
class Request:
    host: str
    path: str
    range: str | None
    token: str | None


class FakeHub:
    """Repositories by name, each a list of commits; the last one is `main`. Use as a context."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.listed: Callable[[str, bytes], tuple[int, str] | None] = lambda _name, _data: None
        self.fault: Callable[[str, int], Fault | None] = lambda _path, _number: None
        self.requests: list[Request] = []
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):  # a client that was killed or has had enough
                    hub._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, files: Mapping[str, bytes]) -> str:
        """Add a commit; returns its name."""
        commits = self.repos.setdefault(repo, {})
        commit = hashlib.sha1(f"{repo}{len(commits)}".encode()).hexdigest()
        commits[commit] = dict(files)
        return commit

    def asked_for(self, name: str) -> list[Request]:
        """The requests for a file's bytes."""
        return [request for request in self.requests if request.path.endswith(f"/{name}") and request.host]

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        headers = request.headers
        seen = Request(headers["Host"], path, headers["Range"], headers["Authorization"])
        with self._lock:
            self.requests.append(seen)
            number = self._numbers[path] = self._numbers.get(path, 0) + 1
        fault = self.fault(path, number) or Fault()
        if fault.body is not None:
            self._send(request, 200, fault.body, {"Content-Type": "text/html"})
            return
        if fault.status:
            self._send(request, fault.status, b"", fault.headers)
            return
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"] and len(words) > 5:
            self._tell(request, "/".join(words[2:4]), words[4], "/".join(words[5:]))
        elif words[0] == "cdn":
            self._give(request, self.repos["/".join(words[1:3])][words[3]]["/".join(words[4:])], fault)
        elif len(words) < 5 or words[2] != "resolve":
            self._send(request, 404, b"", {})
        else:
            repo, commit, name = "/".join(words[:2]), words[3], "/".join(words[4:])
            data = self.repos[repo][commit].get(name)
            if data is None:
                self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            elif name.endswith(".safetensors"):
                place = f"http://localhost:{self.port}/cdn/{repo}/{commit}/{name}"
                self._send(request, 302, b"", {"Location": place})
            else:
                self._give(request, data, fault)

    def _tell(self, request: BaseHTTPRequestHandler, repo: str, what: str, revision: str) -> None:
        if repo not in self.repos:
            self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        commits = self.repos[repo]
        commit = next(reversed(commits)) if revision == "main" else revision
        if commit not in commits:
            self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        if what == "revision":
            answer: object = {"id": repo, "sha": commit, "siblings": []}
        else:
            answer = [self._entry(name, data) for name, data in commits[commit].items()]
        self._send(request, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        size, digest = self.listed(name, data) or (len(data), hashlib.sha256(data).hexdigest())
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": git}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
        return entry

    def _give(self, request: BaseHTTPRequestHandler, data: bytes, fault: Fault) -> None:
        if fault.change is not None:
            data = fault.change(data)
        asked = request.headers["Range"]
        headers, status = {}, 200
        if asked and not fault.ignores_range:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self._send(request, status, data, headers, fault)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: Mapping[str, str],
        fault: Fault | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        fault = fault or Fault()
        if fault.cut_after is not None:
            data = data[: fault.cut_after]
            request.close_connection = True
        for start in range(0, len(data), 1 << 20):
            if start and fault.hold is not None:
                request.wfile.flush()
                fault.hold.wait(60)
            request.wfile.write(data[start : start + (1 << 20)])
        request.wfile.flush()

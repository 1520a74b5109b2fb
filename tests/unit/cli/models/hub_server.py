"""An HTTP server with the Hugging Face Hub's endpoints for downloads, over folders."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
STATUSES = {"private": 403, "limited": 429}
"""The statuses of all answers about repositories of an organization."""


class HubServer(ThreadingHTTPServer):
    """Serves each folder ORG/NAME below `root` as a repository with the branch main and the tag v1.

    Repositories of the organization `gated` need TOKEN, and no repository takes another token. Those of STATUSES are
    answered with an error. `requests` has the paths of all requests.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requests: list[str] = []
        self.sizes: dict[str, int] = {}
        """Sizes that files are said to have, by name."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> set[str]:
        """Returns the names of the files that were downloaded."""
        return {path.rpartition("/")[2] for path in self.requests if path.startswith("GET") and "/resolve/" in path}


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        org, name, action, revision, *rest = [*(parts[2:] if is_api else parts), "", ""]
        folder = self.server.root / org / name
        authorization = self.headers["authorization"]
        if authorization not in (None, f"Bearer {TOKEN}"):
            self._send(401, message="Invalid credentials in Authorization header")
        elif not folder.is_dir():
            self._send(404, code="RepoNotFound")
        elif org in STATUSES:
            self._send(STATUSES[org], message=f"{org} says the Hub")
        elif not is_api and org == "gated" and authorization != f"Bearer {TOKEN}":
            self._send(403, code="GatedRepo")
        elif revision not in {"main", "v1", COMMIT}:
            self._send(404, code="RevisionNotFound")
        elif action == "tree":
            self._send(200, json.dumps([self._entry(folder, file) for file in sorted(folder.rglob("*"))]).encode())
        elif is_api:
            files = [{"rfilename": str(file.relative_to(folder))} for file in folder.rglob("*") if file.is_file()]
            self._send(200, json.dumps({"id": f"{org}/{name}", "sha": COMMIT, "siblings": files}).encode())
        else:
            content = (folder / "/".join(rest).strip("/")).read_bytes()
            self._send(200, content, etag=hashlib.sha1(content).hexdigest(), size=self.server.sizes.get(rest[0]))

    def _entry(self, folder: Path, file: Path) -> dict[str, object]:
        path = str(file.relative_to(folder))
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": "d"}
        size = self.server.sizes.get(file.name, file.stat().st_size)
        return {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()}

    def _send(
        self,
        status: int,
        content: bytes = b"",
        *,
        code: str = "",
        message: str = "",
        etag: str = "",
        size: int | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.send_header("X-Repo-Commit", COMMIT)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(root: Path) -> Iterator[HubServer]:
    """Yields a running server."""
    server = HubServer(root)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hub_environment(hub: HubServer, home: Path) -> dict[str, str]:
    """Return the environment of a process whose Hub is `hub` and whose caches are in `home`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return env | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "XDG_CACHE_HOME": str(home),
    }

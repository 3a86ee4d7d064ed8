"""A publisher on this machine, on a free port: it resumes, breaks and refuses as a test asks. And archives to offer."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from fedmoe.data.source_spec import Remote


@dataclass
class Site:
    """What the server offers, how it misbehaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    address: str = ""
    resumes: bool = True
    break_after: int | None = None  # bytes of a reply, then the connection is closed
    breaks: int = 0  # how many replies break
    statuses: list[int] = field(default_factory=list)  # answered first, one per request
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def remote(self, file: str, content: bytes, members: dict[str, str] | None = None) -> Remote:
        self.files[file] = content
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return Remote(f"{self.address}/{file}", file, checksum, members or {})


def handler_of(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range")
            site.asked.append((name, wanted))
            if site.statuses:
                self.send_error(site.statuses.pop(0))
                return
            if name not in site.files:
                self.send_error(404)
                return
            content, begin = site.files[name], 0
            if wanted and site.resumes:
                begin = int(wanted.removeprefix("bytes=").rstrip("-"))
                if begin >= len(content):
                    self.send_error(416)
                    return
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            rest = content[begin:]
            if site.breaks > 0 and site.break_after is not None:
                site.breaks -= 1
                rest = rest[: site.break_after]
            self.wfile.write(rest)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(site))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def archive_of(members: dict[str, bytes], *hostile: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in hostile:
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info

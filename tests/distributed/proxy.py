"""A small stand-in for the proxy of docs/deploy.md: it ends TLS and lets only the routes of nodes through."""

import http.client
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "deploy.md"


def allowed_prefixes() -> list[str]:
    """The locations that the nginx config in the docs passes on."""
    blocks = re.findall(r"location\s+(\S+)\s*\{([^}]*)\}", DOCS.read_text(encoding="utf-8"))
    return [place for place, block in blocks if "proxy_pass" in block]


@contextmanager
def proxy_to(port: int, keys: Path) -> Iterator[int]:
    prefixes = allowed_prefixes()
    upstream = ssl.create_default_context(cafile=str(keys / "ca.crt"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if not any(self.path.startswith(prefix) for prefix in prefixes):
                return self._reply(403, b"", {})
            line = http.client.HTTPSConnection("127.0.0.1", port, context=upstream, timeout=120)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                line.request("POST", self.path, body, headers)
                answer = line.getresponse()
                kept = {
                    n: v for n, v in answer.getheaders() if n.lower() not in ("transfer-encoding", "content-length")
                }
                return self._reply(answer.status, answer.read(), kept)
            except OSError:
                return self._reply(502, b"", {})
            finally:
                line.close()

        do_GET = do_PUT = do_DELETE = do_POST

        def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

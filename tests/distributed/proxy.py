"""The proxy of docs/deploy.md: nginx itself, as a process of this user on a free port, with the config of that page."""

import grp
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed.deployment import free_port, listens

DOCS = Path(__file__).parents[2] / "docs" / "deploy.md"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
needs_nginx = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed: the proxy of docs/deploy.md is not tried"
)

# What is around the page's `server` block: no service, nothing outside of its own folder.
AROUND = """
daemon off;
pid nginx.pid;
user {user} {group};
error_log error.log;
events {{}}
http {{
    access_log access.log;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
{server}}}
"""


def recipe(port: int, superlink: int, keys: Path) -> str:
    """The page's config with other ports, this folder's keys and this machine's name."""
    (block,) = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.S)
    changes = {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "127.0.0.1:8000": f"127.0.0.1:{superlink}",
        "fed.example.org": "localhost",
        "/etc/fed/": f"{keys}/",
    }
    for old, new in changes.items():
        assert old in block
        block = block.replace(old, new)
    return block


@contextmanager
def nginx_to(superlink: int, keys: Path, folder: Path) -> Iterator[int]:
    """Its port."""
    assert NGINX
    folder.mkdir()
    port = free_port()
    names = {"user": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}
    (folder / "nginx.conf").write_text(AROUND.format(server=recipe(port, superlink, keys), **names))
    command = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while not listens(port):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "error.log").read_text()
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(30)

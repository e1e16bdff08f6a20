"""A Hugging Face hub on this machine with one repository, for tests of what is downloaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

REPOSITORY = "org/model"
COMMIT = "c0ffee" * 6 + "c0ff"


@contextmanager
def local_hub(directory: Path) -> Iterator[str]:
    """Serve the files of a directory as the repository REPOSITORY; yield the address of the hub."""
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    listing = [{"type": "file", "path": name, "size": path.stat().st_size, "oid": name} for name, path in files.items()]
    about = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            path = urlsplit(self.path).path
            name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
            if "/tree/" in path or "/revision/" in path:
                content = json.dumps(listing if "/tree/" in path else about).encode()
            else:
                content = files[name].read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name.replace("/", "-")}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()

"""Notices that are no signals."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from elastic_runner.launch import notice
from elastic_runner.launch.notice import Notices, can_be_asked


def test_a_file_that_appears(tmp_path: Path) -> None:
    notices = Notices(file=tmp_path / "stop")
    assert notices.given() is None
    (tmp_path / "stop").touch()
    assert notices.given() == f"{tmp_path}/stop is there"


def test_a_url_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After refusals: 404 is what clouds say until there is a notice. 0: what is no HTTP."""
    monkeypatch.setattr(notice, "_ASK_EVERY", 0.01)
    answers, asked = [404, 500, 0, 404, 200], threading.Semaphore(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if status := answers.pop(0):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.wfile.write(b"what?\r\n")
            asked.release()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        notices = Notices(url=f"http://127.0.0.1:{server.server_port}/action")
        try:
            for _ in range(4):
                assert asked.acquire(timeout=30)
                assert notices.given() is None
            assert notices._answered.wait(30)
            assert str(notices.given()).endswith("/action has answered")
        finally:
            notices.close()
            server.shutdown()


def test_what_is_no_url_is_never_asked() -> None:
    """Case c15: nobody would ever hear of the notice."""
    for url in ("http://localhost/", "https://[::1]:8080/a?b=c", "HTTP://host"):
        assert can_be_asked(url)
    for url in ("", "nonsense", "localhost:80/x", "http:///x", "ftp://h/x", "http://h:x", "http://h/ ", "http://h/é"):
        assert not can_be_asked(url)


def test_a_url_that_nobody_serves_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_ASK_EVERY", 0.01)
    notices = Notices(url="http://127.0.0.1:1/")
    assert not notices._answered.wait(0.2)
    assert notices.given() is None
    notices.close()

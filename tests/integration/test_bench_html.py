"""The HTML report and the progress bar, as their readers get them."""

import os
import pty
import re
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_runs import PROGRAM, bench, run
from hand_made_server import Request, answer_in_words, hand_made_server, response

from kvwatch.bench.errors import SavedRunError

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "link", "img", "br", "input"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_that_asks_nobody_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def every_third_fails(connection: socket.socket, request: Request) -> None:
        time.sleep(0.25)  # so that the run lasts for a reading of the metrics
        if request.number % 3 == 0:
            connection.sendall(response("500 Internal Server Error", EVIL.encode()))
        else:
            answer_in_words(connection, request)

    with hand_made_server(every_third_fails) as server:
        server.models = response("200 OK", b'{"data": [{"id": "' + EVIL.encode() + b'", "max_model_len": 512}]}')
        server.metrics = response(
            "200 OK",
            b'vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 3\nvllm:num_requests_waiting 1\n'
            b'vllm:num_preemptions_total 0\nvllm:cache_config_info{num_gpu_blocks="101",block_size="16"} 1\n',
        )  # fmt: skip
        words = ("--scenario", "mixed", "--num-requests", "60", "--html", str(tmp_path / "r.html"))
        status, report = bench(capsys, "--url", server.url, *words, "--assert", "errors>=0")

    assert status == 0
    assert report["requests"]["failed"] > 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in {"src", "href", "srcset"} or name.startswith("on")]
    assert not re.search(r"@import|url\(", text)
    assert EVIL not in text
    assert EVIL in page.text
    assert page.tags.count("svg") >= 5
    assert page.tags.count("rect") > 50
    assert '"schema_version": 1' in page.text
    for words_shown in ("first token", "failed", "http_500", "errors>=0", "shared-prefix", "fewest free blocks"):
        assert words_shown in page.text


def test_a_page_that_cannot_be_written_costs_no_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with hand_made_server() as server, pytest.raises(SavedRunError, match="--html"):
        run(
            [
                "--url",
                server.url,
                "--scenario",
                "short",
                "--num-requests",
                "3",
                "--html",
                str(tmp_path / "no" / "r.html"),
            ]
        )
    assert "3 answered" in capsys.readouterr().out


def test_a_terminal_gets_a_bar_and_stdout_stays_clean() -> None:
    ours, theirs = pty.openpty()
    with hand_made_server() as server:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--url", server.url, "--scenario", "short", "--num-requests", "5"],
            stdout=subprocess.PIPE, stderr=theirs, text=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        out, _ = process.communicate(timeout=60)
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert process.returncode == 0
    assert "5/5" in drawn
    assert "[##############################]" in drawn
    assert "\r" not in out
    assert "5 answered" in out

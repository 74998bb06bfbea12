"""The documentation site opened from its files: its search runs in a browser that starts no worker for a file."""

import shutil

import pytest

from tests.browser import browser, needs_browser
from tests.running import ROOT

WORKER = """
addEventListener("message", (event) => postMessage({ twice: 2 * event.data.number }));
postMessage("ready");
"""
PAGE = '<!doctype html><title>page</title><script src="iframe-worker.js"></script><body></body>'
ASK = """
    return new Promise((done, failed) => {
      const worker = new Worker("worker.js"), heard = [];
      worker.addEventListener("message", (event) => {
        heard.push(event.data);
        if (heard.length === 3) done(heard);
      });
      setTimeout(() => failed("no answer"), 5000);
      worker.postMessage({ number: 4 });  // before its script is there
      worker.postMessage({ number: 5 });
    });
"""


@pytest.mark.browser
@needs_browser
def test_a_worker_answers_where_the_page_is_a_file(tmp_path):
    shutil.copy(ROOT / "docs" / "assets" / "iframe-worker.js", tmp_path)
    (tmp_path / "worker.js").write_text(WORKER)
    (tmp_path / "page.html").write_text(PAGE)
    with browser(tmp_path / "profile") as window:
        window.open(tmp_path / "page.html")
        assert window.run(ASK) == ["ready", {"twice": 8}, {"twice": 10}]
        assert window.console() == []

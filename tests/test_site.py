"""The documentation site opened from its files: its search runs in a browser that starts no worker for a file."""

import runpy
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


HEADER = ["setting", "default", "meaning", "allowed values and rules"]
SETTING = ["<code>model.compute_dtype_of_all_weights</code>", "<code>'auto'</code>", "Precision of products. " * 6, ""]
FIGURES = ["learning rate of a run", "0.123", "0.456", "0.789"]


def _table(header, row):
    cells = ("".join(f"<{tag}>{text}</{tag}>" for text in texts) for tag, texts in (("th", header), ("td", row)))
    return "<table>\n<thead>\n<tr>{}</tr>\n</thead>\n<tbody>\n<tr>{}</tr>\n</tbody>\n</table>".format(*cells)


def _marked(html):
    return runpy.run_path(str(ROOT / "dev" / "site_tables.py"))["on_page_content"](html)


def test_wide_tables_of_text_are_marked():
    marked = _marked(_table(HEADER, SETTING) + _table(HEADER, FIGURES) + _table(HEADER[:3], SETTING[:3]))
    assert marked.count("<table data-stacked>") == 1 and marked.count("<table>") == 2
    assert marked.count("data-column") == 4 and "<td data-column=\"default\"><code>'auto'</code></td>" in marked


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize(("width", "stacked"), [(400, True), (1400, False)])
def test_a_wide_table_of_text_needs_no_scrolling_on_a_phone(tmp_path, width, stacked):
    styles = ("* { box-sizing: border-box; }", (ROOT / "docs" / "assets" / "site.css").read_text())
    body = f'<body><div class="md-typeset">{_marked(_table(HEADER, SETTING))}</div></body>'
    (tmp_path / "frame.html").write_text(f"<!doctype html><style>{''.join(styles)}</style>{body}")
    (tmp_path / "page.html").write_text(
        f'<!doctype html><iframe src="frame.html" width="{width}" height="600"></iframe>'
    )
    with browser(tmp_path / "profile", "--allow-file-access-from-files") as window:
        window.open(tmp_path / "page.html")
        found = window.run("""
            const page = document.querySelector("iframe").contentDocument, cells = [...page.querySelectorAll("td")];
            const lefts = new Set(cells.slice(0, 3).map((cell) => cell.getBoundingClientRect().left));
            return [page.documentElement.scrollWidth, lefts.size, page.defaultView.innerWidth];
        """)
    assert found == [width, 1 if stacked else 3, width]

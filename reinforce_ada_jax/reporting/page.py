"""index.html: one page with curves, configurations and sampled responses of runs, which needs no server and no network.

The page is a template without content. Its program draws everything from JSON. The page in a file contains all of it;
the live page (`live`) requests new data. Responses are untrusted text and must stay text. They are embedded as JSON
with `<`, `>`, `&` and line separators as escapes, and the page's program inserts them as text, never as markup. The
page's content policy allows no other program; the page in a file may use no network, a live page only its own server.
"""

import base64
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from reinforce_ada_jax.config import flatten
from reinforce_ada_jax.files import buckets
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.reporting.comparison import ComparedRun, Comparison
from reinforce_ada_jax.reporting.curves import BUDGETS, EVALUATING, Figure
from reinforce_ada_jax.reporting.history import History
from reinforce_ada_jax.reporting.panels import DARK_COLORS, LIGHT_COLORS, Curve, Panel
from reinforce_ada_jax.reporting.samples import SampledResponses, description, evenly_spaced

ASSETS = pathlib.Path(__file__).parents[1] / "assets" / "report"
PROGRAM = ("charts.js", "responses.js", "report.js")
# Characters that could end the element with the JSON, and surrogates, which UTF-8 cannot encode.
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
COLUMNS = (
    "run", "iteration", "prompt", "problem", "draw", "response", "boxed", "correct", "reason", "reward", "advantage",
    "tokens", "truncated",
)  # fmt: skip
MOST_POINTS = 400  # of a curve in `figure_data`: a live page gets the whole curve again with each iteration
RECENT = 10  # iterations whose mean time predicts that of the remaining ones


def embedded(value: Any) -> str:
    """Returns JSON that is safe in a script element, whatever text is in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _number(value: Any) -> Any:
    """Returns a number with six digits, and None for NaN and infinity, which JSON lacks; other values as they are."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def _numbers(values: np.ndarray) -> list[Any]:
    return [_number(value) for value in values.tolist()]


# ---- runs ------------------------------------------------------------------------------------------------------------


def metric_rows(history: History, begin: int = 0) -> dict[str, Any]:
    """Returns the metrics of a run from row `begin` on, as `keys` and `rows`.

    Row 0 is the evaluation before the first iteration, row i the i-th line of metrics.jsonl. A row begins with
    iteration, updates, tokens and seconds.
    """
    keys = [key for key in dict.fromkeys((*history.metrics, *history.before)) if key != "iteration"]
    rows = []
    if begin == 0:
        rows.append([0, 0, 0, 0, *(_number(history.before.get(key)) for key in keys)])
    nothing = np.full(len(history.updates), np.nan)
    columns = (history.metrics["iteration"], history.updates, history.tokens, history.seconds)
    columns = (*columns, *(history.metrics.get(key, nothing) for key in keys))
    rows += [list(row) for row in zip(*(_numbers(column[max(begin - 1, 0) :]) for column in columns), strict=True)]
    return {"keys": keys, "rows": rows}


def seconds_left(history: History) -> float | None:
    """Estimates the seconds until the run ends, from the newest iterations; None if the metrics have no times."""
    iterations = history.config.get("iterations")
    spent = np.diff(history.seconds, prepend=0.0)
    evaluating = history.metrics.get(EVALUATING)
    recent = spent if evaluating is None else spent + np.nan_to_num(evaluating)
    mean = float(recent[1:][-RECENT:].mean()) if len(recent) > 1 else math.nan  # the first one compiles
    if not isinstance(iterations, int) or not math.isfinite(mean):
        return None
    return mean * max(iterations - int(history.metrics["iteration"][-1]), 0)


def run_data(history: History, begin: int = 0) -> dict[str, Any]:
    """Returns a run in the form that the page's program reads, with its metrics from row `begin` on."""
    run: dict[str, Any] = {"name": history.name, "workdir": buckets.origin(history.workdir), "begin": begin}
    iterations = history.config.get("iterations")
    run |= {"iterations": iterations if isinstance(iterations, int) else None, "left": _number(seconds_left(history))}
    if begin == 0:
        config = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(history.config).items()}
        run |= {"samples": history.samples, "config": config, "started": history.started}
    return run | metric_rows(history, begin)


# ---- figures and tables ----------------------------------------------------------------------------------------------


def _curve(curve: Curve, runs: Sequence[int]) -> dict[str, Any]:
    at = np.flatnonzero(np.isfinite(curve.x) & np.isfinite(curve.y))
    at = at[evenly_spaced(len(at), MOST_POINTS)]
    found = {"run": runs[curve.style], "x": _numbers(curve.x[at]), "y": _numbers(curve.y[at]), "faint": curve.faint}
    return found if curve.error is None else found | {"error": _numbers(curve.error[at])}


def _panel(panel: Panel, runs: Sequence[int]) -> dict[str, Any]:
    return {
        "title": panel.title, "xLabel": panel.x_label, "yLabel": panel.y_label, "limits": panel.limits,
        "powers": panel.powers, "diagonal": panel.diagonal, "counted": panel.counted,
        "series": [_curve(curve, runs) for curve in panel.curves],
        "bars": [[bar, [[part, _number(length)] for part, length in parts.items()]]
                 for bar, parts in panel.bars.items()],
    }  # fmt: skip


def figure_data(figures: Sequence[Figure], runs: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the figures without the panels over updates, tokens or time, which the page draws from the metrics.

    `runs` are the indices on the page of the runs that the figures show.
    """
    over_time = {label for label, _ in BUDGETS.values()}
    found = []
    for figure in figures:
        panels = [_panel(panel, runs) for panel in figure.panels if panel.x_label not in over_time]
        if panels:
            found.append({"name": figure.name, "title": figure.title, "caption": figure.caption, "panels": panels})
    return found


def comparison_data(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    def row(run: ComparedRun) -> dict[str, Any]:
        averages = {at: list(map(_number, pair)) for at, pair in run.averages.items()}
        return {**run._asdict(), "averages": averages}

    return [{**vars(found), "runs": list(map(row, found.runs))} for found in comparisons]


# ---- responses -------------------------------------------------------------------------------------------------------


def response_data(sampled: Sequence[SampledResponses]) -> dict[str, Any]:
    """Returns the responses for the page's program: rows of `COLUMNS`, with runs and problems as indices."""
    problems: dict[tuple[str, str], int] = {}
    rows = []
    for run, found in enumerate(sampled):
        for row in found.rows:
            problem = problems.setdefault((row["problem"], row["answer"]), len(problems))
            cells = row | {"run": run, "problem": problem}
            rows.append([_number(cells[column]) for column in COLUMNS])
    return {"problems": list(problems), "columns": COLUMNS, "rows": rows}


# ---- the page --------------------------------------------------------------------------------------------------------


def data(
    histories: Sequence[History],
    comparisons: Sequence[Comparison],
    figures: Sequence[Figure],
    sampled: Sequence[SampledResponses],
) -> dict[str, Any]:
    """Returns all that a page in a file shows; `sampled` are the responses of each run."""
    return {
        "live": False,
        "runs": [run_data(history) for history in histories],
        "comparisons": comparison_data(comparisons),
        "figures": figure_data(figures, range(len(histories))),
        "responses": response_data(sampled),
        "shown": [description(history.name, found) for history, found in zip(histories, sampled, strict=True)],
    }


def render(content: dict[str, Any]) -> str:
    """Returns the page with this content; only a live page may make requests, to its own server."""
    program = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in PROGRAM)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    # The template gets only these values; the page's program inserts all text of runs.
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(ASSETS), undefined=jinja2.StrictUndefined)
    source = "'self'" if content["live"] else "'none'"
    return environment.get_template("index.html").render(
        data=embedded(content),
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        colors={"light": LIGHT_COLORS, "dark": DARK_COLORS},
        program=program,
        policy=f"script-src 'sha256-{digest}'; connect-src {source}",
    )


def write(output: pathlib.Path, page: str) -> pathlib.Path:
    output.mkdir(parents=True, exist_ok=True)
    file = output / "index.html"
    # Names of folders may hold surrogates.
    write_atomically(file, page.encode("utf-8", "replace").decode("utf-8"))
    return file

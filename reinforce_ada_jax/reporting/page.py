"""index.html: figures, configurations and sampled responses of runs on one page that needs no server.

A response is hostile text and must stay text. The template escapes everything; responses are embedded as JSON with
`<`, `>`, `&` and line separators as escapes; the page's program inserts them as text, never as markup; and the page's
content policy allows no other program and no network.
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

from reinforce_ada_jax.config import flatten
from reinforce_ada_jax.files.durable import write_atomically
from reinforce_ada_jax.reporting.comparison import Comparison
from reinforce_ada_jax.reporting.curves import Figure
from reinforce_ada_jax.reporting.history import History
from reinforce_ada_jax.reporting.samples import SampledResponses, description

ASSETS = pathlib.Path(__file__).parents[1] / "assets" / "report"
# Characters that could end the element that holds the JSON, and surrogates, which UTF-8 lacks.
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
COLUMNS = (
    "run", "iteration", "problem", "draw", "response", "boxed", "correct", "reason", "reward", "advantage", "tokens",
    "truncated",
)  # fmt: skip


def _finite(value: Any) -> Any:
    """Returns None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def embedded(value: Any) -> str:
    """Returns JSON that is safe in a script element, whatever text is in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def response_data(names: Sequence[str], sampled: Sequence[SampledResponses]) -> dict[str, Any]:
    """Returns the responses as the page's program reads them: rows of `COLUMNS`, runs and problems as indices."""
    problems: dict[tuple[str, str], int] = {}
    rows = []
    for run, found in enumerate(sampled):
        for row in found.rows:
            problem = problems.setdefault((row["problem"], row["answer"]), len(problems))
            cells = row | {"run": run, "problem": problem}
            rows.append([_finite(cells[column]) for column in COLUMNS])
    return {"runs": list(names), "problems": list(problems), "columns": COLUMNS, "rows": rows}


def configuration_rows(histories: Sequence[History]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns lines [key, value of each run]: those in which the runs differ, and the others."""
    leaves = [flatten(history.config) for history in histories]
    different, same = [], []
    for key in sorted({key for flat in leaves for key in flat}):
        values = [json.dumps(flat[key], ensure_ascii=False) if key in flat else "absent" for flat in leaves]
        (same if len(set(values)) == 1 else different).append([key, *values])
    return different, same


def render(
    histories: Sequence[History],
    comparisons: Sequence[Comparison],
    figures: Sequence[Figure],
    sampled: Sequence[SampledResponses],
) -> str:
    """Returns the page; `sampled` are the responses of each run."""
    program = (ASSETS / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    names = [history.name for history in histories]
    different, same = configuration_rows(histories)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("index.html").render(
        names=names,
        histories=histories,
        comparisons=comparisons,
        figures=figures,
        different=different,
        same=same,
        shown=[description(name, found) for name, found in zip(names, sampled, strict=True)],
        any_responses=any(found.rows for found in sampled),
        data=embedded(response_data(names, sampled)),
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        program=program,
        program_digest=digest,
    )


def write(output: pathlib.Path, page: str) -> pathlib.Path:
    """Writes output/index.html, which shows the figures in the same folder; returns its path."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "index.html"
    # Names of folders may hold surrogates.
    write_atomically(file, page.encode("utf-8", "replace").decode("utf-8"))
    return file

"""index.html: the figures, the configurations and the sampled responses of runs on one page that needs no server.

A response is hostile text: whatever a model writes must stay text. So the template escapes all it is given; responses
travel as JSON in which `<`, `>`, `&` and line separators are written as escapes; the page's program puts them on the
page as text, never as markup; and the page's content policy allows no program but that one, and no network.
"""

import base64
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from reinforce_ada_jax.reporting import samples
from reinforce_ada_jax.reporting.curves import Figure
from reinforce_ada_jax.reporting.files import write_atomically
from reinforce_ada_jax.reporting.history import History, flatten
from reinforce_ada_jax.reporting.samples import Sampled

ASSETS = pathlib.Path(__file__).parents[1] / "assets" / "report"
# What could end the element that holds JSON, or is no character of UTF-8.
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
COLUMNS = (
    "run", "iteration", "problem", "draw", "response", "boxed", "correct", "reason", "reward", "advantage", "tokens",
    "truncated",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Summary:
    """One benchmark's table (header first) and, of two runs, a sentence."""

    benchmark: str
    rows: Sequence[Sequence[str]]
    sentence: str


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def embedded(value: Any) -> str:
    """JSON that can stand in a script element, whatever text is in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def response_data(names: Sequence[str], sampled: Sequence[Sampled]) -> dict[str, Any]:
    """The responses as the page's program takes them: rows of `COLUMNS`, with runs and problems by number."""
    problems: dict[tuple[str, str], int] = {}
    rows = []
    for run, found in enumerate(sampled):
        for row in found.rows:
            problem = problems.setdefault((row["problem"], row["answer"]), len(problems))
            cells = row | {"run": run, "problem": problem}
            rows.append([_finite(cells[column]) for column in COLUMNS])
    return {"runs": list(names), "problems": list(problems), "columns": COLUMNS, "rows": rows}


def configuration_rows(histories: Sequence[History]) -> tuple[list[list[str]], list[list[str]]]:
    """Lines [key, value of each run]: those in which runs differ, and the others."""
    leaves = [flatten(history.config) for history in histories]
    different, same = [], []
    for key in sorted({key for flat in leaves for key in flat}):
        values = [json.dumps(flat[key], ensure_ascii=False) if key in flat else "absent" for flat in leaves]
        (same if len(set(values)) == 1 else different).append([key, *values])
    return different, same


def read_responses(histories: Sequence[History]) -> list[Sampled]:
    """Each run's samples, as many as a page should hold."""
    return samples.read_all([history.workdir for history in histories])


def render(
    histories: Sequence[History], summaries: Sequence[Summary], figures: Sequence[Figure], sampled: Sequence[Sampled]
) -> str:
    """The page."""
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
        summaries=summaries,
        figures=figures,
        different=different,
        same=same,
        shown=[samples.words(name, found) for name, found in zip(names, sampled, strict=True)],
        any_responses=any(found.rows for found in sampled),
        data=embedded(response_data(names, sampled)),
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        program=program,
        program_digest=digest,
    )


def write(
    output: pathlib.Path,
    histories: Sequence[History],
    summaries: Sequence[Summary],
    figures: Sequence[Figure],
    sampled: Sequence[Sampled],
) -> pathlib.Path:
    """Writes output/index.html, beside the figures that it shows."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "index.html"
    page = render(histories, summaries, figures, sampled)
    # Names of folders may hold what is no character.
    write_atomically(file, page.encode("utf-8", "replace").decode("utf-8"))
    return file

"""A hook of mkdocs: wide tables of text are marked, so that docs/assets/site.css stacks their cells on narrow screens.

A stacked cell says in which column it is, which only the header has in HTML. Tables of figures stay tables.
"""

import itertools
import re

MIN_COLUMNS = 4
# Characters of the longest cells of all columns together: a screen of 400 px shows about 70 in a row.
MIN_CHARACTERS = 120

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_NAME = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td\b[^>]*>(.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def _texts(pattern, table):
    return [" ".join(_TAG.sub("", content).split()) for content in pattern.findall(table)]


def _marked(match):
    table = match[0]
    names, cells = _texts(_NAME, table), _texts(_CELL, table)
    if len(names) < MIN_COLUMNS or len(cells) % len(names):
        return table
    if sum(max(map(len, cells[column :: len(names)]), default=0) for column in range(len(names))) < MIN_CHARACTERS:
        return table
    columns = itertools.cycle(name.replace('"', "&quot;") for name in names)
    table = re.sub(r"<td\b", lambda _: f'<td data-column="{next(columns)}"', table)
    return table.replace("<table>", "<table data-stacked>", 1)


def on_page_content(html, **_):
    """Marks the wide tables of a page, and their cells with the names of their columns."""
    return _TABLE.sub(_marked, html)

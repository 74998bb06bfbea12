"""Checks the language of documents, docstrings, comments and messages; part of `make lint`.

    python dev/language.py

Rules: no words of BANNED; no docstring that begins with a clause ("What ...", "Whether ..."); the median sentence of a
document has at most MAX_MEDIAN_WORDS words, and no sentence more than MAX_WORDS. Code in backticks, quotations ("...",
as in error messages that a document explains) and blocks of code in documents are exempt, and so is dev/.
"""

import ast
import io
import pathlib
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
# What to say instead of each word.
BANNED = {
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix",
    r"whoever|whosoever|whomever": "the user, everyone who",
    r"hears?|heard (of|from)": "receives, detects",
    r"(stands?|standing|stood) beside": "is next to, is compared with",
    r"so many": "that many, or the number",
    r"to and fro": "alternately, back and forth",
    r"that which": "what, the one that",
    r"of which the": "whose",
    r"thereby|therein|thereof|thereto|wherein|whereof|whereby|hereby": "a sentence of its own",
    r"besides": "also, in addition",
    r"lifelines?": "watchdog",
    r"take_ahead|begun ahead": "prefetch, partial rollouts",
    r"lest|albeit|ere|amidst?|amongst|whilst|betwixt|perchance|forthwith|nigh|yonder|thrice|alas": "a plain word",
    r"for ever": "forever, without end",
    r"nought|naught|aught": "nothing",
    r"as it stands": "by default",
    r"at the fore|in sooth|in lieu": "a plain word",
}
CLAUSES = ("What", "Whether", "Of", "How", "Which", "Who", "Where", "That")
MAX_MEDIAN_WORDS, MAX_WORDS = 18, 40
_PATTERNS = {words.replace(" ", r"\s+"): say for words, say in BANNED.items()}
_BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in _PATTERNS), re.IGNORECASE)
_QUOTED = re.compile(r'`[^`]*`|"[^"\n]*"|\bhttps?://\S+')


def words_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, words found, what to say instead) of a text."""
    text = _QUOTED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in _BANNED.finditer(text):
        instead = next(say for words, say in _PATTERNS.items() if re.fullmatch(words, match[0], re.IGNORECASE))
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def prose(document: str) -> str:
    """Returns a Markdown document with its blocks of code blanked."""
    return re.sub(r"^( *)```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), document, flags=re.M | re.S)


def sentences(document: str) -> Iterator[tuple[int, str]]:
    """Yields (number of words, sentence) in paragraphs and lists of a Markdown document, tables left out."""
    text = re.sub(r"<!--[\s\S]*?-->|^ {4,}\S.*$", "", prose(document), flags=re.M)
    text = re.sub(r"`[^`]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not block.strip() or block.lstrip().startswith(("|", "#", "!")):
            continue
        for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(block.split())):
            words = re.findall(r"\S*\w\S*", sentence)
            if len(words) > 2:
                yield len(words), sentence


def too_long(document: str) -> Iterator[str]:
    """Yields what breaks a rule about the length of sentences."""
    found = list(sentences(document))
    median = statistics.median([count for count, _ in found]) if found else 0
    if median > MAX_MEDIAN_WORDS:
        yield f"the median sentence has {median:g} words; at most {MAX_MEDIAN_WORDS}"
    for count, sentence in found:
        if count > MAX_WORDS:
            yield f"a sentence has {count} words, at most {MAX_WORDS}: {sentence[:60]!r}..."


def comments_and_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every comment and string of a Python file, docstrings included."""
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type in strings:
            yield token.start[0], token.string.strip("rbfuRBFU").strip("\"'")


def clauses_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, first line) of the docstrings that begin with a clause."""
    nodes = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, nodes):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.partition(" ")[0].rstrip(".,") in CLAUSES:
                yield getattr(node, "lineno", 1), first


def main() -> None:
    """Prints what breaks a rule, and fails if there is anything."""
    found = []
    folders = ("docs", "launch", "bench", "reinforce_ada_jax", "configs", "examples", "tests")
    documents = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*.md"))]
    for file in sorted(documents):
        name = file.relative_to(ROOT)
        text = file.read_text()
        found += [f"{name}:{line}: {words!r}: {say}" for line, words, say in words_in(prose(text))]
        if name.name != "CHANGELOG.md":  # its entries are lists of names
            found += [f"{name}: {text}" for text in too_long(text)]
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        name, source = file.relative_to(ROOT), file.read_text()
        for first, text in comments_and_strings(source):
            found += [f"{name}:{first + line - 1}: {words!r}: {say}" for line, words, say in words_in(text)]
        found += [f"{name}:{line}: {text!r}: begin with a noun or a verb" for line, text in clauses_in(source)]
    print("\n".join(found), end="\n" if found else "")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The language check (dev/language.py) finds words and openings, and leaves quotations and code alone."""

import json

import pytest

from tests.running import ROOT, load

LANGUAGE = load(ROOT / "dev" / "language.py")
# In dev/, because no other file may contain these words.
CASES = json.loads((ROOT / "dev" / "language_cases.json").read_text())


def words(text: str) -> list[list]:
    """Returns [line, words] of a document."""
    return [[line, found] for line, found, _ in LANGUAGE.words_in(LANGUAGE.prose(text))]


# Across the end of a line; inside of other words; quoted; in a block of code, whose lines count.
@pytest.mark.parametrize(("text", "found"), CASES["documents"])
def test_words_of_documents(text, found):
    assert words(text) == found


def test_comments_strings_and_docstrings_are_read_and_code_is_not():
    found = [
        [first + line - 1, word]
        for first, text in LANGUAGE.comments_and_strings(CASES["source"])
        for line, word, _ in LANGUAGE.words_in(text)
    ]
    assert found == CASES["found"]


def test_docstrings_that_begin_with_a_clause():
    source = (
        '"""What is here."""\nclass A:\n    """Whatever."""\n    def f(self):\n        """Whether.\n\n        Of."""'
    )
    assert list(LANGUAGE.clauses_in(source)) == [(1, "What is here."), (4, "Whether.")]


def test_the_length_of_sentences():
    heading, table, code = "# A heading of five words", "| a cell with words | another |", "    python -m a command"
    text = f"{heading}\n\nOne two three. Four `a b c d` six\nseven.\n\n{table}\n\n{code}\n\n- Eight nine ten (11)."
    assert [count for count, _ in LANGUAGE.sentences(text)] == [3, 4, 4]
    assert list(LANGUAGE.too_long(text)) == []
    assert list(LANGUAGE.too_long("a " * 19 + "b.\n")) == ["the median sentence has 20 words; at most 18"]
    (first,) = LANGUAGE.too_long(f"One two three. Four five six. {'a ' * 40}b.")
    assert first.startswith("a sentence has 41 words, at most 40: ")

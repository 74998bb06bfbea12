"""Tokenizers and templates that take all time or memory: refused in one line, because a child process took the harm."""

import json
import shutil
import time

import pytest

from reinforce_ada_jax.data import cipher, tokenizer_trial
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.training import components as components_lib
from tests import standins
from tests.running import tiny

# Each value holds the one before it twice: a list of 60 lists, whose text has 2**60 numbers.
NESTED = (
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s|MAKES|length }}"
)
TOO_SLOW, TOO_LARGE = "took more than 1 s of a processor", "used too much memory"


def tokenizer_folder(folder, template=None, **changes):
    """A vocabulary of four tokens, with keys of tokenizer.json changed."""
    cipher.write_tokenizer(folder)
    vocabulary = {token: index for index, token in enumerate(("<eos>", "a", " ", "1"))}
    whole = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None, "added_tokens": []}
    whole |= {"model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<eos>"}} | changes
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NESTED.replace("MAKES", "string"), TOO_SLOW),
        pytest.param(NESTED.replace("MAKES", "tojson"), TOO_SLOW, marks=pytest.mark.slow),
        ("{{ range(99999)|map('string')|map('center', 99999)|list|length }}", TOO_LARGE),
    ],
)
def test_a_template_ends_its_child_only(tmp_path, monkeypatch, template, reason):
    seconds = 1 if reason == TOO_SLOW else 6
    standins.constants(monkeypatch, tokenizer_trial, PROCESSOR_S=seconds, MEMORY_BYTES=4 * 10**8)
    with pytest.raises(ValueError, match=f"{reason}. Use a model from where you trust it") as error:
        tokenizer_trial.check(tokenizer_folder(tmp_path, template))
    assert "\n" not in str(error.value)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
REPEATED = [{"Sequence": {"id": "A", "type_id": 0}}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # A text of 10 KB becomes a gigabyte of tokens, and the failed allocation aborts the process.
        (
            {"post_processor": {
                "type": "TemplateProcessing", "single": REPEATED * 10**5, "pair": REPEATED, "special_tokens": {},
            }},
            r"ended its process by SIG(ABRT|XCPU)|of a processor|failed in native code",
        ),
        # A regular expression that tries 2**64 ways: the library gives up with a panic.
        (
            {"pre_tokenizer": {
                "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
            }},
            "failed in native code .*retry-limit",
        ),
    ],
    ids=["post_processor", "regex"],
)  # fmt: skip
def test_a_vocabulary_ends_its_child_only(tmp_path, capfd, changes, reason):
    with pytest.raises(ValueError, match=reason) as error:
        tokenizer_trial.check(tokenizer_folder(tmp_path, **changes))
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


@pytest.mark.parametrize("place", ["normalizer", "decoder"])
def test_replacements_multiply(tmp_path, place):
    """A letter that no sample contains would bring them; so they are counted."""
    steps = {"normalizer": "normalizers", "decoder": "decoders"}[place]
    nine, ten = ({"type": "Sequence", steps: [REPLACE] * count} for count in (9, 10))
    assert Tokenizer.load(tokenizer_folder(tmp_path / "512", **{place: nine})).vocab_size == 4
    with pytest.raises(ValueError, match="replacements may make more than 1,000 letters of one"):
        Tokenizer.load(tokenizer_folder(tmp_path / "1024", **{place: ten}))


def test_mistakes_are_left_to_those_who_describe_them(tmp_path):
    tokenizer_trial.check(tokenizer_folder(tmp_path / "raises", "{{ raise_exception('no system message') }}"))
    tokenizer_trial.check(tokenizer_folder(tmp_path / "lacks", model={"type": "WordLevel", "vocab": {}}))
    (tmp_path / "empty").mkdir()
    tokenizer_trial.check(tmp_path / "empty")


def test_the_built_in_vocabulary_needs_no_child(tmp_path, monkeypatch):
    standins.not_called(monkeypatch, tokenizer_trial.child, "start")
    tokenizer_trial.check(components_lib.model_folder("package:cipher"))
    cipher.write_tokenizer(tmp_path)
    tokenizer_trial.check(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(pytest.fail.Exception, match="start was called"):
        tokenizer_trial.check(tmp_path)


def test_every_command_begins_with_it(tmp_path, monkeypatch):
    """train, prepare, evaluate, export and serve all build their components."""
    standins.constants(monkeypatch, tokenizer_trial, PROCESSOR_S=1)
    folder = shutil.copytree(components_lib.model_folder("package:cipher"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(NESTED.replace("MAKES", "string"))
    began = time.monotonic()
    with pytest.raises(ValueError, match=TOO_SLOW):
        components_lib.build(tiny(), folder)
    assert time.monotonic() - began < 30

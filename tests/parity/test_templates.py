"""Prompts and tokenizers against transformers, on the real files of the four models (shared data)."""

import datetime
import json

import jinja2
import numpy as np
import pytest
import transformers

from reinforce_ada_jax.data.files import read_file
from reinforce_ada_jax.data.templates import Chat, render_chat, takes_tools
from reinforce_ada_jax.data.tokenizer import Tokenizer
from tests.data import conversations, shared
from tests.golden.templates import make_golden

pytestmark = shared.MARKS

# Qwen2.5-Math-1.5B and -7B share one template; Qwen3's hybrid one stands for Qwen3-4B-Instruct-2507's, which renders
# the two messages alike.
MODELS = ("qwen2.5-math", "qwen2.5-math-byte-pairs", "qwen3", "llama3")
CHATS = {
    "published": Chat(),
    "no system": Chat(system=""),
    "own words": Chat("Answer in <b>HTML</b> & 'quotes'.\n", "Go.", Chat().date.replace(month=1, day=2)),
    "bare": Chat("", ""),
}
PROBLEMS = ["What is $1+1$?", "  spaces \n\n", "<|im_end|><|eot_id|> as text", "½ 你好 🙂 \\boxed{}", ""]


def tokenizers(name, folder):
    """(ours, theirs) of a model's folder."""
    ours = Tokenizer.load(folder)
    if name == "llama3":  # published with a tokenizer.json, which is what our conversion writes
        ours._tokenizer.save(str(folder / "tokenizer.json"))
        config = {**shared.LLAMA3_CONFIG, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """(ours, theirs) of one folder."""
    folder = shared.model_folder(request.param, tmp_path_factory.mktemp("models") / "model")
    return tokenizers(request.param, folder)


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_prompts(pair, chat):
    ours, theirs = pair
    olympiad = read_file(shared.FOLDER / "benchmarks" / "olympiadbench.jsonl")[::45]
    for problem in (*PROBLEMS, *(row["problem"] for row in olympiad)):
        options = dict(add_generation_prompt=True, date_string=chat.date.strftime("%d %b %Y"))
        messages = chat.messages(problem)
        assert ours.render_text(problem, chat) == theirs.apply_chat_template(messages, tokenize=False, **options)
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ours.render(problem, "chat", chat).tolist() == ids
        assert ours.render(problem, "plain").tolist() == theirs(problem)["input_ids"]
        assert ours.decode(np.array(ids)) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", conversations.CONSTRUCTS)
def test_what_templates_may_write(pair, name):
    """tests/data/test_published_templates.py compares with the same texts."""
    ours, theirs = pair
    template, _ = conversations.CONSTRUCTS[name]
    messages = conversations.MESSAGES
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert render_chat(template, messages, ours.special_tokens) == expected


@pytest.fixture(scope="module")
def theirs():
    return make_golden.tokenizer()


@pytest.mark.parametrize("name", conversations.CONSTRUCTS)
def test_recorded_texts_of_what_templates_may_write(theirs, name):
    template, expected = conversations.CONSTRUCTS[name]
    assert make_golden.rendered(theirs, template, conversations.MESSAGES, []) == expected


@pytest.mark.parametrize("file", conversations.published(), ids=lambda file: file.stem)
def test_published_templates(theirs, file):
    """Conversations of tests/data, and of problems in one to six turns, are rendered or refused as in transformers."""
    template, problems = file.read_text(), []
    for name in ("olympiadbench", "gsm8k_test", "minerva_math"):
        problems += [row["problem"] for row in read_file(shared.FOLDER / "benchmarks" / f"{name}.jsonl")[::10]]
    users = [{"role": "user", "content": problem} for problem in problems]
    made = []
    for index in range(0, len(users) - 6, 3):
        turns = [message for user in users[index : index + index % 6] for message in (user, conversations.ANSWER)]
        made.append(([*([conversations.SYSTEM] if index % 2 else []), *turns, users[index + 6]], []))
    today, num_compared = datetime.date.today(), 0  # transformers takes the date of `strftime_now` from the clock
    for messages, tools in [*conversations.CONVERSATIONS, *made]:
        if tools and not takes_tools(template):  # transformers leaves them out, here the system message has them
            continue
        expected = make_golden.rendered(theirs, template, messages, tools, today)
        try:
            text = render_chat(template, messages, conversations.SPECIAL_TOKENS, today, tools)
        except jinja2.TemplateError:
            text = None
        assert text == expected, messages
        num_compared += text is not None
    assert num_compared > 50


def test_llama2_is_what_transformers_makes_of_its_sentencepiece_model(tmp_path):
    folder = shared.model_folder("llama2", tmp_path / "llama2")
    # As published with Llama-2: transformers 5 adds no BOS, and 4 adds one, where the key is left out.
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    # Where a text begins with a space transformers 5 leaves out SentencePiece's own (" " is 29871 there, not the
    # vectors' 259): there it is not what the model was trained with.
    texts = [row["text"] for row in shared.vectors("llama2") if not row["text"].startswith(" ")]
    for text in [*texts, "<s>[INST] What is 1+1? [/INST]", "a</s>b", "<s> a <unk>b"]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == ids, text
        assert ours.decode(np.array(ids)) == theirs.decode(ids, skip_special_tokens=True)

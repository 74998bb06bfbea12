"""Prompts and tokenizers against transformers, on the real files of the four models (shared data)."""

import json

import numpy as np
import pytest
import transformers

from reinforce_ada_jax.data.files import read_file
from reinforce_ada_jax.data.templates import Chat, render_chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from tests.data import shared

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


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson(indent=2) }}{{ {'b': '<', 'a': [1.5, none, true]} | tojson(sort_keys=true) }}",
        "{% for m in messages %}\n  {%- if loop.last %}{% break %}{% endif %}\n {{ m.content | trim }}\n{% endfor %}\n",
        "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
        "a\n  {% generation %}\n b{% set c = 1 %}\n  {% endgeneration %}\n{{ c is defined }}",
        "{{ tools }}|{{ documents }}|{{ add_generation_prompt }}|{{ bos_token }}|{{ eos_token }}|{{ nothing }}",
    ],
)
def test_what_templates_may_write(pair, template):
    ours, theirs = pair
    messages = [{"role": "system", "content": " <é> "}, {"role": "user", "content": "U"}]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert render_chat(template, messages, ours.special_tokens) == expected


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

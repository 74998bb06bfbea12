"""Tokenizer folders as models come in them, built here: no file of any model is needed."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from reinforce_ada_jax.config import Config
from reinforce_ada_jax.data import cipher, turns
from reinforce_ada_jax.data.templates import Chat
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.rewards import math_answer
from reinforce_ada_jax.training import components as components_lib

CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
RENDERED = (
    "<|im_start|>system\n"
    "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n"
    "What is $1+1$? Let's think step by step and output the final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_folder(folder, special=(), config=None, bos=None, **files):
    """A byte-level tokenizer: the special tokens from 0, then the 256 bytes. `files` are JSON, by stem."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *bytes_])}, []))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, special.index(bos))]
        )
    tokenizer.enable_truncation(4)  # some published files have one; a prompt must not be cut by it
    tokenizer.save(str(folder / "tokenizer.json"))
    for stem, content in {"tokenizer_config": config or {}, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_chatml_rendering(tmp_path):
    """Markers of ChatML are single tokens, and the text is that of the template."""
    write_folder(tmp_path, CHATML_TOKENS, {"eos_token": "<|endoftext|>", "chat_template": CHATML})
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.render("What is $1+1$?", "qwen_math")
    assert tokens.dtype == np.int32
    assert tokens[0] == 1
    assert tokenizer.decode(tokens) == RENDERED.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokens.tolist() == tokenizer.encode(RENDERED).tolist()
    assert np.sum(tokens == 1) == 3 and np.sum(tokens == 2) == 2  # markers are single tokens


def test_plain_rendering_takes_the_post_processor_and_chat_does_not(tmp_path):
    # A Llama-like folder: both the post-processor and the template write BOS. One, never two.
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    tokenizer = Tokenizer.load(write_folder(tmp_path, ("<s>", "</s>"), config, bos="<s>"))
    assert np.sum(tokenizer.render("1+1", "qwen_math") == 0) == 1
    plain = tokenizer.render("1+1", "plain")
    assert (plain[0], len(plain), tokenizer.decode(plain)) == (0, 4, "1+1")
    with pytest.raises(ValueError, match="template is 'qwen'; it must be one of plain, qwen_math, chat"):
        tokenizer.render("1+1", "qwen")


def test_chat_renders_its_messages(tmp_path):
    write_folder(tmp_path, CHATML_TOKENS, {"eos_token": "<|endoftext|>", "chat_template": CHATML})
    tokenizer = Tokenizer.load(tmp_path)
    published = tokenizer.render("What is $1+1$?", "qwen_math")
    np.testing.assert_array_equal(tokenizer.render("What is $1+1$?", "chat"), published)
    # "qwen_math" is the paper's, whatever else is said.
    np.testing.assert_array_equal(tokenizer.render("What is $1+1$?", "qwen_math", Chat("S", "I")), published)
    assert tokenizer.render_text("1?", Chat("S", "I")) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n1? I<|im_end|>\n<|im_start|>assistant\n"
    )
    # Without a system message it is the template's own.
    assert tokenizer.render_text("1?", Chat("", "")).startswith("<|im_start|>system\nYou are a helpful assistant.")


def test_template_is_sandboxed(tmp_path):
    config = {"eos_token": "</s>", "chat_template": "{{ messages.append.__globals__ }}"}
    tokenizer = Tokenizer.load(write_folder(tmp_path, ("</s>",), config))
    with pytest.raises(ValueError, match="can't render"):
        tokenizer.render("1+1", "qwen_math")


def test_a_template_that_refuses(tmp_path):
    config = {"eos_token": "</s>", "chat_template": "{{ raise_exception('System role not supported') }}"}
    tokenizer = Tokenizer.load(write_folder(tmp_path, ("</s>",), config))
    with pytest.raises(ValueError, match=r"System role not supported.*data.template='plain'"):
        tokenizer.render("1+1", "qwen_math")


def test_where_a_template_may_stand(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    write_folder(tmp_path, ("</s>",), {"eos_token": "</s>", "chat_template": named})
    assert Tokenizer.load(tmp_path).chat_template == "named"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.load(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.load(tmp_path).chat_template == "from jinja"


def test_stop_ids_are_the_union(tmp_path):
    special = ("<s>", "</s>", "<|eot|>", "<|eom|>")
    write_folder(tmp_path, special, {"eos_token": "</s>"}, generation_config={"eos_token_id": [3, 2]})
    assert Tokenizer.load(tmp_path).stop_ids == (1, 2, 3)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert Tokenizer.load(tmp_path).stop_ids == (0, 1, 2, 3)


def test_chatml_stops_on_both(tmp_path):
    # The base model's files name <|endoftext|> only, and prompted in ChatML it ends on <|im_end|>.
    write_folder(tmp_path, CHATML_TOKENS, {"eos_token": "<|endoftext|>"}, generation_config={"eos_token_id": 0})
    assert Tokenizer.load(tmp_path).stop_ids == (0, 2)


def test_a_long_text_is_not_cut(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path, ("</s>",), {"eos_token": "</s>"}))
    assert len(tokenizer.encode("x" * 100)) == 100  # 4 with the file's own truncation


def test_vocabulary(tmp_path):
    """Ids beyond the vocabulary decode to nothing."""
    tokenizer = Tokenizer.load(write_folder(tmp_path, ("</s>",), {"eos_token": "</s>"}))
    assert tokenizer.vocab_size == 257
    # An embedding table may have more rows than the vocabulary has tokens, and a sampler may pick one.
    assert tokenizer.decode(np.array([*tokenizer.encode("a½b"), 300, 0], np.int32)) == "a½b"


def test_the_built_in_tokenizer(tmp_path):
    cipher.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.chat_template) == (133, (2,), None)
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    assert tokenizer.render("Ая....=", "plain").tolist() == [1, 5, 68, 3, 3, 3, 3, 4]
    assert tokenizer.decode(np.array([69, 132, 2], np.int32)) == "A/"
    with pytest.raises(ValueError, match=r"has no chat template.*data.template='plain'"):
        tokenizer.render("Ая....=", "qwen_math")


def test_what_a_folder_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json is missing: it has the vocabulary"):
        Tokenizer.load(tmp_path)
    write_folder(tmp_path, ("</s>",))
    with pytest.raises(ValueError, match=r"names no end token.*generation_config.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match=r"names the end token '<end>', which tokenizer.json does not have"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config.json is missing: it holds the special tokens"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer that"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_is_larger_than_the_embedding(tmp_path):
    shutil.copy(components_lib.model_folder("package:cipher") / "config.json", tmp_path)  # of 133 rows
    write_folder(tmp_path, ("</s>",), {"eos_token": "</s>"})
    with pytest.raises(ValueError, match=r"has 257 tokens, the model's embedding only 133 rows"):
        components_lib.build(Config(), tmp_path)


def test_ids_of_added_tokens_that_tokenizers_numbers_otherwise(tmp_path):
    """`tokenizers` numbers added tokens without a gap, as transformers then does too."""
    config = {"eos_token": "<a>", "added_tokens_decoder": {"256": {"content": "<a>"}, "259": {"content": "<b>"}}}
    write_folder(tmp_path, (), config)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    content["added_tokens"] = [{"id": 256, "content": "<a>", **flags}, {"id": 259, "content": "<b>", **flags}]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"gives '<b>' the id 259, tokenizer.json gives it 257: copy both files"):
        Tokenizer.load(tmp_path)
    # A token in the vocabulary keeps its id, whatever ids have no token.
    content["model"]["vocab"] |= {"<a>": 256, "<b>": 259}
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.encode("x<b>").tolist()[1:]) == (260, [259])


HARMONY_TOKENS = ("<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)


def test_a_response_in_channels(tmp_path):
    """As gpt-oss answers: all end tokens are known, and the last box is that of the final channel."""
    config = {"eos_token": "<|return|>", "chat_template": HARMONY}
    stops = {"eos_token_id": [1, 0, 6]}
    write_folder(tmp_path, HARMONY_TOKENS, config, generation_config=stops)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.stop_ids == (0, 1, 6)
    analysis = r"<|channel|>analysis<|message|>\boxed{3}? No.<|end|>"
    response = tokenizer.encode(analysis + r"<|start|>assistant<|channel|>final<|message|>\boxed{4}<|return|>")
    text = tokenizer.decode(response)
    assert text == r"analysis\boxed{3}? No.assistantfinal\boxed{4}"
    assert math_answer.grade(text, "4").correct and not math_answer.grade(text, "3").correct
    # A turn that ended with <|return|> keeps this token, and the template's own end of a turn comes after it.
    first, new = [{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]
    between = turns.following(tokenizer, Chat("", ""), first, new, 1)
    joined = "".join(map(tokenizer.token, between.tolist()))
    assert joined == "<|end|><|start|>user<|message|>2<|end|><|start|>assistant"

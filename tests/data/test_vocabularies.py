"""Tokenizer files of every kind, made here; tests/data/test_real_tokenizers.py reads those of published models."""

import base64
import io
import json

import numpy as np
import pytest
import sentencepiece
import tiktoken

from reinforce_ada_jax.data import vocabularies
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.files import gguf_tokenizer
from reinforce_ada_jax.serving.response_text import TextStream

TEXTS = ["", " ", "  the cat\n\n sat", "1 + 1 = 2", "the the  the", "naïve 你好 🙂", "it's THE CAT'S mat\t12345"]


# ---- SentencePiece ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece_model():
    """Llama-2-like: byte pairs, bytes for what they lack, no normalisation."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "the cat sat on the mat", "1 + 1 = 2"] * 5),
        model_writer=out,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return out.getvalue()


def write(folder, model, config, **files):
    (folder / "tokenizer.model").write_bytes(model)
    for stem, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def chat_config(size, **changes):
    """With two tokens behind the vocabulary, one of them special."""
    added = {
        "1": {"content": "<s>", "special": True},
        str(size): {"content": "<|user|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
    }
    template = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    return {"added_tokens_decoder": added, "chat_template": template} | changes


def test_sentencepiece_is_what_the_library_says(tmp_path, sentencepiece_model):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    ours = Tokenizer.load(write(tmp_path, sentencepiece_model, {}))
    assert (ours.vocab_size, ours.stop_ids) == (len(theirs), (2,))
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in TEXTS:
        assert ours.encode(text).tolist() == [1, *theirs.encode(text)]
        assert ours.encode(text, add_special_tokens=False).tolist() == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert [ours.token(2), ours.token(len(theirs))] == ["</s>", f"<{len(theirs)}>"]
    assert ours.decode(np.array([1, *theirs.encode("the cat"), 2, 10_000])) == "the cat"


def test_sentencepiece_and_added_tokens(tmp_path, sentencepiece_model):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    size = len(theirs)
    ours = Tokenizer.load(write(tmp_path, sentencepiece_model, chat_config(size)))
    assert ours.vocab_size == size + 2
    tokens = ours.encode("<|user|>the cat<think> sat</s>", add_special_tokens=False)
    assert [index for index in tokens if index >= size or index == 2] == [size, size + 1, 2]
    # "the" behind a token has no space before it, " sat" has its own only.
    assert "".join(ours.token(int(index)) for index in tokens) == "<|user|>the▁cat<think>▁sat</s>"
    assert ours.decode(tokens) == "the cat<think> sat"
    # As transformers 4 had it: with a space behind every added token.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(chat_config(size, legacy=True)))
    legacy = Tokenizer.load(tmp_path).encode("<|user|>the cat", add_special_tokens=False)
    assert legacy.tolist() == [size, *theirs.encode("the cat")]


def test_sentencepiece_and_the_space_around_added_tokens(tmp_path, sentencepiece_model):
    """In Phi-3 the line feed after <|user|> belongs to the token."""
    size = len(sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model))
    config = chat_config(size)
    config["added_tokens_decoder"][str(size)] |= {"rstrip": True}
    config["added_tokens_decoder"][str(size + 1)] |= {"lstrip": True}
    ours = Tokenizer.load(write(tmp_path, sentencepiece_model, config))
    tokens = ours.encode("<|user|>\n the cat \n<think> sat", add_special_tokens=False)
    assert "".join(ours.token(int(index)) for index in tokens) == "<|user|>the▁cat<think>▁sat"


def test_sentencepiece_flags(tmp_path, sentencepiece_model):
    """Flags of the tokenizer add tokens at the ends, and no space."""
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    config = {"add_bos_token": False, "add_eos_token": True}
    ours = Tokenizer.load(write(tmp_path, sentencepiece_model, config))
    assert ours.encode("the cat").tolist() == [*theirs.encode("the cat"), 2]
    bare = Tokenizer.load(write(tmp_path, sentencepiece_model, {"add_prefix_space": False}))
    assert bare.encode("the cat").tolist()[1:] == bare.encode("<s>the cat", False).tolist()[1:]
    assert bare.decode(bare.encode(" the cat")) == " the cat"


def test_sentencepiece_bos_is_not_doubled(tmp_path, sentencepiece_model):
    size = len(sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model))
    ours = Tokenizer.load(write(tmp_path, sentencepiece_model, chat_config(size)))
    tokens = ours.render("1 + 1", "qwen_math")
    assert tokens[0] == 1 and np.sum(tokens == 1) == 1 and np.sum(tokens == size) == 2


def test_sentencepiece_text_grows_token_by_token(tmp_path, sentencepiece_model):
    ours = Tokenizer.load(write(tmp_path, sentencepiece_model, {}))
    tokens, stream = ours.encode("  the cat 你好 sat🙂", add_special_tokens=False), TextStream(ours)
    pieces = [*(stream.add([int(index)]) for index in tokens), stream.flush()]
    assert "".join(pieces) == ours.decode(tokens) == "  the cat 你好 sat🙂"
    assert not any("\ufffd" in piece for piece in pieces)
    # Cut within a character: the end isn't swallowed.
    stream = TextStream(ours)
    assert "".join([*(stream.add([int(index)]) for index in tokens[:-1]), stream.flush()]).endswith("\ufffd")


def test_files_that_do_not_belong_together(tmp_path, sentencepiece_model):
    config = {"added_tokens_decoder": {"5": {"content": "<|user|>"}}}
    with pytest.raises(ValueError, match=r"for '<\|user\|>', tokenizer_config.json says 5: copy both"):
        Tokenizer.load(write(tmp_path, sentencepiece_model, config))
    with pytest.raises(ValueError, match="neither a SentencePiece model nor tiktoken's ranks"):
        Tokenizer.load(write(tmp_path, b"no model", {}))


# ---- tiktoken -----------------------------------------------------------------------------------------------------


MERGED = [
    b"th",
    b"the",
    b" t",
    b" the",
    b"ca",
    b"cat",
    b" c",
    b" ca",
    b" cat",
    b"12",
    b"123",
    b"\xe4\xbd",
    b"aa",
    b"aaa",
]


def ranks_file(tokens):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def ranks():
    return [*(bytes([byte]) for byte in range(256)), *MERGED]


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_what_tiktoken_says(tmp_path, ranks, seed):
    special = {token: 270 + index for index, token in enumerate(vocabularies.LLAMA3_SPECIAL_TOKENS)}
    theirs = tiktoken.Encoding(
        "tiny",
        pat_str=gguf_tokenizer.LLAMA3_SPLIT,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens=special,
    )
    config = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>"}}
    ours = Tokenizer.load(write(tmp_path, ranks_file(ranks), config))
    assert (ours.vocab_size, ours.stop_ids) == (270 + 256, (279,))
    generator = np.random.default_rng(seed)
    noise = ["".join(generator.choice(list("theca 12a\n你'"), size=30)) for _ in range(100)]
    for text in [*TEXTS, *noise, "<|eot_id|>the<|python_tag|> cat"]:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text, add_special_tokens=False).tolist() == ids
        assert ours.encode(text).tolist() == [270, *ids]
    assert ours.decode(np.array(theirs.encode("the cat<|eot_id|>", allowed_special="all"))) == "the cat"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nYg== x\n", "line 2: not a base64 token and rank"),
        (b"YQ== 0\nYg==\n", "line 2: not a base64 token and rank"),
        (b"YQ== 0\nYg== 2\n", "ranks are not 0 to 1"),
        # All splits of a token are tried: a token of a megabyte would take hours.
        (b"YQ== 0\n" + base64.b64encode(b"a" * 10**6) + b" 1\n", "line 2: .*a token of 1,333,336 characters"),
    ],
)
def test_bad_ranks(tmp_path, content, message):
    """A file of ranks that is wrong is refused."""
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(write(tmp_path, content, {"bos_token": "<|begin_of_text|>"}))


# ---- vocab.json and merges.txt ------------------------------------------------------------------------------------


def write_byte_pairs(folder, config):
    letters = vocabularies._byte_letters()
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


ADDED = {"260": {"content": "<|endoftext|>", "special": True}, "261": {"content": "<think>", "special": False}}


def test_byte_pairs(tmp_path):
    """A folder with merges alone has the ids of its family."""
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "added_tokens_decoder": ADDED}
    ours = Tokenizer.load(write_byte_pairs(tmp_path, config))
    assert (ours.vocab_size, ours.stop_ids) == (262, (260,))
    # Qwen cuts between digits, so "12" stays two tokens; bytes have their own number as id.
    tokens = ours.encode("the the 12<think>é<|endoftext|>")
    assert tokens.tolist() == [257, 258, 32, 49, 50, 261, 0xC3, 0xA9, 260]
    assert ours.decode(tokens) == "the the 12<think>é"
    # NFC: e and its accent are one character.
    assert ours.encode("e\u0301").tolist() == [0xC3, 0xA9]
    config |= {"tokenizer_class": "GPT2TokenizerFast", "add_bos_token": True, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).encode("the 12").tolist() == [260, 257, 32, 259]


@pytest.mark.parametrize("content", [b"", b"\x0a\xff\xff"])
def test_a_tokenizer_model_of_no_kind(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match="is neither a SentencePiece model nor tiktoken's ranks"):
        Tokenizer.load(tmp_path)


def test_byte_pairs_that_cannot_be_read(tmp_path):
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"300": {"content": "<x>"}}}
    with pytest.raises(ValueError, match=r"gives '<x>' the id 300, after the vocabulary it would have 260"):
        Tokenizer.load(write_byte_pairs(tmp_path, config))
    with pytest.raises(ValueError, match=r"names the class 'FalconTokenizer'.*add its tokenizer.json"):
        Tokenizer.load(write_byte_pairs(tmp_path, {"tokenizer_class": "FalconTokenizer"}))
    for added in ([], {"7": 3}, {"7": {"content": 3}}):
        with pytest.raises(ValueError, match="its added tokens are no table of ids and texts"):
            Tokenizer.load(write_byte_pairs(tmp_path, config | {"added_tokens_decoder": added}))
    (tmp_path / "added_tokens.json").write_text("{")
    with pytest.raises(ValueError, match=r"^[^(]*added_tokens.json is not JSON .*from where you trust it.$"):
        Tokenizer.load(write_byte_pairs(tmp_path, config | {"added_tokens_decoder": {}}))
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ValueError, match=r"vocab.json and merges.txt are not byte pairs"):
        Tokenizer.load(tmp_path)


def test_a_beginning_of_texts_that_is_no_token(tmp_path, ranks):
    """A bos_token that is missing, or that the vocabulary lacks, is named."""
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": ADDED, "add_bos_token": True}
    for changes in ({}, {"bos_token": "<s>"}):
        with pytest.raises(ValueError, match="its texts begin with bos_token, which is no token of its vocabulary"):
            Tokenizer.load(write_byte_pairs(tmp_path, config | changes))
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(ValueError, match="its texts begin with bos_token, which is no token of its vocabulary"):
        Tokenizer.load(write(tmp_path, ranks_file(ranks), {"bos_token": "<s>"}))

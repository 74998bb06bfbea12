"""Text that is streamed token by token is the text of all tokens."""

import pathlib

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.serving.response_text import TextStream


def wrap(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(pathlib.Path(), tokenizer.get_vocab_size(), (0,), {}, None, tokenizer)


def of_bytes() -> Tokenizer:
    """Byte-level, as Qwen's and Llama-3's, and without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def of_words() -> Tokenizer:
    """SentencePiece's way, as Mistral's: a word begins with its space, and rare characters are written as bytes."""
    words = ["▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "!"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer)


def pieces(tokenizer: Tokenizer, tokens) -> list[str]:
    """Text that each token adds, and the rest at the end."""
    stream = TextStream(tokenizer)
    return [*(stream.add([int(token)]) for token in tokens), stream.flush()]


def test_a_character_is_shown_when_it_is_complete():
    tokenizer = of_bytes()
    # 1, 2, 3 and 4 bytes.
    tokens = tokenizer.encode("aé你🙂!")
    assert len(tokens) == 1 + 2 + 3 + 4 + 1
    assert pieces(tokenizer, tokens) == ["a", "", "é", "", "", "你", "", "", "", "🙂", "!", ""]
    # Token by token it would be torn: the trap.
    assert "".join(tokenizer.decode(tokens[index : index + 1]) for index in range(11)) == "a" + 9 * "\ufffd" + "!"


def test_tokens_may_come_several_at_a_time():
    tokenizer = of_bytes()
    tokens, stream = tokenizer.encode("é你!").tolist(), TextStream(tokenizer)
    assert [stream.add(tokens[:3]), stream.add(tokens[3:4]), stream.add(tokens[4:])] == ["", "", "é你!"]


def test_an_incomplete_end_is_not_swallowed():
    tokenizer = of_bytes()
    assert pieces(tokenizer, tokenizer.encode("a你")[:3]) == ["a", "", "", "\ufffd"]


def test_spaces_before_words_are_kept():
    # Token by token it would be "HelloworldHello": a lone word is stripped.
    assert pieces(of_words(), [0, 1, 0, 2]) == ["Hello", " world", " Hello", "!", ""]


def test_bytes_between_words():
    # E4 BD A0 is 你; ids of bytes begin at 3.
    assert pieces(of_words(), [0, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 1]) == ["Hello", "", "", "你", " world", ""]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_bytes_join_to_the_whole(seed):
    tokenizer, generator = of_bytes(), np.random.default_rng(seed)
    # Half of the tokens are of text, the others of noise that is mostly no UTF-8, the ends of characters included.
    text = tokenizer.encode("Привет, 你好 🙂 naïve")
    noise = generator.integers(0, 256, len(text))
    tokens = np.where(generator.random(len(text)) < 0.7, text, noise)
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_ids_without_text_hold_nothing_up():
    tokenizer = of_bytes()
    a, b = tokenizer.encode("ab")
    # 300 is one of the embedding's rows beyond the vocabulary.
    assert pieces(tokenizer, [a, 300, 300, b]) == ["a", "", "", "b", ""]

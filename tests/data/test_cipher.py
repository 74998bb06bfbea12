"""The built-in task. Literal words, key and answers: a change of any makes every recorded figure incomparable."""

import json

import pytest
import tokenizers

from reinforce_ada_jax.data import cipher


def test_the_task_never_changes():
    assert "".join(cipher.LETTERS[letter] for letter in cipher.key()) == (
        "VKLOBFUG+qsHlnCQk1wSMfa6b/oyZvcueNtDA3TgdxE2hm5PzrY80XJIW4Rjp9i7"
    )
    assert cipher.problems("train")[:2] == [
        {"id": "train-0000", "problem": "ЩХеЕм.=", "answer": "/f3Fh"},
        {"id": "train-0001", "problem": "еУюж..=", "answer": "3SiT"},
    ]
    assert cipher.problems("heldout")[0] == {"id": "heldout-0000", "problem": "рСУш..=", "answer": "z1SW"}


def test_the_key_is_a_permutation():
    assert len(set(cipher.SYMBOLS)) == len(set(cipher.LETTERS)) == 64
    assert (cipher.SYMBOLS[0], cipher.SYMBOLS[-1]) == ("А", "я")
    assert sorted(cipher.key()) == list(range(64))


def test_splits():
    """Words are uniform over lengths, and none is in both splits."""
    train, heldout = cipher.words("train"), cipher.words("heldout")
    assert (len(train), len(heldout)) == (1024, 256)
    assert len({*train, *heldout}) == 1280
    assert set("".join(heldout)) <= set("".join(train)) == set(cipher.SYMBOLS)
    # Uniform over 5 lengths: 1280 / 5 = 256, standard deviation sqrt(1280 * 0.2 * 0.8) = 14.3.
    for length in range(2, 7):
        assert abs(sum(len(word) == length for word in train + heldout) - 256) < 4 * 14.3
    with pytest.raises(ValueError, match="no split 'test'; it must be one of train, heldout"):
        cipher.problems("test")


def test_tokenizer(tmp_path):
    """The written tokenizer has the ids of the formula, and decodes without spaces."""
    cipher.write_tokenizer(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert [config[name] for name in ("pad_token", "bos_token", "eos_token")] == ["<pad>", "<bos>", "<eos>"]
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 3 + 2 + 64 + 64
    # <bos> 1, А 5, я 5 + 63 = 68, "." 3, "=" 4.
    assert tokenizer.encode("Ая....=").ids == [1, 5, 68, 3, 3, 3, 3, 4]
    # A 69, / 69 + 63 = 132; no spaces between, no special tokens.
    assert tokenizer.decode([69, 132, 2]) == "A/"
    for split in ("train", "heldout"):
        for problem in cipher.problems(split):
            assert len(tokenizer.encode(problem["problem"]).ids) == 8
            answer = tokenizer.encode(problem["answer"], add_special_tokens=False).ids
            assert tokenizer.decode([*answer, 2]) == problem["answer"]
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("a b")

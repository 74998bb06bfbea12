"""A tokenizer of characters with the chat template ChatML, as files of a model's folder."""

import pathlib

import tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chatml(folder: pathlib.Path) -> pathlib.Path:
    """Writes the files of a tokenizer of 99 tokens, three of them marks of ChatML; returns the folder."""
    marks = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    vocabulary = marks + [chr(code) for code in (10, *range(32, 127))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({text: i for i, text in enumerate(vocabulary)}))
    tokenizer.add_special_tokens(marks)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder

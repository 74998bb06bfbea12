"""Turns of a conversation: the tokens that messages add after a turn of the model.

A model's own tokens are never decoded and encoded again. The template renders the conversation with a placeholder for
the model's turn, and the text after the placeholder is encoded alone.
"""

from collections.abc import Mapping, Sequence

import jinja2
import numpy as np
from jaxtyping import Int32

from reinforce_ada_jax.data.templates import Chat, render_chat
from reinforce_ada_jax.data.tokenizer import Tokenizer

# Letters only: templates may strip spaces, and escape signs.
_PLACEHOLDER = "TURNOFTHEMODEL"


def following(
    tokenizer: Tokenizer,
    chat: Chat,
    first: Sequence[Mapping[str, str]],
    new: Sequence[Mapping[str, str]],
    stop_id: int | None,
) -> Int32[np.ndarray, " T"]:
    """Returns the tokens between two turns of the model, up to the beginning of the second one.

    `first` are the messages before the first turn, `new` those that answer it. `stop_id` is the token that ended the
    turn. If the template ends turns with it, it is not repeated. None: the turn has no end token yet. Raises ValueError
    where there is no template, or it can't render these messages.
    """
    if tokenizer.chat_template is None:
        raise ValueError(f"{tokenizer.folder} has no chat template, and a task of several turns needs one.")
    messages = [*first, {"role": "assistant", "content": _PLACEHOLDER}, *new]
    try:
        text = render_chat(tokenizer.chat_template, messages, tokenizer.special_tokens, chat.date, chat.tools)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"the chat template of {tokenizer.folder} can't render a conversation with the messages {new!r:.200} "
            f"after a turn of the model ({error})."
        ) from error
    _, found, rest = text.rpartition(_PLACEHOLDER)
    if not found:
        raise ValueError(f"the chat template of {tokenizer.folder} does not render the turns of the model.")
    if stop_id is not None:
        rest = rest.removeprefix(tokenizer.token(stop_id))
    return tokenizer.encode(rest, add_special_tokens=False)

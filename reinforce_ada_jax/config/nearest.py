"""Settings that a wrong name most likely means."""

import difflib

from reinforce_ada_jax.config.defaults import settings
from reinforce_ada_jax.config.reference import COMMON

# Similarity that is enough for a name without a section, which is compared with the names in all sections: with 0.6,
# batch_size would mean sampling.page_size.
SURE = 0.8


def meant(name: str) -> list[str]:
    """Returns the settings that a name may mean, as dotted keys; [] if none is near.

    The name may lack its section, have the section of another setting, mean a whole section, be the initials of a
    setting ("lr"), or be misspelt.
    """
    keys = [key for key, _ in settings()]
    words = name.replace("-", "_")
    section, _, last = words.rpartition(".")
    joined = [key for key in keys if key.replace(".", "_") == words.replace(".", "_")]
    whole = [key for key in COMMON if key.startswith(f"{words}.")][:1]
    same = [key for key in keys if key.rpartition(".")[2] == last]
    around = [key for key in keys if not section or key.rpartition(".")[0] == section]
    within = {key.rpartition(".")[2]: key for key in around}
    short = [
        key for word, key in within.items() if "_" in word and "".join(part[0] for part in word.split("_")) == last
    ]
    near = [within[word] for word in difflib.get_close_matches(last, within, 1, 0.6 if section else SURE)]
    return joined or whole or same or short[:1] or near

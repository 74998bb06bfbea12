"""Models of huggingface.co by their names, fetched once into the cache of `huggingface_hub`.

Only safetensors, JSON and tokenizer files at the top of a repository are fetched: no pickle, and no code. The cache's
locks make it safe that several processes of a run fetch one model at once.
"""

import pathlib
import re
import sys

from reinforce_ada_jax.policy.huggingface import TOKENIZER_FILES

FILES = ["*.safetensors", "*.json", *(name for name in TOKENIZER_FILES if not name.endswith(".json"))]
OTHERS = ["*/*", "consolidated*"]  # folders with copies for other programs, and a second copy of the weights
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,95})?")
_REPOSITORY = "models--"


def is_name(path: str) -> bool:
    """Returns True if `path` may name a model of the hub, OWNER/MODEL or OWNER/MODEL@REVISION."""
    return bool(_NAME.fullmatch(path))


def repository(folder: pathlib.Path) -> str | None:
    """Returns the name OWNER/MODEL of a folder in the cache, None for any other folder."""
    folder = folder.absolute()
    found = folder.parents[1].name if len(folder.parts) > 2 and folder.parent.name == "snapshots" else ""
    return found.removeprefix(_REPOSITORY).replace("--", "/") if found.startswith(_REPOSITORY) else None


def fetch(path: str) -> pathlib.Path:
    """Returns the folder of a model, after fetching the files that the cache lacks.

    `path` is OWNER/MODEL, of the main branch, or OWNER/MODEL@REVISION with a branch, tag or commit.

    Raises:
      ValueError: there is no such model or revision, it has no safetensors, or neither the hub nor the cache has it.
    """
    # These imports take 0.6 s; a model in a folder does not need them.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415

    name, _, revision = path.partition("@")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=FILES, ignore_patterns=OTHERS)
    except Exception as error:  # errors of huggingface_hub and of its HTTP client have no common class
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        lines = str(error).strip().splitlines() or [""]
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"{name} is not a folder, and the model{at} can't be fetched from huggingface.co ({type(error).__name__}: "
            f"{lines[0]:.200}). Check name and network (HF_TOKEN for a private model), or name a folder on this "
            "machine."
        ) from error
    if not any(pathlib.Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{name} has no safetensors on huggingface.co, and weights in pickles are never read: they can run any "
            "code. Convert it where you trust it, and name the folder: transformers.AutoModelForCausalLM"
            f".from_pretrained({name!r}).save_pretrained(folder)."
        )
    return pathlib.Path(folder)

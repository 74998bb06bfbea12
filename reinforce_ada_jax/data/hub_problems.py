"""Problems from Hugging Face's `datasets`, if installed: "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:SUBSET:SPLIT"."""

import pathlib
from typing import Any

from reinforce_ada_jax.data.files import json_values, optional_package
from reinforce_ada_jax.data.problems import Problem
from reinforce_ada_jax.data.rows import BY_RULES, Columns, to_problems

PREFIX = "hf:"


def _rows(datasets: Any, name: str, subset: str | None, split: str) -> Any:
    """Returns the rows of a split: of a folder that `save_to_disk` wrote, or of what `load_dataset` finds."""
    if not any((pathlib.Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(name, subset, split=split)
    saved = datasets.load_from_disk(name)
    if not isinstance(saved, dict):  # one split
        return saved
    if split not in saved:
        raise ValueError(f"it has the splits {', '.join(saved)}")
    return saved[split]


def read_hub(source: str, columns: Columns = BY_RULES) -> list[Problem]:
    """Returns the problems of a data set, in its order.

    The source is "hf:NAME", "hf:NAME:SPLIT", "hf:NAME:SUBSET:SPLIT", or the path of a folder; the split is train unless
    it is named. NAME is a data set of huggingface.co, downloaded once into the cache of `datasets`; or a folder of
    files that `datasets` reads, or that `save_to_disk` wrote. `datasets` does not run code of a data set.
    """
    name, which = source, []
    if source.startswith(PREFIX):
        name, *which = source.removeprefix(PREFIX).split(":")
        if len(which) > 2:
            raise ValueError(f"{source} has too many parts; it must be hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT.")
    split = which[-1] if which else "train"
    subset = which[0] if len(which) == 2 else None
    remedy = "pip install '.[hub]', or download the set and name a JSONL file of id, problem and answer."
    datasets = optional_package("datasets", f"{source} needs Hugging Face's datasets", remedy)
    try:
        rows = _rows(datasets, name, subset, split)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such set or split, no such format
        raise ValueError(
            f"{source} can't be loaded ({type(error).__name__}: {error!s:.300}). Check the name and the split "
            f"{split!r}; without a network, name a folder or a JSONL file."
        ) from error
    return to_problems(enumerate(map(json_values, rows), start=1), source, columns)

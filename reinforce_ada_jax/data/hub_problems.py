"""Problems from Hugging Face's `datasets`, if installed: "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:SUBSET:SPLIT"."""

from typing import Any

from reinforce_ada_jax.data.problems import Problem, from_columns

PREFIX = "hf:"


def _datasets(source: str) -> Any:
    try:
        import datasets  # noqa: PLC0415  # pyright: ignore[reportMissingImports]  (optional)
    except ImportError as error:
        raise ValueError(
            f"{source} needs Hugging Face's datasets ({error}): pip install '.[hub]', or download the set and name a "
            "JSONL file of id, problem and answer."
        ) from error
    return datasets


def read_hub(source: str) -> list[Problem]:
    """Returns the problems of a data set, in its order; the split is train unless it is named.

    NAME is a data set of huggingface.co, downloaded once into the cache of `datasets`, or a folder of files that it
    reads. `datasets` does not run code of a data set.
    """
    name, *which = source.removeprefix(PREFIX).split(":")
    if len(which) > 2:
        raise ValueError(f"{source} has too many parts; it must be hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT.")
    split = which[-1] if which else "train"
    subset = which[0] if len(which) == 2 else None
    datasets = _datasets(source)
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:  # no network, no such set or split
        raise ValueError(
            f"{source} can't be loaded ({type(error).__name__}: {error}). Check the name and the split {split!r}; "
            "without a network, name a folder or a JSONL file."
        ) from error
    return from_columns(rows, source)

"""Problems prepared with TensorFlow Datasets. TensorFlow is not needed.

Only array_record files on disk are read: nothing is downloaded, and no builder of the catalogue is made, because
without a network it would retry for minutes. The stock gsm8k is prepared once, where there is a network, by

    python -c "import tensorflow_datasets as t, tensorflow_datasets.text; \\
               t.builder('gsm8k', file_format='array_record').download_and_prepare()"
"""

import os
import pathlib

from reinforce_ada_jax.data.files import json_values, optional_package
from reinforce_ada_jax.data.problems import Problem
from reinforce_ada_jax.data.rows import BY_RULES, Columns, to_problems

PREFIX = "tfds:"
_INFO = "dataset_info.json"


def _data_dir() -> pathlib.Path:
    """Returns the folder in which TFDS prepares: TFDS_DATA_DIR, or TFDS's default in the user's home."""
    return pathlib.Path(os.environ.get("TFDS_DATA_DIR", pathlib.Path.home() / "tensorflow_datasets"))


def _prepared(path: str) -> pathlib.Path | None:
    """Returns the folder of a data set, by its path or by its name under `_data_dir`; None if there is none."""
    for folder in (pathlib.Path(path), _data_dir() / path):
        if (folder / _INFO).is_file():
            return folder
        versions = [file.parent.name for file in folder.glob(f"*/{_INFO}")]
        versions = [name for name in versions if all(part.isdigit() for part in name.split("."))]
        if versions:
            return folder / max(versions, key=lambda name: [*map(int, name.split("."))])
    return None


def read_tfds(source: str, columns: Columns = BY_RULES) -> list[Problem]:
    """Returns the problems of "tfds:NAME/SPLIT", "tfds:DIR" or "tfds:DIR/SPLIT", in their order.

    DIR has a dataset_info.json, or versions that have one; the newest of them is read. A single SPLIT may be left out.
    """
    path = source.removeprefix(PREFIX)
    remedy = "pip install '.[data]' or -r requirements-data.txt, or name a JSONL file."
    # Its import takes 0.8 s and 280 MB.
    tfds = optional_package("tensorflow_datasets", f"{source} needs tensorflow-datasets and array_record", remedy)
    folder, split = _prepared(path), None
    if folder is None:
        parent, _, split = path.rpartition("/")
        folder = _prepared(parent) if parent else None
    if folder is None:
        raise ValueError(
            f"{source}: nothing is prepared at {path} nor in {_data_dir()}. Prepare it as array_record "
            "(reinforce_ada_jax/data/tfds_problems.py says how), or set TFDS_DATA_DIR to the folder that has it."
        )
    builder = tfds.builder_from_directory(str(folder))
    splits = sorted(builder.info.splits)
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        raise ValueError(f"{source}: split {split!r} is none of {', '.join(splits)}. Name one, {PREFIX}{folder}/SPLIT.")
    if builder.info.file_format.value != "array_record":
        raise ValueError(
            f"{source} is prepared as {builder.info.file_format.value}, which needs TensorFlow to read: prepare it "
            "with file_format='array_record'."
        )
    rows = builder.as_data_source(split=split)
    return to_problems(enumerate(map(json_values, rows), start=1), source, columns)

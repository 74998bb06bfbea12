"""Problems that TensorFlow Datasets has prepared, and a builder that prepares a problem file. TensorFlow isn't needed.

    pip install '.[data]'
    python -c "from reinforce_ada_jax.data import tfds_problems as t; print(t.prepare('math.jsonl', 'prepared'))"

Only what lies on disk as array_record is read: nothing is downloaded here, and no builder of the catalogue is made,
since without a network that one tries for minutes. The stock gsm8k is prepared once, where there is a network, by

    python -c "import tensorflow_datasets as t, tensorflow_datasets.text; \\
               t.builder('gsm8k', file_format='array_record').download_and_prepare()"
"""

import os
import pathlib
from typing import Any

import numpy as np

from reinforce_ada_jax.data.problems import LABELS, Problem, from_columns, read_jsonl

PREFIX = "tfds:"
_VERSION = "1.0.0"
_INFO = "dataset_info.json"


def _tfds(source: str) -> Any:
    """The package; imported here, because it takes 0.8 s and 280 MB that most runs have no use for."""
    try:
        import tensorflow_datasets  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(
            f"{source} needs tensorflow-datasets and array_record ({error}): pip install '.[data]' or "
            "-r requirements-data.txt, or name a JSONL file."
        ) from error
    return tensorflow_datasets


def prepare(file: str | pathlib.Path, folder: str | pathlib.Path) -> str:
    """Prepares a JSONL file of problems as the data set `folder`/problems; gives its source, "tfds:DIR".

    The order of the file is kept.
    """
    tfds = _tfds(f"Preparing {file}")
    problems = read_jsonl(file)
    labels = [name for name in LABELS if any(name in problem.get("labels", {}) for problem in problems)]
    rows = [{key: value for key, value in problem.items() if key != "labels"} for problem in problems]
    for row, problem in zip(rows, problems, strict=True):
        # A feature has a value in every row: an empty label stands for none.
        row.update({name: problem.get("labels", {}).get(name, "") for name in labels})

    class Problems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Problems of a JSONL file."""

        VERSION = tfds.core.Version(_VERSION)

        def _info(self):
            text = tfds.features.Text()
            features = {"id": text, "problem": text, "answer": text, **dict.fromkeys(labels, text)}
            if any("pass_rate" in row for row in rows):
                features["pass_rate"] = tfds.features.Scalar(dtype=np.float64)
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            # As with the labels: NaN stands for none.
            missing = {"pass_rate": float("nan")} if "pass_rate" in self.info.features else {}
            yield from enumerate(missing | row for row in rows)

    builder = Problems(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return f"{PREFIX}{builder.data_dir}"


def _data_dir() -> pathlib.Path:
    """Where TFDS prepares: TFDS_DATA_DIR or a folder in the user's home, as TFDS itself has it."""
    return pathlib.Path(os.environ.get("TFDS_DATA_DIR", pathlib.Path.home() / "tensorflow_datasets"))


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))


def _prepared(path: str) -> pathlib.Path | None:
    """The folder of a data set named by its directory, or by its name under `_data_dir`; None if there is none."""
    for folder in (pathlib.Path(path), _data_dir() / path):
        if (folder / _INFO).is_file():
            return folder
        versions = [file.parent.name for file in folder.glob(f"*/{_INFO}")]
        versions = [name for name in versions if all(part.isdigit() for part in name.split("."))]
        if versions:
            return folder / max(versions, key=_version)
    return None


def _plain(value: Any) -> Any:
    """TFDS gives texts as bytes and numbers as numpy's; NaN is what `prepare` writes for nothing."""
    if isinstance(value, bytes):
        return value.decode()
    number = value.item() if hasattr(value, "item") else value
    return None if number != number else number  # noqa: PLR0124


def read_tfds(source: str) -> list[Problem]:
    """The problems of "tfds:NAME/SPLIT", "tfds:DIR" or "tfds:DIR/SPLIT", in the order in which they lie there.

    DIR holds a dataset_info.json, or its versions do, of which the newest is taken. Without SPLIT there must be one.
    """
    path = source.removeprefix(PREFIX)
    tfds = _tfds(source)
    folder, split = _prepared(path), None
    if folder is None:
        parent, _, split = path.rpartition("/")
        folder = _prepared(parent) if parent else None
    if folder is None:
        raise ValueError(
            f"{source}: nothing is prepared at {path} nor in {_data_dir()}. Prepare it as array_record "
            "(reinforce_ada_jax/data/tfds_problems.py says how), and set TFDS_DATA_DIR where it lies elsewhere."
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
    return from_columns(({name: _plain(value) for name, value in row.items()} for row in rows), source)

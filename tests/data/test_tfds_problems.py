"""Problems that TensorFlow Datasets has prepared, without TensorFlow and without a network."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.data import tfds_problems
from reinforce_ada_jax.data.prompts import load_problems
from tests.data.shared import write_rows

ROWS = [{"id": f"p{index}", "problem": f"½ of {index}?", "answer": str(index / 2)} for index in range(20)]
installed = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_datasets") is None, reason="tensorflow-datasets is not installed"
)


@pytest.fixture
def quiet(monkeypatch):
    """Progress bars off, and no data set but the test's own."""
    tfds = pytest.importorskip("tensorflow_datasets")
    tfds.disable_progress_bar()
    return tfds


def prepare(tfds, folder, rows):
    """Prepares rows that have the same columns; returns their source."""
    kinds = {str: tfds.features.Text(), float: tfds.features.Scalar(dtype=np.float64)}

    class Problems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Problems of a test."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({name: kinds[type(value)] for name, value in rows[0].items()})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": iter(enumerate(rows))}

        def _generate_examples(self): ...

    builder = Problems(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return f"tfds:{builder.data_dir}"


def load(source):
    """The problems of a source without columns and origin."""
    return [
        {name: value for name, value in row.items() if name not in ("columns", "origin")}
        for row in load_problems(source)
    ]


def test_without_the_package(monkeypatch):
    """The package that is missing is named."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match=r"tfds:gsm8k/test needs tensorflow-datasets.*pip install.*\[data\]"):
        load_problems("tfds:gsm8k/test")


@installed
def test_prepared_rows(tmp_path, quiet):
    """A prepared folder is read in the order of its rows."""
    source = prepare(quiet, tmp_path / "prepared", ROWS)
    assert source == f"tfds:{tmp_path}/prepared/problems/1.0.0"
    # The order is that of the rows, so a cursor goes through them as through a file.
    assert load(source) == load(write_rows(tmp_path / "some.jsonl", ROWS)) == ROWS
    for same in (f"tfds:{tmp_path}/prepared/problems", f"{source}/train", f"tfds:{tmp_path}/prepared/problems/train"):
        assert load(same) == ROWS
    with pytest.raises(ValueError, match="split 'test' is none of train"):
        load_problems(f"{source}/test")
    assert "tensorflow" not in sys.modules


@installed
def test_pass_rates_and_labels(tmp_path, quiet):
    # A feature has a value in every row: an empty label and a NaN mean none.
    rows = [ROWS[0] | {"pass_rate": 0.25, "level": "5"}, ROWS[1] | {"pass_rate": float("nan"), "level": ""}]
    assert load(prepare(quiet, tmp_path / "prepared", rows)) == [
        ROWS[0] | {"pass_rate": 0.25, "labels": {"level": "5"}},
        ROWS[1],
    ]


def test_columns_that_are_no_single_values_are_read_too(tmp_path, monkeypatch):
    row = {
        "question": b"\xc2\xbd of 4?", "answer": np.int64(2), "tests": np.array([b"a", b"b"], object),
        "scores": np.array([[0.5, np.nan]]), "about": {"year": np.int32(1)}, "picture": b"\xff\xd8",
    }  # fmt: skip
    builder = SimpleNamespace(
        info=SimpleNamespace(splits={"train": None}, file_format=SimpleNamespace(value="array_record")),
        as_data_source=lambda split: [row],
    )
    stand_in = SimpleNamespace(builder_from_directory=lambda folder: builder)
    monkeypatch.setattr(tfds_problems, "optional_package", lambda *_: stand_in)
    (tmp_path / "dataset_info.json").touch()
    (problem,) = load_problems(f"tfds:{tmp_path}")
    assert (problem["problem"], problem["answer"]) == ("½ of 4?", "2")
    columns = {"tests": ["a", "b"], "scores": [[0.5, None]], "about": {"year": 1}, "picture": None}
    assert {name: problem["columns"][name] for name in columns} == columns


@installed
def test_the_stock_gsm8k(tmp_path, quiet, monkeypatch):
    """The catalogue's own builder, with a file in place of its download."""
    from tensorflow_datasets.text.gsm8k import gsm8k  # noqa: PLC0415

    line = {"question": "How many?", "answer": "500 + 734 = <<500+734=1234>>1234.\n#### 1,234"}
    file = write_rows(tmp_path / "gsm8k.jsonl", [line])
    monkeypatch.setattr(
        quiet.download.DownloadManager, "download_and_extract", lambda self, urls: dict.fromkeys(urls, file)
    )
    builder = gsm8k.Gsm8k(data_dir=str(tmp_path / "data"), file_format="array_record")
    builder.download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    for split in ("train", "test"):
        ((problem),) = load_problems(f"tfds:gsm8k/{split}")
        assert (problem["problem"], problem["answer"], len(problem["id"])) == ("How many?", "1234", 16)
    with pytest.raises(ValueError, match=r"split None is none of test, test_socratic, train, train_socratic"):
        load_problems("tfds:gsm8k")


@installed
def test_what_is_not_prepared(tmp_path, quiet, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"tfds:gsm8k/test: nothing is prepared at gsm8k/test.*TFDS_DATA_DIR"):
        load_problems("tfds:gsm8k/test")

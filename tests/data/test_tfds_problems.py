"""Problems that TensorFlow Datasets has prepared, without TensorFlow and without a network."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from reinforce_ada_jax.data import tfds_problems
from reinforce_ada_jax.data.prompts import PromptCursor, load_problems, next_prompts
from reinforce_ada_jax.types import Prompt

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


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(source):
    """The problems of a source without columns and origin, which TFDS files of `prepare` do not keep."""
    return [
        {name: value for name, value in row.items() if name not in ("columns", "origin")}
        for row in load_problems(source)
    ]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match=r"tfds:gsm8k/test needs tensorflow-datasets.*pip install.*\[data\]"):
        load_problems("tfds:gsm8k/test")


@installed
def test_a_file_there_and_back(tmp_path, quiet):
    file = write(tmp_path / "some.jsonl", ROWS)
    source = tfds_problems.prepare(file, tmp_path / "prepared")
    assert source == f"tfds:{tmp_path}/prepared/problems/1.0.0"
    # The order is the file's, so a cursor goes through both alike.
    assert load(source) == load(str(file)) == ROWS
    for same in (f"tfds:{tmp_path}/prepared/problems", f"{source}/train", f"tfds:{tmp_path}/prepared/problems/train"):
        assert load(same) == ROWS
    with pytest.raises(ValueError, match="split 'test' is none of train"):
        load_problems(f"{source}/test")
    assert "tensorflow" not in sys.modules


@installed
def test_the_cursor_resumes(tmp_path, quiet):
    source = tfds_problems.prepare(write(tmp_path / "some.jsonl", ROWS), tmp_path / "prepared")

    def prompts():
        return [
            Prompt(row["id"], row["problem"], row["answer"], np.zeros(1, np.int32)) for row in load_problems(source)
        ]

    first, cursor = next_prompts(prompts(), PromptCursor(seed=3), 12)
    unbroken, _ = next_prompts(prompts(), cursor, 8)
    resumed, _ = next_prompts(prompts(), cursor, 8)
    assert [prompt.id for prompt in unbroken] == [prompt.id for prompt in resumed]
    assert sorted(prompt.id for prompt in first + resumed) == sorted(row["id"] for row in ROWS)


@installed
def test_pass_rates(tmp_path, quiet):
    rows = [ROWS[0] | {"pass_rate": 0.25}, ROWS[1]]
    assert load(tfds_problems.prepare(write(tmp_path / "some.jsonl", rows), tmp_path / "prepared")) == rows


@installed
def test_labels(tmp_path, quiet):
    labels = [{"subject": "½"}, {"subject": "x", "level": "5"}, {}]
    file = write(tmp_path / "some.jsonl", [row | some for row, some in zip(ROWS, labels, strict=False)])
    problems = load(tfds_problems.prepare(file, tmp_path / "prepared"))
    assert problems == load(str(file))
    assert [problem.get("labels", {}) for problem in problems] == labels


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
    monkeypatch.setattr(tfds_problems, "_tfds", lambda source: stand_in)
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
    file = write(tmp_path / "gsm8k.jsonl", [line])
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
    file = write(tmp_path / "bad.jsonl", [ROWS[0], ROWS[0]])
    with pytest.raises(ValueError, match="lines 1 and 2: both have id 'p0'"):
        tfds_problems.prepare(file, tmp_path / "prepared")

"""The packages that users install: what a wheel holds, and that a release builds to the same bytes."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import reinforce_ada_jax as ada
from reinforce_ada_jax.config import config_files
from tests import running
from tests.running import CONFIGS, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The unpacked wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True,
        capture_output=True,
    )  # fmt: skip
    (file,) = folder.glob("*.whl")
    assert file.name == f"reinforce_ada_jax-{ada.__version__}-py3-none-any.whl"
    zipfile.ZipFile(file).extractall(folder / "unpacked")
    return folder / "unpacked"


def files(folder: pathlib.Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_wheel_holds_the_package_the_configurations_and_the_examples(wheel):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    package = {name for name in tracked if name.startswith("reinforce_ada_jax/") and (ROOT / name).exists()}
    added = {f"reinforce_ada_jax/{name}" for name in tracked if name.startswith(("configs/", "examples/"))}
    held = {name for name in files(wheel) if ".dist-info/" not in name}
    assert package | added <= held
    assert {pathlib.Path(name).parts[0] for name in held} == {"reinforce_ada_jax"}
    assert [name for name in held if "__pycache__" in name] == []
    for name in ("configs/tiny.py", "examples/word_problems.py"):
        assert (wheel / "reinforce_ada_jax" / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_metadata_name_the_command_and_the_extras(wheel):
    (info,) = wheel.glob("*.dist-info")
    assert "reinforce-ada = reinforce_ada_jax.__main__:main" in (info / "entry_points.txt").read_text()
    lines = (info / "METADATA").read_text().partition("\n\n")[0].splitlines()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", f"Version: {ada.__version__}"):
        assert line in lines
    assert {line for line in lines if line.startswith("Provides-Extra")} >= {
        f"Provides-Extra: {name}" for name in ("cuda", "data", "hub", "openai", "serve", "tinker", "tpu")
    }
    assert not any("jetstream" in line.lower() for line in lines)  # it would bring TensorFlow


def test_a_wheel_finds_its_configurations_outside_the_repository(wheel, tmp_path):
    code = (
        "import reinforce_ada_jax as ada; from reinforce_ada_jax.config import config_files;"
        "print(*config_files.packaged_configs().values(), ada.config.packaged('tiny').model.path)"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {code}"]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    expected = [str(wheel / "reinforce_ada_jax" / "configs" / file.name) for file in sorted(CONFIGS.glob("*.py"))]
    assert result.stdout.split() == [*expected, "package:cipher"]


def test_a_name_means_a_packaged_configuration():
    assert {name: config_files.config_file(name) for name in ("tiny", "qwen_1p5b")} == {
        "tiny": str(CONFIGS / "tiny.py"), "qwen_1p5b": str(CONFIGS / "qwen_1p5b.py"),
    }  # fmt: skip
    for path in ("configs/tiny.py", "mine.py", "./mine", "mine.py:large"):  # as they are, there or not
        assert config_files.config_file(path) == path
    with pytest.raises(
        ValueError, match=r"no packaged configuration 'tinny': name one of calculator, .*configs/tiny.py"
    ):
        config_files.config_file("tinny")


def test_a_configuration_for_python():
    config = ada.config.packaged("tiny")
    assert (config.iterations, config.data.prompts) == (100, "cipher:train")
    config.iterations = 3
    assert ada.config.packaged("tiny").iterations == 100


# ---- Dockerfile ---------------------------------------------------------------------------------------------------


def test_what_the_image_copies_is_there_and_is_sent_to_the_builder():
    instructions = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    copied = [name for line in re.findall(r"^COPY (.+)$", instructions, re.M) for name in line.split()[:-1]]
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert sorted(copied) == sorted(sent) and "reinforce_ada_jax" in copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"serve", "tpu", "cuda"} <= project["optional-dependencies"].keys()
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", instructions, re.M)
    assert json.loads(entry)[0] in project["scripts"]


def docker_works() -> bool:
    command = shutil.which("docker")
    return command is not None and subprocess.run([command, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not docker_works(), reason="no docker that can build")
def test_the_image_trains(tmp_path):
    tmp_path.chmod(0o777)
    subprocess.run(["docker", "build", "--quiet", "--tag=reinforce-ada-test", "."], cwd=ROOT, check=True)
    command = ["docker", "run", "--rm", f"--volume={tmp_path}:/work", "reinforce-ada-test", "train", "--config=tiny"]
    subprocess.run([*command, "--workdir=run", "--config.iterations=1", "--config.evaluation.every=0"], check=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


# ---- dev/release.py -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headings", "date"),
    [
        (["[0.1.0] - 2026-11-22"], "2026-11-22"),
        (["[Unreleased]", "[0.1.0] - unreleased", "[0.0.9] - 2026-01-02"], "unreleased"),
        (["[0.2.0] - 2026-12-01", "[0.1.0] - 2026-11-22"], None),  # of the next version
        (["[0.1.0]"], None),
        (["[Unreleased]"], None),
        ([], None),
    ],
)
def test_a_release_needs_its_section_in_the_changelog(headings, date):
    release = running.load(ROOT / "dev" / "release.py")
    text = "\n".join(["# Changelog", *(f"\n## {heading}\n\n### Added\n" for heading in headings)])
    if date:
        assert release.check_changelog(text, "0.1.0") == date
    else:
        with pytest.raises(SystemExit, match=r'must begin with "## \[0.1.0\] - DATE"'):
            release.check_changelog(text, "0.1.0")


def test_the_changelog_has_the_version():
    running.load(ROOT / "dev" / "release.py").check_changelog((ROOT / "CHANGELOG.md").read_text(), ada.__version__)

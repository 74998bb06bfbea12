"""References to environments: nothing of the user's runs in the parent, and what workers load is an environment."""

import sys
import types

import pytest

from reinforce_ada_jax.environments import loading


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes packages that raise where they are imported, and finds them: packages("my_game", "verifiers")."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*names):
        for name in names:
            file = tmp_path.joinpath(*name.split("."), "__init__.py")
            file.parent.mkdir(parents=True)
            file.write_text("raise RuntimeError('imported')")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "there is no file"), ("game", "there is no file"), (":Game", "there is no file"),
        ("none.py:Game", "there is no file"), ("{folder}:Game", "there is no file"),
        ("{folder}/text.txt:Game", "its name must end in .py"), ("{folder}/wrong.py:Game", "is not valid Python"),
        ("{folder}/game.py:Gmae", "defines no 'Gmae'"), ("{folder}/game.py:", "defines no ''"),
        ("verifiers:game", "verifiers is not installed"),
    ],
)  # fmt: skip
def test_a_wrong_reference_is_said_and_nothing_is_run(tmp_path, reference, message):
    (tmp_path / "game.py").write_text("class Game: ...\nraise RuntimeError('run')")
    (tmp_path / "wrong.py").write_text("class Game")
    (tmp_path / "text.txt").write_text("class Game: ...")
    if "verifiers" in reference and loading.importlib.util.find_spec("verifiers"):
        pytest.skip("verifiers is installed")
    with pytest.raises(ValueError, match=message) as error:
        loading.file_reference(reference.format(folder=tmp_path))
    assert str(error.value).startswith("environment.path is ") and "\n" not in str(error.value)
    assert loading.file_reference(f"{tmp_path}/game.py:Game") == f"{tmp_path}/game.py:Game"


@pytest.mark.parametrize("name", ["", "my_game.rules", "owner/my_game.rules@1", "..my_game", "my game", "my_game/"])
def test_a_name_that_is_no_package_is_refused_before_the_package_around_it_runs(packages, name):
    packages("verifiers", "my_game", "my_game.rules")
    with pytest.raises(ValueError, match=r"is no name of a package: name it as in verifiers:owner/my-game@1"):
        loading.file_reference(f"verifiers:{name}")
    assert "my_game" not in sys.modules and "verifiers" not in sys.modules


def test_every_file_of_a_package_is_in_its_hash_and_no_other_one(packages):
    folder = packages("verifiers", "my_game", "my_game.deep", "other")
    hashes = [loading.file_hash("verifiers:my-game")]
    for file in ("my_game/__init__.py", "my_game/deep/rules.py", "other/__init__.py", "my_game/notes.txt"):
        (folder / file).write_text("pass")
        hashes.append(loading.file_hash("verifiers:my-game"))
    assert len(set(hashes)) == 3 and hashes[2] == hashes[3] == hashes[4]


def test_the_hash_of_a_file_is_that_of_its_content(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("class Game: ...")
    a, b = (loading.file_hash(f"{tmp_path / name}:Game") for name in ("a.py", "b.py"))
    (tmp_path / "b.py").write_text("class Game: pass")
    assert a == b != loading.file_hash(f"{tmp_path / 'b.py'}:Game")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("function", "function is <function function at .*, and not a class"),
        ("number", "number is 3, and not a class"),
        ("NoReset", r"the class NoReset has no method reset\(\)"),
        ("NoStep", r"the class NoStep has no method step\(\)"),
    ],
)
def test_what_is_loaded_must_be_an_environment(tmp_path, name, message):
    (tmp_path / "mine.py").write_text(
        "number = 3\ndef function(): ...\n"
        "class NoReset:\n    def step(self, messages): ...\n"
        "class NoStep:\n    step = 'no function'\n    def reset(self, problem): ...\n"
        "class Game(NoReset):\n    reset = NoStep.reset\n"
    )
    with pytest.raises(TypeError, match=message):
        loading.load(f"{tmp_path}/mine.py:{name}")
    assert loading.load(f"{tmp_path}/mine.py:Game").__name__ == "Game"


def test_what_belongs_to_verifiers_is_told_from_a_class_of_ones_own(tmp_path, monkeypatch):
    library = types.SimpleNamespace(**{name: type(name, (), {}) for name in ("Env", "Taskset", "EnvConfig")})
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)  # as the user's file imports it
    (tmp_path / "mine.py").write_text(
        "import sys\nvf = sys.modules['verifiers.v1']\n"
        "class Env(vf.Env): ...\nclass Tasks(vf.Taskset): ...\nclass Game: ...\nconfig = vf.EnvConfig()\n"
    )
    found = {name: loading.named(f"{tmp_path}/mine.py:{name}") for name in ("Env", "Tasks", "Game", "config")}
    assert found["Env"][1] == found["Tasks"][1] == "mine" and found["Game"][1] is None
    assert found["config"][1] is found["config"][0] and isinstance(found["config"][0], library.EnvConfig)
    assert loading.named("verifiers:owner/my-game@1") == (None, "owner/my-game@1")

"""Messages for mistakes of users: one screen that names value and remedy, exit code 2, and no file written."""

import ast
import dataclasses
import errno
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reinforce_ada_jax import __main__ as dispatch
from reinforce_ada_jax import cli, evaluate, export, prepare, sft, train, user_code
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import reference
from reinforce_ada_jax.serving.settings import ServerSettings
from reinforce_ada_jax.training import components as components_lib
from tests.running import ROOT, cipher_file, environment, refused, run_python, tiny

TINY = "--config=configs/tiny.py"
# A command of no other work, and so without the seconds that importing jax takes.
PARSE_ONLY = """
from reinforce_ada_jax import cli
config = cli.define_config()
cli.run(lambda: print(config.value.collection.strategy, config.value.iterations))
"""


def check_message(text: str, *parts: str) -> None:
    """One screen, the error and nothing else."""
    assert text.startswith("error: ") and len(text.splitlines()) < 15
    assert "Traceback" not in text
    for part in parts:
        assert part in text


def refusal(capsys, main, *arguments) -> str:
    """Runs a command that must end with BAD_INPUT; returns its message."""
    shown = refused(capsys, main, *arguments)
    assert shown.out == ""
    return shown.err


def refused_run(tmp_path, capsys, *parts, **changes):
    """A training run that must not begin."""
    workdir = tmp_path / "run"
    check_message(refusal(capsys, train.main, tiny(**changes), workdir), *parts)
    assert not workdir.exists()


# ---- flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([TINY, "--config.collection.stratgy=grpo"], ["key 'collection.stratgy'", "mean 'collection.strategy'"]),
        (
            [TINY, "--config.colection.strategy=grpo"],
            ["key 'colection.strategy'", "did you mean 'collection.strategy'"],
        ),
        ([TINY, "--config.strategy=grpo"], ["key 'strategy'", "did you mean 'collection.strategy'"]),
        (
            [TINY, "--config.zzz=1"],
            ["key 'zzz'", "a configuration has checkpoint, code, collection,", "--help describes"],
        ),
        ([TINY, "--config.lora.zzz=1"], ["key 'lora.zzz'", "the section lora has alpha, rank, targets. --help=lora"]),
        (
            [TINY, "--config.num_generations", "8"],
            ["key 'num_generations'", "TRL, tunix is collection.group_size here"],
        ),
        (
            [TINY, "--config.stratgy=grpo", "--config.lora.rnk=8"],
            ["key 'stratgy': did you mean 'collection.strategy'", "key 'lora.rnk': did you mean 'lora.rank'"],
        ),
        ([TINY, "--config.max_steps=8"], ["max_steps of TRL, tunix has no counterpart", "Set iterations"]),
        ([TINY, "--config.iterations=many"], ["--config.iterations is 'many'", "a whole number"]),
        ([TINY, "--config.mesh=3"], ["--config.mesh is a section", "--help=mesh"]),
        ([TINY, "--config.seed.x=3"], ["--config.seed.x: seed is a setting", "no keys of its own"]),
        ([TINY, "grpo"], ["unexpected argument 'grpo'", "--name=value"]),
        ([TINY, "data.train_batch_size=64"], ["written --config.data.train_batch_size=64."]),
        ([TINY, "lora.rank=8"], ["unexpected argument 'lora.rank=8': settings are written --config.lora.rank=8."]),
        ([TINY, "--strategy=grpo"], ["flag 'strategy': did you mean --config.collection.strategy?", "--help"]),
        ([TINY, "--lr=1e-5"], ["did you mean --config.learning.learning_rate?"]),
        ([TINY, "--group-size=8"], ["did you mean --config.collection.group_size?"]),
        ([TINY, "--model=models/mine"], ["did you mean --config.model.path?"]),
        ([TINY, "--output_dir=runs/a"], ["output_dir of TRL has no counterpart. Use the flag --workdir."]),
        ([TINY, "--confg=tiny"], ["did you mean 'config'?"]),
        ([TINY, "--config.model_path=a"], ["did you mean 'model.path'?"]),
        (
            [TINY, "--config.max_response_tokens=9"],
            ["mean 'sampling.max_response_tokens' or 'evaluation.max_response_tokens'?"],
        ),
        (["--config=configs/none.py"], ["there is no file", "configs/none.py", "configs/tiny.py"]),
        (["--config=configs/"], ["there is no file", "configs/tiny.py"]),
        (["--config=tny"], ["no packaged configuration 'tny'", "tiny, word_problems", "configs/tiny.py"]),
        (["--config=pyproject.toml"], ["pyproject.toml"]),
        ([], ["error: --config must have a value. --help describes the flags."]),
        (["tiny"], ["--config must have a value, and 'tiny' belongs to no flag", "--name=value"]),
    ],
    ids=lambda value: " ".join(value[-1:]),
)
def test_flags_that_cannot_be_read(arguments, parts):
    result = run_python("-c", PARSE_ONLY, *arguments)
    assert result.returncode == cli.BAD_INPUT and result.stdout == ""
    check_message(result.stderr, *parts)


def test_flags_that_can_be_read():
    result = run_python("-c", PARSE_ONLY, "--config.collection.strategy=grpo", TINY)  # in any order
    assert (result.returncode, result.stdout, result.stderr) == (0, "grpo 100\n", "")


def test_a_setting_by_its_name_in_trl():
    result = run_python("-c", PARSE_ONLY, TINY, "--config.max_completion_length=4", "--config.beta=0.1")
    assert (result.returncode, result.stdout) == (0, "balance 100\n")
    assert result.stderr.splitlines() == [
        "note: max_completion_length of TRL is sampling.max_response_tokens=4 here. That of evaluations is "
        "evaluation.max_response_tokens.",
        "note: beta of TRL, tunix is learning.kl_coefficient=0.1 here.",
    ]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("config.collection.stratgy = 'grpo'", ["key 'stratgy'", "line 4", "did you mean 'strategy'"]),
        ("config.num_generations = 8", ["num_generations of TRL, tunix is collection.group_size here"]),
        ("config.zzz = 8", ["unknown configuration key 'zzz'", "line 4", "--help=all"]),
        ("config.iterations = 'many'", ["iterations cannot be 'many'", "line 4"]),
        ("return", ["get_config"]),
        ("config = (", ["file.py"]),
    ],
)
def test_config_files_that_are_wrong(tmp_path, line, parts):
    lines = ["from reinforce_ada_jax.config import defaults", "def get_config():", "    config = defaults()"]
    text = "\n".join([*lines, f"    {line}", "    return config"])
    file = tmp_path / "file.py"
    file.write_text(text.replace("get_config", "get_confg") if line == "return" else text)
    result = run_python("-c", PARSE_ONLY, f"--config={file}")
    assert result.returncode == cli.BAD_INPUT and result.stdout == ""
    check_message(result.stderr, *parts)


def test_a_config_file_may_import_those_in_its_folder(tmp_path):
    lines = ["from reinforce_ada_jax.config import defaults", "def get_config():", "    return defaults()"]
    (tmp_path / "base_of_mine.py").write_text("\n".join(lines))
    (tmp_path / "mine.py").write_text("from base_of_mine import get_config")
    result = run_python("-c", PARSE_ONLY, f"--config={tmp_path / 'mine.py'}")
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base_of_mine.py", "mine.py"]


# ---- python -m reinforce_ada_jax ------------------------------------------------------------------------------------


def test_the_package_lists_its_commands(capsys):
    dispatch.main([])
    listed = capsys.readouterr().out.splitlines()
    assert "  train          Trains a policy, from a Hugging Face folder to checkpoints." in listed
    lines = {line.split()[0]: line for line in listed if line.startswith("  ")}
    assert tuple(lines) == dispatch.COMMANDS and max(map(len, lines.values())) <= 120
    commands = [
        file.stem
        for file in (ROOT / "reinforce_ada_jax").glob("*.py")
        if re.search(r"(cli|command)\.run\w*\(", file.read_text())
    ]
    assert sorted(commands) == sorted(dispatch.COMMANDS)


def test_the_package_starts_a_command():
    result = run_python("-m", "reinforce_ada_jax", "plot")
    assert (result.returncode, result.stdout) == (cli.BAD_INPUT, "")
    check_message(result.stderr, "name at least one work directory")


def test_the_package_names_its_version(capsys):
    dispatch.main(["--version"])
    assert re.fullmatch(
        r"reinforce_ada_jax 0\.\d+\.\d+, Python 3\.\d+\.\d+, jax \d+\.\d+\.\d+\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "said"), [("trian", "did you mean 'train'?"), ("zzz", "name one of train, sft, prepare")]
)
def test_a_command_that_is_not_there(capsys, name, said):
    check_message(refusal(capsys, dispatch.main, [name, "--help"]), f"no command {name!r}", said)


# ---- train --------------------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_limit(tmp_path, capsys):
    parts = ("1,024 prompts have 8 to 8 tokens, limit 7", "raise data.max_prompt_tokens")
    refused_run(tmp_path, capsys, *parts, **{"data.max_prompt_tokens": 7})


@pytest.mark.parametrize("strategy", ["positive", "balance"])
def test_a_group_larger_than_a_round(tmp_path, capsys, strategy):
    sizes = {"collection.strategy": strategy, "collection.group_size": 16}
    refused_run(tmp_path, capsys, "group_size is 16", "samples_per_round is 8", "Lower group_size, raise", **sizes)


def test_too_few_pages_for_one_response(tmp_path, capsys):
    # A prompt of 8 tokens fills one page of 8, the same with 8 of response fills two, and one is reserved.
    refused_run(tmp_path, capsys, "sampling.pages is 3", "needs 4 pages", "or 0", **{"sampling.pages": 3})


def test_a_users_strategy_that_does_not_go_with_the_devices(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("from reinforce_ada_jax.collection.strategies import estimate as mine\n")
    split = {"collection.strategy": f"{file}:mine", "estimator.kind": "value", "mesh.sampler": 1}
    refused_run(tmp_path, capsys, "estimator.kind is 'value'", "use 'ema'", **split)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"iterations": -1}, ["iterations is -1"]),
        ({"data.prompts": "none.jsonl"}, ["no file none.jsonl", "cipher:train"]),
        ({"evaluation.benchmarks": ("none.jsonl",)}, ["no file none.jsonl"]),
        (
            {"collection.prompts_per_iteration": 2048},
            ["takes 2,048 different prompts", "there are 1,024", "or add prompts"],
        ),
        ({"model.path": "Qwen/Qwen2.5-1.5B"}, ["Qwen/Qwen2.5-1.5B is not a folder", "can't be fetched"]),
        ({"data.template": "qwen_math"}, ["no chat template", "data.template='plain'"]),
        ({"mesh.data": 16}, ["mesh.data", "= 16", "8 devices", "lower one of them"]),
        ({"mesh.fsdp": 2, "mesh.tensor": 2}, ["'vocab' of size 133", "mesh.tensor = 2", "a divisor of 133"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_what_else_a_run_refuses(tmp_path, capsys, changes, parts):
    refused_run(tmp_path, capsys, *parts, **changes)


def edited_model(tmp_path, **tensors) -> pathlib.Path:
    """A copy of the packaged model with some tensors replaced, or left out where they are None."""
    folder = tmp_path / "model"
    shutil.copytree(components_lib.ASSETS / "cipher", folder)
    merged = load_file(folder / "model.safetensors") | tensors
    save_file({name: value for name, value in merged.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_a_model_without_one_of_its_tensors(tmp_path, capsys):
    folder = edited_model(tmp_path, **{"model.norm.weight": None})
    parts = (str(folder), "model.norm.weight is missing", "Fetch the folder again")
    refused_run(tmp_path, capsys, *parts, **{"model.path": str(folder)})


def test_a_model_with_a_tensor_of_another_shape(tmp_path, capsys):
    folder = edited_model(tmp_path, **{"model.norm.weight": np.ones(63, np.float32)})
    parts = (str(folder), "model.norm.weight has shape (63,)", "asks for (64,)")
    refused_run(tmp_path, capsys, *parts, **{"model.path": str(folder)})


def test_a_model_without_safetensors(tmp_path, capsys):
    folder = edited_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused_run(tmp_path, capsys, str(folder), "pytorch_model.bin", "safetensors", **{"model.path": str(folder)})


def test_a_workdir_of_another_run(tmp_path, capsys):
    workdir = tmp_path / "run"
    workdir.mkdir()
    saved = config_lib.to_json(tiny(seed=1))
    (workdir / "config.json").write_text(saved)
    text = refusal(capsys, train.main, tiny(), workdir)
    check_message(
        text, f"{workdir} holds a run of another configuration", "seed: 1 -> 0", "or choose another --workdir"
    )
    assert [file.name for file in workdir.iterdir()] == ["config.json"]
    assert (workdir / "config.json").read_text() == saved


# ---- what the operating system says ------------------------------------------------------------------------------


def test_a_work_directory_under_a_file(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for workdir in (file / "run", file):
        text = refusal(capsys, train.main, tiny(), workdir)
        check_message(text, repr(str(workdir)), "name another path")
        assert len(text.splitlines()) == 1
    assert file.read_text() == ""


def test_a_store_under_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    model, output = str(components_lib.ASSETS / "cipher"), str(tmp_path / "file" / "output")
    config = tiny(**{"evaluation.benchmarks": (cipher_file(tmp_path / "words.jsonl", 2),), "evaluation.samples": 1})
    shown = refused(capsys, evaluate.main, config, evaluate.Options(model=model, output=output))
    check_message(shown.err, repr(output), "name another path")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), cli.BAD_INPUT, "Permission denied: '/a/b': "),
        (OSError(errno.EROFS, "Read-only file system", "/a"), cli.BAD_INPUT, "Read-only file system: '/a': "),
        (OSError(errno.EXDEV, "Cross-device link", "/a", None, "/b"), cli.BAD_INPUT, "link: '/a' -> '/b': "),
        # A disk may be well again when launch/ starts the run again, which it doesn't after BAD_INPUT.
        (OSError(errno.ENOSPC, "No space left on device"), cli.STOPPED, "No space left on device. Fix this"),
        (OSError(errno.EIO, "Input/output error", "/a"), cli.STOPPED, "Input/output error: '/a'. Fix this"),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/mnt/a"), cli.STOPPED, "'/mnt/a'. Fix this"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_operating_system_says_of_a_path_is_one_line(capsys, error, code, said):
    with pytest.raises(SystemExit) as ended, cli.user_input():
        raise error
    assert ended.value.code == code
    text = capsys.readouterr().err
    check_message(text, said)
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a fault of the program"),
        KeyError("key"),
        OSError(errno.EBADF, "Bad file descriptor"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        ChildProcessError(errno.ECHILD, "No child processes"),
        OSError("of a library, without a number"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_be_a_fault_of_the_program_is_not_hidden(error):
    with pytest.raises(type(error)) as raised, cli.user_input():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        ("KeyboardInterrupt", cli.INTERRUPTED, "error: interrupted. The same command starts again from what is saved."),
        ("OSError(28, 'No space left')", cli.STOPPED, "error: No space left. Fix this (on a full disk, free space)"),
    ],
)
def test_an_end_in_the_middle_of_a_command_is_one_line(raised, code, line):
    program = f"from reinforce_ada_jax import cli\ndef main():\n    raise {raised}\ncli.run(main)"
    result = run_python("-c", program)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (code, "", 1)
    assert result.stderr.startswith(line)


@pytest.mark.parametrize(
    ("statement", "code", "call"),
    [
        ("sys.exit(0)", cli.STOPPED, "sys.exit(0)"),
        ("exit()", cli.STOPPED, "sys.exit(None)"),
        ("sys.exit(7)", 7, "sys.exit(7)"),
        ("os._exit(0)", cli.STOPPED, "os._exit(0)"),
        ("os._exit(7)", 7, "os._exit(7)"),
        ("posix._exit(7)", 7, "os._exit(7)"),
    ],
)
def test_a_file_of_the_user_that_ends_the_process_is_named(tmp_path, statement, code, call):
    (tmp_path / "mine.py").write_text(f"import os, posix, sys\ndef mine():\n    {statement}\n")
    program = f"import sys\nsys.path.append({str(tmp_path)!r})\nfrom reinforce_ada_jax import cli\nimport mine\n"
    result = run_python("-c", f"{program}cli.run(mine.mine)")
    said = f"error: {tmp_path / 'mine.py'}, line 3, ended the command with {call} before it had finished. Remove the"
    assert (result.returncode, len(result.stderr.splitlines())) == (code, 1)
    assert result.stderr.startswith(said)


def test_the_end_of_a_fork_is_not_that_of_the_command():
    fork = "def main():\n    os.fork() or os._exit(0)\n    print(os.wait()[1])\n"
    result = run_python("-c", f"import os\nfrom reinforce_ada_jax import cli\n{fork}cli.run(main)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", "")


def test_ctrl_c_while_a_command_is_imported(tmp_path):
    # The first import of a command is absl: this one says that it has begun, and does not end.
    slow = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "absl.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "reinforce_ada_jax.plot", "run"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment() | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == cli.INTERRUPTED
    assert err == "error: interrupted while the command was starting; nothing was written.\n"


THREAD = """
import concurrent.futures, time
from reinforce_ada_jax import cli
def main():
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 60)
    print("working", flush=True)
    time.sleep(60)
cli.run(main)
"""


def test_a_second_ctrl_c_ends_a_command_that_waits_for_its_threads():
    """It ends at once, and without a stack trace of the interpreter."""
    process = subprocess.Popen(
        [sys.executable, "-c", THREAD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()
    time.sleep(0.5)  # the interpreter begins to wait for the thread
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert said == "error: interrupted. The same command starts again from what is saved.\n" and err == ""


# ---- evaluate, export, warm_start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"workdir": "runs/some", "model": "models/some"}])
def test_evaluate_wants_a_run_or_a_model(capsys, given):
    text = refusal(capsys, evaluate.main, tiny(), evaluate.Options(**given))
    check_message(text, "either --workdir", "or --model")


def test_evaluate_refuses(tmp_path, capsys):
    """A model or a benchmark that can not be evaluated is named."""

    def said(config=None, **options):
        return refusal(capsys, evaluate.main, config or tiny(), evaluate.Options(**options))

    model = str(components_lib.ASSETS / "cipher")
    nothing = said(tiny(**{"evaluation.benchmarks": ()}), model=model)
    check_message(nothing, "nothing to evaluate on", "--benchmarks=FILE.jsonl")
    check_message(said(model=model, benchmarks=["none.jsonl"]), "no file none.jsonl")
    check_message(said(model=model, samples=0), "evaluation.samples is 0")
    check_message(said(workdir=str(tmp_path / "run")), "holds no checkpoint", "another --workdir")
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_what_is_no_run(tmp_path, capsys):
    text = refusal(capsys, export.main, tmp_path / "run", None, tmp_path / "out")
    check_message(text, f"{tmp_path / 'run'} is no work directory")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config_lib.to_json(tiny()))
    text = refusal(capsys, export.main, tmp_path / "run", None, tmp_path / "out")
    check_message(text, "holds no checkpoint: train first")
    assert not (tmp_path / "out").exists()


def test_warm_start_overwrites_nothing(tmp_path, capsys):
    warm_start = user_code.run(ROOT / "examples" / "warm_start.py")
    text = refusal(capsys, warm_start.main, tiny(), tmp_path)
    check_message(text, f"{tmp_path} exists already", "another --output")
    assert list(tmp_path.iterdir()) == []


# ---- dry runs -------------------------------------------------------------------------------------------------------


def described(capsys) -> tuple[dict[str, Any], str]:
    """Returns the settings that differ from their defaults and the summary, as a dry run printed them."""
    said = capsys.readouterr()
    assert said.err == "" and said.out.endswith(
        "\n\ndry run: the input is valid. Nothing was started, and no file of the run was written.\n"
    )
    settings, _, text = said.out.partition("\n\n")
    title, *lines = settings.splitlines()
    assert title == "Settings that differ from their defaults:"
    return {key.strip(): ast.literal_eval(value) for key, _, value in (line.partition(" = ") for line in lines)}, text


def test_a_dry_run_of_train(tmp_path, capsys):
    train.dry_run(tiny(seed=3), tmp_path / "run")
    settings, text = described(capsys)
    assert config_lib.replaced(config_lib.resolve({}), settings) == tiny(seed=3)
    assert settings["seed"] == 3 and "mesh.data" not in settings
    for part in ("107,392 weights", "100 iterations of 32 prompts (of 1,024)", f"files       {tmp_path / 'run'}"):
        assert part in text
    check_message(refusal(capsys, train.dry_run, tiny(**{"data.max_prompt_tokens": 7}), tmp_path / "run"), "limit 7")
    folder = str(edited_model(tmp_path, **{"model.norm.weight": None}))
    text = refusal(capsys, train.dry_run, tiny(**{"model.path": folder}), tmp_path / "run")
    check_message(text, "model.norm.weight is missing")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("command", [train, sft])
def test_a_dry_run_refuses_trackers_that_are_not_installed(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    text = refusal(capsys, command.dry_run, tiny(**{"logging.trackers": "wandb:project"}), tmp_path / "run")
    check_message(text, "wandb", "pip install")


def test_a_dry_run_of_evaluate(tmp_path, capsys):
    model, output = str(components_lib.ASSETS / "cipher"), str(tmp_path / "out")
    options = evaluate.Options(model=model, samples=4, output=output, dry_run=True)
    evaluate.main(tiny(), options)
    settings, text = described(capsys)
    assert settings["evaluation.samples"] == 4 and "heldout" in text and "4 each at temperature 1" in text
    check_message(
        refusal(capsys, evaluate.main, tiny(), dataclasses.replace(options, regrade=True)), "--regrade draws nothing"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_prepare(tmp_path, capsys):
    source = cipher_file(tmp_path / "words.jsonl", 3)
    prepare.main(tiny(), source, tmp_path / "prompts.jsonl", (0.0, 0.5), 16, dry_run=True)
    settings, text = described(capsys)
    assert settings["data.prompts"] == source and "16 each" in text
    assert [file.name for file in tmp_path.iterdir()] == ["words.jsonl"]


# ---- help -----------------------------------------------------------------------------------------------------------

SECTIONS = """
  run          Seed and length of the run.
  model        Weights that a run starts from, and their precision.
  data         Problems, and how they become prompts.
"""


@pytest.mark.parametrize(("command", "flag"), [("train", "--help"), ("evaluate", "-h"), ("simulate", "--help")])
def test_help_lists_flags_common_settings_and_sections(command, flag):
    done = run_python("-m", f"reinforce_ada_jax.{command}", flag)
    assert (done.returncode, done.stderr) == (0, "")
    examples = [line for line in done.stdout.splitlines() if f"python -m reinforce_ada_jax.{command} --" in line]
    assert len(examples) >= 3
    assert "\n  --config=VALUE\n      " in done.stdout and SECTIONS in done.stdout
    assert ("\n  --workdir=VALUE\n      " in done.stdout) is (command != "simulate")
    shown = re.findall(r"^  --config\.(.+?)=", done.stdout, re.MULTILINE)
    assert len(reference.COMMON) == 20 and sorted(shown) == sorted(reference.COMMON if command != "simulate" else ())
    assert "alsologtostderr" not in done.stdout


def test_help_of_serve_has_a_group_for_each_interface():
    groups = re.split("\n(Flags of .*):\n", run_python("-m", "reinforce_ada_jax.serve", "--help").stdout)
    named = dict(
        zip(groups[1::2], (re.findall(r"(?m)^  --(?:\[no\])?(\w+)", text) for text in groups[2::2]), strict=True)
    )
    assert named["Flags of --api=grpc"] == ["peer_calls"] and named["Flags of --api=openai"] == ["replicas", "tensor"]
    assert "workdir" in named["Flags of --api=tinker"] and "api_key" in named["Flags of --api=openai and --api=tinker"]
    every = {"distributed", *(field.name for field in dataclasses.fields(ServerSettings))}
    assert sorted(name for names in named.values() for name in names) == sorted(every)  # each in one group


def test_help_of_simulate_leaves_settings_to_their_section():
    text = run_python("-m", "reinforce_ada_jax.simulate", "--help").stdout
    assert "\n  --pass_rates=0.01:0.99\n" in text and "--group_size=VALUE" not in text
    assert text.partition("\nSections")[0].count("\n") < 50  # with a line for each setting: 86


def test_help_of_sections():
    """Help describes a section, all settings, or what was meant."""
    one = run_python("-c", PARSE_ONLY, "--help=mesh")
    assert (one.returncode, one.stdout) == (0, reference.help_text("mesh") + "\n")
    every = run_python("-c", PARSE_ONLY, TINY, "--help=all")
    assert [key for key, _ in config_lib.settings() if f"--config.{key}=" not in every.stdout] == []
    check_message(run_python("-c", PARSE_ONLY, "--help=mash").stderr, "no section 'mash'", "run, model, data", "all")


def test_a_message_has_no_control_characters(capsys):
    shown = refused(capsys, cli.fail, "a file \x1b[2J\ud800\nand its remedy: é")
    assert shown.err == "error: a file \\x1b[2J\\ud800\nand its remedy: é\n"

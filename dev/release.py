"""Checks that the commit can be released: `make release-check`.

    python dev/release.py --output=dist [--environment=DIR] [--offline]

The tree must be clean, the version must have its section in CHANGELOG.md, and two builds in two folders must give the
same bytes: a source archive of the commit, a wheel of the commit, and a wheel of the unpacked source archive. The wheel
is then installed with its dependencies into an empty environment (DIR, deleted first), where the installed command
trains the built-in model for two iterations and evaluates it, outside the repository. The two files of the release are
left in --output. Nothing is uploaded.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

from packaging.metadata import Metadata

ROOT = pathlib.Path(__file__).parents[1]
RUN = ("--config=tiny", "--workdir=run", "--config.evaluation.samples=2")


def run(*command: object, folder: pathlib.Path = ROOT, **variables: str) -> str:
    """Returns the output of a command; its failure ends this program with its last lines."""
    result = subprocess.run(
        [str(word) for word in command], cwd=folder, env=os.environ | variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if result.returncode:
        said = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
        sys.exit(f"error: {' '.join(map(str, command))} ended with code {result.returncode}:\n{said}")
    return result.stdout


def require(condition: bool, problem: str) -> None:
    """Ends this program with `problem` unless the condition holds."""
    if not condition:
        sys.exit(f"error: {problem}")


def check_tree() -> None:
    """Checks that every file is committed, so that the release is what the commit holds."""
    changed = run("git", "status", "--porcelain")
    require(not changed, f"there are changes that are not committed; commit or remove them:\n{changed}")


def check_changelog(text: str, version: str) -> str:
    """Returns the date of the version's section, which is the newest one: "2026-11-22", or "unreleased"."""
    sections = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d|unreleased))?$", text, re.MULTILINE)
    versions = [section for section in sections if section[0] != "Unreleased"]
    require(
        bool(versions) and versions[0][0] == version and bool(versions[0][1]),
        f'CHANGELOG.md must begin with "## [{version}] - DATE", the version of reinforce_ada_jax/__init__.py; '
        f"its sections are {', '.join(name for name, _ in sections) or 'none'}.",
    )
    return versions[0][1]


def unpack(archive: tarfile.TarFile, folder: pathlib.Path) -> None:
    """Unpacks an archive of our own; Python 3.11.0 to 3.11.3 has no filters, and 3.12 warns without one."""
    archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def exported(folder: pathlib.Path) -> pathlib.Path:
    """Returns a new folder with the files of the commit."""
    folder.mkdir()
    run("git", "archive", f"--output={folder}.tar", "HEAD")
    with tarfile.open(f"{folder}.tar") as archive:
        unpack(archive, folder)
    return folder


def built(source: pathlib.Path, kind: str, output: pathlib.Path) -> pathlib.Path:
    """Returns the file that a build makes: kind "sdist" or "wheel"."""
    epoch = run("git", "show", "--no-patch", "--format=%ct", "HEAD").strip()
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", output, folder=source, SOURCE_DATE_EPOCH=epoch)
    (file,) = output.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


def same_bytes(first: pathlib.Path, second: pathlib.Path, how: str) -> None:
    """Checks that two builds agree."""
    require(first.read_bytes() == second.read_bytes(), f"{first.name} differs from {how}: {first}, {second}")


def build(work: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the source archive and the wheel of the commit, each built twice with the same bytes."""
    one, two = exported(work / "one"), exported(work / "a folder with another name")
    archive = built(one, "sdist", work / "first")
    same_bytes(archive, built(two, "sdist", work / "second"), "a second build")
    with tarfile.open(archive) as opened:
        unpack(opened, work / "unpacked")
        held = {name.partition("/")[2] for name in opened.getnames()} - {"PKG-INFO"}
    committed = set(run("git", "ls-files", "-z").rstrip("\0").split("\0"))
    require(held == committed, f"the source archive differs from the commit in {sorted(held ^ committed)[:10]}")
    wheel = built(two, "wheel", work / "first")
    (unpacked,) = (work / "unpacked").iterdir()
    same_bytes(wheel, built(unpacked, "wheel", work / "third"), "a build from the source archive")
    return archive, wheel


def check_metadata(wheel: pathlib.Path, version: str) -> None:
    """Checks the metadata as a package index does, and the files beside the package."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (file,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(opened.read(file), validate=True)
    require(str(metadata.version) == version, f"{wheel.name} has the version {metadata.version}, not {version}")
    require(metadata.description_content_type == "text/markdown", "the description must be README.md")
    top = {name.partition("/")[0] for name in names}
    require(top == {"reinforce_ada_jax", f"reinforce_ada_jax-{version}.dist-info"}, f"{wheel.name} holds {sorted(top)}")


def try_out(wheel: pathlib.Path, environment: pathlib.Path, work: pathlib.Path) -> None:
    """Installs the wheel into an empty environment, then trains and evaluates outside the repository."""
    venv.create(environment, clear=True, with_pip=True)
    binaries = (environment / "bin").resolve()
    run(binaries / "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    run(binaries / "pip", "check")
    folder, variables = work / "empty", {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    folder.mkdir()
    command = binaries / "reinforce-ada"
    print("  train", flush=True)
    said = run(command, "train", *RUN, "--config.iterations=2", folder=folder, **variables)
    require("finished iteration 2" in said, f"the training printed {said}")
    print("  evaluate", flush=True)
    said = run(command, "evaluate", *RUN, folder=folder, **variables)
    require("heldout" in said, f"the evaluation printed {said}")
    print(said.rstrip())


def main() -> None:
    """Makes all checks, and leaves the files of the release in --output."""
    parser = argparse.ArgumentParser(description="Checks that the commit can be released.")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "dist", help="where the two files are left")
    parser.add_argument("--environment", type=pathlib.Path, help="folder of the empty environment; it is deleted first")
    parser.add_argument("--offline", action="store_true", help="build and compare only; install nothing")
    options = parser.parse_args()
    check_tree()
    version = re.findall(r'^__version__ = "(.+)"$', (ROOT / "reinforce_ada_jax/__init__.py").read_text(), re.M)[0]
    date = check_changelog((ROOT / "CHANGELOG.md").read_text(), version)
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        print(f"building {version} twice", flush=True)
        archive, wheel = build(work)
        check_metadata(wheel, version)
        if not options.offline:
            print("installing into an empty environment", flush=True)
            try_out(wheel, options.environment or work / "environment", work)
        options.output.mkdir(parents=True, exist_ok=True)
        for file in (archive, wheel):
            shutil.copy2(file, options.output)
            print(f"{options.output / file.name}: {file.stat().st_size:,} bytes")
    if date == "unreleased":
        print(f'Before the tag: replace "unreleased" by the date in the section {version} of CHANGELOG.md.')


if __name__ == "__main__":
    main()

"""Configuration files: those of the package by their names, others by their paths."""

import pathlib

from ml_collections import ConfigDict

from reinforce_ada_jax import user_code


def packaged_configs() -> dict[str, pathlib.Path]:
    """Returns the packaged configurations by name: configs/ is inside an installed package, else next to it."""
    package = pathlib.Path(__file__).parents[1]
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def config_file(name: str) -> str:
    """Returns the configuration file of a name: a path is the file itself, "tiny" means the packaged tiny.py.

    Raises ValueError if the name is neither a path nor that of a packaged configuration.
    """
    if "/" in name or ".py" in name:
        return name
    packaged = packaged_configs()
    if name not in packaged:
        raise ValueError(
            f"there is no packaged configuration {name!r}: name one of {', '.join(packaged)}, "
            "or a file such as configs/tiny.py."
        )
    return str(packaged[name])


def packaged(name: str) -> ConfigDict:
    """Returns the settings of a packaged configuration, such as "tiny"; ValueError for other names lists them."""
    return user_code.run(pathlib.Path(config_file(name))).get_config()

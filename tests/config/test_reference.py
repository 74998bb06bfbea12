"""Help text and the reference page say what the settings are."""

import pathlib

import pytest

from reinforce_ada_jax.config import reference, settings

ROOT = pathlib.Path(__file__).parents[2]


def test_every_setting_is_in_help_and_page():
    text, page = reference.help_text(), reference.page()
    for key, field in settings():
        assert f"--config.{key}={field.default!r}\n" in text
        assert f"| `{key}` | `{field.default!r}` |" in page


def test_help_of_one_section():
    text = reference.help_text("mesh")
    assert [line.strip() for line in text.splitlines() if "--config" in line] == [
        "--config.mesh.data=1", "--config.mesh.fsdp=1", "--config.mesh.context=1", "--config.mesh.tensor=1",
        "--config.mesh.sampler=0",
    ]  # fmt: skip
    assert "Must be at least 1 and at most 65,536." in text
    with pytest.raises(ValueError, match="no section 'mash'; sections are run, model, data, reward"):
        reference.help_text("mash")


def test_the_page_is_the_one_in_docs():
    made = "python -m reinforce_ada_jax.config.reference > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == reference.page(), f"run {made}"


def test_the_first_line_of_each_rule_is_whole():
    """Page and help print this line alone."""
    cut = [
        rule.__name__ for rule in reference.RULES.values() if not (rule.__doc__ or "").partition("\n")[0].endswith(".")
    ]
    assert cut == []

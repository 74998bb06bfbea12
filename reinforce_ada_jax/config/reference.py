"""Text made from the settings: the table of `--help`, and the reference page docs/settings.md.

python -m reinforce_ada_jax.config.reference > docs/settings.md
"""

import dataclasses
import textwrap

from reinforce_ada_jax.config import collection_rules, rules
from reinforce_ada_jax.config.defaults import settings
from reinforce_ada_jax.config.settings import Config

RULES = {rule.__name__: rule for rule in (*rules.FIRST, *rules.RULES, *collection_rules.RULES)}
ALL = "all"  # names every section in `help_text`
# Settings that most runs change, in the order of docs/settings.md; `--help` shows these.
COMMON = (
    "seed", "iterations", "model.path", "data.prompts", "data.template", "data.max_prompt_tokens", "reward.kind",
    "reward.path", "collection.strategy", "collection.group_size", "collection.prompts_per_iteration",
    "sampling.max_response_tokens", "sampling.slots", "learning.prompts_per_update", "learning.micro_batches",
    "learning.learning_rate", "lora.rank", "mesh.fsdp", "checkpoint.every", "evaluation.benchmarks",
)  # fmt: skip
RUN = "Seed and length of the run."  # settings outside of the sections
INTRODUCTION = """# Settings

Every setting of a run, with its default. A file in `configs/` starts from `reinforce_ada_jax.config.defaults()` and
changes what it needs; `--config.SECTION.KEY=VALUE` changes one setting of any command that takes `--config`. All checks
run before any device work. This page is made from `reinforce_ada_jax/config/settings.py` by
`python -m reinforce_ada_jax.config.reference > docs/settings.md`.
"""


def _sections() -> dict[str, tuple[str, list[tuple[str, dataclasses.Field]]]]:
    """Returns {section: (meaning, settings)}; settings without a section are under ""."""
    meanings = {field.name: type(field.default).__doc__ or "" for field in dataclasses.fields(Config)}
    result: dict[str, tuple[str, list[tuple[str, dataclasses.Field]]]] = {}
    for key, field in settings():
        section = key.rpartition(".")[0]
        result.setdefault(section, (meanings[section] if section else RUN, []))[1].append((key, field))
    return result


def _bounds(field: dataclasses.Field) -> str:
    """Returns the sentences on allowed values and on the rule of a setting; "" where there are none."""
    allowed, rule = field.metadata["allowed"], field.metadata["rule"]
    sentences = [f"Must {allowed.text}."] if allowed is not None else []
    if rule:
        sentences.append((RULES[rule].__doc__ or "").partition("\n")[0])
    return " ".join(sentences)


def overview() -> str:
    """Returns the sections as terminal text, one line each."""
    sections = {name or "run": meaning for name, (meaning, _) in _sections().items()}
    width = max(map(len, sections))
    return "\n".join(f"  {name:<{width}}  {meaning}" for name, meaning in sections.items())


def common() -> str:
    """Returns the settings of `COMMON` as terminal text."""
    return "\n".join(_described([(key, field) for key, field in settings() if key in COMMON]))


def _described(members: list[tuple[str, dataclasses.Field]]) -> list[str]:
    """Returns lines of terminal text: each setting with its default, and below it what it means."""
    lines = []
    for key, field in members:
        lines.append(f"  --config.{key}={field.default!r}")
        text = " ".join(filter(None, (field.metadata["text"], _bounds(field))))
        lines += textwrap.wrap(text, 112, initial_indent="      ", subsequent_indent="      ")
    return lines


def help_text(section: str = ALL) -> str:
    """Returns the settings of a section, or of `ALL`, as terminal text; ValueError if there is no such section."""
    sections = {name or "run": content for name, content in _sections().items()}
    if section != ALL and section not in sections:
        raise ValueError(f"there is no section {section!r}; sections are {', '.join(sections)}, or {ALL} of them.")
    lines = []
    for name, (meaning, members) in sections.items():
        if section in (ALL, name):
            lines += [f"\n{name}: {meaning}", *_described(members)]
    return "\n".join(lines).strip("\n")


def page() -> str:
    """Returns docs/settings.md."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    parts = [INTRODUCTION]
    for name, (meaning, members) in _sections().items():
        parts.append(f"\n## {name or 'The run'}\n\n{meaning}\n")
        parts.append("| setting | default | meaning | allowed values and rules |\n|---|---|---|---|")
        parts += [
            f"| `{key}` | `{cell(repr(field.default))}` | {cell(field.metadata['text'])} | {cell(_bounds(field))} |"
            for key, field in members
        ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")

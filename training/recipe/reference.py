"""The table of training/README.md: every field of the installed TrainingArguments, and what a recipe does with it.

python -m training.recipe.reference
"""

from __future__ import annotations

from training.recipe import Training
from training.recipe.extra_arguments import ACCEPTED, arguments, set_by_project


def table() -> str:
    """Markdown, a line a field, in the order of TrainingArguments."""
    lines = ["| field | in a recipe | |", "|---|---|---|", *map(_line, arguments())]
    return "\n".join(lines)


def _line(name: str) -> str:
    if name in Training.model_fields:
        text = " ".join((Training.model_fields[name].description or "").split())
        return f"| `{name}` | `training.{name}` | {text} |"
    if reason := set_by_project(name):
        return f"| `{name}` | refused | {reason} |"
    return f"| `{name}` | `training.extra.{name}` | {ACCEPTED.get(name, '')} |"


if __name__ == "__main__":
    print(table())

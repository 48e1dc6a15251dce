"""`finetune predict NAME[@ALIAS] TEXT…`: asks a registered model."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser = commands.add_parser("predict", help="ask a registered model", description=__doc__)
    parser.add_argument("model", metavar="NAME[@ALIAS]", help="a registered model; the alias is champion by default")
    parser.add_argument("texts", metavar="TEXT", nargs="+")
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints labels and probabilities, the likeliest first. Raises UserError for a model that is not there."""
    from tasks.runtime.answers import ask

    name, _, alias = arguments.model.partition("@")
    answers = ask(name, alias or "champion", arguments.texts)
    for text, answer in zip(arguments.texts, answers, strict=True):
        print(text)
        for entry in answer:
            print(f"  {entry['score']:6.1%}  {entry['label']}")
    return 0

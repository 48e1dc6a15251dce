"""The commands `verify` and `sign`: who signed a registered version, and whether it is as it was signed."""

from __future__ import annotations

import argparse
import sys

from flows.cli.shared import COMPLETED, FAILED
from tasks.registry.lineage import find_record_of_version
from tasks.registry.version_signatures import check_version, sign_registered
from tasks.registry.versions import find_version_number
from tasks.reports.formatting import format_count
from training.recipe import split_version_name


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="NAME[@ALIAS|/VERSION]",
        help="a registered model; without alias and version, its champion",
    )


def verify(arguments: argparse.Namespace) -> int:
    """Check the signature of a registered version, and all its files.

    Exit code 1 if it has no signature, or if a file is not the signed one; 2 if the version is refused.
    """
    name, number = _find(arguments.model)
    signed, warning, problems = check_version(name, number)
    if signed is None:
        print(warning, file=sys.stderr)
        return FAILED
    print(f"{name} version {number}")
    print(f"  signed by   {signed.key.name}, key {signed.key.id[:12]}, {signed.signed_at:%Y-%m-%d %H:%M} UTC")
    print(f"  name, tags  {format_count(len(signed.tags), 'tag')}, as signed")
    print(f"  files       {format_count(len(signed.files), 'file')}, {'not ' if problems else ''}as signed")
    for problem in problems:
        print(f"{name}/{number}: {problem} since it was signed: use another version.", file=sys.stderr)
    return FAILED if problems else COMPLETED


def add_sign_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME/VERSION|NAME@ALIAS", help="a registered version")


def sign(arguments: argparse.Namespace) -> int:
    """Sign a registered version whose origin you know, with the key of this home.

    Runs sign what they register: this is for versions of before, and for those of other programs.
    """
    name, number = _find(arguments.model)
    signed = sign_registered(name, number, find_record_of_version(f"{name}/{number}"))
    files = format_count(len(signed.files), "file")
    print(f"{name} version {number} is signed by {signed.key.name}, key {signed.key.id[:12]}: {files}.")
    return COMPLETED


def _find(model: str) -> tuple[str, str]:
    name, alias, number = split_version_name(model)
    return name, number or find_version_number(name, alias)

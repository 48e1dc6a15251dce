"""The commands `verify` and `sign`: who signed a registered version or a dossier, and whether it was changed since."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flows.cli.shared import COMPLETED, FAILED
from tasks.provenance.dossier_signature import check_dossier
from tasks.registry.lineage import find_record_of_version
from tasks.registry.version_signatures import check_version, sign_registered
from tasks.registry.versions import find_version_number
from tasks.reports.formatting import format_count
from training.recipe import split_version_name


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="NAME[@ALIAS|/VERSION]|FILE.zip",
        help="a registered model, without alias and version its champion; or a dossier",
    )


def verify(arguments: argparse.Namespace) -> int:
    """Check the signature of a registered version and all its files, or that of a dossier.

    Exit code 1 if it has no signature, or if a file is not the signed one; 2 if the version or dossier is refused.
    """
    if arguments.model.endswith(".zip"):
        return _verify_dossier(Path(arguments.model))
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
        print(f"{name}/{number}: {problem}", file=sys.stderr)
    return FAILED if problems else COMPLETED


def _verify_dossier(file: Path) -> int:
    found = check_dossier(file)
    print(f"{file}: dossier of {found.name} version {found.number}")
    print(f"  signed by   {found.key.name}, key {found.key.id[:12]}, {found.signed_at:%Y-%m-%d %H:%M} UTC")
    print(f"  content     {'' if found.is_unchanged else 'not '}as signed")
    if found.is_unchanged:
        return COMPLETED
    version = f"{found.name}/{found.number}"
    advice = f"Write it again: finetune dossier {version} --out {file}."
    print(f"{file} has changed since it was signed as the dossier of {version}. {advice}", file=sys.stderr)
    return FAILED


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

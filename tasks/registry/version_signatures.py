"""Signatures of registered versions: made at registration, and verified before a version's files are used.

    model.sig                   the manifest of all files of a version, which OpenSSF's model_signing verifies
    provenance.sigstore.json    name, number, tags and origin of the version: an in-toto statement, SLSA's provenance

Both are among the version's files in MLflow. The home keeps those that it has verified: they are fetched once, and a
missing one is noticed:

    <home>/signatures/<digest of the registry>/<name>/<version>/
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter, ValidationError

from tasks.cache.digests import Digests, digest_of
from tasks.cache.store import link_or_copy
from tasks.home import home, mlflow_artifacts, registry_place, tracking_uri
from tasks.registry.lineage import has_own_record
from tasks.registry.slsa_statement import PREDICATE_TYPE, build_provenance, require_signed_record
from tasks.registry.versions import BOUND_TAGS, EXPORTS_TAG, SIGNED_TAG, find_version, need_model, need_version
from tasks.registry.weight_files import WEIGHTS, Different, TrainedModel, require_trained
from tasks.shared_store.bucket import VARIABLE as STORE
from tasks.signatures.bundles import BadSignature, ForeignKey, build_manifest, read_manifest, sign, verify
from tasks.signatures.keys import KEY, key_id, load_signing_key
from tasks.signatures.trust import Trust, TrustedKey, pin_own_key, read_trust, trust_file
from tasks.tracking.connection import FLOW_RUN_TAG, MODEL_TAG, MlflowFailed, connect, find_files_here, mlflow_errors
from training.jobs.protocol import write_atomically
from training.local_files import find_foreign
from training.models.repository_files import REGISTRY_ROOMS, part_of
from training.problems import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

MANIFEST, PROVENANCE = "model.sig", "provenance.sigstore.json"
NOT_SIGNED = (MANIFEST, PROVENANCE, "registered_model_meta")
"""Files that no manifest covers: the signatures, and the file that MLflow adds to a download."""
EXPORTS = "export"
"""The folder of exports in the version's MLflow run."""
LONGEST = 2**26
"""Bytes of a signature."""
_TIME = TypeAdapter(AwareDatetime)
_NUMBER = re.compile("[1-9][0-9]*")
_logger = logging.getLogger(__name__)
_warned: set[Path] = set()
"""The folders of the homes, registries and names of which this process has warned."""


class SignedVersion(BaseModel):
    """A version as a trusted key has signed it."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    name: str
    number: str
    key: TrustedKey
    signed_at: datetime
    files: dict[str, str]
    """sha256 by path below the version's folder in MLflow."""
    exports: dict[str, str]
    """sha256 of released exports, by path in the version's MLflow run."""
    tags: dict[str, str]
    """Those of BOUND_TAGS that the version has."""
    provenance: dict[str, Any]
    """The predicate of the statement."""

    def require_tags(self, tags: Mapping[str, str | None]) -> None:
        """Raises BadSignature if one of these tags has another value."""
        if changed := sorted(tag for tag, value in tags.items() if self.tags.get(tag) != value):
            raise BadSignature(f"its tag {changed[0]} has changed since it was signed")

    def require_files(self, folder: str, names: list[str], here: Path, fetched: list[str]) -> None:
        """Raises UserError if a folder of the version has not the signed files.

        Args:
            folder: its path below the version's folder.
            names: of all files that it has.
            here: the copy of the folder.
            fetched: the names of the files that were copied.
        """
        signed = {path.removeprefix(f"{folder}/"): digest for path, digest in self.files.items()}
        signed = {path: digest for path, digest in signed.items() if f"{folder}/{path}" in self.files}
        problem = _compare_names(signed, names, folder)
        for name, digest in zip(fetched, Digests(home()).of_many([here / name for name in fetched]), strict=True):
            if signed.get(name) not in (None, digest):
                problem = problem or f"its file {folder}/{name} has changed since it was signed"
        if problem:
            raise _refuse(self.name, self.number, problem, _REPLACE if set(names) - signed.keys() else _RESTORE)

    def require_export(self, path: str, file: Path) -> None:
        """Raises UserError if an export of the version's MLflow run is not the signed one."""
        if self.exports.get(path) != Digests(home()).of(file):
            reason = f"its file {path} {'has changed' if path in self.exports else 'was added'} since it was signed"
            raise _refuse(self.name, self.number, reason, _REPLACE)


def _compare_names(signed: Mapping[str, str], names: list[str], folder: str) -> str:
    if added := sorted(set(names) - signed.keys()):
        return f"its file {folder}/{added[0]} was added since it was signed"
    if missing := sorted({name for name in signed if "/" not in name} - set(names)):
        return f"its file {folder}/{missing[0]} is missing, which was signed"
    return ""


class Verification(NamedTuple):
    """The signed version; None for one that may be used without a trusted signature, with the warning."""

    signed: SignedVersion | None
    warning: str = ""


_REPLACE = "Use another version, restore this one in MLflow, or run its recipe again."
_RESTORE = "Use another version, or restore this one: finetune run RECIPE --force fit."
_DELETE = "Delete the version in MLflow, and run the recipe again."


def verify_version(
    name: str, number: str, tags: Mapping[str, str | None], version: ModelVersion | None = None
) -> Verification:
    """Verifies the signatures of a version before anything of it is used.

    Args:
        tags: values that the caller uses: each must be the signed one.
        version: the version as the registry has it; it is looked up if that is needed.

    Raises UserError for a signature that is not valid, and for a version without a trusted one if trust.yaml refuses
    it, or if an earlier version of this name is known to be signed; MlflowFailed. A warning is logged once for a name.
    """
    verified = _find_verification(name, number, tags, version)
    if verified.warning and (place := _kept_folder(name)) not in _warned:
        _warned.add(place)
        _logger.warning(verified.warning)
    return verified


def _find_verification(
    name: str, number: str, tags: Mapping[str, str | None], version: ModelVersion | None
) -> Verification:
    if not _NUMBER.fullmatch(number):
        raise _refuse(name, number, "it has no number", "Look at what the server of the registry answers.")
    trust, problem = read_trust(), BadSignature("")
    newest: SignedVersion | None = None
    for read in (_read_kept, _fetch):
        try:
            if (found := read(name, number, version)) is None:
                continue
            signed = _verify_bundles(*found, name, number, trust)
            if newest is not None and signed.signed_at < newest.signed_at:
                continue
            newest = signed
            signed.require_tags(tags)
            _keep(name, number, *found)
            return Verification(signed)
        except BadSignature as error:
            problem = error
    if str(problem) and not isinstance(problem, ForeignKey):
        raise _refuse(name, number, f"its signature cannot be trusted: {problem}", _REPLACE)
    if str(problem):
        reason = f"{problem}, which {trust_file()} does not trust for {name}"
        advice = "If it is a colleague's, add it to the keys there, as their trust.yaml has it."
    else:
        reason, advice = "it is not signed", f"If you know its origin, sign it: finetune sign {name}/{number}."
    first = min((int(kept.name) for kept in _kept_folder(name).glob("[1-9]*")), default=None)
    if first is not None and int(number) >= first and not str(problem):
        raise _refuse(name, number, f"{reason}, and {name}/{first} was signed", advice)
    if trust.unsigned == "refuse":
        raise _refuse(name, number, f"{reason}, and unsigned: refuse is set in {trust_file()}", advice)
    return Verification(None, f"{name}/{number} is used without a signature: {reason}. {advice}")


def verify_tags(version: ModelVersion) -> SignedVersion | None:
    """Verifies a version of the registry, with the tags by which it is used, as `verify_version` does."""
    tags = {tag: version.tags.get(tag) for tag in BOUND_TAGS}
    return verify_version(version.name, str(version.version), tags, version).signed


def _refuse(name: str, number: str, reason: str, advice: str) -> UserError:
    return UserError.of("signature", f"{name}/{number}", f"is refused: {reason}. {advice}")


def _verify_bundles(manifest: bytes, provenance: bytes, name: str, number: str, trust: Trust) -> SignedVersion:
    """Raises BadSignature."""
    keys = {one.id: one.public for one in trust.keys if one.may_sign(name)}
    signer, listed = verify(manifest, keys)
    other_signer, statement = verify(provenance, keys)
    if signer != other_signer:
        raise BadSignature(f"{MANIFEST} and {PROVENANCE} are signed by two keys")
    subject, *exports = statement.subject
    if statement.predicate_type != PREDICATE_TYPE or subject.name != f"{name}/{number}":
        raise BadSignature(f"it is the signature of {subject.name}")
    files = read_manifest(listed)
    same = statement.predicate.get("finetune_files") == digest_of(files) and listed.subject[0].name == name
    if subject.digest != listed.subject[0].digest or not same:
        raise BadSignature(f"{MANIFEST} is of another model than {PROVENANCE}")
    key = trust.by_id[signer]
    try:
        signed = SignedVersion(
            name=name,
            number=number,
            key=key,
            signed_at=_TIME.validate_python(statement.predicate["runDetails"]["metadata"]["finishedOn"]),
            files=files,
            exports={export.name: export.digest["sha256"] for export in exports},
            tags=statement.predicate["finetune_tags"],
            provenance=statement.predicate,
        )
    except (LookupError, TypeError, ValidationError) as error:
        raise BadSignature(f"{PROVENANCE} has another content than this release writes") from error
    if key.is_revoked(signed.signed_at):
        raise BadSignature(f"the key {signer[:12]} of {key.name!r} was revoked on {key.revoked:%Y-%m-%d %H:%M} UTC")
    return signed


def _kept_folder(name: str) -> Path:
    return home() / "signatures" / digest_of(registry_place())[:16] / quote(name, safe=" ")


def _read_kept(name: str, number: str, version: ModelVersion | None) -> tuple[bytes, bytes] | None:
    folder = _kept_folder(name) / number
    try:
        return (folder / MANIFEST).read_bytes(), (folder / PROVENANCE).read_bytes()
    except FileNotFoundError:
        return None


def _keep(name: str, number: str, manifest: bytes, provenance: bytes) -> None:
    folder = _kept_folder(name) / number
    with contextlib.suppress(OSError):
        if (folder / PROVENANCE).read_bytes() == provenance and (folder / MANIFEST).read_bytes() == manifest:
            return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MANIFEST, manifest)
    write_atomically(folder / PROVENANCE, provenance)


def _fetch(name: str, number: str, version: ModelVersion | None) -> tuple[bytes, bytes] | None:
    """The signatures of a version in MLflow; None if it has none. Raises BadSignature if one is missing."""
    with mlflow_errors():
        client = connect()
        version = version or find_version(client, name, number)
        if version is None or SIGNED_TAG not in version.tags:
            return None
        with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
            uri, files = _open_files(client, name, number)
            present = [one for one in files.list_artifacts() if not one.is_dir and one.path in (MANIFEST, PROVENANCE)]
            for entry in present:
                if reason := _find_unreadable(uri, entry.path, entry.file_size):
                    raise BadSignature(reason)
                files.download_artifacts(entry.path, folder)
            try:
                return Path(folder, MANIFEST).read_bytes(), Path(folder, PROVENANCE).read_bytes()
            except FileNotFoundError as error:
                raise BadSignature(f"its file {Path(error.filename).name} is missing") from error


def _find_unreadable(uri: str, file: str, size: int | None) -> str:
    """Why a signature below a URI is not read; empty if it is."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    if (size or 0) > LONGEST:
        return f"its file {file} has more than {LONGEST >> 20} MiB"
    here = [f"{local_file_uri_to_path(uri)}/{file}"] if is_local_uri(uri) else []
    foreign = find_foreign(here, REGISTRY_ROOMS, "signature")
    return f"its file {file} {foreign[0].message}" if foreign else ""


def _open_files(client: MlflowClient, name: str, number: str) -> tuple[str, Any]:
    """The URI of a version's files, and MLflow's repository of them."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    uri = client.get_model_version_download_uri(name, number)
    return uri, get_artifact_repository(uri, tracking_uri=tracking_uri(), registry_uri=tracking_uri())


def require_own_key(client: MlflowClient, name: str) -> EllipticCurvePrivateKey:
    """The key that signs versions of this name here. It is pinned in trust.yaml if there is none yet: then what is not
    signed is refused, unless versions or artifacts of others are in use already.

    Raises UserError if trust.yaml does not trust the key for this name.
    """
    key = load_signing_key()
    in_use = STORE in os.environ or bool(client.search_model_versions(max_results=1))
    pin_own_key(key.public_key(), "warn" if in_use else "refuse")
    own = read_trust().by_id.get(key_id(key.public_key()))
    if own is None or not own.may_sign(name) or own.is_revoked(datetime.now(UTC)):
        reason = "has" if own is None else "trusts for other names" if not own.may_sign(name) else "has revoked"
        message = f"{trust_file()} {'does not have' if own is None else reason} the key {key_id(key.public_key())[:12]}"
        message += f", with which this home would sign {name}: trust it there, or name another key in {KEY}."
        raise UserError.of("signature", "release.registry", message)
    return key


def sign_own_version(
    client: MlflowClient,
    name: str,
    number: str,
    record: Mapping[str, Any] | None,
    *,
    is_new: bool,
    tags: tuple[Mapping[str, str], Mapping[str, str]],
    trained: TrainedModel,
    exports: Mapping[str, str],
) -> str:
    """Signs a version after the run that has registered it or given it new figures, unless its signature fits. Only
    tags that the run has computed, or that are signed already, are signed. Returns a warning if it stays unsigned.

    Args:
        is_new: whether this run has registered it.
        tags: those of its origin, and those that every run sets anew.

    Raises UserError if it is not as it was signed.
    """
    version = client.get_model_version(name, number)
    try:
        earlier = None if is_new else _find_signed(name, number, version)
    except ForeignKey:
        return ""
    except BadSignature as error:
        raise _refuse(name, number, f"its signature cannot be trusted: {error}", _REPLACE) from error
    origin, latest = ({tag: one[tag] for tag in BOUND_TAGS if tag in one} for one in tags)
    if record is not None and _is_own(record, origin.get(MODEL_TAG)):  # that run was killed before it signed
        origin[FLOW_RUN_TAG] = record["run"]["flow_run_id"]
    expected = (earlier.tags if earlier else origin) | latest
    present = {tag: version.tags[tag] for tag in BOUND_TAGS if tag in version.tags}
    if odd := sorted(tag for tag in {*expected, *present} if expected.get(tag) != present.get(tag)):
        if earlier:
            raise _refuse(name, number, f"its tag {odd[0]} has changed since it was signed", _REPLACE)
        advice = f"If you know its origin, sign it: finetune sign {name}/{number}."
        return f"{name}/{number} stays unsigned: another run or program has set its tag {odd[0]}. {advice}"
    if earlier is None or earlier.tags != expected or not exports.items() <= earlier.exports.items():
        if record is not None and earlier is not None:
            require_signed_record(record, earlier.provenance, f"{name}/{number}")
        all_exports = {**(earlier.exports if earlier else {}), **exports}
        sign_version(client, name, number, record, trained=trained, exports=all_exports, earlier=earlier)
    return ""


def _is_own(record: Mapping[str, Any], model: str | None) -> bool:
    """Whether a record is of this home's training of the model with this digest."""
    return has_own_record(record["run"]["flow_run_id"]) and (record.get("model") or {}).get("digest") == model


def _find_signed(name: str, number: str, version: ModelVersion) -> SignedVersion | None:
    """The version as the newest signature has it, in this home or in MLflow. Raises BadSignature."""
    trust = read_trust()
    found = [read(name, number, version) for read in (_read_kept, _fetch)]
    signed = [_verify_bundles(*pair, name, number, trust) for pair in found if pair is not None]
    return max(signed, key=lambda one: one.signed_at, default=None)


def sign_version(
    client: MlflowClient,
    name: str,
    number: str,
    record: Mapping[str, Any] | None,
    *,
    trained: TrainedModel | None = None,
    exports: Mapping[str, str] | None = None,
    earlier: SignedVersion | None = None,
) -> SignedVersion:
    """Signs a version of the registry with the key of this home, and stores the signatures with its files.

    Args:
        record: of the run that registered it; None if no run did.
        trained: its model as it was trained here: the version's must be the same.
        exports: sha256 of its exports, by path in its MLflow run.
        earlier: the version as it was signed before: it must have the same files.

    Raises UserError if the version has other files than the trained model or than before; MlflowFailed.
    """
    key = require_own_key(client, name)
    version = client.get_model_version(name, number)
    tags = {tag: version.tags[tag] for tag in BOUND_TAGS if tag in version.tags}
    with _open_folder(client, name, number) as folder:
        paths = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
        names = [path.relative_to(folder).as_posix() for path in paths]
        if link := next((path for path in paths if path.is_symlink()), None):
            raise _refuse(name, number, f"{link} is a link", "Put a file in its place, and sign it again.")
        digests = zip(names, Digests(home()).of_many(paths), strict=True)
        files = {path: digest for path, digest in digests if path not in NOT_SIGNED}
        try:
            files = require_trained(folder, files, trained) if trained is not None else files
        except Different as difference:
            reason = f"in the registry, {difference} differs from the model that was trained here"
            raise _refuse(name, number, reason, _DELETE) from difference
    if earlier is not None and (odd := sorted(path for path, _ in files.items() ^ earlier.files.items())):
        raise _refuse(name, number, f"its file {odd[0]} has changed since it was signed", _DELETE)
    manifest = build_manifest(name, files, NOT_SIGNED)
    signer = key_id(key.public_key())
    origin = f"{name}/{number}", manifest.subject[0].digest
    statement = build_provenance(*origin, digest_of(files), signer, tags, exports or {}, record)
    bundles = {MANIFEST: sign(manifest, key), PROVENANCE: sign(statement, key)}
    signed = _verify_bundles(bundles[MANIFEST], bundles[PROVENANCE], name, number, read_trust())
    with tempfile.TemporaryDirectory(prefix="finetune-") as aside:
        for file, content in bundles.items():
            Path(aside, file).write_bytes(content)
            _open_files(client, name, number)[1].log_artifact(str(Path(aside, file)))
    client.set_model_version_tag(name, number, SIGNED_TAG, signer)
    _keep(name, number, bundles[MANIFEST], bundles[PROVENANCE])
    return signed


@contextlib.contextmanager
def _open_folder(client: MlflowClient, name: str, number: str) -> Iterator[Path]:
    """The folder of a version with all its files: a local one itself, or a copy."""
    from mlflow.artifacts import download_artifacts

    uri = client.get_model_version_download_uri(name, number)
    if (here := find_files_here(uri)) is not None:
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="finetune-") as aside:
        yield Path(download_artifacts(artifact_uri=uri, dst_path=aside, tracking_uri=tracking_uri()))


def sign_registered(name: str, number: str, record: Mapping[str, Any] | None) -> SignedVersion:
    """Signs a version that a person vouches for: `sign_version` with the exports that it has. Raises UserError, and
    MlflowFailed."""
    with mlflow_errors():
        client = connect()
        version = need_version(client, need_model(client, name), version=number)
        exports: dict[str, str] = {}
        if EXPORTS_TAG in version.tags:
            with tempfile.TemporaryDirectory(prefix="finetune-") as aside:
                folder = Path(client.download_artifacts(version.run_id, EXPORTS, aside))
                paths = sorted(path for path in folder.rglob("*") if path.is_file())
                names = [f"{EXPORTS}/{path.relative_to(folder).as_posix()}" for path in paths]
                exports = dict(zip(names, Digests(home()).of_many(paths), strict=True))
        return sign_version(client, name, number, record, exports=exports)


def check_version(name: str, number: str) -> tuple[SignedVersion | None, str, list[str]]:
    """The signed version, or else the warning; and each of its files that is not as it was signed. Raises UserError if
    the version is refused, and MlflowFailed."""
    with mlflow_errors():
        client = connect()
        version = need_version(client, need_model(client, name), version=number)
    tags = {tag: version.tags.get(tag) for tag in BOUND_TAGS}
    signed, warning = _find_verification(name, number, tags, version)
    return signed, warning, check_all_files(signed) if signed else []


def check_all_files(signed: SignedVersion) -> list[str]:
    """Fetches all files of a version and returns each difference from the signed ones, with the next step."""
    with mlflow_errors(), _open_folder(connect(), signed.name, signed.number) as folder:
        differences = _find_differences(signed, folder)
    return [
        f"{path} {difference} since it was signed. {_RESTORE if _is_trained(signed, path) else _DELETE}"
        for path, difference in differences.items()
    ]


def _is_trained(signed: SignedVersion, path: str) -> bool:
    """Whether training makes this file of a version."""
    return path in signed.files and part_of(Path(path).name) is not None


def _find_differences(signed: SignedVersion, folder: Path) -> dict[str, str]:
    """What happened to files of a version since it was signed, by path."""
    present = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or path.relative_to(folder).as_posix() in signed.files
    }
    present = {name: path for name, path in present.items() if name not in NOT_SIGNED}
    found = dict.fromkeys(sorted(signed.files.keys() - present.keys()), "is missing")
    for name, path in sorted(present.items()):
        if path.is_symlink():
            found[name] = "is a link"
        elif name not in signed.files:
            found[name] = "was added"
        elif not path.is_file() or Digests(home()).of(path) != signed.files[name]:
            found[name] = "has changed"
    return found


def restore_files(name: str, number: str, trained: Path, *, fetches: bool) -> list[str]:
    """Replaces files of a version that are not as they were signed by those of the trained folder. Returns a warning
    for each such file, restored or not.

    `fetches`: whether files that MLflow does not keep on this machine are fetched, to be compared.
    """
    client = connect()
    try:
        signed = _find_signed(name, number, client.get_model_version(name, number))
    except BadSignature:  # the caller's next step refuses it
        return []
    uri, files = _open_files(client, name, number)
    here, warnings = find_files_here(uri), list[str]()
    if signed is None or (here is None and not fetches):
        return []
    try:
        with mlflow_errors(), _open_folder(client, name, number) as folder:
            differences = _find_differences(signed, folder)
    except MlflowFailed as error:
        return [f"{name}/{number} could not be compared with its signature: {error}"]
    for path, difference in differences.items():
        own = trained / Path(path).name
        said = f"{name}/{number}: in MLflow its file {path} {difference} since it was signed"
        if not own.is_file() or signed.files.get(path) != Digests(home()).of(own):
            warnings.append(f"{said}. {_DELETE}")
            continue
        try:
            if here is not None:
                _put(own, here, path)
            else:
                files.log_artifact(str(own), str(Path(path).parent))
        except OSError as error:
            warnings.append(f"{said}, and could not be restored ({error}). {_DELETE}")
        else:
            warnings.append(f"{said}; it was restored")
    return warnings


def _put(own: Path, folder: Path, path: str) -> None:
    """Puts a file at a path below a folder of the home's MLflow: a link to it if it has weights, else a copy. Raises
    OSError for any other folder, which the registry may name, and if the path leads elsewhere."""
    if not folder.resolve().is_relative_to(mlflow_artifacts().resolve()):
        raise OSError(errno.EPERM, "it is not in this home", str(folder))
    place = folder / path
    above = [folder / parent for parent in Path(path).parents]
    if ".." in Path(path).parts or any(parent.is_symlink() for parent in above[:-1]):
        raise OSError(errno.ELOOP, "its folder is a link", str(place))
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f".{place.name}-{uuid.uuid4().hex[:8]}")
    try:
        (link_or_copy if own.suffix == WEIGHTS else shutil.copyfile)(str(own.resolve()), str(aside))
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)

"""Stages `register` and `promote`: registration of the model in MLflow, and its alias."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from tasks.cache.code import git_commit, library_versions
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, Lock, PinnedFile, Promotion, Verdict, Version, by_stage, label_names
from tasks.cache.stage import Inputs, Work, action
from tasks.home import named_lock, registry_place
from tasks.jobs.commands import python_argv
from tasks.jobs.retries import run_child
from tasks.registry import lineage, promotions
from tasks.registry.log_model import LogModelSettings
from tasks.registry.model_card import CardFacts, build_description
from tasks.registry.version_exports import (
    describe_exports,
    digest_exports,
    log_exports,
    read_calibration,
    released_exports,
)
from tasks.registry.version_signatures import require_own_key, restore_files, sign_own_version
from tasks.registry.versions import (
    BASE_VERSION_TAG,
    CALIBRATION_TAG,
    COLUMNS_TAG,
    DATA_COMMIT_TAG,
    DATA_FILES_TAG,
    DATA_TAG,
    EXPORTS_TAG,
    GIT_COMMIT_TAG,
    LONGEST_TAG,
    METRICS_TAG,
    PRECISION_TAG,
    READING_TAG,
    RECIPE_TAG,
    ROWS_TAG,
    SPLIT_TAG,
    STARTED_FROM_TAG,
    TASK_TAG,
    WEIGHTS_TAG,
    Aliases,
    find_model,
    list_aliases,
    need_model,
)
from tasks.registry.weight_files import TrainedModel
from tasks.reports.formatting import escape_markdown
from tasks.tracking.connection import (
    FLOW_RUN_TAG,
    MAX_LENGTH_TAG,
    MODEL_TAG,
    REASON_TAG,
    VERDICT_TAG,
    build_environment,
    connect,
    find_or_create_run,
    mlflow_errors,
)
from training.data.file_systems import name_of
from training.problems import NETWORK, UserError
from training.recipe import Recipe
from training.recipe.column_types import EXAMPLES
from training.recipe.reading_rules import ReadingRules
from training.recipe.rules.column_rules import source_columns

SERVED_WITH = ("torch", "transformers", "accelerate", "tokenizers", "safetensors")
MADE_WITH = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "pyarrow", "mlflow", "prefect")
PROBES = 8
LOGGED_EXAMPLES = 2
# A registered model predicts in full precision and in other batches, so its predictions may differ by rounding.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2
_SHOWN = ("calibrate", "export", "compare_exports", "compare_teacher")
"""Stages whose results are registered with the model."""
LONGEST_DESCRIPTION = 5000
"""Characters that MLflow allows in a description."""


def inputs(recipe: Recipe, lock: Lock, verdict: Verdict, *artifacts: Artifact | None) -> Inputs:
    """The model, its calibration and exports, the registry, and whether the verdict is a rejection."""
    refs = by_stage(artifacts)
    return Inputs(
        {
            "release": {"registry": recipe.release.registry},
            "registry": registry_place(),
            "upstream": {
                "fit": refs["fit"].parts["model"],
                **{stage: refs[stage].digest for stage in _SHOWN if stage in refs},
            },
            "rejected": verdict.decision == "reject",
        }
    )


@action(inputs, gives=Version)
def register(work: Work, recipe: Recipe, lock: Lock, verdict: Verdict, *artifacts: Artifact | None) -> Version | None:
    """Registers the model without an alias, unless it was rejected. If the model is registered already with the same
    calibration, its version gets the new figures and verdict."""
    name = recipe.release.registry
    if name is None or verdict.decision == "reject":
        work.state = "skipped"
        return None
    refs, champion = by_stage(artifacts), recipe.release.champion
    origin, judged = _build_origin_tags(recipe, lock, work.run, refs), _build_judgement_tags(recipe, verdict, refs)
    # Concurrent runs with the same model register it once.
    with mlflow_errors(), named_lock(f"registry-{name}"), ExitStack() as stack:
        client = connect()
        require_own_key(client, name)
        if _find_version(client, name, refs, None) is None:
            stack.enter_context(work.one_at_a_time())
        model = find_model(client, name)
        current = model.aliases.get(champion) if model else None
        version = _find_version(client, name, refs, current)
        taken = promotions.explain_lost_alias(model, champion, version) if model and version else None
        if not taken:
            _require_compared(client, current, name, version, refs["fit"].parts["model"], verdict)
        if is_new := version is None:
            run_id = find_or_create_run(client, recipe.name, work.run)
            # Before the registration, so that every version has its lineage.
            record = lineage.build_record(recipe, work.run, work.earlier, mlflow_run=run_id, verdict=verdict)
            client.log_text(run_id, lineage.save_record(record), lineage.LINEAGE)
            if (adapter := refs["fit"].path / "adapter").is_dir():
                client.log_artifacts(run_id, str(adapter), "fit/adapter")
            version = _log_model(work, recipe, lock, run_id, origin | judged, refs)
            work.rollback = partial(_unregister, name, version)
        else:
            # MLflow's weights may be the same files as those of an artifact that was damaged and made again.
            is_retrained = any(row.name == "fit" and row.state != "cached" for row in work.earlier)
            for text in restore_files(name, version, refs["fit"].path / "model", fetches=is_retrained):
                work.warning(text)
        if str(current) == version and (verdict.comparison is None or verdict.comparison.baseline):
            # The model is the champion, so it was compared with none: it keeps the verdict of its promotion.
            present = client.get_model_version(name, version).tags
            judged |= {tag: present[tag] for tag in (VERDICT_TAG, REASON_TAG) if tag in present}
        exports = released_exports(refs)
        log_exports(client, name, version, refs, exports)
        data, trained, predicted, scored = map(refs.__getitem__, ("load_data", "fit", "predict", "score"))
        others = exports, refs.get("calibrate"), refs.get("score_folds"), refs.get("compare_teacher")
        facts = CardFacts(recipe, lock, data, trained, predicted, scored, verdict, *others)
        card = build_description(facts)
        text = f"{judged[VERDICT_TAG]}: {escape_markdown(judged[REASON_TAG])}\n\n{card}"
        _update_version(client, name, version, judged, text[:LONGEST_DESCRIPTION])
        files = digest_exports(refs, exports)
        latest = judged | ({EXPORTS_TAG: describe_exports(exports)} if exports else {})
        warning = sign_own_version(
            *(client, name, version, lineage.find_record_of_version(f"{name}/{version}")),
            is_new=is_new,
            tags=(origin, latest),
            trained=TrainedModel(refs["fit"].path / "model", _digest_trained(refs["fit"].key)),
            exports=files,
        )
        if warning:
            work.warning(warning)
    return Version(name=name, version=version, taken=taken)


def promotion_inputs(recipe: Recipe, version: Version | None, verdict: Verdict) -> Inputs:
    """The version, the decision, and the names of the aliases."""
    return Inputs(
        {
            "release": recipe.release.model_dump(include={"champion", "challenger"}),
            "registry": registry_place(),
            "version": version.model_dump() if version else None,
            "decision": verdict.decision,
        }
    )


@action(promotion_inputs, gives=Promotion)
def promote(work: Work, recipe: Recipe, version: Version | None, verdict: Verdict) -> Promotion | None:
    """Sets the champion's alias if the version is promoted, otherwise the challenger's. Skips a version that lost the
    champion's alias by a user's command."""
    if version is None:
        work.state = "skipped"
        return None
    name, number = version.name, version.version
    aliases = Aliases(recipe.release.champion, recipe.release.challenger)
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        model = need_model(client, name)
        promotions.store_alias_names(client, model, aliases)
        numbers = {alias: model.aliases.get(alias) for alias in aliases}
        before = {alias: None if at is None else str(at) for alias, at in numbers.items()}
        if verdict.decision != "promote" and before[aliases.champion] != number:
            client.set_registered_model_alias(name, aliases.challenger, number)
            alias = aliases.challenger
        elif taken := promotions.explain_lost_alias(model, aliases.champion, number):
            work.note(f"{name} version {number} {taken}")
            work.state = "skipped"
            return None
        else:
            alias = aliases.champion
            digest = client.get_model_version(name, number).tags.get(MODEL_TAG)
            _require_compared(client, before[alias], name, number, digest, verdict)
            promotions.set_champion_alias(
                client, model, number, aliases, by="run", why=verdict.reason, flow_run=work.run
            )
        work.rollback = partial(promotions.restore_aliases, name, before, number)
    previous = before[alias] if before[alias] != number else None
    return Promotion(name=name, version=number, alias=alias, previous=previous)


def _require_compared(
    client: Any, champion: object, name: str, version: str | None, digest: str | None, verdict: Verdict
) -> None:
    """Raises UserError if the model is to be promoted, and another version became champion after the comparison. The
    champion may be the same model, with this `digest`, in another calibration."""
    compared = verdict.comparison.champion if verdict.comparison else None
    if verdict.decision != "promote" or champion is None or f"{name}/{champion}" in (compared, f"{name}/{version}"):
        return
    if digest is not None and client.get_model_version(name, str(champion)).tags.get(MODEL_TAG) == digest:
        return
    message = (
        f"version {champion} of {name!r} became champion during this run, and the model was not compared with it: run "
        "the same command again."
    )
    raise UserError.of(NETWORK, "release.registry", message)


def _unregister(name: str, version: str) -> str:
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        # An alias may be of another run, of a user, or of this run if only MLflow's response was lost.
        if aliases := list_aliases(need_model(client, name), version):
            return f"{name} version {version} stays, although a stage after it failed: it is {', '.join(aliases)} now."
        client.delete_model_version(name, version)
    return f"{name} version {version} was removed again: a stage after it failed."


def _build_origin_tags(recipe: Recipe, lock: Lock, run: str, refs: Mapping[str, Artifact]) -> dict[str, str]:
    """Builds the tags for the origin of the model, which never change."""
    tags = {
        MODEL_TAG: refs["fit"].parts["model"],
        PRECISION_TAG: lock.mixed_precision,
        RECIPE_TAG: recipe.name,
        "finetune.recipe_digest": digest_of(recipe.model_dump(mode="json")),
        FLOW_RUN_TAG: run,
        DATA_TAG: " + ".join(" ".join(filter(None, [one.path, one.config])) for one in recipe.data.sets),
        "finetune.libraries": json.dumps(library_versions(MADE_WITH)),
    }
    if trained := _digest_trained(refs["fit"].key):
        tags[WEIGHTS_TAG] = json.dumps({name: sha for name, sha in trained.items() if name.endswith(".safetensors")})
    if lock.data_hub:
        tags[DATA_COMMIT_TAG] = lock.data_hub.commit
    if lock.all_data_files:
        files = {s: [f"{name_of(f.path)} {f.sha256}" for f in pinned] for s, pinned in _files_by_split(lock).items()}
        text = json.dumps(files, ensure_ascii=False)
        tags[DATA_FILES_TAG] = text if len(text) <= LONGEST_TAG else json.dumps({s: len(files[s]) for s in files})
    if lock.model_hub:
        tags["finetune.base_model_commit"] = lock.model_hub.commit
    if lock.rows:
        tags[ROWS_TAG] = lock.rows
    if calibration := read_calibration(refs):
        tags[CALIBRATION_TAG] = calibration.text()
    if lock.model_version:
        tags[BASE_VERSION_TAG] = str(lock.model_version)
    if lock.started_from:
        tags[STARTED_FROM_TAG] = lock.started_from.model_dump_json()
    if git := git_commit():
        tags |= {GIT_COMMIT_TAG: git.commit, "finetune.git_dirty": str(git.dirty).lower()}
    return tags


def _digest_trained(key: str) -> dict[str, str]:
    """The sha256 of the files of a trained model, by path in its folder."""
    return {name: file["sha256"] for name, file in (lineage.list_model_files(key) or {}).items()}


def _files_by_split(lock: Lock) -> dict[str, list[PinnedFile]]:
    """The files of each split; in a mixture the split's name begins with the set's: `reviews/train`."""
    sets = lock.data_sets.items()
    return {f"{name}/{split}": files for name, one in sets for split, files in one.files.items()} or lock.data_files


def _build_judgement_tags(recipe: Recipe, verdict: Verdict, refs: Mapping[str, Artifact]) -> dict[str, str]:
    """Builds the tags for the model's inputs, figures and verdict, which a later run may change."""
    columns = source_columns(recipe).inputs
    tags = {
        MAX_LENGTH_TAG: str(recipe.tokens.max_length),
        TASK_TAG: json.dumps(recipe.task_and_options, ensure_ascii=False),
        COLUMNS_TAG: json.dumps({column.name: column.source_name for column in columns}, ensure_ascii=False),
        READING_TAG: json.dumps(ReadingRules.of(recipe.data).sets, ensure_ascii=False),
        VERDICT_TAG: verdict.decision,
        REASON_TAG: verdict.reason,
        SPLIT_TAG: recipe.judged_split,
        METRICS_TAG: json.dumps(refs["score"].result),
    }
    for stage, ref in refs.items():
        tags |= {f"finetune.{stage}.key": ref.key, f"finetune.{stage}.digest": ref.digest}
    return tags


def _update_version(client: Any, name: str, version: str, tags: Mapping[str, str], description: str) -> None:
    current = client.get_model_version(name, version)
    for tag, value in tags.items():
        if current.tags.get(tag) != value:
            client.set_model_version_tag(name, version, tag, value)
    if current.description != description:
        client.update_model_version(name, version, description)


def _log_model(
    work: Work, recipe: Recipe, lock: Lock, run_id: str, tags: Mapping[str, str], refs: Mapping[str, Artifact]
) -> str:
    """Registers the model by a child program, which also loads it again and compares its predictions on some rows of
    the judged split with those of `predict`. Returns the number of the new version."""
    split, negatives = recipe.judged_split, recipe.data.negatives
    rows = refs["mine_negatives" if negatives is not None and split in negatives.splits else "load_data"]
    logged = run_child(
        work,
        "tasks.registry.log_model",
        python_argv("tasks.registry.log_model"),
        settings=LogModelSettings(
            experiment=recipe.name,
            run_id=run_id,
            registry=str(recipe.release.registry),
            **recipe.task_and_options,
            inputs=[column.name for column in source_columns(recipe).inputs],
            labels=label_names(refs["load_data"]),
            requirements=[f"{k}=={v}" for k, v in library_versions(SERVED_WITH).items() if k != "python"],
            max_length=recipe.tokens.max_length,
            tags=dict(tags),
            probes=PROBES,
            examples=LOGGED_EXAMPLES,
            tolerance=TOLERANCE if lock.mixed_precision == "no" else MIXED_TOLERANCE,
            calibration=read_calibration(refs),
        ),
        inputs={
            "model": refs["fit"].path / "model",
            "rows": rows.path / f"{split}.arrow",
            "predictions": refs["predict"].path / f"{split}.parquet",
        },
        env=build_environment(),
    )
    return str(logged["version"])


def _find_version(client: Any, name: str, refs: Mapping[str, Artifact], champion: object) -> str | None:
    """The version with this model and this calibration. If several homes have registered it, the champion comes
    first."""
    digest, calibration = refs["fit"].parts["model"], read_calibration(refs)
    versions = client.search_model_versions(f"name = '{name}' and tags.`{MODEL_TAG}` = '{digest}'")
    text = calibration.text() if calibration else None
    numbers = [str(version.version) for version in versions if version.tags.get(CALIBRATION_TAG) == text]
    return str(champion) if str(champion) in numbers else next(iter(numbers), None)


def format_example_arguments(recipe: Recipe) -> str:
    """Formats example arguments of `finetune predict` after the model's name, such as `"some text"`, without optional
    ones."""
    read = source_columns(recipe)
    examples = [
        f'"some {column.source_name}"'
        if column.form not in EXAMPLES or column.form == "content"
        else f"'{EXAMPLES[column.form]}'"
        for column in read.inputs
        if not (column.may_be_empty and read.task_type.columns[column.name].optional)
    ]
    return " ".join([*examples, *(["--task", recipe.task] if ":" in recipe.task else [])])

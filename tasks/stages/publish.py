"""Stage: publication of the promoted model on the Hugging Face Hub."""

from __future__ import annotations

import math
import os

from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, Lock, Publication, Verdict, Version, by_stage
from tasks.cache.stage import Inputs, Work, action
from tasks.home import named_lock
from tasks.hub.client import EVAL_RESULTS, PublishSettings, build_environment
from tasks.jobs.commands import python_argv
from tasks.jobs.retries import run_child
from tasks.provenance.eval_results import build_eval_results
from tasks.registry.model_card import CALIBRATION_PICTURES, CURVES, CardFacts, build_card
from tasks.registry.version_exports import released_exports
from training import task_types
from training.evaluation.stored_calibration import FILE as CALIBRATION
from training.recipe import Recipe
from training.recipe.tables.exports import EXPORTS


def inputs(
    recipe: Recipe, lock: Lock, verdict: Verdict, version: Version | None, *artifacts: Artifact | None
) -> Inputs:
    """The model, the contents of its card, and the repository; nothing if the model is not promoted."""
    hub = recipe.release.hub
    if hub is None or not _is_promoted(verdict, version):
        return Inputs({"promoted": False})
    refs = by_stage(artifacts)
    stages = ["load_data", "predict", "score", "score_folds", "calibrate", "export", "compare_exports"]
    stages.append("compare_teacher")
    upstream = {stage: refs[stage].digest for stage in stages if stage in refs}
    return Inputs(
        {
            "release": {"hub": hub.model_dump(exclude={"checkpoints"})},
            "endpoint": os.environ.get("HF_ENDPOINT"),
            "recipe": digest_of(recipe.model_dump(mode="json")),
            "lock": digest_of(lock.model_dump(mode="json", exclude={"notes", "unreachable"})),
            "upstream": {**upstream, "fit": refs["fit"].parts["model"]},
            "warnings": verdict.own_warnings,
        }
    )


@action(inputs, gives=Publication)
def publish(
    work: Work, recipe: Recipe, lock: Lock, verdict: Verdict, version: Version | None, *artifacts: Artifact | None
) -> Publication | None:
    """Pushes model, tokenizer, card, curves and released exports in one commit if the model is promoted."""
    hub = recipe.release.hub
    if hub is None or not _is_promoted(verdict, version):
        work.state = "skipped"
        return None
    refs = by_stage(artifacts)
    data, trained, predictions, scores = map(refs.__getitem__, ("load_data", "fit", "predict", "score"))
    exports = released_exports(refs)
    work.out.mkdir(parents=True)
    readme = work.out / "README.md"
    calibrated = refs.get("calibrate")
    others = exports, calibrated, refs.get("score_folds"), refs.get("compare_teacher")
    facts = CardFacts(recipe, lock, data, trained, predictions, scores, verdict, *others)
    readme.write_text(build_card(facts), encoding="utf-8")
    files = {path.name: str(path) for path in sorted((trained.path / "model").iterdir())}
    files |= {f"adapter/{path.name}": str(path) for path in sorted((trained.path / "adapter").glob("*"))}
    if exports:
        made = refs["export"].path
        files |= {str(file.relative_to(made)): str(file) for name in exports for file in EXPORTS[name].files_in(made)}
    task_type = task_types.load(**recipe.task_and_options)
    for name, text in task_type.published_files(trained.path / "model", recipe.tokens.max_length).items():
        (work.out / name).parent.mkdir(exist_ok=True)
        (work.out / name).write_text(text, encoding="utf-8")
        files[name] = str(work.out / name)
    if calibrated:
        files[CALIBRATION] = str(calibrated.path / CALIBRATION)
        pictures = [calibrated.path / "log" / name for name in CALIBRATION_PICTURES]
        files |= {file.name: str(file) for file in pictures if file.is_file()}
    files |= {"README.md": str(readme), CURVES: str(trained.path / "log" / CURVES)}
    if (results := build_eval_results(recipe, lock, data, scores)) is not None:
        (work.out / "eval_results.yaml").write_text(results, encoding="utf-8")
        files[EVAL_RESULTS] = str(work.out / "eval_results.yaml")
    # Concurrent runs with the same model publish it once.
    with named_lock(f"hub-{hub.repo.replace('/', '--')}"):
        published = run_child(
            work,
            "tasks.hub.push",
            python_argv("tasks.hub.push"),
            settings=PublishSettings(
                **hub.model_dump(include={"repo", "revision", "private", "pull_request"}),
                title=f"{recipe.name} {trained.digest[:12]}",
                files=files,
            ),
            inputs={},
            env=build_environment(),
            stall_timeout_s=math.inf,  # its connections have their own time-outs
        )
    return Publication.model_validate(published)


def _is_promoted(verdict: Verdict, version: Version | None) -> bool:
    """Whether the model becomes the champion, or would become it with a registry."""
    return verdict.decision == "promote" and (version is None or version.taken is None)

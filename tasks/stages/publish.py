"""Stage: the promoted model, for all who may read its repository on the Hugging Face Hub."""

from __future__ import annotations

import math
import os

from tasks.cache.digests import digest_of
from tasks.cache.refs import Lock, Publication, Ref, Verdict, Version
from tasks.cache.stage import Inputs, Work, action
from tasks.hub.push import environment
from tasks.jobs.child import run_child
from tasks.jobs.launch import python_argv
from tasks.registry.model_card import CURVES, card
from tasks.tracking.connection import exclusive
from training import task_types
from training.recipe import Recipe


def inputs(
    recipe: Recipe,
    lock: Lock,
    data: Ref,
    trained: Ref,
    predictions: Ref,
    scores: Ref,
    verdict: Verdict,
    version: Version | None,
) -> Inputs:
    """The model, all that its card says, and where they go, if at all."""
    hub = recipe.release.hub
    if hub is None or not _promoted(verdict, version):
        return Inputs({"promoted": False})
    upstream = {"load_data": data.digest, "fit": trained.parts["model"], "predict": predictions.digest}
    return Inputs(
        {
            "release": {"hub": hub.model_dump(exclude={"checkpoints"})},
            "endpoint": os.environ.get("HF_ENDPOINT"),
            "recipe": digest_of(recipe.model_dump(mode="json")),
            "lock": digest_of(lock.model_dump(mode="json", exclude={"notes", "unreachable"})),
            "upstream": {**upstream, "score": scores.digest},
            "warnings": verdict.own_warnings,
        }
    )


@action(inputs, gives=Publication)
def publish(
    work: Work,
    recipe: Recipe,
    lock: Lock,
    data: Ref,
    trained: Ref,
    predictions: Ref,
    scores: Ref,
    verdict: Verdict,
    version: Version | None,
) -> Publication | None:
    """Pushes model, tokenizer, card and curves in one commit, where the model is to be promoted."""
    hub = recipe.release.hub
    if hub is None or not _promoted(verdict, version):
        work.state = "skipped"
        return None
    work.out.mkdir(parents=True)
    readme = work.out / "README.md"
    readme.write_text(card(recipe, lock, data, trained, predictions, scores, verdict), encoding="utf-8")
    files = {path.name: str(path) for path in sorted((trained.path / "model").iterdir())}
    files |= {f"adapter/{path.name}": str(path) for path in sorted((trained.path / "adapter").glob("*"))}
    for name, text in task_types.load(**recipe.task_and_options).published_files(trained.path / "model").items():
        (work.out / name).write_text(text, encoding="utf-8")
        files[name] = str(work.out / name)
    files |= {"README.md": str(readme), CURVES: str(trained.path / "log" / CURVES)}
    # Two runs that end with the same model at once publish it once.
    with exclusive(f"hub-{hub.repo.replace('/', '--')}"):
        figures = run_child(
            work,
            "tasks.hub.publish_model",
            python_argv("tasks.hub.publish_model"),
            settings={
                **hub.model_dump(include={"repo", "revision", "private", "pull_request"}),
                "title": f"{recipe.name} {trained.digest[:12]}",
                "files": files,
            },
            inputs={},
            env=environment(),
            stall_timeout_s=math.inf,  # its connections have time-outs of their own
        )
    return Publication.model_validate(figures)


def _promoted(verdict: Verdict, version: Version | None) -> bool:
    """Whether the model will be champion, or would be, were there a registry."""
    return verdict.decision == "promote" and (version is None or version.taken is None)

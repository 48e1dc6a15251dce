"""What MLflow's page of a run says first: where else to look, how it ended, what came of it, and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.pipeline import Finished
from tasks.prefect.flow_runs import page_url
from tasks.registry.model_card import figures
from tasks.tracking.connection import version_page
from tasks.tracking.reports import describe_verdict
from training.recipe import Recipe


def note(
    recipe: Recipe,
    run: str,
    why: Sequence[str] = (),
    finished: Finished | None = None,
    problems: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The run's description, as Markdown.

    Args:
        recipe: what it ran.
        run: the flow run's id.
        why: what changed, where that is known.
        finished: what the stages gave, where all of them ended well.
        problems: what ended the run, as its result tells it.
    """
    # MLflow shows some three lines of it at first.
    parts = [" · ".join(_elsewhere(run, finished))]
    if finished is not None:
        parts += [describe_verdict(finished.verdict), figures(recipe, finished.scores)]
    parts += [f"**{problem['where']}**: {problem['message']}" for problem in problems]
    if why:
        parts.append("\n".join(["What changed:", "", *(f"- {line}" for line in why)]))
    return "\n\n".join(parts)


def _elsewhere(run: str, finished: Finished | None) -> list[str]:
    url = page_url(run)
    links = [f"[Flow run {run}]({url})" if url else f"Flow run {run}"]
    if finished and (version := finished.version):
        page = version_page(version.name, version.version)
        links.append(f"[{version.name} version {version.version}](#/{page})")
    if finished and finished.publication:
        links.append(f"[{finished.publication.repo}]({finished.publication.url})")
    return links

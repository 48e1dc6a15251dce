"""The program that pushes a model to the Hugging Face Hub, with the access token of its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.hub.push import Place, PublishSettings, connect, push
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.models.repository_files import part_of


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Pushes the model, and returns its repo, revision, commit and url.

    Weights and tokenizer files in the repository that this model does not have are removed: they belong to an earlier
    model.
    """
    settings = PublishSettings.model_validate(job.settings)
    pushed = push(
        connect(settings.repo),
        Place(settings.repo, settings.revision, settings.private),
        {path: Path(file) for path, file in settings.files.items()},
        title=settings.title,
        replaced=lambda path: "/" not in path and part_of(path) is not None,
        pull_request=settings.pull_request,
    )
    if not pushed.is_new:
        events.note(f"{settings.repo} has this model already: nothing to commit")
    return {"repo": settings.repo, "revision": pushed.revision, "commit": pushed.commit, "url": pushed.url}


if __name__ == "__main__":
    run_program(main)

"""The program that pushes a model to the Hugging Face Hub, with the access token of its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.hub.push import Place, connected, push
from training.jobs.program import run_program
from training.jobs.protocol import Events, Job
from training.models.repository_files import part_of


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Settings: repo, revision, private, pull_request, title (of the commit), files (paths in the repository to files
    here). Figures: repo, revision, commit, url.

    Weights and tokenizer files of the repository that the model does not have are removed: they are of another one.
    """
    say = job.settings
    pushed = push(
        connected(say["repo"]),
        Place(say["repo"], say["revision"], say["private"]),
        {path: Path(file) for path, file in say["files"].items()},
        title=say["title"],
        replaced=lambda path: "/" not in path and part_of(path) is not None,
        pull_request=say["pull_request"],
    )
    if not pushed.made:
        events.note(f"{say['repo']} has it already: nothing to commit")
    return {"repo": say["repo"], "revision": pushed.revision, "commit": pushed.commit, "url": pushed.url}


if __name__ == "__main__":
    run_program(main)

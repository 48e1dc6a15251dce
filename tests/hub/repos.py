"""Repositories as the Hub keeps them: files, commits, and the branches and tags that point to them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

LFS_SUFFIXES = (".safetensors", ".parquet", ".arrow", ".bin")  # as a new repository's .gitattributes say


@dataclass(frozen=True)
class File:
    """One version of one file."""

    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The content's id in git or LFS."""
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    """All files of a repository at one time."""

    id: str
    parent: str | None
    title: str
    files: dict[str, File]


@dataclass
class Repo:
    """Commits by id, and what points to them. `kind` is models, datasets or spaces, as in addresses."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)
    """The branches of pull requests, as `refs/pr/N`."""

    def add(self, files: dict[str, File], title: str, branch: str = "main") -> Commit:
        """Moves a branch, or a pull request, to a new commit with exactly these files."""
        names = self.pulls if branch.startswith("refs/pr/") else self.branches
        parent = names.get(branch)
        content = json.dumps([self.name, len(self.commits), parent, {path: files[path].oid for path in sorted(files)}])
        commit = Commit(hashlib.sha1(content.encode()).hexdigest(), parent, title, files)
        self.commits[commit.id] = commit
        names[branch] = commit.id
        return commit

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag or an id names."""
        named = {**self.pulls, **self.tags, **self.branches}
        found = self.commits.get(named.get(revision, revision))
        if found is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found


class Refused(Exception):
    """An answer that is an error, as the Hub words it in its headers."""

    def __init__(self, status: int, code: str | None, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {**({"X-Error-Code": code} if code else {}), "X-Error-Message": message, **headers}

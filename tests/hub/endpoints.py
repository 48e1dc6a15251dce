"""Responses of the Hub: one function an endpoint, named in ENDPOINTS.

All other requests of the clients (Xet, multipart uploads, pages of a listing) are answered with 404.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tests.hub.repos import LFS_SUFFIXES, Commit, File, Refused, Repo

if TYPE_CHECKING:
    from tests.hub.server import Hub

USER = "tester"
DATE = "2026-01-02T03:04:05.000Z"


@dataclass(frozen=True)
class Request:
    """A request."""

    query: dict[str, list[str]]
    headers: Mapping[str, str]
    body: bytes

    @property
    def token(self) -> str | None:
        """The access token it came with."""
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    @property
    def json(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """A response."""

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


Endpoint = Callable[..., Answer]
ENDPOINTS: list[tuple[str, re.Pattern[str], Endpoint]] = []
_PARTS = {
    "{kind}": "(?P<kind>models|datasets|spaces)",
    "{datasets/}": "(?:(?P<kind>datasets|spaces)/)?",  # addresses of models have no kind
    "{name}": "(?P<name>[^/]+/[^/]+)",
    "{rev}": "(?P<rev>[^/]+)",
    "{path}": "(?P<path>.+)",
}


def endpoint(method: str, *templates: str) -> Callable[[Endpoint], Endpoint]:
    """Registers the function that answers for these addresses; a part in braces becomes its argument."""

    def register(function: Endpoint) -> Endpoint:
        for template in templates:
            pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
            for part, expression in _PARTS.items():
                pattern = pattern.replace(part, expression)
            ENDPOINTS.append((method, re.compile(pattern), function))
        return function

    return register


@endpoint("GET", "/api/whoami-v2")
def whoami(hub: Hub, request: Request) -> Answer:
    if request.token is None:
        raise Refused(401, None, "Invalid username or password.")
    return as_json({"name": USER, "type": "user", "orgs": [], "auth": {"type": "access_token"}})


@endpoint("POST", "/api/repos/create")
def create(hub: Hub, request: Request) -> Answer:
    kind, name = _named(request)
    hub.need_writer(request)
    status = 409 if (kind, name) in hub.repos else 200
    if status == 200:
        hub.repos[kind, name] = Repo(kind, name, private=request.json.get("visibility") == "private")
        hub.repos[kind, name].add({}, "initial commit")
    return as_json({"url": f"{hub.url}/{'datasets/' if kind == 'datasets' else ''}{name}", "name": name}, status)


@endpoint("DELETE", "/api/repos/delete")
def delete(hub: Hub, request: Request) -> Answer:
    repo = hub.writable(request, *_named(request))
    del hub.repos[repo.kind, repo.name]
    return as_json({})


def _named(request: Request) -> tuple[str, str]:
    kind = f"{request.json.get('type') or 'model'}s"
    return kind, f"{request.json.get('organization') or USER}/{request.json['name']}"


@endpoint("POST", "/api/validate-yaml")
def validate_yaml(hub: Hub, request: Request) -> Answer:
    return as_json({"errors": [], "warnings": []})


@endpoint("GET", "/api/{kind}/{name}", "/api/{kind}/{name}/revision/{rev}")
def info(hub: Hub, request: Request, kind: str, name: str, rev: str = "main") -> Answer:
    repo = hub.readable(request, kind, name)
    commit = repo.at(rev)
    return as_json(
        {
            "id": name,
            "author": name.split("/")[0],
            "sha": commit.id,
            "createdAt": DATE,
            "lastModified": DATE,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }
    )


@endpoint("GET", "/api/{kind}/{name}/auth-check")
def auth_check(hub: Hub, request: Request, kind: str, name: str) -> Answer:
    hub.readable(request, kind, name, content=True)
    return as_json({})


@endpoint("GET", "/api/{kind}/{name}/tree/{rev}", "/api/{kind}/{name}/tree/{rev}/{path}")
def tree(hub: Hub, request: Request, kind: str, name: str, rev: str, path: str = "") -> Answer:
    files = hub.readable(request, kind, name).at(rev).files
    below = f"{path}/" if path else ""
    entries = [entry for entry in _entries(files) if entry["path"].startswith(below)]
    if path and not entries:
        raise Refused(404, "EntryNotFound", f"{path} does not exist on {rev!r}")
    if request.query.get("recursive") != ["true"]:
        entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(below)]
    return as_json(entries)


@endpoint("POST", "/api/{kind}/{name}/paths-info/{rev}")
def paths_info(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    wanted = parse_qs(request.body.decode())["paths"]
    files = hub.readable(request, kind, name).at(rev).files
    return as_json([entry for entry in _entries(files) if entry["path"] in wanted])


def _entries(files: Mapping[str, File]) -> list[dict[str, Any]]:
    """A repository's folders and files, as listings have them."""
    folders = sorted({str(folder) for path in files for folder in Path(path).parents} - {"."})
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": folder, "size": 0, "oid": hashlib.sha1(folder.encode()).hexdigest()}
        for folder in folders
    ]
    for path, file in sorted(files.items()):
        entry = {"type": "file", "path": path, "size": len(file.content), "oid": file.oid}
        if file.lfs:
            entry["lfs"] = {"oid": file.oid, "size": len(file.content), "pointerSize": 134}
        entries.append(entry)
    return entries


@endpoint("GET", "/{datasets/}{name}/resolve/{rev}/{path}")
def resolve(hub: Hub, request: Request, kind: str, name: str, rev: str, path: str) -> Answer:
    commit = hub.readable(request, kind, name, content=True).at(rev)
    headers = {"X-Repo-Commit": commit.id}
    if path not in commit.files:
        raise Refused(404, "EntryNotFound", "Entry not found", **headers)
    file = commit.files[path]
    headers |= {"ETag": f'"{file.oid}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if file.lfs:
        headers |= {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": str(len(file.content))}
    return Answer(file.content, 200, headers)


@endpoint("GET", "/api/{kind}/{name}/refs")
def refs(hub: Hub, request: Request, kind: str, name: str) -> Answer:
    repo = hub.readable(request, kind, name)

    def listed(sort: str, names: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"name": ref, "ref": f"refs/{sort}/{ref}", "targetCommit": id} for ref, id in names.items()]

    return as_json({"branches": listed("heads", repo.branches), "tags": listed("tags", repo.tags), "converts": []})


@endpoint("GET", "/api/{kind}/{name}/commits/{rev}")
def commits(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    repo = hub.readable(request, kind, name)

    def back(commit: Commit | None) -> Iterable[Commit]:
        while commit is not None:
            yield commit
            commit = repo.commits.get(commit.parent or "")

    who = [{"user": USER}]
    return as_json(
        [{"id": c.id, "title": c.title, "message": "", "authors": who, "date": DATE} for c in back(repo.at(rev))]
    )


@endpoint("POST", "/api/{kind}/{name}/branch/{rev}")
def create_branch(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    repo = hub.writable(request, kind, name)
    return _point(repo, repo.branches, rev, (request.json or {}).get("startingPoint", "main"))


@endpoint("DELETE", "/api/{kind}/{name}/branch/{rev}")
def delete_branch(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    hub.writable(request, kind, name).branches.pop(rev)
    return as_json({})


@endpoint("POST", "/api/{kind}/{name}/tag/{rev}")
def create_tag(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    repo = hub.writable(request, kind, name)
    return _point(repo, repo.tags, request.json["tag"], rev)


def _point(repo: Repo, names: dict[str, str], name: str, revision: str) -> Answer:
    if name in names:
        raise Refused(409, None, f"Reference {name} already exists")
    names[name] = repo.at(revision).id
    return as_json({})


@endpoint("PUT", "/api/{kind}/{name}/settings")
def settings(hub: Hub, request: Request, kind: str, name: str) -> Answer:
    repo = hub.writable(request, kind, name)
    repo.private = request.json.get("visibility", "private" if repo.private else "public") == "private"
    repo.gated = bool(request.json.get("gated", repo.gated))
    return as_json({})


@endpoint("POST", "/api/{kind}/{name}/preupload/{rev}")
def preupload(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    there = hub.writable(request, kind, name).at(rev).files
    return as_json(
        {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                    **({"oid": there[file["path"]].oid} if file["path"] in there else {}),
                }
                for file in request.json["files"]
            ]
        }
    )


@endpoint("POST", "/{datasets/}{name}.git/info/lfs/objects/batch")
def lfs_batch(hub: Hub, request: Request, kind: str, name: str) -> Answer:
    hub.writable(request, kind, name)
    objects = [
        {**thing, "actions": {"upload": {"href": f"{hub.url}/lfs/{thing['oid']}"}}}
        if thing["oid"] not in hub.blobs
        else thing
        for thing in request.json["objects"]
    ]
    return as_json({"transfer": "basic", "objects": objects})


@endpoint("PUT", "/lfs/{path}")
def lfs_upload(hub: Hub, request: Request, path: str) -> Answer:
    if hashlib.sha256(request.body).hexdigest() != path:
        raise Refused(400, None, "The content is not what its name says")
    hub.blobs[path] = request.body
    return Answer()


@endpoint("POST", "/api/{kind}/{name}/commit/{rev}")
def commit(hub: Hub, request: Request, kind: str, name: str, rev: str) -> Answer:
    repo = hub.writable(request, kind, name)
    head, files = repo.at(rev), dict(repo.at(rev).files)
    title, number = "", None
    if request.query.get("create_pr") == ["1"]:
        number = len(repo.pulls) + 1
        rev = f"refs/pr/{number}"
        repo.pulls[rev] = head.id
    for line in request.body.splitlines():
        operation = json.loads(line)
        key, value = operation["key"], operation["value"]
        if key == "header":
            title = value["summary"]
            if value.get("parentCommit", head.id) != head.id:
                raise Refused(412, None, "A commit has happened since. Please refresh and try again.")
        elif key == "file":
            files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
        elif key == "lfsFile":
            files[value["path"]] = File(hub.blobs[value["oid"]], lfs=True)
        elif key == "deletedFile":
            del files[value["path"]]
        elif key == "deletedFolder":
            files = {path: file for path, file in files.items() if not path.startswith(value["path"])}
    made = repo.add(files, title, rev)
    address = f"{hub.url}/{name}"
    pull_request = f"{address}/discussions/{number}" if number else None
    return as_json({"commitUrl": f"{address}/commit/{made.id}", "commitOid": made.id, "pullRequestUrl": pull_request})


@endpoint("GET", "/api/{kind}/{name}/discussions")
def discussions(hub: Hub, request: Request, kind: str, name: str) -> Answer:
    repo = hub.readable(request, kind, name)
    found = [
        {
            "num": int(ref.rpartition("/")[2]),
            "title": repo.commits[id].title,
            "author": {"name": USER},
            "createdAt": DATE,
            "status": "open",
            "isPullRequest": True,
            "repo": {"name": name, "type": kind.removesuffix("s")},
        }
        for ref, id in repo.pulls.items()
    ]
    return as_json({"discussions": found, "count": len(found), "start": 0})

"""The page of a served model: which columns it reads, how to ask it, a form that asks it, and the paths of its API.

The page loads one script, which is also served here. Its content security policy allows no other, and no request to
another server. The token is what the user types: the page does not contain it, and stores it nowhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from tasks.registry.model_spec import ModelSpec
from training import task_types
from training.problems import visible
from training.recipe.column_types import EXAMPLES

OPEN_PATHS = ("/", "/health", "/docs", "/openapi.json", "/page.js")
"""Paths that need no token."""
_STYLE = """
body {font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a}
pre {background: #f4f4f4; padding: 1rem; overflow-x: auto} td, th {text-align: left; padding: .3rem 1.5rem .3rem 0}
code {white-space: nowrap} textarea, input {box-sizing: border-box; width: 100%; font: 14px/1.5 monospace}
@media (prefers-color-scheme: dark) {body {background: #161616; color: #e8e8e8}
pre, textarea, input {background: #262626; color: inherit} a {color: #8ab4f8}}
"""
_SCRIPT = """\
const form = document.querySelector("form"), {token, body} = form.elements;
const answer = document.querySelector("#answer");
form.addEventListener("submit", async event => {
  event.preventDefault();
  answer.textContent = "…";
  const headers = {"Authorization": `Bearer ${token.value}`, "Content-Type": "application/json"};
  try {
    const response = await fetch(form.dataset.path, {method: "POST", headers, body: body.value});
    answer.textContent = JSON.stringify(await response.json(), null, 2);
  } catch (error) {
    answer.textContent = String(error);
  }
});
"""
_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="
)
"""A gray pixel."""
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    f"style-src 'sha256-{_STYLE_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def example_row(model: ModelSpec) -> dict[str, Any]:
    """A row with the columns that the model needs."""
    columns = task_types.class_of(model.task["task"]).columns
    needed = {
        role: name
        for role, name in model.columns.items()
        if not (columns[role].optional and columns[role].may_be_empty)  # the others the model was trained with
    }
    values: dict[str, Any] = {"number": 1.0, "boolean": True, "image": _IMAGE}
    row = {}
    for role, name in needed.items():
        form = columns[role].form
        row[name] = json.loads(EXAMPLES[form]) if form in EXAMPLES else values.get(form, f"some {name}")
    return row


def example_command(model: ModelSpec, address: str, token: str, *, holds_conversations: bool) -> str:
    """A shell command that asks the model. `token`: as a shell reads it."""
    if task_types.class_of(model.task["task"]).reads_images():
        return f'curl {address}/predict -H "Authorization: Bearer {token}" \\\n  -F file=@image.jpg'
    path, body = _example_request(model, holds_conversations=holds_conversations)
    text = body.replace("'", "'\\''")
    return f"curl {address}/{path} -H \"Authorization: Bearer {token}\" \\\n  -d '{text}'"


def _example_request(model: ModelSpec, *, holds_conversations: bool) -> tuple[str, str]:
    """The path of a request to the model, and its body."""
    path, body = "predict", {"rows": [example_row(model)]}
    if holds_conversations:
        path = "v1/chat/completions"
        body = {"model": model.name, "messages": [{"role": "user", "content": "Hello"}]}  # type: ignore[dict-item]
    text = json.dumps(body, ensure_ascii=False)
    # Names of columns may hold codes of terminals.
    return path, text if visible(text) == text else json.dumps(body)


class _Described(FastAPI):
    """An application whose description says which paths need the token. The guard in front of it asks for the token."""

    def openapi(self) -> dict[str, Any]:
        """The description, by OpenAPI."""
        if self.openapi_schema is None:
            said = super().openapi()
            token = {"type": "http", "scheme": "bearer", "description": "finetune serve prints where the token is."}
            said.setdefault("components", {})["securitySchemes"] = {"token": token}
            for path, operations in said["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in OPEN_PATHS else [{"token": []}]
        return super().openapi()


def find_paths(app: FastAPI) -> set[str]:
    """The paths of an application, which have no parameters."""
    return {*OPEN_PATHS, *app.openapi()["paths"]}


def create_app(model: ModelSpec, description: str, *, holds_conversations: bool) -> FastAPI:
    """An application with the page at `/` and `/docs`, and without routes for requests."""
    app = _Described(
        title=model.name,
        description=description,
        docs_url=None,  # FastAPI's page runs a script of another server
        redoc_url=None,
    )

    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def page() -> HTMLResponse:
        command = example_command(model, "http://ADDRESS", "TOKEN", holds_conversations=holds_conversations)
        asked = _example_request(model, holds_conversations=holds_conversations)
        return HTMLResponse(_write(model, command, asked, app.openapi()), headers=_HEADERS)

    @app.get("/page.js", include_in_schema=False)
    async def script() -> Response:
        return Response(_SCRIPT, media_type="text/javascript", headers=_HEADERS)

    return app


def _write(model: ModelSpec, command: str, asked: tuple[str, str], description: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(about.get('description', ''))}</td></tr>"
        for path, methods in description["paths"].items()
        for method, about in methods.items()
    ]
    path, body = map(escape, asked)
    columns = ", ".join(f"<code>{escape(name)}</code>" for name in model.columns.values())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(model.name)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(model.name)}</h1><p>A model for {escape(model.task['task'])}. It reads {columns}.</p>"
        f"<pre>{escape(command)}</pre><h2>Try it</h2><form data-path='{path}'>"
        f"<p>The body of a request to <code>POST /{path}</code>:<textarea name=body rows=4>{body}</textarea>"
        "<p><input name=token type=password placeholder='the token' autocomplete=off required>"
        "<p><button>Ask</button> <code>finetune serve</code> prints where the token is. The page stores it nowhere."
        f"</form><pre id=answer></pre><h2>Paths</h2><table><tr><th>path<th>for{''.join(rows)}</table>"
        "<p>All but this page, /health and <a href=openapi.json>openapi.json</a> need the token.</p>"
        "<script src=page.js></script></html>"
    )

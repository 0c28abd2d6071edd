"""`/docs`: the OpenAPI document as a page on which every route can be tried. FastAPI's own page loads scripts from a CDN; this
one works without a network: its only script is `exec_service/web/docs.js`, which sends a form and shows the answer as text."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc }
h3 { margin: 1.75rem 0 .25rem }
code, pre, textarea, input { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse; width: 100% }
td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0 }
tr + tr { border-top: 1px solid #eee }
a { color: #0645ad }
summary { cursor: pointer; color: #0645ad }
textarea { width: 100%; box-sizing: border-box }
label { display: block; margin: .25rem 0 }
pre { background: #f4f4f4; padding: .5rem; max-height: 24rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere }
pre:empty { display: none }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; color-scheme: dark }
  pre { background: #242424 }
  tr + tr { border-color: #333 }
  a, summary { color: #8ab4f8 }
}
"""


def docs_page(document: dict[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    sections = [tag["name"] for tag in document["tags"]]
    body = [
        f"<h1>{title}</h1>",
        f"<p>{escape(document['info'].get('description', ''))}</p>",
        '<p>For machines: <a href="/openapi.json">openapi.json</a>. For people: <a href="/">the playground</a>.</p>',
        f"<p>{' · '.join(_link(name) for name in [*sections, 'Messages'])}</p>",
        '<label>API key, where one is needed (it stays in this tab): <input id="key" type="password"></label>',
        *(part for section in sections for part in _section(section, document["paths"])),
        '<h2 id="Messages">Messages</h2>',
        *_messages(document["components"]["schemas"]),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'<script src="/web/docs.js" type="module"></script></head><body>{"".join(body)}</body></html>'
    )


def _link(section: str) -> str:
    return f'<a href="#{escape(section.replace(" ", "-"))}">{escape(section)}</a>'


def _section(section: str, paths: dict[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(section.replace(" ", "-"))}">{escape(section)}</h2>'
    for path, verbs in paths.items():
        for verb, operation in verbs.items():
            if operation["tags"] == [section]:
                yield f'<h3 id="{escape(operation["operationId"])}">{verb.upper()} <code>{escape(path)}</code></h3>'
                yield f"<p>{escape(operation.get('summary', ''))}</p>"
                yield _form(verb, path, operation)
                yield f"<details><summary>Parameters and answers</summary>{_table(_route_rows(operation))}</details>"


def _form(verb: str, path: str, operation: dict[str, Any]) -> str:
    """What `docs.js` sends: inputs named by where a parameter is and what it is called, and the body."""
    fields = [
        f'<label>{escape(one["name"])} <input name="{one["in"]} {escape(one["name"])}" '
        f'value="{escape(str(one.get("example", one["schema"].get("default", "") if one["in"] == "header" else "")))}"></label>'
        for one in operation.get("parameters", [])
    ]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        example = content["example"]
        text = example if isinstance(example, str) else json.dumps(example, indent=2)
        rows = min(text.count("\n") + 2, 20)
        fields.append(
            f'<textarea name="body" data-kind="{escape(kind)}" rows="{rows}" spellcheck="false" aria-label="body">'
            f"\n{escape(text)}</textarea>"
        )
    return (
        f'<details><summary>Try it</summary><form data-verb="{verb.upper()}" data-path="{escape(path)}">{"".join(fields)}'
        '<button>Send</button><pre class="curl"></pre><pre class="answer" aria-live="polite"></pre></form></details>'
    )


def _route_rows(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for parameter in operation.get("parameters", []):
        where = {"path": "in the path", "query": "in the query", "header": "header"}[parameter["in"]]
        words = f"{where}: {_type(parameter['schema'])}. {escape(parameter.get('description', ''))}"
        yield f"<code>{escape(parameter['name'])}</code>", words
    if "requestBody" in operation:
        yield "body", _contents(operation["requestBody"])
    for status, response in operation["responses"].items():
        yield escape(status), f"{escape(response.get('description', ''))} {_contents(response)}"


def _contents(holder: dict[str, Any]) -> str:
    return ", ".join(
        f"<code>{escape(kind)}</code> {_type(content.get('schema', {}))}" for kind, content in holder.get("content", {}).items()
    )


def _messages(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        required = schema.get("required", [])
        yield _table(
            (f"<code>{escape(field)}</code>{' (required)' if field in required else ''}", _type(detail))
            for field, detail in schema.get("properties", {}).items()
        )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " ".join(f"<code>{escape(str(one) or repr(one))}</code>" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(" ".join([str(schema.get("type", "")), *_bounds(schema)]))


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    labels = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤", "maxLength": "length ≤", "default": "· default"}
    for key, label in labels.items():
        if key in schema:
            yield f"{label} {schema[key]!r}"


def _table(rows: Iterator[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{left}</td><td>{right}</td></tr>" for left, right in rows) + "</table>"

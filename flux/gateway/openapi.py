"""The document that describes the API, made of the routes, the answers and the problems themselves (design: gateway-answers)."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import flux
from flux.eventlog.streams import StreamDefinition
from flux.gateway.answers import (
    CorrectedEvent,
    ErrorAnswer,
    HealthAnswer,
    OutputAnswer,
    OutputsAnswer,
    PushAnswer,
    QueriesAnswer,
    QueryAnswer,
    RowsAnswer,
    StreamAnswer,
    StreamsAnswer,
    TentativeEvent,
    UndoEvent,
)
from flux.gateway.problems import KINDS
from flux.gateway.routes import (
    ARROW,
    CONTENT,
    METHODS,
    ROWS,
    ROWS_MAX,
    WAIT_MAX_S,
    Action,
    Describe,
    FollowRows,
    ForgetReader,
    Health,
    ListOutputs,
    ListQueries,
    ListStreams,
    PushEvents,
    ReadRows,
    RegisterOutput,
    RegisterQuery,
    RegisterStream,
    RemoveOutput,
    RemoveQuery,
    RemoveStream,
    RestartQuery,
    ResumeOutput,
    ShowOutput,
    ShowQuery,
    ShowStream,
)
from flux.gateway.webhooks.catalogue import WebhookRequest
from flux.registry.definitions import QueryDefinition

#: By action, the class of the answer to each status that is no error; None: the answer has no content.
GOOD: dict[type[Action], dict[int, type[msgspec.Struct] | None]] = {
    Health: {200: HealthAnswer},
    Describe: {200: None},
    ListStreams: {200: StreamsAnswer},
    ShowStream: {200: StreamAnswer},
    RegisterStream: {200: StreamAnswer, 201: StreamAnswer},
    RemoveStream: {204: None},
    PushEvents: {200: PushAnswer},
    ForgetReader: {204: None},
    ListQueries: {200: QueriesAnswer},
    ShowQuery: {200: QueryAnswer},
    RegisterQuery: {200: QueryAnswer, 201: QueryAnswer},
    RemoveQuery: {204: None},
    RestartQuery: {200: QueryAnswer},
    ReadRows: {200: RowsAnswer},
    FollowRows: {200: None},
    ListOutputs: {200: OutputsAnswer},
    ShowOutput: {200: OutputAnswer},
    RegisterOutput: {200: OutputAnswer, 201: OutputAnswer},
    RemoveOutput: {204: None},
    ResumeOutput: {200: OutputAnswer},
}
#: By action, the content of an answer with status 200 besides JSON.
CONTENT_OF_ANSWERS: dict[type[Action], str] = {ReadRows: ARROW, FollowRows: "text/event-stream"}
#: By action, the class of its body.
REGISTRATIONS: dict[type[Action], type[msgspec.Struct]] = {
    RegisterStream: StreamDefinition,
    RegisterOutput: WebhookRequest,
    RegisterQuery: QueryDefinition,
}
_ANY = ("malformed", "wrong_method", "internal", "not_stored", "busy", "too_large", "slow_head", "slow_body")
_OF_TOKENS = ("no_token", "unknown_token", "no_right")
#: Problems of requests that the service of the location carries out.
_OF_CALLS = ("other_gateway", "no_service", "not_changed")
#: By action, the problems that it may have besides those that all have.
PROBLEMS: dict[type[Action], tuple[str, ...]] = {
    Health: (),
    Describe: (),
    ListStreams: _OF_TOKENS,
    ShowStream: (*_OF_TOKENS, "no_such_stream"),
    RegisterStream: (*_OF_TOKENS, "stream_exists", "unfit_definition", "no_room"),
    RemoveStream: (*_OF_TOKENS, "no_such_stream", "has_readers", *_OF_CALLS),
    ForgetReader: (*_OF_TOKENS, "no_such_stream", "no_such_reader", "has_readers"),
    ListQueries: _OF_TOKENS,
    ShowQuery: (*_OF_TOKENS, "no_such_query"),
    RegisterQuery: (
        *_OF_TOKENS,
        "unfit_query",
        "no_such_input",
        "query_exists",
        "no_room",
        *_OF_CALLS,
    ),
    RemoveQuery: (*_OF_TOKENS, "no_such_query", "has_readers", *_OF_CALLS),
    RestartQuery: (*_OF_TOKENS, "no_such_query", "input_failed", "unfit_query", *_OF_CALLS),
    PushEvents: (
        *_OF_TOKENS,
        "no_such_stream",
        "name_reused",
        "unknown_content",
        "other_gateway",
        "unfit_row",
        "log_full",
        "over_quota",
    ),
    ReadRows: (*_OF_TOKENS, "no_such_query", "no_tentative", "cursor_gone", "not_readable"),
    FollowRows: (*_OF_TOKENS, "no_such_query", "no_tentative", "cursor_gone", "not_readable"),
    ListOutputs: _OF_TOKENS,
    ShowOutput: (*_OF_TOKENS, "no_such_output"),
    RegisterOutput: (*_OF_TOKENS, "no_such_query", "cursor_gone", "output_exists", "unfit_definition", "no_room"),
    RemoveOutput: (*_OF_TOKENS, "no_such_output"),
    ResumeOutput: (*_OF_TOKENS, "no_such_output"),
}
_CLASSES = (
    CorrectedEvent, ErrorAnswer, HealthAnswer, OutputAnswer, OutputsAnswer, PushAnswer, QueryAnswer, QueriesAnswer, RowsAnswer,
    StreamAnswer, StreamsAnswer, StreamDefinition, QueryDefinition, TentativeEvent, UndoEvent, WebhookRequest,
)  # fmt: skip
#: The names in paths.
_NAMES = {
    "name": "The name of the stream, the query or the output.", "reader": "The reader, as the stream lists it.",
}  # fmt: skip
_OF_ROWS = {
    "limit": ("query", f"The most rows, from 1 to {ROWS_MAX:,}; {ROWS:,} unless given."),
    "wait": ("query", f"Time to wait for the first row, as in 10s or 500ms; up to {WAIT_MAX_S:g}s, 0s unless given."),
}
_OF_READERS = {
    "after": "A cursor from an answer; oldest (default) or newest.",
    "tentative": "true: with results that may still change. The query needs availability.",
}
_OF_EVENTS = {"Last-Event-ID": ("header", "The id of the last event that came: goes on behind it, in place of after.")}
_HEADERS = {
    "Idempotency-Key": "A repeat under the same key within ten minutes changes nothing.",
    "Flux-Client": "The name of the client that numbers its requests; with Flux-Number, and without a key.",
    "Flux-Number": "Grows from request to request. A repeat of a number, or a lower one, changes nothing, for ever.",
    "Flux-Direct": "true: answer 421 with the owner of the log, in place of passing the request on to that gateway.",
    "Content-Encoding": "gzip or zstd.",
}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document, version 3.1."""
    _, components = msgspec.json.schema_components(_CLASSES, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Flux gateway", "version": flux.__version__},
        "paths": {path: _path(path, methods) for path, methods in METHODS.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _path(path: str, methods: dict[str, type[Action]]) -> dict[str, Any]:
    made: dict[str, Any] = {method.lower(): _operation(action) for method, action in methods.items()}
    names = [_parameter(name, "path", text, required=True) for name, text in _NAMES.items() if f"{{{name}}}" in path]
    if names:
        made["parameters"] = names
    return made


def _parameter(name: str, place: str, text: str, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": place, "description": text, "required": required, "schema": {"type": "string"}}


def _operation(action: type[Action]) -> dict[str, Any]:
    summary = (action.__doc__ or "").strip()
    made: dict[str, Any] = {"operationId": action.__name__, "summary": summary, "responses": _responses(action)}
    if not action.right:
        made["security"] = []
    if action in REGISTRATIONS:
        made["requestBody"] = {"required": True, "content": {"application/json": _schema(REGISTRATIONS[action])}}
    elif action is RemoveStream or action is RemoveQuery:
        made["parameters"] = [_parameter("cascade", "query", "true: with all queries that read it.")]
    elif action is PushEvents:
        made["requestBody"] = {"required": True, "content": {kind: {"schema": {}} for kind in CONTENT}}
        made["parameters"] = [_parameter(name, "header", text) for name, text in _HEADERS.items()]
    elif action in (ReadRows, FollowRows):
        made["parameters"] = [_parameter(name, "query", text) for name, text in _OF_READERS.items()]
        more = _OF_ROWS if action is ReadRows else _OF_EVENTS
        made["parameters"] += [_parameter(name, place, text) for name, (place, text) in more.items()]
    return made


def _responses(action: type[Action]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for status, answer in GOOD[action].items():
        made[str(status)] = {"description": (answer.__doc__ or "").strip() if answer else "Done."}
        if answer is not None:
            made[str(status)]["content"] = {"application/json": _schema(answer)}
    if action in CONTENT_OF_ANSWERS:
        made["200"].setdefault("content", {})[CONTENT_OF_ANSWERS[action]] = {"schema": {}}
    for status in sorted({KINDS[code].status for code in (*_ANY, *PROBLEMS[action])}):
        codes = [code for code in (*_ANY, *PROBLEMS[action]) if KINDS[code].status == status]
        made[str(status)] = {"description": ", ".join(codes), "content": {"application/json": _schema(ErrorAnswer)}}
    return made


def _schema(answer: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{answer.__name__}"}}

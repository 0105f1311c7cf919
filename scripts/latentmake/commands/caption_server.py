"""`latentmake captions RUN --edit`: a server for one person's browser on this machine.

It listens on 127.0.0.1. Its address has a random token, so other users and pages cannot use it. It
writes caption files of the run's items, and nothing else. A request names an item by dataset and
stem; the server looks up the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from pydantic import TypeAdapter, ValidationError, validate_call

from latentmake import backends
from latentmake.base.errors import UserError, first_line
from latentmake.base.machine import counted, usable_cores
from latentmake.commands.caption_editor import ConflictError, Editor
from latentmake.formats.readers import Readers
from latentmake.layouts.layout import CAPTIONS, kind_of
from latentmake.pages.page import page
from latentmake.pages.plan_report import stopped_by
from latentmake.pages.thumbnails import picture
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from latentmake.plan.run_plan import RunPlan

_MOST = 1_000_000  # bytes of a request's body
_SIDES = {"small": 160, "large": 1280}  # longest sides of pictures, in pixels
_VALUES = TypeAdapter(dict[str, Any])
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_Serve = Callable[[], None]


def edit(facts: Facts, run: str, open_page: bool) -> None:
    """Serve the page that edits the captions of a run, until Ctrl-C."""
    with prepared(facts, run) as (address, serve, _):
        typer.echo(f"edit the captions of {run} at {address} (Ctrl-C ends it)")
        if open_page:
            typer.launch(address)
        with contextlib.suppress(KeyboardInterrupt):
            serve()


@contextlib.contextmanager
def prepared(facts: Facts, run: str) -> Iterator[tuple[str, _Serve, _Serve]]:
    """Yield the address of a run's page, a function that serves it, and one that ends that."""
    import uvicorn

    with socket.socket() as listening, contextlib.ExitStack() as ends:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port, token = listening.getsockname()[1], secrets.token_urlsafe(32)
        app = guarded(_application(facts, run, ends), token, port)
        options: dict[str, Any] = {"access_log": False, "log_level": "warning", "lifespan": "off"}
        options |= {"ws": "none", "proxy_headers": False, "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(uvicorn.Config(app, **options))
        serve = partial(server.run, sockets=[listening])
        yield (
            f"http://127.0.0.1:{port}/{token}/",
            serve,
            partial(setattr, server, "should_exit", True),
        )


def guarded(app: ASGIApp, token: str, port: int) -> ASGIApp:
    """Return an application in front of another one, which sees only requests of the page itself.

    The first part of each path is the token, which the other application does not see.
    """
    from starlette.datastructures import Headers
    from starlette.responses import PlainTextResponse

    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    def refused(given: str, headers: Mapping[str, str], method: str) -> int | None:
        host, length = headers.get("host", ""), headers.get("content-length", "0")
        # A name of another site may lead here, and a page of another site may send requests.
        if host not in hosts or headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403
        if given == "favicon.ico":  # browsers ask for it by themselves
            return 204
        if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
            return 403
        if "transfer-encoding" in headers or not length.isdecimal() or int(length) > _MOST:
            return 413
        is_json = headers.get("content-type") == "application/json"
        return 415 if method == "POST" and not is_json else None

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        headers = Headers(scope=scope)
        given, _, rest = scope["path"].removeprefix("/").partition("/")
        if status := refused(given, headers, scope["method"]):
            text = "refused" if status > 400 else ""
            answer: ASGIApp = PlainTextResponse(text, status, {"connection": "close"})
            await answer(scope, receive, send_safely)
        else:
            await app({**scope, "path": f"/{rest}", "root_path": ""}, receive, send_safely)

    return guard


def _application(facts: Facts, run: str, ends: contextlib.ExitStack) -> ASGIApp:
    """Return the application; `ends` will end its threads."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    # One thread has all captions, so two requests never write at the same time. Tokenizers, plans
    # and pictures take longer, and no other request waits for them.
    pools = [ThreadPoolExecutor(count) for count in (1, 1, 1, usable_cores())]
    for pool in pools:
        ends.callback(pool.shutdown, cancel_futures=True)
    captions, tokens, plans, pictures = pools
    readers = ends.enter_context(Readers())

    def plan(version: int) -> None:
        if version == editor.version:  # else a later plan waits already
            line = _work(editor, run)
            editor.work = line if version == editor.version else ""

    def changed() -> None:
        editor.work = ""
        plans.submit(plan, editor.version)

    editor = Editor(facts, run, changed)
    captions.submit(editor.load).result()

    async def show_page(_: Request) -> Response:
        text = page("edit", f"Captions of {run}", {})
        return HTMLResponse(text, headers={"cache-control": "no-store"})

    async def show_picture(request: Request) -> Response:
        query, loop = request.query_params, asyncio.get_running_loop()
        try:
            dataset, side = query.get("dataset", ""), _SIDES[request.path_params["size"]]
            item = editor.caption(dataset, query.get("stem", "")).item
            settings = facts.config.datasets[dataset]
            data = await loop.run_in_executor(pictures, picture, settings, item, readers, side)
        except (UserError, OSError, KeyError, RuntimeError) as error:
            return PlainTextResponse(first_line(error), 404)
        # The address has the time of the picture's last change.
        return Response(data, 200, {"cache-control": "private, max-age=86400"}, "image/webp")

    routes = [Route("/", show_page), Route("/picture/{size}", show_picture)]
    for name in ("load", "state", "save", "back", "replace", "undo", "tokens"):
        methods = ["GET"] if name in ("load", "state") else ["POST"]
        answer = _answer(tokens if name == "tokens" else captions, getattr(editor, name))
        routes.append(Route(f"/{name}", answer, methods=methods))
    return Starlette(routes=routes)


def _work(editor: Editor, run: str) -> str:
    """Return a line about the next build of a run."""
    try:
        facts = editor.facts()
        with facts.memo:
            # Not by `present_plan`, after which no garbage of a long-lived server is collected.
            plan = make_plan(facts, [run], batched=False)
            backends.plan_training(facts, plan.runs[run], train=False)
            plan.leave_out_prompts([] if facts.config.runs[run].trainer else [run])
            return stopped_by(facts, plan.runs[run]) or _words(plan.runs[run])
    except (UserError, OSError) as error:
        return f"The next build stops: {error}"


def _words(plan: RunPlan) -> str:
    counts = Counter[str]()
    for part, state in plan.parts.items():
        counts[kind_of(part.name)] += sum(not target.at_hand for target in state.to_make)
    captions, texts, latents = (counts[kind] for kind in (CAPTIONS, "text", "latents"))
    works = {
        f"makes {counted(captions, 'caption')}": captions,
        # Captions may come out as before.
        f"encodes {'up to ' if captions else ''}{counted(texts, 'text')}": texts,
        f"encodes {latents} latents": latents,
        "trains": plan.training_order,
    }
    words = [word for word, is_due in works.items() if is_due] or ["encodes nothing"]
    *first, last = words
    return f"The next build {' and '.join([', '.join(first), last] if first else [last])}."


def _answer(threads: Executor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an endpoint that calls a function with the values of a request."""
    checked = validate_call(function)

    async def answer(request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            values: dict[str, Any] = dict(request.query_params)
            if request.method == "POST":
                values = _VALUES.validate_json(await request.body())
            loop = asyncio.get_running_loop()
            result, status = await loop.run_in_executor(threads, partial(checked, **values)), 200
        except ConflictError as error:
            result, status = error.values, 409
        except ValidationError as error:
            result, status = {"what": f"no such request: {first_line(error)}"}, 400
        except (UserError, OSError) as error:
            result, status = {"what": str(error)}, 422
        return JSONResponse(result, status, {"cache-control": "no-store"})

    return answer

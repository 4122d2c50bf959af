"""The routes of the page: json, pictures, uploads and static files, all behind the guard."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from uniquery.errors import UserError
from uniquery.explore.equivariance_view import Choice, compare_views, view_picture
from uniquery.explore.exploration import Exploration
from uniquery.explore.gallery import Gallery
from uniquery.explore.pictures import LONGEST, Size, jpeg_bytes
from uniquery.explore.query_view import QueryView
from uniquery.explore.security import Guard, refusal
from uniquery.explore.training_view import training_state
from uniquery.explore.uploads import MAX_BYTES, Uploads

STATIC = Path(__file__).parent / "static"
CACHED = {"Cache-Control": "private, max-age=3600"}  # the address holds the token, which is new after every start


class Page:
    """One method for each address.

    Args:
        exploration: the data and the runs.
    """

    def __init__(self, exploration: Exploration) -> None:
        self.exploration, self.gallery, self.uploads = exploration, Gallery(exploration), Uploads()
        self._query_views = [QueryView(maps) for maps in exploration.maps]

    def start(self, _: Request) -> Response:
        return JSONResponse(self.gallery.start())

    def state(self, _: Request) -> Response:
        return JSONResponse(self.gallery.state())

    def analysis(self, request: Request) -> Response:
        return JSONResponse(self.gallery.analysis(request.path_params["run"]))

    def training(self, request: Request) -> Response:
        return JSONResponse(training_state(self.exploration.run(request.path_params["run"])))

    def masks(self, request: Request) -> Response:
        names = request.query_params.get("images", "").split(",")
        return JSONResponse(self.gallery.masks([_number(name, int, "images") for name in names if name]))

    def picture(self, request: Request) -> Response:
        index = self.exploration.index(request.path_params["image"])
        size: Size = "thumbnail" if request.query_params.get("size") == "thumbnail" else "picture"
        return Response(self.exploration.pictures.get(index, size), media_type="image/jpeg", headers=CACHED)

    def predictions_at(self, request: Request) -> Response:
        run, mask = _query(request, "run", int), _mask_threshold(request)
        if mask is None:
            raise UserError("The address lacks mask.")
        content = self.gallery.predictions_at(run, request.path_params["image"], mask)
        return Response(content, media_type="application/json")

    def query(self, request: Request) -> Response:
        run, image_id = _query(request, "run", int), _query(request, "image", int)
        self.exploration.run(run)
        source, position = request.query_params.get("source", "truth"), _query(request, "instance", int)
        clicked, index = self.gallery.instance(image_id, source, position), self.exploration.index(image_id)
        view = self._query_views[run]
        return JSONResponse(view.of_truth(index, position) if source == "truth" else view.of_mask(index, clicked))

    def prepare(self, request: Request) -> Response:
        """What the query view needs of an image: asked for while the user looks at it."""
        run, index = _query(request, "run", int), self.exploration.index(_query(request, "image", int))
        self.exploration.run(run)
        self._query_views[run].prepare(index)
        return JSONResponse({})

    def equivariance(self, request: Request) -> Response:
        run, index, choice = self._view(request)
        return JSONResponse(compare_views(run, self.exploration.data, index, choice))

    def view(self, request: Request) -> Response:
        run, index, choice = self._view(request)
        image = view_picture(run, self.exploration.data, index, choice)
        return Response(jpeg_bytes(image, LONGEST["picture"]), media_type="image/jpeg")

    def _view(self, request: Request) -> tuple[Any, int, Choice]:
        run = self.exploration.run(_query(request, "run", int))
        index = self.exploration.index(_query(request, "image", int))
        numbers = {name: _query(request, name, float, default) for name, default in _CHOICE.items()}
        return run, index, Choice(request.query_params.get("flip") == "1", **numbers)

    async def upload(self, request: Request) -> Response:
        run = self.exploration.run(_query(request, "run", int))
        content = await _limited_body(request)
        return JSONResponse(await run_in_threadpool(self.uploads.add, run, content))

    def upload_predictions(self, request: Request) -> Response:
        mask = _mask_threshold(request)
        return JSONResponse(self.uploads.get(request.path_params["upload"]).predictions_at(mask))

    def upload_file(self, request: Request) -> Response:
        upload, name = self.uploads.get(request.path_params["upload"]), request.path_params["name"]
        mask = _mask_threshold(request)
        content, media_type = upload.file(name, _query(request, "score", float, 0.5), mask)
        disposition = f'attachment; filename="{name}"'
        return Response(content, media_type=media_type, headers={"Content-Disposition": disposition})


_CHOICE = {"crop": 1.0, "angle": 0.0, "scale": 1.0}


def _number(text: str, kind: type[Any], name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{name}: {text[:40]!r} is not a number.") from None


def _query(request: Request, name: str, kind: type[Any], default: Any = None) -> Any:
    text = request.query_params.get(name)
    if text is None:
        if default is None:
            raise UserError(f"The address lacks {name}.")
        return default
    return _number(text, kind, name)


def _mask_threshold(request: Request) -> float | None:
    """None: the model's own."""
    text = request.query_params.get("mask")
    if text is None:
        return None
    value: float = _number(text, float, "mask")
    if not 0 <= value <= 1:
        raise UserError(f"mask is a probability from 0 to 1, not {value:g}.")
    return value


async def _limited_body(request: Request) -> bytes:
    """The body of a request; reading ends as soon as it is too long, whatever its header says."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BYTES:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _TOO_LARGE)
        parts.append(part)
    return b"".join(parts)


_TOO_LARGE = f"A picture may have at most {MAX_BYTES // 2**20} MB."


def _answer_error(_: Request, error: Exception) -> Response:
    """Every error is one sentence on the page."""
    if isinstance(error, HTTPException):
        return refusal(HTTPStatus(error.status_code), error.detail)
    if isinstance(error, UserError):
        return refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
    if isinstance(error, OSError):
        return refusal(HTTPStatus.NOT_FOUND, f"{error.filename}: {(error.strerror or 'cannot be read').lower()}.")
    traceback.print_exception(error)
    return refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR, f"The server met an error: {type(error).__name__}, see its terminal."
    )


def build_app(exploration: Exploration, token: str) -> Guard:
    """The page as an ASGI application, at addresses that begin with the token."""
    page = Page(exploration)
    api: dict[str, Callable[[Request], Response | Awaitable[Response]]] = {
        "/api/start": page.start,
        "/api/state": page.state,
        "/api/runs/{run:int}/analysis": page.analysis,
        "/api/runs/{run:int}/training": page.training,
        "/api/masks": page.masks,
        "/api/images/{image:int}": page.picture,
        "/api/images/{image:int}/predictions": page.predictions_at,
        "/api/query": page.query,
        "/api/prepare": page.prepare,
        "/api/equivariance": page.equivariance,
        "/api/view": page.view,
        "/api/uploads": page.upload,
        "/api/uploads/{upload:int}/predictions": page.upload_predictions,
        "/api/uploads/{upload:int}/{name}": page.upload_file,
    }
    methods = {"/api/uploads": ["POST"]}
    routes = [Route(path, partial(_caught, handler), methods=methods.get(path)) for path, handler in api.items()]
    app = Starlette(
        routes=[
            *routes,
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        exception_handlers={HTTPException: _answer_error},
    )

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        with exploration.request():
            await app(scope, receive, send)

    return Guard(app=counted, token=token)


async def _caught(handler: Callable[[Request], Response | Awaitable[Response]], request: Request) -> Response:
    """Runs a handler, in a thread if it is no coroutine; an error of any kind becomes a sentence."""
    try:
        answer = handler(request) if iscoroutinefunction(handler) else await run_in_threadpool(handler, request)
        return await answer if isinstance(answer, Awaitable) else answer
    except Exception as error:
        return _answer_error(request, error)

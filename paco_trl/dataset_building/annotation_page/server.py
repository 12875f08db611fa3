# SPDX-License-Identifier: Apache-2.0
"""The web server of the annotation page."""

import io
import json
import logging
import socket
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...utils.addresses import is_loopback
from .work import AnnotationWork, RefusedError


if TYPE_CHECKING:
    from datasets import Dataset
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# A ranking has some hundred bytes
_MAX_BODY = 64 * 1024
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NEEDS = 'The annotation page needs `starlette` and `uvicorn`: pip install "paco_trl[annotate]".'


def make_app(
    instances: "Dataset",
    panels: "Dataset",
    prompts: "Dataset | None",
    annotations_folder: str | Path,
    annotations_per_instance: int = 3,
    gold: str | Path | None = None,
    not_people: Collection[str] = (),
    hosts: Sequence[str] = _LOOPBACK,
) -> "Starlette":
    """
    Make the web application of the annotation page, see [`serve_annotation`].

    One process at a time may serve a folder: what it has read of the annotations, it keeps in memory.

    Args:
        instances ([`~datasets.Dataset`]):
            The ranking instances: `id`, `prompt_id`, `reference` (id of a panel) and `candidates` (2 to 12 such ids).
        panels ([`~datasets.Dataset`]):
            The panels: `id`, `sha256` and `image`.
        prompts ([`~datasets.Dataset`] or `None`):
            The prompts: `id`, `prompt` and, where known, `theme` and `dimensions`. With `None`, the images are shown
            without a theme.
        annotations_folder (`str` or `Path`):
            Folder of the annotations, a file `<annotator>.jsonl` each. Those that are there already count.
        annotations_per_instance (`int`, *optional*, defaults to `3`):
            Number of people who rank each instance.
        gold (`str` or `Path`, *optional*):
            Annotations of an expert, outside of `annotations_folder`. The instances ranked in it are gold questions:
            one in ten of what a person sees, each at most once a person.
        not_people (`Collection[str]`, *optional*, defaults to `()`):
            Annotators with a file in the folder that are no people, such as a judge: their rankings do not count
            towards `annotations_per_instance`, and no person can take their names.
        hosts (`Sequence[str]`, *optional*, defaults to `("127.0.0.1", "localhost", "[::1]")`):
            Names by which the page may be called. A request for another name is refused: it is from a foreign page
            whose name was made to point here.

    Returns:
        `starlette.applications.Starlette`: the application.

    Raises:
        ImportError: If `starlette` is not installed.
        FileNotFoundError: If there is no file `gold`.
        ValueError: If the datasets do not fit to one another, an instance has too many candidates, or a file of
            annotations is broken.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import HTMLResponse, JSONResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    from jinja2 import Environment

    work = AnnotationWork(
        instances, panels, prompts, Path(annotations_folder), annotations_per_instance, gold, not_people
    )
    page = Environment(autoescape=True).from_string(_text("page.html"))

    def show_page(request: "Request") -> Response:
        name, error = request.query_params.get("annotator"), None
        if name is not None:
            try:
                work.check_name(name)
            except RefusedError as refused:
                error = str(refused)
        html = page.render(annotator=None if error else name, name=name, error=error)
        return HTMLResponse(html, 400 if error else 200, {"Cache-Control": "no-store"})

    def show_task(request: "Request") -> Response:
        task = work.task(request.query_params.get("annotator"), request.query_params.get("instance"))
        return JSONResponse(task, headers={"Cache-Control": "no-store"})

    async def take_annotation(request: "Request") -> Response:
        sent = await _read_json(request)
        # The disk may be slow; the others go on meanwhile
        annotator = await run_in_threadpool(work.save, sent)
        return JSONResponse(await run_in_threadpool(work.task, annotator), headers={"Cache-Control": "no-store"})

    def show_image(request: "Request") -> Response:
        return _image_response(work, request.path_params["sha256"])

    def show_file(name: str, media_type: str) -> Route:
        text = _text(name)
        headers = {"Cache-Control": "no-cache"}
        return Route(f"/{name}", lambda request: Response(text, media_type=media_type, headers=headers))

    def refuse(request: "Request", error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    def explain(request: "Request", error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    def not_saved(request: "Request", error: Exception) -> Response:
        logger.error(f"{annotations_folder}: {error}")
        return JSONResponse({"error": f"Reading or writing failed on the server: {error.strerror}."}, 500)

    async def add_headers(request: "Request", call_next: Any) -> Response:
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    return Starlette(
        routes=[
            Route("/", show_page),
            show_file("page.js", "text/javascript"),
            show_file("page.css", "text/css"),
            Route("/favicon.ico", lambda request: Response(status_code=204)),
            Route("/task", show_task),
            Route("/annotation", take_annotation, methods=["POST"]),
            Route("/image/{sha256}", show_image),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=add_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        ],
        exception_handlers={RefusedError: refuse, HTTPException: explain, OSError: not_saved},
    )


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


async def _read_json(request: "Request") -> Any:
    """Read what the page sent, if it is the page: a form or a script of another site is not."""
    from starlette.exceptions import HTTPException

    origin = request.headers.get("origin")
    if origin is None or origin.partition("://")[2] != request.headers["host"]:
        raise HTTPException(403, f"The origin is {origin!r}: only the page itself may save rankings.")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, f"The content type is {media_type!r}, but must be 'application/json'.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise HTTPException(413, f"The ranking has more than {_MAX_BODY} bytes.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"What was sent is not valid JSON ({error}). Reload the page.") from error


def _image_response(work: AnnotationWork, sha256: str) -> "Response":
    from PIL import Image
    from starlette.exceptions import HTTPException
    from starlette.responses import FileResponse, Response

    try:
        image = work.image(sha256)
    except KeyError as error:
        raise HTTPException(404, "There is no such image. Reload the page.") from error
    # Its address is made of its pixels: what is behind it never changes
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    try:
        with Image.open(image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])) as opened:
            media_type = Image.MIME[opened.format]
    except (OSError, KeyError) as error:
        logger.error(f"The image {image['path']} of a panel cannot be read: {error}")
        raise HTTPException(404, "This image cannot be read on the server; its output says why.") from error
    if image["bytes"] is None:
        return FileResponse(image["path"], media_type=media_type, headers=headers)
    return Response(image["bytes"], media_type=media_type, headers=headers)


def serve_annotation(
    instances: "Dataset",
    panels: "Dataset",
    prompts: "Dataset | None",
    annotations_folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 8090,
    annotations_per_instance: int = 3,
    gold: str | Path | None = None,
    not_people: Collection[str] = (),
) -> None:
    """
    Serve a web page on which people rank the candidates of ranking instances, until it is stopped (Ctrl+C).

    Each ranking is on the disk before the next instance is shown; stopping the server or closing the browser at any
    moment loses none. A person needs only a name, which is that of the file too. Everyone who reaches the page may take
    any name, so that it listens to this machine alone unless another `host` is given.

    Args:
        instances ([`~datasets.Dataset`]):
            The ranking instances: `id`, `prompt_id`, `reference` (id of a panel) and `candidates` (2 to 12 such ids).
        panels ([`~datasets.Dataset`]):
            The panels: `id`, `sha256` and `image`.
        prompts ([`~datasets.Dataset`] or `None`):
            The prompts: `id`, `prompt` and, where known, `theme` and `dimensions`. With `None`, the images are shown
            without a theme.
        annotations_folder (`str` or `Path`):
            Folder of the annotations, a file `<annotator>.jsonl` each. Those that are there already count.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address or name of this machine to listen to, by which the page is then called.
        port (`int`, *optional*, defaults to `8090`):
            Port; 0 is a free one.
        annotations_per_instance (`int`, *optional*, defaults to `3`):
            Number of people who rank each instance.
        gold (`str` or `Path`, *optional*):
            Annotations of an expert, outside of `annotations_folder`. The instances ranked in it are gold questions:
            one in ten of what a person sees, each at most once a person.
        not_people (`Collection[str]`, *optional*, defaults to `()`):
            Annotators with a file in the folder that are no people, such as a judge: their rankings do not count
            towards `annotations_per_instance`, and no person can take their names.

    Raises:
        ImportError: If `starlette` or `uvicorn` is not installed.
        FileNotFoundError: If there is no file `gold`.
        OSError: If the port is in use, or `host` is not an address of this machine.
        ValueError: If `host` stands for all addresses, the datasets do not fit to one another, an instance has too many
            candidates, or a file of annotations is broken.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(_NEEDS) from error

    if host in ("", "0.0.0.0", "::"):
        raise ValueError(
            f"`host` is {host!r}, which stands for all addresses, so that requests under a foreign name could not be "
            "told apart. Give the address or the name by which the annotators reach this machine."
        )
    name = f"[{host}]" if ":" in host else host
    hosts = list(dict.fromkeys([name.lower(), *_LOOPBACK]))
    app = make_app(
        instances, panels, prompts, annotations_folder, annotations_per_instance, gold, not_people, hosts=hosts
    )
    listener = _listen(host, port)
    # Before the configuration, which sets up uvicorn's own messages
    config = uvicorn.Config(app, access_log=False, proxy_headers=False, server_header=False, ws="none")
    messages = logging.getLogger("uvicorn.error")
    messages.info(f"Annotation page: http://{name}:{listener.getsockname()[1]} (Ctrl+C to stop)")
    if not is_loopback(host):
        messages.warning(
            f"Everyone in the network who reaches {host} can rank under any name: the page has no password."
        )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        # The way to stop it; uvicorn raises it once it has shut down
        pass
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise OSError(
            error.errno,
            f"The annotation page cannot listen to port {port} of {host!r} ({error.strerror}). If another program, or "
            "an annotation page that still runs, has the port, stop it or give another `port`; `host` must be an "
            "address of this machine",
        ) from error

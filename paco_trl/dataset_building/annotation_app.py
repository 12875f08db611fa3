# SPDX-License-Identifier: Apache-2.0
"""Serve a Gradio app in which people rank the candidates of ranking instances."""

import html
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..utils.addresses import is_loopback
from ..utils.files import read_template, take_lock
from .annotation_work import AnnotationWork


if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.requests import Request
    from starlette.responses import Response


logger = logging.getLogger(__name__)

_LOOK_FOR = {
    "identity": "the same person, animal or thing",
    "style": "the same look: technique, colors, light",
    "logic": "what is shown fits together",
}
_INTRODUCTION = """# Which image is most consistent with the reference?
You see one reference and several candidates. Rank the candidates: first the one that is most consistent with the
reference, last the one that is least. Use the same name each time to resume where you stopped."""
# Nothing is fetched from or sent to another server. Gradio's templates need `eval`
_CONTENT_SECURITY_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'self'"
)

(_, _BOARD), (_, _STYLE), (_, _PAGE_STYLE), (_, _SCRIPT) = re.findall(
    r"<(template|style|script)>(.*?)</\1>", read_template("annotation_app.html"), re.DOTALL
)


@contextmanager
def _shown_errors() -> Iterator[None]:
    import gradio as gr

    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            logger.error(f"Saving a ranking failed: {error}")
            message = f"The ranking was not saved: {error.strerror}."
        # Gradio shows it as HTML
        raise gr.Error(html.escape(message), duration=4, print_exception=False) from error


def make_app(work: AnnotationWork) -> "Blocks":
    """Build the app: a name first, then one instance after the other."""
    import gradio as gr

    def show(annotator: str, instance: str | None = None, saved: str | None = None) -> list[Any]:
        task = work.task(annotator, instance) | {"shown_at": time.time(), "saved": saved}
        is_task = task["instance"] is not None
        if is_task:
            count = len(task["images"])
            task["columns"] = 2 if count <= 4 else 3 if count <= 9 else 4
            task["theme"] = html.escape(task["theme"])
            task["dimensions"] = [
                f"<b>{html.escape(name)}</b>" + (f": {_LOOK_FOR[name]}" if name in _LOOK_FOR else "")
                for name in task["dimensions"]
            ]
        buttons = [gr.Button(visible=is_task), gr.Button(interactive=task["previous"] is not None)]
        return [gr.Column(visible=False), gr.Column(visible=True), task, *buttons, gr.Button(visible=is_task)]

    def open_(name: str, request: gr.Request) -> list[Any]:
        annotator = name or request.query_params.get("annotator")
        if not annotator:
            return [gr.skip()] * 6
        with _shown_errors():
            return show(annotator, None if name else request.query_params.get("instance"))

    def save(task: dict[str, Any]) -> list[Any]:
        with _shown_errors():
            work.save(task["annotator"], task["instance"], task["order"], time.time() - task["shown_at"])
            return show(task["annotator"], saved=task["instance"])

    def back(task: dict[str, Any]) -> list[Any]:
        with _shown_errors():
            return show(task["annotator"], task["previous"])

    with gr.Blocks(title="Rank images by consistency", analytics_enabled=False, fill_width=True) as app:
        with gr.Column() as start:
            gr.Markdown(_INTRODUCTION)
            name = gr.Textbox(
                label="Your name", info="Letters a to z, digits, and . _ -", max_lines=1, max_length=40, autofocus=True
            )
            start_button = gr.Button("Start", variant="primary")
        with gr.Column(visible=False) as page:
            board = gr.HTML({}, html_template=_BOARD, css_template=_STYLE, js_on_load=_SCRIPT, apply_default_css=False)
            with gr.Row(elem_id="buttons"):
                save_button = gr.Button("Save", variant="primary", elem_id="save")
                back_button = gr.Button("Back", elem_id="back")
                skip_button = gr.Button("Skip", elem_id="skip")
        outputs = [start, page, board, save_button, back_button, skip_button]
        options: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        app.load(open_, name, outputs, **options)
        gr.on([name.submit, start_button.click], open_, name, outputs, **options)
        save_button.click(save, board, outputs, **options)
        skip_button.click(lambda task: save(task | {"order": None}), board, outputs, **options)
        back_button.click(back, board, outputs, **options)
    return app


async def _same_origin_only(request: "Request", call_next: Any) -> "Response":
    """Refuse requests from pages of another origin, and allow no content from elsewhere."""
    from starlette.responses import PlainTextResponse

    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
        return PlainTextResponse(f"The origin is {origin!r}: only the page itself may send rankings.", 403)
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    return response


def serve_annotation(
    work: AnnotationWork, host: str = "127.0.0.1", port: int = 8090, prevent_thread_lock: bool = False
) -> "Blocks":
    """Serve the app until it is stopped (Ctrl+C); a second process that would write into the directory is refused."""
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise ImportError('The annotation app needs `gradio`: pip install "paco_trl[apps]".') from error
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"`host` is {host!r}, all addresses. Give the one by which annotators reach this machine.")

    def image(request: "Request") -> Response:
        path = work.image_files.get(request.path_params["sha256"])
        if path is None or not Path(path).is_file():
            return Response(status_code=404)
        # Its address is made of its pixels: what is behind it never changes
        return FileResponse(path, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    if not is_loopback(host):
        logger.warning(f"Everyone who reaches {host} can rank under any name: the app has no password.")
    if problem := take_lock(work.file_lock, "annotations", work.folder):
        raise ValueError(problem)
    try:
        app = make_app(work)
        app.launch(
            server_name=host,
            server_port=port,
            share=False,
            inline=False,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            max_file_size=1,  # nothing is uploaded
            css=_PAGE_STYLE,
            prevent_thread_lock=prevent_thread_lock,
            app_kwargs={
                "routes": [Route("/image/{sha256}", image)],
                "middleware": [
                    # A name of another site that was made to point here
                    Middleware(TrustedHostMiddleware, allowed_hosts=[host.lower(), "127.0.0.1", "localhost"]),
                    Middleware(BaseHTTPMiddleware, dispatch=_same_origin_only),
                ],
            },
        )
    finally:
        if not prevent_thread_lock:
            work.file_lock.release()
    return app

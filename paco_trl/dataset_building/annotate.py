# SPDX-License-Identifier: Apache-2.0
"""Stage 4, by people: a Gradio app to rank the candidates of ranking instances."""

import html
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from datasets import Dataset
from filelock import FileLock

from ..data.columns import column_by_id
from ..data.rankings import theme_of
from ..utils.addresses import is_loopback
from ..utils.files import read_app_template
from ..utils.locks import take_lock
from ..utils.text import shorten
from .annotations import (
    AUTOMATIC,
    append_annotation,
    check_annotator,
    checked_annotations,
    keyed_hash,
    ranks_of_ranking,
)
from .prompt_writing import DIMENSIONS


if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.requests import Request
    from starlette.responses import Response


logger = logging.getLogger(__name__)

_INTRODUCTION = """# Which image is most consistent with the reference?
You see one reference and several candidates. Rank the candidates: first the one that is most consistent with the
reference, last the one that is least. Use the same name each time to resume where you stopped."""
# Blocks requests to other servers. Gradio's templates need `eval`
_CONTENT_SECURITY_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'self'"
)

_APP = read_app_template("annotation_app.html")


def display_order(annotator: str, instance: str, count: int) -> list[int]:
    """Return the order in which to display the candidates of an instance."""
    # By a hash, so that it is stable across restarts and tabs, but differs between annotators
    return sorted(range(count), key=lambda index: keyed_hash("candidate", annotator, instance, index))


def next_instance(
    annotator: str, names: Collection[str], finished: Collection[str], counts: Mapping[str, int], num_required: int
) -> str | None:
    """Select the next instance for an annotator: one with the fewest rankings, in the annotator's random order."""
    candidates = [name for name in names if name not in finished and counts.get(name, 0) < num_required]
    return min(
        candidates, key=lambda name: (counts.get(name, 0), keyed_hash("instance", annotator, name)), default=None
    )


class AnnotationWork:
    """Instances, and the rankings of all annotators on disk and in memory. Rankings of judges do not count."""

    def __init__(
        self,
        instances: Dataset,
        panels: Dataset,
        prompts: Dataset,
        folder: Path,
        annotations_per_instance: int = 3,
    ):
        if annotations_per_instance < 1:
            raise ValueError(f"`annotations_per_instance` is {annotations_per_instance}, but must be at least 1.")
        self.folder, self.annotations_per_instance = folder, annotations_per_instance
        self._lock = threading.Lock()
        # Only one process may serve the directory: another process would not see the rankings that this one saves
        self.file_lock = FileLock(folder.absolute().with_name(f".{folder.name}.lock"))
        self._rows = {row["id"]: row for row in instances.with_format(None)}
        self._prompts = {row["id"]: row for row in prompts.with_format(None)}
        self._sha256_by_panel = column_by_id(panels, "sha256")
        # Images are addressed by the digest of their pixels, which browsers can cache, and which hides the seed
        self.image_files = {
            self._sha256_by_panel[name]: image["path"] for name, image in column_by_id(panels, "image").items()
        }
        # By annotator and instance, in the order of first ranking, for the button `Back`
        self._rankings: dict[str, dict[str, tuple[int, ...] | None]] = {}
        self._automatic_annotators = {AUTOMATIC}
        num_stale = 0
        for annotation in checked_annotations(sorted(self.folder.glob("*.jsonl")), instances):
            if annotation.has_scores:
                self._automatic_annotators.add(annotation.annotator)
            if annotation.stale:
                num_stale += 1
            else:
                self._rankings.setdefault(annotation.annotator, {})[annotation.instance] = annotation.ranks
        if num_stale:
            logger.warning(f"{num_stale} rankings are of images that have changed since: their instances come again.")

    def _check_name(self, annotator: Any) -> str:
        if check_annotator(annotator) in self._automatic_annotators:
            raise ValueError(f"The name {annotator!r} belongs to an automatic ranking. Choose another one.")
        return annotator

    def task(self, annotator: Any, instance: Any = None) -> dict[str, Any]:
        """Return the content of the page for an annotator: the instance, or the next one if it does not exist."""
        annotator = self._check_name(annotator)
        with self._lock:
            own_rankings = dict(self._rankings.get(annotator, {}))
            counts = Counter(
                name
                for other_annotator, rankings in self._rankings.items()
                for name, ranks in rankings.items()
                if other_annotator not in self._automatic_annotators and ranks is not None
            )
        num_required = self.annotations_per_instance
        if instance not in self._rows:
            instance = next_instance(annotator, self._rows, own_rankings, counts, num_required)
        history = list(own_rankings)
        history = history[: history.index(instance)] if instance in own_rankings else history
        num_ranked = sum(ranks is not None for ranks in own_rankings.values())
        progress = sum(min(count, num_required) for count in counts.values()) / (num_required * len(self._rows))
        task = {
            "annotator": annotator,
            "instance": instance,
            "previous": history[-1] if history else None,
            "ranked": num_ranked,
            "skipped": len(own_rankings) - num_ranked,
            "percent": int(100 * progress),
        }
        if instance is None:
            return task
        row = self._rows[instance]
        ranks = own_rankings.get(instance)
        prompt = self._prompts[row["prompt_id"]]
        order = display_order(annotator, instance, len(row["candidates"]))
        return task | {
            "theme": theme_of(prompt),
            "dimensions": prompt.get("dimensions") or list(DIMENSIONS),
            "reference": f"/image/{self._sha256_by_panel[row['reference']]}",
            "images": [f"/image/{self._sha256_by_panel[row['candidates'][index]]}" for index in order],
            # Positions of the displayed images, best first
            "order": [] if ranks is None else sorted(range(len(order)), key=lambda position: ranks[order[position]]),
            "was_skipped": instance in own_rankings and ranks is None,
        }

    def save(self, annotator: Any, instance: Any, order: Any) -> None:
        """Check and save an order of the displayed images, or `None` to skip the instance."""
        annotator = self._check_name(annotator)
        if instance not in self._rows:
            raise ValueError(f"There is no instance {shorten(instance)}. Reload the page.")
        count = len(self._rows[instance]["candidates"])
        record = {"annotator": annotator, "instance": instance, "digest": self._rows[instance]["digest"]}
        if order is None:
            ranks, record["skipped"] = None, True
        else:
            if len(order) != count:
                raise ValueError(f"Rank all candidates: {count - len(order)} of {count} are left.")
            ranks_of_ranking(order)  # raises for an invalid order
            record["ranking"] = [display_order(annotator, instance, count)[position] for position in order]
            ranks = ranks_of_ranking(record["ranking"])
        with self._lock:
            append_annotation(self.folder, record)
            self._rankings.setdefault(annotator, {})[instance] = ranks


@contextmanager
def _display_errors() -> Iterator[None]:
    import gradio as gr

    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            logger.error(f"Saving a ranking failed: {error}")
            message = f"The ranking was not saved: {error.strerror}."
        # Gradio displays it as HTML
        raise gr.Error(html.escape(message), duration=4, print_exception=False) from error


def make_app(work: AnnotationWork) -> "Blocks":
    """Build the app, which asks for a name, and then shows one instance at a time."""
    import gradio as gr

    @_display_errors()
    def show(annotator: str, instance: str | None = None, saved_instance: str | None = None) -> list[Any]:
        task = work.task(annotator, instance) | {"saved": saved_instance}
        is_task = task["instance"] is not None
        if is_task:
            count = len(task["images"])
            task["columns"] = 2 if count <= 4 else 3 if count <= 9 else 4
            task["theme"] = html.escape(task["theme"])
            names = task["dimensions"]
            task["dimensions"] = [f"<b>{html.escape(name)}</b>: {DIMENSIONS.get(name, '')}" for name in names]
        buttons = [gr.Button(visible=is_task), gr.Button(interactive=task["previous"] is not None)]
        return [gr.Column(visible=False), gr.Column(visible=True), task, *buttons, gr.Button(visible=is_task)]

    def open_(name: str, request: gr.Request) -> list[Any]:
        annotator = name or request.query_params.get("annotator")
        if not annotator:
            return [gr.skip()] * 6
        return show(annotator, None if name else request.query_params.get("instance"))

    @_display_errors()
    def save(task: dict[str, Any]) -> list[Any]:
        work.save(task["annotator"], task["instance"], task["order"])
        return show(task["annotator"], saved_instance=task["instance"])

    with gr.Blocks(title="Rank images by consistency", analytics_enabled=False, fill_width=True) as app:
        with gr.Column() as start:
            gr.Markdown(_INTRODUCTION)
            name = gr.Textbox(
                label="Your name", info="Letters a to z, digits, and . _ -", max_lines=1, max_length=40, autofocus=True
            )
            start_button = gr.Button("Start", variant="primary")
        with gr.Column(visible=False) as page:
            board = gr.HTML(
                {}, html_template=_APP.board, css_template=_APP.style, js_on_load=_APP.script, apply_default_css=False
            )
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
        back_button.click(lambda task: show(task["annotator"], task["previous"]), board, outputs, **options)
    return app


async def _same_origin_only(request: "Request", call_next: Any) -> "Response":
    """Reject requests from pages of other origins, and block content from elsewhere."""
    from starlette.responses import PlainTextResponse

    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
        return PlainTextResponse(f"The origin is {origin!r}, but only the page itself may send rankings.", 403)
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    return response


def serve_annotation(
    work: AnnotationWork, host: str = "127.0.0.1", port: int = 8090, prevent_thread_lock: bool = False
) -> "Blocks":
    """Serve the app until it is stopped (Ctrl+C)."""
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
        raise ValueError(
            f"`host` is {host!r}, which means all addresses. Pass the one by which annotators reach this machine."
        )

    def image(request: "Request") -> Response:
        path = work.image_files.get(request.path_params["sha256"])
        if path is None or not Path(path).is_file():
            return Response(status_code=404)
        # Immutable, since its address is a digest of its pixels
        return FileResponse(path, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    if not is_loopback(host):
        logger.warning(f"Everyone who reaches {host} can rank under any name, since the app has no password.")
    take_lock(work.file_lock, "annotations", work.folder)
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
            css=_APP.page_style,
            prevent_thread_lock=prevent_thread_lock,
            app_kwargs={
                "routes": [Route("/image/{sha256}", image)],
                "middleware": [
                    # Refuses the name of another site that was made to point here
                    Middleware(TrustedHostMiddleware, allowed_hosts=[host.lower(), "127.0.0.1", "localhost"]),
                    Middleware(BaseHTTPMiddleware, dispatch=_same_origin_only),
                ],
            },
        )
    finally:
        if not prevent_thread_lock:
            work.file_lock.release()
    return app

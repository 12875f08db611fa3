# SPDX-License-Identifier: Apache-2.0
"""Stage 4, by people: a Gradio app in which they rank the candidates of ranking instances."""

import html
import logging
import re
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
from ..utils.files import read_template
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
from .prompts import DIMENSIONS


if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.requests import Request
    from starlette.responses import Response


logger = logging.getLogger(__name__)

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


def shown_order(annotator: str, instance: str, count: int) -> list[int]:
    """Return the order in which the candidates of an instance are shown."""
    # By a hash: the same after a restart and in every tab, and different between annotators
    return sorted(range(count), key=lambda index: keyed_hash("candidate", annotator, instance, index))


def next_instance(
    annotator: str, names: Collection[str], done: Collection[str], counts: Mapping[str, int], needed: int
) -> str | None:
    """Choose what an annotator ranks next: what has the fewest rankings, in an order of their own."""
    left = [name for name in names if name not in done and counts.get(name, 0) < needed]
    return min(left, key=lambda name: (counts.get(name, 0), keyed_hash("instance", annotator, name)), default=None)


class AnnotationWork:
    """Instances and rankings of all annotators, on disk and in memory; rankings of judges do not count."""

    def __init__(
        self,
        instances: Dataset,
        panels: Dataset,
        prompts: Dataset,
        folder: Path,
        annotations_per_instance: int = 3,
    ):
        if annotations_per_instance < 1:
            raise ValueError(f"`annotations_per_instance` is {annotations_per_instance}. It must be at least 1.")
        self.folder, self.annotations_per_instance = folder, annotations_per_instance
        self._lock = threading.Lock()
        # Of the process that serves the directory: another one would not know the rankings that this one saves
        self.file_lock = FileLock(folder.absolute().with_name(f".{folder.name}.lock"))
        self._rows = {row["id"]: row for row in instances.with_format(None)}
        self._prompts = {row["id"]: row for row in prompts.with_format(None)}
        self._sha_of = column_by_id(panels, "sha256")
        # The address of an image is the digest of its pixels: a browser may keep it, and it does not tell the seed
        self.image_files = {self._sha_of[name]: image["path"] for name, image in column_by_id(panels, "image").items()}
        # Of each annotator, by instance, in the order in which they were first ranked: this is the way back
        self._done: dict[str, dict[str, tuple[int, ...] | None]] = {}
        self._not_people = {AUTOMATIC}
        for annotation, has_scores in checked_annotations(sorted(self.folder.glob("*.jsonl")), instances):
            self._done.setdefault(annotation.annotator, {})[annotation.instance] = annotation.ranks
            if has_scores:
                self._not_people.add(annotation.annotator)

    def _check_name(self, annotator: Any) -> str:
        if check_annotator(annotator) in self._not_people:
            raise ValueError(f"The name {annotator!r} is that of an automatic ranking. Choose another one.")
        return annotator

    def task(self, annotator: Any, instance: Any = None) -> dict[str, Any]:
        """Return what an annotator is shown: an instance, or the next one if it does not exist."""
        annotator = self._check_name(annotator)
        with self._lock:
            done = dict(self._done.get(annotator, {}))
            counts = Counter(
                name
                for other_annotator, rankings in self._done.items()
                for name, ranks in rankings.items()
                if other_annotator not in self._not_people and ranks is not None
            )
        needed = self.annotations_per_instance
        if instance not in self._rows:
            instance = next_instance(annotator, self._rows, done, counts, needed)
        history = list(done)
        history = history[: history.index(instance)] if instance in done else history
        ranked = sum(ranks is not None for ranks in done.values())
        finished = sum(min(count, needed) for count in counts.values()) / (needed * len(self._rows))
        task = {
            "annotator": annotator,
            "instance": instance,
            "previous": history[-1] if history else None,
            "ranked": ranked,
            "skipped": len(done) - ranked,
            "percent": int(100 * finished),
        }
        if instance is None:
            return task
        row, ranks = self._rows[instance], done.get(instance)
        prompt = self._prompts[row["prompt_id"]]
        shown = shown_order(annotator, instance, len(row["candidates"]))
        return task | {
            "theme": theme_of(prompt),
            "dimensions": prompt.get("dimensions") or list(DIMENSIONS),
            "reference": f"/image/{self._sha_of[row['reference']]}",
            "images": [f"/image/{self._sha_of[row['candidates'][index]]}" for index in shown],
            # Places of the shown images, best first
            "order": [] if ranks is None else sorted(range(len(shown)), key=lambda position: ranks[shown[position]]),
            "was_skipped": instance in done and ranks is None,
        }

    def save(self, annotator: Any, instance: Any, order: Any) -> None:
        """Check an order of the shown images (`None` to skip the instance), and save it."""
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
            ranks_of_ranking(order)  # checks it before its places are looked up
            record["ranking"] = [shown_order(annotator, instance, count)[position] for position in order]
            ranks = ranks_of_ranking(record["ranking"])
        with self._lock:
            append_annotation(self.folder, record)
            self._done.setdefault(annotator, {})[instance] = ranks


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

    @_shown_errors()
    def show(annotator: str, instance: str | None = None, saved: str | None = None) -> list[Any]:
        task = work.task(annotator, instance) | {"saved": saved}
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

    @_shown_errors()
    def save(task: dict[str, Any]) -> list[Any]:
        work.save(task["annotator"], task["instance"], task["order"])
        return show(task["annotator"], saved=task["instance"])

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
        back_button.click(lambda task: show(task["annotator"], task["previous"]), board, outputs, **options)
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
        raise ValueError(f"`host` is {host!r}, all addresses. Give the one by which annotators reach this machine.")

    def image(request: "Request") -> Response:
        path = work.image_files.get(request.path_params["sha256"])
        if path is None or not Path(path).is_file():
            return Response(status_code=404)
        # Its address is made of its pixels: what is behind it never changes
        return FileResponse(path, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    if not is_loopback(host):
        logger.warning(f"Everyone who reaches {host} can rank under any name: the app has no password.")
    if refusal := take_lock(work.file_lock, "annotations", work.folder):
        raise ValueError(refusal)
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

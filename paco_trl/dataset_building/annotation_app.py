# SPDX-License-Identifier: Apache-2.0
"""Serve a Gradio app in which people rank the candidates of ranking instances."""

import html
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..utils.addresses import is_loopback
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

# A value must not come in with Handlebars' double braces: Gradio evaluates what they give as a JavaScript template
# (https://github.com/gradio-app/gradio/blob/gradio@6.31.0/js/html/shared/HTML.svelte), in which a prompt could run code
_BOARD = """
<p class="head"><b>${value.annotator}</b>
  <span id="own">${value.ranked} ranked${value.skipped ? `, ${value.skipped} skipped` : ""}</span>
  <span>everyone: <span id="percent">${value.percent} %</span></span></p>
${!value.instance ? `<h2 id="thanks">Thank you, ${value.annotator}!</h2>
<p>Nothing is left for you to rank. Everything is saved; you can close this page.</p>` : `
<h3 id="theme">${value.was_skipped ? "(You skipped this one.) " : ""}${value.theme}</h3>
<p id="dimensions">${value.dimensions.join(" · ")}</p>
<div class="board" style="--columns: ${value.columns}; --rows: ${Math.ceil(value.images.length / value.columns)}">
  <div class="frame"><img id="reference" src="${value.reference}" alt="Reference"
    ><button class="zoom" aria-label="Enlarge the reference">⤢</button>
    <p class="keys">Reference. <kbd>1</kbd>–<kbd>${Math.min(9, value.images.length)}</kbd> pick, best first;
      <kbd>⌫</kbd> take back; hold <kbd>Space</kbd> to enlarge; <kbd>Enter</kbd> save; <kbd>S</kbd> skip;
      <kbd>Z</kbd> back</p></div>
  <div class="candidates">${value.images.map((image, place) => {
    const rank = value.order.indexOf(place) + 1;
    return `<div class="frame"><button class="candidate" data-place="${place}" draggable="true"
      aria-pressed="${rank > 0}" aria-label="Candidate ${place + 1}${rank ? `, ranked ${rank}` : ""}"
      ><img src="${image}" alt="" draggable="false"><span class="key">${place + 1}</span
      ><span class="rank">${rank || ""}</span></button
    ><button class="zoom" aria-label="Enlarge candidate ${place + 1}">⤢</button></div>`;
  }).join("")}</div>
  <ol class="order" aria-label="Your order, most consistent first">${value.images.map((_, rank) => {
    const place = value.order[rank];
    return `<li data-rank="${rank}">` + (place === undefined ? "" : `<button data-place="${place}" draggable="true"
      aria-label="Rank ${rank + 1}: candidate ${place + 1}"><img src="${value.images[place]}" alt="" draggable="false"
      ><span class="key">${place + 1}</span></button>`) + "</li>";
  }).join("")}</ol>
</div>`}
"""

_STYLE = """
.head { display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 0; }
.head > :last-child { margin-left: auto; }
#theme { margin: 8px 0 0; max-height: 4.5em; overflow-y: auto; overflow-wrap: anywhere; }
#dimensions, .keys { font-size: 14px; margin: 4px 0; opacity: .75; }
.board { display: grid; grid-template-columns: 4fr 6fr 110px; gap: 20px; --high: calc(100dvh - 290px); }
.frame, .board button { position: relative; }
img { display: block; width: 100%; object-fit: contain; margin: 0; background: var(--background-fill-secondary); }
#reference { max-height: var(--high); }
.candidates { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: 10px; align-content: start; }
.candidate { width: 100%; border-radius: 8px; overflow: hidden; cursor: pointer; }
.candidate img { height: calc(var(--high) / var(--rows) - 10px); min-height: 90px; }
.candidate[aria-pressed=true] { outline: 3px solid var(--color-accent); }
.key, .rank, .board .zoom { position: absolute; left: 6px; top: 6px; min-width: 26px; padding: 2px 6px;
  border-radius: 6px; color: #222; background: #ffffffd9; font-weight: 600; }
.board .zoom { left: auto; right: 6px; }
.rank { top: auto; bottom: 6px; font-size: 22px; color: #fff; background: var(--color-accent); }
.rank:empty { display: none; }
.order { list-style: none; margin: 0; padding: 0; display: flex; flex-flow: column; gap: 6px; counter-reset: rank; }
.order li { counter-increment: rank; display: flex; align-items: center; gap: 6px; margin: 0;
  height: calc(var(--high) / var(--columns) / var(--rows) - 6px); max-height: 96px; min-height: 34px; }
.order li::before { content: counter(rank); width: 1.2em; }
.order button, .order li:empty::after { content: ""; height: 100%; flex: 1; overflow: hidden; border-radius: 6px; }
.order li:empty::after { border: 1px dashed var(--border-color-primary); }
.order img { height: 100%; }
@media (max-width: 900px) {
  .board { grid-template-columns: 1fr; gap: 10px; padding-bottom: 90px; }
  #reference { max-height: 34vh; }
  .candidates { grid-template-columns: 1fr 1fr; }
  .candidate img { height: auto; min-height: 0; }
  .order { flex-flow: wrap; }
  .order li { flex: 1 1 60px; height: 54px; }
  .keys { display: none; }
}
"""
# On a phone the buttons stay at the bottom
_PAGE_STYLE = """@media (max-width: 900px) {
  #buttons { position: fixed; inset: auto 0 0; padding: 8px; z-index: 1; background: var(--body-background-fill); }
  #buttons button { min-width: 0; }
}"""

_SCRIPT = """
const draft = () => `paco-annotation ${props.value.annotator} ${props.value.instance}`;
const setOrder = (order) => {
  props.value = { ...props.value, order };
  localStorage.setItem(draft(), JSON.stringify(order));
};
const without = (place) => props.value.order.filter((other) => other !== place);
const toggle = (place) => setOrder(props.value.order.includes(place) ? without(place) : [...props.value.order, place]);
const placeOf = (target) => target.closest("[data-place]")?.dataset.place;

const large = document.createElement("dialog");
large.style = "width: 100vw; height: 100vh; max-width: none; max-height: none; background: #111";
large.innerHTML = '<img alt="" style="width: 100%; height: 100%; object-fit: contain">';
large.onclick = () => large.close();
document.body.append(large);
const enlarge = (image) => { large.firstChild.src = image.src; large.showModal(); };

// A new task: an order that was begun before a reload is restored, and the address leads back to the instance
const begin = () => {
  const { annotator, instance, images, saved } = props.value ?? {};
  if (!annotator) return;
  history.replaceState(null, "", `?${new URLSearchParams(instance ? { annotator, instance } : { annotator })}`);
  if (saved) localStorage.removeItem(`paco-annotation ${annotator} ${saved}`);
  const order = JSON.parse(localStorage.getItem(draft()) ?? "null");
  if (instance && order?.every((place) => place < images.length)) props.value = { ...props.value, order };
};
watch("value", begin);
begin();

element.addEventListener("click", (event) => {
  const place = placeOf(event.target);
  if (event.target.matches(".zoom")) enlarge(event.target.parentElement.querySelector("img"));
  else if (place) toggle(Number(place));
});
// After a click with the mouse, keys act on the page again, not on the button
document.addEventListener("click", (event) => { if (event.detail) event.target.closest("button")?.blur(); });

element.addEventListener("dragstart", (event) => event.dataTransfer.setData("text/plain", placeOf(event.target)));
element.addEventListener("dragover", (event) => { if (event.target.closest("[data-rank]")) event.preventDefault(); });
element.addEventListener("drop", (event) => {
  event.preventDefault();
  const place = Number(event.dataTransfer.getData("text/plain"));
  setOrder(without(place).toSpliced(Number(event.target.closest("[data-rank]").dataset.rank), 0, place));
});

document.addEventListener("keydown", (event) => {
  const { instance, images, order } = props.value ?? {}, key = event.key.toLowerCase();
  const modified = event.ctrlKey || event.metaKey || event.altKey || event.repeat;
  if (modified || large.open || event.target.closest("input")) return;
  const button = { enter: "save", s: "skip", z: "back" }[key];
  if (button) {
    if (key === "enter" && event.target.closest("button")) return;
    document.getElementById(button)?.click();
  } else if (!instance) return;
  else if (/^[1-9]$/.test(key) && Number(key) <= images.length) toggle(Number(key) - 1);
  else if (key === "backspace") setOrder(order.slice(0, -1));
  else if (key === " ")
    enlarge(element.querySelector("[data-place]:is(:focus, :hover) img") ?? element.querySelector("#reference"));
  else return;
  event.preventDefault();
});
document.addEventListener("keyup", (event) => { if (event.key === " ") large.close(); });
"""


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
    """Serve the app until it is stopped (Ctrl+C); one process at a time may serve a directory of annotations."""
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise ImportError('The annotation app needs `gradio`: pip install "paco_trl[annotate]".') from error
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    if host in ("", "0.0.0.0", "::"):
        raise ValueError(
            f"`host` is {host!r}, which stands for all addresses, so requests under a foreign name could not be "
            "refused. Give the address or the name by which the annotators reach this machine."
        )

    def image(request: "Request") -> Response:
        path = work.image_files.get(request.path_params["sha256"])
        if path is None or not Path(path).is_file():
            return Response(status_code=404)
        # Its address is made of its pixels: what is behind it never changes
        return FileResponse(path, headers={"Cache-Control": "private, max-age=31536000, immutable"})

    if not is_loopback(host):
        logger.warning(f"Everyone who reaches {host} can rank under any name: the app has no password.")
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
    return app

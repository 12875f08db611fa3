# SPDX-License-Identifier: Apache-2.0
"""`paco-trl push`: uploads the saved model of a run."""

from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi

from ..checkpointing.checkpoints import find_saved_model
from ..hub.card_data import card_data_text, load_card_data
from ..hub.cards import render_card, replace_repo_id
from ..hub.files import find_published_patterns, select_files
from ..hub.pushing import HubPusher, load_push_target, reset_push_dir
from ..hub.repositories import check_token, prepare_repo
from ..utils.errors import OptionError
from ..utils.model_files import CARD_DATA_FILE
from .messages import print_message
from .model_arguments import PushArguments


def push(args: PushArguments) -> str:
    """Upload a saved model, and return the address of the repository."""
    folder = Path(args.folder)
    model = find_saved_model(folder)
    card = load_card_data(model)
    if card is None:  # for example a base model
        raise OptionError(f"'{model}' was not saved by paco_trl: it has no {CARD_DATA_FILE}. Use `hf upload`.")
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    saved_settings = load_push_target(run)
    repo_id = args.hub_model_id or saved_settings.get("repo_id")
    if repo_id is None:
        raise OptionError(f"'{run}' has no repository yet. Pass `--hub_model_id user/name`.")
    api = HfApi(library_name="paco_trl")
    check_token(api)
    # The settings of the run's repository do not apply to another one
    run_id = saved_settings.get("repo_id", "")
    run_settings = saved_settings if args.hub_model_id in (None, run_id, run_id.split("/")[-1]) else {}
    revision = args.hub_revision or run_settings.get("revision")
    private = args.private if args.private is not None else run_settings.get("private")
    published_patterns = find_published_patterns(model) or []
    repo_id = prepare_repo(api, repo_id, private, revision, card.base_model, published_patterns)
    if not saved_settings and folder == run:
        reset_push_dir(run, repo_id, revision, private)
    pusher = HubPusher(api, repo_id, revision, run, published_patterns)
    step = f", {model.name.replace('-', ' ')}" if model != run else ""
    readme = model / "README.md"
    pushed_card = replace(card, repo_id=repo_id)
    text = (
        replace_repo_id(card, repo_id, readme.read_text("utf-8"))
        if readme.is_file()
        else str(render_card(pushed_card))
    )
    contents = {"README.md": text, CARD_DATA_FILE: card_data_text(pushed_card)}
    names = ", ".join(sorted({*select_files(model, published_patterns), *contents}))
    print_message("push", f"uploading to {repo_id} what is in '{model}': {names}.")
    pusher.push_model(model, f"Upload model{step}", contents)
    return f"{api.endpoint}/{repo_id}"

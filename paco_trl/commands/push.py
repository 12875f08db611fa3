# SPDX-License-Identifier: Apache-2.0
"""`paco-trl push`: uploads what a run has saved, and its pending uploads."""

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

from huggingface_hub import HfApi

from ..cards.rendering import renamed
from ..checkpointing.checkpoints import RUN_FILE, checkpoints_of, incomplete_files
from ..hub.account import card_metadata, prepare_repository
from ..hub.files import SETTINGS, published_files_of
from ..hub.pushing import HubPusher, remember_repository, remembered_repository, retrying
from .options import option
from .parser import CommandParser


@dataclass
class PushArguments:
    """Model to upload, and its repository. The token is that of `hf auth login` or of the variable `HF_TOKEN`."""

    folder: str = option(
        MISSING, "Output directory of a run (newest model, pending uploads), or one checkpoint or merged model."
    )
    hub_model_id: str | None = option(None, "Repository. If `None`, that of the run.")
    hub_private_repo: bool | None = option(None, "Whether a new repository is private. Default: the account's.")
    hub_revision: str | None = option(None, "Branch. If `None`, that of the run, or the main one.")


def find_saved_model(folder: Path) -> Path:
    """Find the newest model of an output directory: itself, or its latest complete checkpoint if that is newer."""
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is not a directory. Give the output directory of a run, or a checkpoint.")
    models = [checkpoint for checkpoint in checkpoints_of(folder) if _is_complete(checkpoint)][:1]
    if _is_complete(folder):
        models.append(folder)
    if not models:
        raise ValueError(
            f"'{folder}' has no saved model, or none that is complete. Give the directory of a run or a checkpoint."
        )
    return max(models, key=_saved_at)


def _is_complete(folder: Path) -> bool:
    # Only checkpoints of PaCoGRPOTrainer list their files
    return published_files_of(folder) is not None and incomplete_files(folder) in ([], [RUN_FILE])


def _saved_at(folder: Path) -> float:
    weights = [*folder.glob("*.safetensors"), *folder.glob("transformer/*.safetensors")]
    return max(path.stat().st_mtime for path in weights)


def push(args: PushArguments) -> str:
    """Upload a saved model; return the address of the repository."""
    folder = Path(args.folder)
    model = find_saved_model(folder)
    _check_saved_here(model)
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    known = remembered_repository(run) or {}
    repo_id = args.hub_model_id or known.get("repo_id")
    if repo_id is None:
        raise ValueError(f"`hub_model_id` is not given, and nothing of '{run}' was pushed. Give `--hub_model_id`.")
    # The settings of the run's own repository do not apply to another one
    run_id = known.get("repo_id", "")
    run_settings = known if args.hub_model_id in (None, run_id, run_id.split("/")[-1]) else {}
    revision = args.hub_revision or run_settings.get("revision")
    private = args.hub_private_repo if args.hub_private_repo is not None else run_settings.get("private")
    published_files, config = published_files_of(model) or [], model / "adapter_config.json"
    base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") if config.is_file() else None
    contents = {"published_files": published_files, "base_model": base}
    api = HfApi(library_name="paco_trl")
    prepare = retrying(api, repo_id)
    repo_id = prepare(prepare_repository, api, repo_id, private=private, revision=revision, **contents)
    if not known and folder == run:
        remember_repository(run, repo_id, revision, private)
    pusher = HubPusher(api, repo_id, revision, run, published_files)
    step = f", {model.name.replace('-', ' ')}" if model != run else ""
    # The card of a model that was trained without a repository loads it by the name of its directory
    card = model / "README.md"
    text = renamed(card.read_text(encoding="utf-8"), run.absolute().name, repo_id) if card.is_file() else None
    pusher.push_now(model, f"Upload model{step}", text)
    return f"{api.endpoint}/{repo_id}"


def _check_saved_here(model: Path) -> None:
    """Refuse a model that this package did not save, such as a base model whose name was mistaken for that of a run."""
    card = model / "README.md"
    is_tagged = card.is_file() and "paco-trl" in (card_metadata(card).get("tags") or [])
    if not is_tagged and not (model / SETTINGS).is_file():
        raise ValueError(
            f"'{model}' was not saved by paco_trl: it has no {SETTINGS}, and no card with the tag 'paco-trl'. Use `hf upload`."
        )


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = CommandParser(PushArguments, positional="folder", prog="paco-trl push")
    (args,) = parser.parse_args_and_config(arguments)
    sys.stdout.write(f"{push(args)}\n")
    return 0

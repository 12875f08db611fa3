# SPDX-License-Identifier: Apache-2.0
"""Mixin of the trainers that pushes to the Hub in the background."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy

from ..hub.cards import save_card
from ..hub.files import check_no_foreign_files
from ..hub.licenses import License, base_license, remember_license
from ..hub.pushing import HubPusher, load_push_target, reset_push_dir
from ..hub.repositories import check_repo, explain_outages, prepare_repo
from ..utils.fingerprint import version
from ..utils.logs import get_logger
from ..utils.names import public_name, relative_name
from .model_cards import cached_commit, describe_hardware, training_seconds


logger = get_logger(__name__)

_LIBRARIES = ("paco_trl", "trl", "transformers", "diffusers", "peft", "accelerate", "datasets", "torch")


class HubTrainer(Trainer):
    """
    Upload the files that match `published_patterns`. Trainer would also upload `training_args.bin`, with the token.
    """

    published_patterns: list[str]
    pusher: HubPusher | None = None  # on the main process, once the repository exists
    _base_model_source: str | None  # Hub id or directory
    _tag_names: list[str]
    _paper: dict[str, str]

    def _init_hub(self, args: TrainingArguments, base_model_source: str | None, published_patterns: list[str]) -> None:
        """Set what is published; open the repository, if the run pushes. Collective: call on all ranks."""
        # Called before Trainer's `__init__`, which calls `init_hf_repo`, so `self.args` does not exist yet
        self._base_model_source, self.published_patterns = base_model_source, published_patterns
        if args.push_to_hub:
            self._open_repo(args)

    def _open_repo(self, args: TrainingArguments, token: str | None = None, private: bool | None = None) -> None:
        """Check the token, and create the repository, unless this has been done. Collective: call on all ranks."""
        error = None
        if args.process_index == 0 and self.pusher is None:
            try:
                self.pusher = self._make_pusher(args, token, private)
            except Exception as refusal:  # raised below: no process may wait for this one
                error = refusal
        message, is_outage = gather_object([(error and f"{error}", isinstance(error, ConnectionError))])[0]
        if message is not None:
            raise error or (ConnectionError if is_outage else ValueError)(message)

    def _make_pusher(self, args: TrainingArguments, token: str | None, private: bool | None) -> HubPusher:
        api = HfApi(token=token if token is not None else args.hub_token, library_name="paco_trl")
        private = private if private is not None else args.hub_private_repo
        repo_id = args.hub_model_id or Path(args.output_dir).absolute().name
        base_model = self._base_model_source
        try:
            if base_model is not None:
                remember_license(base_model, api.token)
            repo_id = prepare_repo(api, repo_id, private, args.hub_revision, base_model, self.published_patterns)
        except ConnectionError as error:
            earlier = load_push_target(args.output_dir)
            earlier_id = earlier.get("repo_id", "")
            requested = {"repo_id": earlier_id, "revision": args.hub_revision, "private": private}
            if earlier != requested or not _is_same_repo(earlier_id, repo_id):
                raise ConnectionError(
                    f"{error} Or start with `push_to_hub=False`, and upload by `paco-trl push {args.output_dir} "
                    f"--hub_model_id {repo_id}`."
                ) from error
            # A resumed run has passed these checks: an outage does not stop it
            repo_id = earlier_id
            logger.warning(f"{error} The run continues, since it has pushed to {repo_id} before.")
        reset_push_dir(args.output_dir, repo_id, args.hub_revision, private)
        return HubPusher(api, repo_id, args.hub_revision, Path(args.output_dir), self.published_patterns)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Create the repository, or check that it is writable. Collective: call on all ranks.

        `token` and `private` default to `args.hub_token` and `args.hub_private_repo`.
        """
        self._open_repo(self.args, token, private)
        if self.pusher is not None:
            self.hub_model_id = self.pusher.repo_id

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """
        Upload a saved checkpoint in the background.

        Only the newest of several waiting checkpoints is uploaded, unless `hub_always_push` or `hub_strategy` asks for
        all.
        """
        args, step = self.args, self.state.global_step
        if args.hub_strategy == HubStrategy.END:
            return
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        self.accelerator.wait_for_everyone()
        if self.pusher is not None:
            self.callback_handler.on_push_begin(args, self.state, self.control)
            is_replacing = not args.hub_always_push and args.hub_strategy != HubStrategy.ALL_CHECKPOINTS
            message = f"Training in progress, step {step}"
            try:
                self.pusher.push_checkpoint(checkpoint_folder, message, names.get(args.hub_strategy), is_replacing)
            except OSError as error:  # such as a full disk
                logger.warning(f"The checkpoint of step {step} is saved, but cannot be prepared for the Hub: {error}.")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> CommitInfo | None:
        """
        Save the trained model with its card to `args.output_dir`, and upload it. Collective: call on all ranks.

        The arguments are as in [`~transformers.Trainer.push_to_hub`], and `kwargs` as in `create_model_card`;
        `private` is for a new repository. Returns a [`~huggingface_hub.CommitInfo`] on the main process, with
        `blocking=False` its `Future`. After a `ConnectionError` the model is saved: `paco-trl push` uploads it later.
        """
        self._check_output_files(self.args.output_dir)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        outage = None
        try:
            self.init_hf_repo(token, private)
        except ConnectionError as error:
            outage = error
        self.save_model(_internal_call=True, **kwargs)
        if outage is not None:
            raise outage
        if self.pusher is None:  # not the main process
            return None
        api = self.pusher.api if token is None else HfApi(token=token, library_name="paco_trl")
        pusher = replace(self.pusher, api=api, revision=revision or self.pusher.revision)
        if private:
            check_repo(api, pusher.repo_id, private)
        if revision is not None:
            with explain_outages(api, f"`paco-trl push {self.args.output_dir}` uploads it later."):
                api.create_branch(pusher.repo_id, branch=revision, exist_ok=True)
        return pusher.push_model(self.args.output_dir, commit_message or "End of training", blocking=blocking)

    def _check_output_files(self, folder: str | Path) -> None:
        """Refuse on all processes to overwrite files of the user."""
        error = None
        if self.args.should_save:
            try:
                check_no_foreign_files(folder, self.published_patterns)
            except ValueError as refusal:  # raised below, on all processes
                error = str(refusal)
        if (error := next(filter(None, gather_object([error])), None)) is not None:
            raise ValueError(error)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        license: str | None = None,
        **kwargs,
    ) -> None:
        """
        Write the model card. Fields that are `None` come from the run.

        `use_ema=False` describes the weights of the last step instead of their average.
        """
        if self.is_world_process_zero():
            fields = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags, "license": license}
            save_card(self._model_card(**fields, **kwargs), self.args.output_dir, self._pictures(**kwargs))

    def _common_card_fields(
        self,
        base_model: str,
        step: int | None = None,
        *,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        license: str | None = None,
    ) -> dict[str, Any]:
        """Return the fields that all cards share. The Hub is queried for the license only if the run pushes to it."""
        args: Any = self.args  # a config of the package, with `model_init_kwargs`
        pusher = self.pusher
        local = Path(args.output_dir).absolute()
        repo_id = self.hub_model_id or args.hub_model_id
        token = pusher.api.token if pusher else None
        return {
            "title": model_name or (repo_id or local.name).split("/")[-1],
            "repo_id": repo_id or relative_name(str(local)),
            "base_model": base_model,
            "base_revision": cached_commit(base_model, (args.model_init_kwargs or {}).get("revision")),
            "license": base_license(base_model, pusher is not None, token) if license is None else License(license),
            "datasets": [public_name(dataset_name)] if dataset_name else [],
            "tags": [*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])],
            "hardware": describe_hardware(args.device, args.world_size),
            "seconds": training_seconds(self.state, step),
            "saved_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "versions": {name: version(name) for name in _LIBRARIES},
            "paper": self._paper,
        }

    def _push_model(self, folder: str | Path) -> None:
        """Upload a model that was just saved."""
        if self.pusher is not None:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.pusher.push_model(folder, "Model save")

    def _finish_current_push(self) -> None:
        """Wait for a running upload; failures are reported, not raised."""
        if self.pusher is not None:
            self.pusher.wait()


def _is_same_repo(full_id: str, repo_id: str) -> bool:
    """Return whether an id, with or without its owner, names the repository `full_id`."""
    return full_id == repo_id or full_id.split("/")[-1] == repo_id

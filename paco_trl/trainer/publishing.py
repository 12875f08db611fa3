# SPDX-License-Identifier: Apache-2.0
"""Mixin of the trainers that pushes to the Hub in the background."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy

from ..hub.cards import save_card
from ..hub.files import check_no_foreign_files
from ..hub.licenses import base_license
from ..hub.pushing import HubPusher, load_push_target, save_push_target
from ..hub.repositories import check_repo, explain_outages, prepare_repo
from ..utils.logs import get_logger


logger = get_logger(__name__)


class HubTrainer(Trainer):
    """Upload `published_files` alone. Trainer would also upload `training_args.bin`, and with it the token."""

    pusher: Any = None  # a HubPusher on the main process, once the repository exists
    _base_model_source: str | None = None  # Hub id or directory
    published_files: list[str]  # patterns

    def _init_pusher(self, args: TrainingArguments, token: str | None = None, private: bool | None = None) -> None:
        """Check the token, and create the repository, before a model is loaded. Collective: call on all ranks."""
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
                base_license(base_model, online=True, token=api.token)  # remembered for the checkpoints
            repo_id = prepare_repo(api, repo_id, private, args.hub_revision, base_model, self.published_files)
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
        save_push_target(args.output_dir, repo_id, args.hub_revision, private)
        return HubPusher(api, repo_id, args.hub_revision, Path(args.output_dir), self.published_files)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Create the repository, or check that it is writable. Collective: call on all ranks.

        `token` and `private` default to `args.hub_token` and `args.hub_private_repo`.
        """
        self._init_pusher(self.args, token, private)
        if self.pusher is not None:
            self.hub_model_id = self.pusher.repo_id

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a saved checkpoint in the background; of several that wait the newest, or all by `hub_strategy`."""
        args, step = self.args, self.state.global_step
        if args.hub_strategy == HubStrategy.END:
            return
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
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

        Arguments are those of [`~transformers.Trainer.push_to_hub`], and in `kwargs` those of `create_model_card`;
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
        if not self.is_world_process_zero():
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
        """Refuse to save over files of the user's, on all processes."""
        error = None
        if self.args.should_save:
            try:
                check_no_foreign_files(folder, self.published_files)
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

    def _push_model(self, folder: str | Path) -> None:
        """Upload a model that was just saved."""
        if self.is_world_process_zero():
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.pusher.push_model(folder, "Model save")

    def _finish_current_push(self) -> None:
        """Wait for a running upload; failures are reported, not raised."""
        if self.pusher is not None:
            self.pusher.wait()


def _is_same_repo(full_id: str, repo_id: str) -> bool:
    """Return whether the id of a repository, with or without its owner, is that of `full_id`."""
    return full_id == repo_id or full_id.split("/")[-1] == repo_id

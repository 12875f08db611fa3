# SPDX-License-Identifier: Apache-2.0
"""What is relied on of other libraries' private surface, so that a release that changes it fails here and loudly."""

import dataclasses
import inspect
import re

import pytest
from diffusers import ConfigMixin, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from transformers import AutoProcessor, Trainer, trainer_callback, trainer_utils
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from trl import GRPOTrainer
from trl.models import utils as trl_model_utils
from trl.trainer import utils as trl_utils
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from paco_trl import PaCoGRPOTrainer, PaCoRewardTrainer
from paco_trl.data import make_pair
from paco_trl.trainer.pair_collator import TOKEN_TENSORS
from paco_trl.trainer.publishing import PushesToHub


# Attributes that GRPOTrainer.__init__ sets and that PaCoGRPOTrainer, which skips it, sets itself for the inherited
# methods named here.
INHERITED = {
    "training_step": {
        "_current_train_step_time",
        "_metrics",
        "_step",
        "current_gradient_accumulation_steps",  # set by Trainer
    },
    "_load_optimizer_and_scheduler": {"_last_world_entropy", "entropy_coef", "use_adaptive_entropy"},
}


@pytest.mark.parametrize("method", INHERITED)
def test_inherited_methods_read_what_is_listed(method):
    source = inspect.getsource(getattr(GRPOTrainer, method))
    read = set(re.findall(r"\bself\.(\w+)", source))
    assert read == INHERITED[method]


def test_log_reads_what_is_listed():
    # Everything behind `self.log_completions`, which is switched off, is TRL's table of texts
    source = inspect.getsource(GRPOTrainer.log).split("self.log_completions")[0]
    assert set(re.findall(r"\bself\.(\w+)", source)) == {"_metrics", "accelerator", "model"}


def test_attributes_exist(make_trainer):
    trainer = make_trainer()
    only_sometimes = {
        "current_gradient_accumulation_steps",
        "_last_world_entropy",
        "entropy_coef",
    }
    for method, attributes in INHERITED.items():
        for attribute in attributes - only_sometimes:
            assert hasattr(trainer, attribute), f"{method} reads {attribute}"
    assert PaCoGRPOTrainer.loss_is_scaled_for_ga is True


def test_methods_that_are_overridden_exist():
    for name in (
        "_prepare_inputs",
        "_generate_and_score_completions",
        "compute_loss",
        "training_step",
        "get_train_dataloader",
        "evaluate",
        "save_model",
        "create_model_card",
        "_push_from_checkpoint",
        "_send_telemetry",
        "train",
        "_save_checkpoint",
        "_load_from_checkpoint",
        "_load_best_model",
        "_run_epoch",
    ):
        assert hasattr(GRPOTrainer, name), name
    for name in ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"):
        assert list(inspect.signature(getattr(Trainer, name)).parameters) == ["self", "output_dir"], name
    # Where they are called from, and when: after the checkpoint is loaded, and once for each optimizer step
    loop = inspect.getsource(Trainer._inner_training_loop)
    assert loop.index("_prepare_for_training") < loop.index("on_train_begin") < loop.index("_run_epoch")
    epoch = inspect.getsource(Trainer._run_epoch)
    assert epoch.index("self.optimizer.step()") < epoch.index("on_optimizer_step") < epoch.index("global_step += 1")
    assert "self._save_checkpoint(model, trial)" in inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert "self._load_best_model()" in inspect.getsource(Trainer._finalize_training)
    assert "_initial_global_step" in inspect.getsource(Trainer._inner_training_loop)
    assert "activation_checkpointing_enable" in inspect.getsource(Trainer.train)
    assert "Trainer" in _BaseTrainer.__mro__[1].__name__


def test_helpers_exist():
    for name in ("identity", "is_async_callable", "get_callable_name", "start_event_loop_in_daemon"):
        assert callable(getattr(trl_utils, name))
    assert callable(trl_model_utils.remove_hooks)
    assert callable(trl_model_utils.add_hooks)


def test_diffusers():
    step = inspect.signature(FlowMatchEulerDiscreteScheduler.step).parameters
    assert list(step)[:4] == ["self", "model_output", "timestep", "sample"]
    source = inspect.getsource(FluxPipeline.__call__)
    assert "self.scheduler.step(noise_pred, t, latents, return_dict=False)" in source
    assert "metadata" in str(inspect.signature(FluxPipeline.save_lora_weights))
    assert "hidden_states" in inspect.signature(FluxTransformer2DModel.forward).parameters


class TestLongRuns:
    """What saving, resuming, the moving average and the trackers take beyond the documentation."""

    def test_checkpoints_of_trainer(self):
        saving = inspect.getsource(Trainer._save_checkpoint)
        # `write_checkpoint` does the same, in its own order
        for name in (
            "_save_optimizer_and_scheduler",
            "_save_scaler",
            "_save_rng_state",
            "ExportableState",
            "stateful_callbacks",
            "state.save_to_json",
            "state.best_global_step",
            "state.best_model_checkpoint",
            "rotate_checkpoints",
        ):
            assert name in saving, name
        parameters = inspect.signature(trainer_utils.rotate_checkpoints).parameters
        assert {"output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"} <= set(parameters)
        assert trainer_callback.ExportableState
        # The best checkpoint is loaded by every process that knows it
        assert "self.state.best_model_checkpoint is not None" in inspect.getsource(Trainer._finalize_training)
        assert "args.eval_on_start" in inspect.getsource(Trainer._inner_training_loop)

    def test_trackers(self):
        assert list(inspect.signature(TensorBoardCallback._init_summary_writer).parameters) == ["self", "args"]
        assert TensorBoardCallback().tb_writer is None
        for callback in (WandbCallback, TrackioCallback):
            assert list(inspect.signature(callback.setup).parameters)[:4] == ["self", "args", "state", "model"]
            assert "self._initialized = False" in inspect.getsource(callback.__init__)

    def test_diffusers_config(self):
        # `prepare_transformer` replaces it: the property has no setter
        assert "_internal_dict" in inspect.getsource(ConfigMixin.config.fget)
        assert ConfigMixin.config.fset is None

    def test_deepspeed(self):
        pytest.importorskip("deepspeed")
        import deepspeed.utils as deepspeed_utils
        from deepspeed.runtime.zero import partition_parameters

        source = inspect.getsource(partition_parameters)
        for name in ("ds_tensor", "ds_numel", "ds_shape", "ds_process_group", "ds_status"):
            assert f"param.{name} = " in source, name
        assert "def all_gather(param_list=None" in source and "def partition(param_list=None" in source
        assert partition_parameters.ZeroParamStatus.AVAILABLE
        for name in ("safe_get_local_fp32_param", "safe_get_full_fp32_param"):
            assert list(inspect.signature(getattr(deepspeed_utils, name)).parameters) == ["param"]
        for name in ("safe_set_local_fp32_param", "safe_set_full_fp32_param"):
            assert list(inspect.signature(getattr(deepspeed_utils, name)).parameters) == ["param", "value"]
        assert list(inspect.signature(trl_model_utils.prepare_deepspeed).parameters) == ["model", "accelerator"]


class TestRewardTrainer:
    """What PaCoRewardTrainer takes from SFTTrainer and Trainer beyond their documentation."""

    @pytest.mark.parametrize(
        "name, parameters",
        [
            ("_remove_unused_columns", ["self", "dataset", "description"]),
            ("_get_num_items_in_batch", ["self", "batch_samples", "device"]),
            ("log", ["self", "logs", "start_time"]),
        ],
    )
    def test_overridden_methods_still_exist(self, name, parameters):
        assert list(inspect.signature(getattr(Trainer, name)).parameters) == parameters
        assert name in vars(PaCoRewardTrainer)

    def test_trainer_calls_them(self):
        for caller, called in [
            ("_get_dataloader", "_remove_unused_columns"),
            ("get_batch_samples", "_get_num_items_in_batch"),
            ("training_step", "loss_is_scaled_for_ga"),
        ]:
            assert called in inspect.getsource(getattr(Trainer, caller))

    def test_the_fused_head_gives_what_is_read(self):
        fields = {field.name for field in dataclasses.fields(trl_utils.FusedCausalLMOutput)}
        assert {"log_probs", "label_mask", "entropy", "is_top1"} <= fields

    def test_the_collator_makes_no_other_tensors_of_tokens(self, tiny_qwen):
        """A new tensor of shape (batch, tokens) would not be cut with the others."""
        processor = AutoProcessor.from_pretrained(tiny_qwen)
        collator = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
        pair = make_pair(*(Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")), "Same?", "No")
        batch = collator([pair])
        length = batch["input_ids"].shape[1]
        assert length > 10
        assert {name for name, tensor in batch.items() if tensor.shape[1:2] == (length,)} <= TOKEN_TENSORS


class TestHub:
    """What PushesToHub takes the place of."""

    @pytest.mark.parametrize(
        "name, parameters",
        [
            ("init_hf_repo", ["self", "token", "private"]),
            ("_push_from_checkpoint", ["self", "checkpoint_folder"]),
            ("_finish_current_push", ["self"]),
            (
                "push_to_hub",
                ["self", "commit_message", "blocking", "token", "revision", "private", "kwargs"],
            ),
        ],
    )
    def test_overridden_methods(self, name, parameters):
        assert list(inspect.signature(getattr(Trainer, name)).parameters) == parameters
        assert list(inspect.signature(vars(PushesToHub)[name]).parameters) == parameters
        for trainer in (PaCoGRPOTrainer, PaCoRewardTrainer):
            order = [base for base in trainer.__mro__ if name in vars(base)]
            assert order.index(PushesToHub) < order.index(Trainer)

    def test_trainer_calls_them(self):
        for caller, called in [
            ("__init__", "init_hf_repo"),
            ("_save_checkpoint", "_push_from_checkpoint"),
            ("_finalize_training", "_finish_current_push"),
        ]:
            assert called in inspect.getsource(getattr(Trainer, caller))

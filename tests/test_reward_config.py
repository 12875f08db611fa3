# SPDX-License-Identifier: Apache-2.0
"""PaCoRewardConfig: the paper's defaults, what is documented, what is refused."""

import dataclasses
import math

import pytest
from trl import SFTConfig

from paco_trl import PaCoRewardConfig
from paco_trl.trainer.config_utils import REFUSED_SFT_FIELDS
from paco_trl.utils.errors import OptionError
from test_config import ENTRY, default_of
from testing_utils import docstring


FIELDS = {field.name: field for field in dataclasses.fields(PaCoRewardConfig)}
TRL_FIELDS = {field.name: field for field in dataclasses.fields(SFTConfig)}
OWN_FIELDS = list(PaCoRewardConfig.__annotations__)
DOCUMENTED = {match[1]: match for match in ENTRY.finditer(docstring(PaCoRewardConfig))}


@pytest.fixture
def make(tmp_path):
    """Makes a config for the CPU."""

    def make_config(**kwargs):
        return PaCoRewardConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **kwargs})

    return make_config


class TestDefaults:
    def test_are_the_papers(self, make):
        """Part 2 of the paper, training of the judge."""
        papers = {
            "first_token_weight": 0.1, "loss_variant": "paper", "max_pixels": 2_097_152, "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "num_train_epochs": 2.0, "per_device_train_batch_size": 8,
        }  # fmt: skip
        # From its published code, or chosen
        others = {"max_length": 16384, "dataloader_num_workers": 0, "ddp_find_unused_parameters": False}
        others |= {"enable_jit_checkpoint": True, "jit_checkpoint_signals": ["SIGTERM", "SIGUSR1"]}
        others |= {"overwrite_output_dir": False}
        config = make()
        for name, value in {**papers, **others}.items():
            assert getattr(config, name) == value, name
        assert sorted(OWN_FIELDS) == sorted([*papers, *others])

    def test_a_routers_loss_is_never_added(self, make):
        """The default of TRL is the model's own."""
        assert default_of(TRL_FIELDS["router_aux_loss_coef"]) is None
        assert make().router_aux_loss_coef == 0.0

    def test_a_text_is_no_flag(self, make):
        assert make(gradient_checkpointing=False).gradient_checkpointing is False
        with pytest.raises(ValueError, match="`gradient_checkpointing` is 'False'; it must be True or False"):
            make(gradient_checkpointing="False")

    def test_a_config_made_from_a_config_is_the_same(self, make):
        config = make(first_token_weight=0.5, max_length=None, max_pixels=None, learning_rate=1e-5)
        again = dataclasses.replace(config)
        for name in (*OWN_FIELDS, *REFUSED_SFT_FIELDS):
            assert getattr(again, name) == getattr(config, name), name


def test_exactly_the_own_fields_are_documented_in_their_order():
    assert list(DOCUMENTED) == OWN_FIELDS
    for name in OWN_FIELDS:
        documented, default = DOCUMENTED[name][3], default_of(FIELDS[name])
        assert (default is None) == (documented is None) == (name == "dataloader_num_workers")
        assert default is None or eval(documented) == default, name


@pytest.mark.parametrize(
    ("name", "value"), [("loss_type", "dft"), ("assistant_only_loss", True), ("completion_only_loss", False)]
)
def test_fields_of_sft_that_are_refused(make, name, value):
    assert name in REFUSED_SFT_FIELDS and name not in OWN_FIELDS
    with pytest.raises(ValueError, match=f"`{name}`"):
        make(**{name: value})
    # Twin: TRL's default passes when it is set
    make(**{name: default_of(FIELDS[name])})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_token_weight", math.nan), ("first_token_weight", 0.0), ("loss_variant", "code"), ("max_length", 0),
        ("max_pixels", 0), ("num_train_epochs", 0), ("gradient_accumulation_steps", 0),
        ("per_device_train_batch_size", 0), ("jit_checkpoint_signals", ["SIGNOTHING"]), ("data_seed", 2**32),
        ("per_device_train_batch_size", 1.5), ("max_length", 99.5), ("dataloader_num_workers", 0.5),
    ],
)  # fmt: skip
def test_bad_values(make, name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        make(**{name: value})


class TestMoreSettings:
    @pytest.mark.parametrize(
        ("settings", "options"),
        [
            ({"bf16": True, "fp16": True}, ("bf16", "fp16")),
            ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, ("save_strategy", "eval_strategy")),
        ],
        ids=str,
    )
    def test_what_transformers_would_refuse_names_its_options(self, make, settings, options):
        with pytest.raises(OptionError, match=f"`{options[0]}`.*`{options[1]}`") as refused:
            make(**settings)
        assert {*options} <= {*refused.value.options}
        make(bf16=True)
        make(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="best", metric_for_best_model="auroc")

    def test_the_least_calibration_error_is_the_best(self, make):
        settings = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
        assert make(metric_for_best_model="eval_ece", **settings).greater_is_better is False
        assert make(metric_for_best_model="eval_ece", greater_is_better=True, **settings).greater_is_better is True
        assert make(metric_for_best_model="eval_auroc", **settings).greater_is_better is True

    def test_sampling_by_length(self, make):
        with pytest.raises(ValueError, match="`train_sampling_strategy` is 'batch_rebalance', whose order"):
            make(train_sampling_strategy="batch_rebalance")

    @pytest.mark.parametrize(
        ("has_gpu", "use_cpu", "expected"), [(True, False, 2), (True, True, 0), (False, False, 0)]
    )
    def test_workers_are_for_gpus(self, make, monkeypatch, has_gpu, use_cpu, expected):
        monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
        # TRL's own would use the GPU
        monkeypatch.setattr("trl.SFTConfig.__post_init__", lambda self: setattr(self, "deepspeed_plugin", None))
        config = make(use_cpu=use_cpu)
        assert config.dataloader_num_workers == expected
        assert config.dataloader_multiprocessing_context == ("fork" if expected else None)
        assert make(use_cpu=use_cpu, dataloader_num_workers=5).dataloader_num_workers == 5
        assert make(use_cpu=use_cpu, dataloader_num_workers=0).dataloader_num_workers == 0

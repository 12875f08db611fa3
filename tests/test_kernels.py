# SPDX-License-Identifier: Apache-2.0
"""What runs the transformer: `attention_backend` and `compile_repeated_blocks`, the same in rollout and training."""

from unittest.mock import patch

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from paco_trl.planning.peaks import training_precision
from paco_trl.rollout import kernels as kernels_module
from paco_trl.rollout.kernels import set_kernels
from paco_trl.rollout.loading import load_pipeline
from test_rollout_batch import CASES
from testing_utils import entries_of


NATIVE = AttentionBackendName.NATIVE


@pytest.fixture(autouse=True)
def settings_of_torch():
    """Those that are made for compiled blocks, put back afterwards."""
    with inductor.patch(emulate_precision_casts=False), torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch.compiler.reset()
    kernels_module._prefer_kernel(None)


def kernels() -> list:
    return _cur_sdpa_kernel_backends(with_priority=True)


def backends_of(transformer) -> set:
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    return {each._attention_backend for each in processors if hasattr(each, "_attention_backend")}


def compiled_of(transformer) -> set[str]:
    return {type(module).__name__ for module in transformer.modules() if module._compiled_call_impl is not None}


def latents_of(trainer) -> torch.Tensor:
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log["ratio_deviation_on_policy/step_1"] == 0 and log["grad_norm"] > 0
    return torch.cat([entry["step"].prev_sample.flatten() for entry in entries_of(trainer.round)])


@pytest.mark.parametrize("name", CASES)
def test_every_family(name, folder_of):
    case = CASES[name]
    transformer = load_pipeline(folder_of(case.builder, **case.options), torch.float32).transformer
    set_kernels(transformer, None, compile_blocks=True)
    assert compiled_of(transformer) == set(
        transformer._no_split_modules or transformer._repeated_blocks
    ) and backends_of(transformer) <= {None}
    if case.pipeline not in ("StableDiffusion3Pipeline", "QwenImage21Pipeline"):  # which always call PyTorch's own
        set_kernels(transformer, "_native_math", compile_blocks=False)
        assert backends_of(transformer) == {NATIVE} and kernels() == [SDPBackend.MATH]
        set_kernels(transformer, "flex", compile_blocks=False)
        assert backends_of(transformer) == {AttentionBackendName.FLEX} and len(kernels()) > 1
        assert (
            _AttentionBackendRegistry.get_active_backend()[0] != AttentionBackendName.FLEX
        )  # other models keep theirs


@pytest.mark.parametrize("name", ["_native_flash", "_native_efficient", "_native_cudnn"])
def test_a_preferred_kernel_leaves_the_others_to_rewards(tiny_flux, name):
    transformer, seen = load_pipeline(str(tiny_flux), torch.float32).transformer, []
    set_kernels(transformer, name, compile_blocks=False)
    transformer.transformer_blocks[0].attn.norm_q.register_forward_hook(lambda *args: seen.append(kernels()))
    attention_dtypes(transformer)
    (during,) = seen
    assert during[0] is kernels_module._SDPA_KERNELS[name] and set(kernels_module._SDPA_KERNELS.values()) <= set(
        during
    )


def attention_dtypes(transformer) -> list[tuple]:
    """Call a FLUX transformer as training does, with the norms in float32 as CUDA's autocast computes them."""
    dtypes, attention = [], functional.scaled_dot_product_attention

    def record(query, key, value, **kwargs):
        dtypes.append((query.dtype, key.dtype, value.dtype))
        return attention(query, key, value, **kwargs)

    config = transformer.config
    with training_precision(torch.bfloat16), patch.object(functional, "scaled_dot_product_attention", record):
        transformer(
            hidden_states=torch.randn(1, 4, config.in_channels), timestep=torch.ones(1), guidance=torch.ones(1),
            encoder_hidden_states=torch.randn(1, 3, config.joint_attention_dim),
            pooled_projections=torch.randn(1, config.pooled_projection_dim),
            img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3),
        )  # fmt: skip
    return dtypes


def test_attention_gets_one_dtype(tiny_flux):
    """Flash attention takes no float32, which autocast makes of the queries and keys on CUDA."""
    transformer = load_pipeline(str(tiny_flux), torch.bfloat16).transformer
    assert (torch.float32, torch.float32, torch.bfloat16) in attention_dtypes(transformer)
    set_kernels(transformer, None, compile_blocks=False)
    assert set(attention_dtypes(transformer)) == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize("bf16", [False, True])
def test_the_ratio_is_one_with_each_backend(make_trainer, bf16):
    latents = {}
    for name in (None, "native", "_native_math"):
        trainer = make_trainer(attention_backend=name, bf16=bf16, max_steps=1)
        assert backends_of(trainer.model) == {name and NATIVE}
        assert (kernels() == [SDPBackend.MATH]) is (name == "_native_math")
        latents[name] = latents_of(trainer)
    assert torch.equal(latents["native"], latents[None])  # diffusers' default
    assert not torch.equal(latents["_native_math"], latents[None])
    torch.testing.assert_close(latents["_native_math"], latents[None], rtol=0.1, atol=0.1 if bf16 else 1e-3)


def test_the_reference_is_compiled_too(make_trainer):
    settings = {"compile_repeated_blocks": True, "attention_backend": "_native_math"}
    trainer = make_trainer(peft_config=None, beta=0.1, **settings)
    for model in (trainer.model, trainer.ref_model):
        assert compiled_of(model) == set(model._no_split_modules) and backends_of(model) == {NATIVE}
    assert inductor.emulate_precision_casts is True and torch._dynamo.config.recompile_limit > 8


@pytest.mark.slow
def test_the_ratio_is_one_with_compiled_blocks(make_trainer, monkeypatch):
    monkeypatch.setattr(inductor.cpp, "simdlen", 1)  # g++ takes less time over scalars
    counters.clear()
    latents_of(make_trainer(compile_repeated_blocks=True, bf16=True, max_steps=1, gradient_checkpointing=False))
    assert counters["stats"]["unique_graphs"] >= 4  # two kinds of blocks, with and without gradients

# SPDX-License-Identifier: Apache-2.0
"""FSDP2, on two processes: the training is that of DDP, resumes exactly, and saves what DDP saves."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from kill_runs import Run, check_same_end, copy_run
from launching import fork_context
from paco_trl.checkpointing.weights import EMA, gather_weights, load_weights, local_weights, use_weights
from paco_trl.rewards import redness_reward
from paco_trl.utils.fsdp import gather_state, kept_gathered, load_state, model_class, reshard
from testing_utils import draw


# The reward does not draw random numbers, which processes may do in another order
SETTINGS = {
    "max_steps": 4, "processes": 2, "reward_funcs": redness_reward, "eval_steps": 2, "save_steps": 1, "beta": 0.01,
    "learning_rate": 1e-3,
}  # fmt: skip
KINDS = {
    "lora": {},
    "full": {
        "peft_config": None,
        "gradient_checkpointing": True,
        "ds3_gather_for_generation": False,
        "per_device_train_batch_size": 2,
    },
    "awm": {"loss_type": "awm", "sde_steps": [1], "num_sde_steps": None, "eval_strategy": "no", "bf16": True},
}


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tiny_flux, tmp_path_factory) -> tuple[Run, Run, dict]:
    """A run with DDP and one with FSDP2, and their settings."""
    folder, settings = tmp_path_factory.mktemp(request.param), SETTINGS | KINDS[request.param]
    ddp, fsdp2 = (
        Run(fork_context(), tiny_flux, folder / name, fsdp2=name == "fsdp2", **settings) for name in ("ddp", "fsdp2")
    )
    ddp.wait()
    return ddp, fsdp2, settings


def difference(one: dict, two: dict) -> float:
    assert one.keys() == two.keys()
    return max((one[name].float() - value.float()).abs().max().item() for name, value in two.items())


@pytest.mark.slow
class TestTwoProcesses:
    def test_the_training_is_that_of_ddp(self, runs, tiny_flux):
        ddp, fsdp2, settings = runs
        states = [[run.state(rank) for rank in range(2)] for run in (ddp, fsdp2)]
        for entry, expected in zip(*(state[0]["history"] for state in reversed(states)), strict=True):
            assert entry.keys() == expected.keys()
            # Small differences of pixels, in which the rounding of summed gradients shows
            gains = {name for name in expected if name.startswith("eval_grid_artifact_gain")}
            assert {name: entry[name] for name in gains} == pytest.approx({n: expected[n] for n in gains}, abs=2e-4)
            entry, expected = ({n: v for n, v in logged.items() if n not in gains} for logged in (entry, expected))
            assert entry == pytest.approx(expected, rel=1e-3, abs=1e-6)
        # Each process has a part of what it had whole
        sizes = [sum(weight.numel() for weight in state["policy"].values()) for state in (*states[0], *states[1])]
        assert sizes[0] == sizes[1] == sizes[2] + sizes[3] and sizes[2] > 0 < sizes[3]
        assert sum(weight.numel() for weight in states[1][0]["ema"].values()) == sizes[2]
        # Policy, averages, what is exported, and the optimizer; the same files, none of them of all weights
        files = {path.relative_to(ddp.output) for path in ddp.output.rglob("*.safetensors")}
        assert files == {path.relative_to(fsdp2.output) for path in fsdp2.output.rglob("*.safetensors")}
        for file in files:
            assert difference(load_file(ddp.output / file), load_file(fsdp2.output / file)) < 1e-5, file
        folders = [run.output / "checkpoint-4" for run in (ddp, fsdp2)]
        assert len({tuple(sorted(path.name for path in folder.iterdir())) for folder in folders}) == 1
        moments = [torch.load(folder / "optimizer.pt")["state"] for folder in folders]
        assert moments[0].keys() == moments[1].keys()
        assert all(difference(moments[0][index], moments[1][index]) < 1e-6 for index in moments[0])
        assert all(moments[0][index]["exp_avg"].abs().max() > 0 for index in moments[0])
        first, last = (load_file(fsdp2.output / f"checkpoint-{step}" / "policy.safetensors") for step in (1, 4))
        assert difference(first, last) > 1e-3

    def test_killed(self, runs, tiny_flux, tmp_path):
        _, fsdp2, settings = runs
        output = tmp_path / "out"
        kill = {"function": "write_record", "count": 1}
        run = Run(
            fork_context(), tiny_flux, output, fsdp2=True, saving={"rank": 1, "step": 4, "kill": kill}, **settings
        )
        run.processes[1].join(200)
        run.processes[0].join(3)
        run.kill()
        assert run.was_killed[1]
        # In the middle of a round
        check_same_end(Run(fork_context(), tiny_flux, output, fsdp2=True, resume=True, **settings), fsdp2)

    def test_saved_weights_generate_what_those_of_ddp_do(self, runs, tiny_flux):
        images = []
        for run in runs[:2]:
            pipeline = FluxPipeline.from_pretrained(tiny_flux)
            before = draw(pipeline)
            if (run.output / "transformer").exists():
                pipeline.transformer = FluxTransformer2DModel.from_pretrained(run.output, subfolder="transformer")
                config = (run.output / "transformer" / "config.json").read_text()
                assert '"_class_name": "FluxTransformer2DModel"' in config
            else:
                pipeline.load_lora_weights(run.output)
            images.append(draw(pipeline, output_type="np"))
            assert not np.array_equal(draw(pipeline), before)
        assert np.abs(images[0] - images[1]).max() < 1e-4


@pytest.mark.slow
def test_a_run_goes_on_with_fsdp2(tiny_flux, tmp_path):
    """A checkpoint does not tell how weights were divided."""
    ddp = Run(fork_context(), tiny_flux, tmp_path / "ddp", **SETTINGS)
    ddp.wait()
    output = copy_run(ddp.output, tmp_path / "fsdp2", [2])
    fsdp2 = Run(fork_context(), tiny_flux, output, fsdp2=True, resume=True, **SETTINGS)
    assert fsdp2.state()["global_step"] == 4
    folders = (ddp.output / "checkpoint-2", ddp.output, fsdp2.output)
    begun, expected, final = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert difference(final, expected) < 1e-6 < 1e-4 < difference(begun, expected)


# ---- In one process ----


@pytest.fixture
def transformer(tiny_flux):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = FluxTransformer2DModel.from_pretrained(tiny_flux, subfolder="transformer")
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block)
    yield fully_shard(model)
    dist.destroy_process_group()


def predict(model) -> torch.Tensor:
    config, generator = model.config, torch.Generator().manual_seed(0)
    states = torch.randn(1, 4, config.in_channels, generator=generator)
    text = torch.randn(1, 3, config.joint_attention_dim, generator=generator)
    pooled = torch.randn(1, config.pooled_projection_dim, generator=generator)
    arguments = {"guidance": torch.ones(1)} if config.guidance_embeds else {}
    return model(
        hidden_states=states, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.ones(1),
        img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3), **arguments,
    ).sample  # fmt: skip


def is_gathered(model) -> list[bool]:
    """Of each block, whether it has whole weights."""
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)][1:]
    return [not isinstance(next(block.parameters()), DTensor) for block in blocks]


def test_weights_stay_gathered(transformer):
    class Plugin:
        reshard_after_forward = True

    class State:
        fsdp_plugin = Plugin

    class Accelerator:
        state = State

    with torch.no_grad():
        predict(transformer)
        assert len(is_gathered(transformer)) > 1 and not any(is_gathered(transformer))
        with kept_gathered(transformer, Accelerator):
            expected = predict(transformer)
            assert all(is_gathered(transformer))
            assert torch.equal(predict(transformer), expected)
        assert not any(is_gathered(transformer))
        assert all(isinstance(parameter, DTensor) for parameter in transformer.parameters())
        assert torch.equal(predict(transformer), expected)
        assert not any(is_gathered(transformer))


def test_other_weights_are_used_where_the_last_forward_left_gathered_ones(transformer):
    with torch.no_grad():
        before = predict(transformer)
        assert not isinstance(transformer.x_embedder.weight, DTensor)  # left so by it
        own = {name: weight.clone() for name, weight in local_weights(transformer, 0).items()}
        other = {name: weight * 1.1 for name, weight in own.items()}
        with use_weights(transformer, other, 0):
            reshard(transformer)  # as a backward pass does
            used = predict(transformer)
        assert (used - before).abs().max() > 1e-3
        assert torch.equal(predict(transformer), before)
        full = gather_weights(transformer, other, 0)
        load_weights(transformer, full, 0)
        assert torch.equal(predict(transformer), used)
        average = EMA(transformer, 0.9, 0, offload=False)
        load_weights(transformer, gather_weights(transformer, own, 0), 0)
        average.step()
        name = "x_embedder.weight"
        torch.testing.assert_close(average.state_dict()[name], 0.9 * other[name] + 0.1 * own[name])


def test_the_optimizer_is_saved_as_that_of_one_process(transformer, tiny_flux):
    plain = FluxTransformer2DModel.from_pretrained(tiny_flux, subfolder="transformer")
    assert model_class(transformer) is model_class(plain) is type(plain) is not type(transformer)
    states = []
    for model in (plain, transformer):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        predict(model).square().mean().backward()
        optimizer.step()
        states.append(gather_state(optimizer, keep=True))
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for index, expected in states[0]["state"].items():
        for name, value in expected.items():
            assert type(states[1]["state"][index][name]) is torch.Tensor
            torch.testing.assert_close(states[1]["state"][index][name], value)
    again = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
    load_state(again, copy.deepcopy(states[0]))
    moments = [state["exp_avg"] for state in again.state.values()]
    assert all(isinstance(moment, DTensor) for moment in moments) and len(moments) == len(states[0]["state"])
    assert torch.equal(moments[0].full_tensor(), states[0]["state"][0]["exp_avg"])

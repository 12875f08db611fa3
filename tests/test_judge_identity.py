# SPDX-License-Identifier: Apache-2.0
"""What tells a judge from another one of the same name, and what is known of one before its weights are read."""

import json
import shutil

import pytest
import torch
from transformers import AutoProcessor

from paco_trl import PaCoReward
from paco_trl.rewards import paco_reward
from paco_trl.tiny import build_tiny_qwen2_5_vl
from paco_trl.utils.fingerprint import weights_fingerprint


class TestFingerprint:
    def test_it_follows_the_weights(self, tiny_qwen, tmp_path):
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        before = judge.fingerprint
        assert len(before) == 16
        copy = tmp_path / "another" / "place"
        shutil.copytree(tiny_qwen, copy)
        assert PaCoReward.from_pretrained(copy, device="cpu").fingerprint == before  # the place does not matter
        other = build_tiny_qwen2_5_vl(tmp_path / "other", seed=1)
        assert PaCoReward.from_pretrained(other, device="cpu").fingerprint != before
        assert PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="bfloat16").fingerprint != before
        with torch.no_grad():
            judge.model.get_output_embeddings().weight.add_(1e-3)
        assert judge.fingerprint != before

    def test_large_weights_are_sampled_everywhere(self):
        module = torch.nn.Linear(200, 200, bias=False)
        found = {weights_fingerprint(module)}
        for part in (slice(0, 100), slice(100, 200)):
            with torch.no_grad():
                module.weight[part] += 1
            found.add(weights_fingerprint(module))
        assert len(found) == 3


class TestProcessor:
    def test_an_adapter_without_one_takes_that_below_it(self, tiny_qwen, tmp_path):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(tiny_qwen)
        adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        adapter.peft_config["default"].base_model_name_or_path = str(tiny_qwen)
        adapter.save_pretrained(tmp_path / "adapter")
        found = PaCoReward.load_processor(tmp_path / "adapter")
        assert type(found) is type(PaCoReward.load_processor(tiny_qwen))

    def test_a_tokenizer_without_yes_is_found_before_the_weights_are_read(self, tiny_qwen, tmp_path, monkeypatch):
        folder = tmp_path / "judge"
        shutil.copytree(tiny_qwen, folder)
        processor = AutoProcessor.from_pretrained(folder)
        vocabulary = processor.tokenizer.get_vocab()
        assert "Yes" in vocabulary
        # Without the merges that make it, the text is three tokens
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        content["model"]["merges"] = []
        content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] not in ("Yes", "No")]
        file.write_text(json.dumps(content), encoding="utf-8")
        read = []
        monkeypatch.setattr(
            paco_reward.AutoModelForImageTextToText, "from_pretrained", lambda *args, **kwargs: read.append(args)
        )
        for load in (PaCoReward.load_processor, PaCoReward.from_pretrained):
            with pytest.raises(ValueError, match="encodes 'Yes' as"):
                load(folder)
        assert read == []

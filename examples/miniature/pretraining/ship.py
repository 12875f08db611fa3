# SPDX-License-Identifier: Apache-2.0
"""
Put the trained toy models into `examples/miniature/weights`, small enough for the repository.

    PYTHONPATH=examples python -m miniature.pretraining.ship --models toy-models
"""

import argparse
import json
import shutil
from pathlib import Path

from diffusers import FluxKontextPipeline, FluxPipeline
from transformers import CLIPModel, CLIPProcessor, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from ..models import (
    WEIGHTS,
    toy_clip_path,
    toy_edit_judge_path,
    toy_flux_path,
    toy_judge_path,
    toy_kontext_path,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("toy-models"))
    models = parser.parse_args().models
    shutil.rmtree(WEIGHTS, ignore_errors=True)

    pipeline = FluxPipeline.from_pretrained(models / "flux")
    # Diffusers loads these in float32 whatever their stored dtype; the parts of transformers stay unchanged
    pipeline.transformer.half()
    pipeline.vae.half()
    pipeline.save_pretrained(toy_flux_path())
    editor = FluxKontextPipeline.from_pretrained(models / "kontext")
    editor.transformer.half()
    editor.save_pretrained(toy_kontext_path())
    shutil.rmtree(toy_kontext_path() / "vae")  # the FLUX's
    for path in WEIGHTS.rglob("*.json"):  # diffusers writes the path that they were loaded from
        config = json.loads(path.read_text(encoding="utf-8"))
        if "_name_or_path" in config:
            del config["_name_or_path"]
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    CLIPModel.from_pretrained(models / "clip").half().save_pretrained(toy_clip_path())  # ClipTReward loads float32
    CLIPProcessor.from_pretrained(models / "clip").save_pretrained(toy_clip_path())
    Qwen2_5_VLForConditionalGeneration.from_pretrained(models / "qwen2.5-vl").save_pretrained(toy_judge_path())
    Qwen2_5_VLProcessor.from_pretrained(models / "qwen2.5-vl").save_pretrained(toy_judge_path())
    Qwen2_5_VLForConditionalGeneration.from_pretrained(models / "edit-judge").half().save_pretrained(
        toy_edit_judge_path()
    )
    Qwen2_5_VLProcessor.from_pretrained(models / "edit-judge").save_pretrained(toy_edit_judge_path())
    size = sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file())
    print(f"{size / 2**20:.2f} MiB in {WEIGHTS}")


if __name__ == "__main__":
    main()

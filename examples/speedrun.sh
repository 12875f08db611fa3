#!/bin/bash
# Trains FLUX.2-klein-base-4B on 18 of the packaged prompts, compares it with the base model on the six others, and publishes
# the adapter and a Space to try it. It takes one GPU with 24 GB that computes in bfloat16: at least three hours on an
# RTX 4090 and four on an L4, by arithmetic (it was not run on a GPU yet). docs/speedrun.md has machines to run it on.
#
#     pip install "paco_trl[apps,quantization] @ git+<address of this repository>"
#     hf auth login
#     bash speedrun.sh USER/paco-klein    # again, to resume
#
# What follows the repository are further options of the training. EVALUATION has those of the evaluation.
set -euo pipefail
repository=${1:?"the repository is missing: bash speedrun.sh USER/paco-klein"}
name=${repository##*/}

# 1. Train: 20 rounds of nine sets of images in 16 versions, which a judge of consistency and CLIP score
paco-trl grpo --config flux.2-klein-4b-24gb --dataset_name demo --dataset_split "train[:18]" \
    --output_dir "$name" --resume_from_checkpoint auto --push_to_hub True --hub_model_id "$repository" "${@:2}"

# 2. Evaluate: base model and adapter from the same noise, on prompts that it was not trained on
paco-trl evaluate prompts --adapter "$name" --dataset_name demo --dataset_split "train[18:]" \
    --rewards consistency clip_t pick_score --num_generations 2 --output_dir "$name-evaluation" \
    ${EVALUATION:---judge_quantization nf4}

# 3. Publish: the adapter with its card, then a Space that shows both models side by side
paco-trl push "$name" --hub_model_id "$repository"
if [ ! -e "$name-space/app.py" ]; then
    paco-trl space "$repository" --output_dir "$name-space"
fi
hf upload "$repository-space" "$name-space" --repo-type space

echo "Done in $((SECONDS / 60)) min. Before and after: $name-evaluation/$name/report.html"

#!/usr/bin/env bash
# Trains an EAGLE-3 head for Llama-3.1-8B-Instruct, from prompts to a head with its card, and exports it for vLLM:
#     bash examples/train_llama31_8b.sh           # one GPU of 80 GB
#     GPUS=8 bash examples/train_llama31_8b.sh    # eight GPUs, each with its own copy of the target
# The same command resumes an interrupted run. Options are passed on to `eagle3-hf train`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${TARGET:-meta-llama/Llama-3.1-8B-Instruct}
prompts=${PROMPTS:-HuggingFaceH4/ultrachat_200k:train_sft}
work=${WORK:-runs/llama31-8b}
gpus=${GPUS:-1}
mkdir -p "$work"

eagle3_hf=(python -m eagle3_hf.cli)
launch=("${eagle3_hf[@]}")
if [ "$gpus" -gt 1 ]; then
    launch=(accelerate launch --config_file "$here/configs/ddp.yaml" --num_processes "$gpus" -m eagle3_hf.cli)
fi

# The target itself answers the prompts: a head should be trained on its output, not on another model's.
"${launch[@]}" datagen "$target" "$work/chats.jsonl" --prompts "$prompts" --max_new_tokens "${NEW_TOKENS:-1024}" \
    --batch_size "${BATCH:-64}"
"${launch[@]}" train "$here/configs/llama31_8b.yaml" --target "$target" --train_data "$work/chats.jsonl" \
    --output_dir "$work/head" "$@"
"${eagle3_hf[@]}" convert "$work/head" "$work/vllm" --to vllm --target "$target" --dtype bfloat16 --overwrite

#!/usr/bin/env bash
# Trains an EAGLE-3 head for a 70B target on one machine with 8 GPUs of 80 GB, from prompts to a head with its card:
#     SERVER=http://localhost:8000/v1 bash examples/train_70b_device_map.sh
# SERVER serves the target while the answers are written (such as `vllm serve MODEL --tensor-parallel-size 8`), which is
# several times faster than this process. Stop it when the script says so. Without SERVER the target is loaded here.
# The same command resumes an interrupted run. Options are passed on to `eagle3-hf train`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${TARGET:-meta-llama/Llama-3.3-70B-Instruct}
prompts=${PROMPTS:-HuggingFaceH4/ultrachat_200k:train_sft[:50000]}
work=${WORK:-runs/llama33-70b}
mkdir -p "$work"
eagle3_hf=(python -m eagle3_hf.cli)

"${eagle3_hf[@]}" datagen "$target" "$work/chats.jsonl" --prompts "$prompts" --max_new_tokens "${NEW_TOKENS:-1024}" \
    ${SERVER:+--server "$SERVER"} --device_map "${DEVICE_MAP:-auto}"
if [ -n "${SERVER:-}" ] && [ -t 0 ]; then
    read -rp "The answers are written. Stop the server, its GPUs are needed now, and press Enter. "
fi
"${eagle3_hf[@]}" train "$here/configs/llama33_70b.yaml" --target "$target" --train_data "$work/chats.jsonl" \
    --device_map "${DEVICE_MAP:-balanced_low_0}" --output_dir "$work/head" "$@"
for engine in vllm sglang; do
    "${eagle3_hf[@]}" convert "$work/head" "$work/$engine" --to $engine --target "$target" --dtype bfloat16 --overwrite
done

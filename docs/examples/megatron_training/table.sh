#!/usr/bin/env bash
# Every verdict of the table in docs/attach.md: bash docs/examples/megatron_training/table.sh [FOLDER]
# Layouts of a dense model and of one with experts, float32 and bfloat16; then layouts that all begin with one
# checkpoint, and runs that go on from it against one that was never interrupted.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$here/output}"
mkdir -p "$folder"
worst=0

align() { # NAME OVERRIDES...: goes on after a verdict, and keeps the worst exit code
    local code=0
    mock-scheduler align "$here/align.yaml" --output-dir "$folder/$1" "${@:2}" || code=$?
    worst=$((code > worst ? code : worst))
}

experts=(options.experts=4 'align.candidates=[{name: again}]' 'align.matrix.layouts=[pp2,dp2-ep2,tp2-sp-ep2]')
for precision in float32 bfloat16; do
    align "dense-$precision" "precision=$precision"
    align "experts-$precision" "precision=$precision" "${experts[@]}"
done

checkpoint="$folder/checkpoint"
if [[ ! -f "$checkpoint/latest_checkpointed_iteration.txt" ]]; then
    torchrun --standalone --nproc-per-node 1 "$here/pretrain_gpt.py" --host-layers --train-iters 10 \
        --save "$checkpoint" --save-interval 3 --exit-interval 3 --ckpt-format torch_dist
fi
align loaded "options.load=$checkpoint" 'align.candidates=[{name: again}]' 'align.matrix.layouts=[tp2,pp2,dp2,tp2-pp2]'
from="'begins_at=3', 'options.load=$checkpoint'"
tp2="'parallel.tensor_model_parallel_size=2'"
align resumed first_step=3 max_steps=5 'align.matrix.layouts=[]' \
    "align.candidates=[{name: one, overrides: [$from]}, {name: tp2, overrides: [$from, $tp2]}]"
exit "$worst"

#!/usr/bin/env bash
# The main job, end to end: a language-model policy plays FrozenLake and trains by GRPO while its rollouts are recorded;
# the same training is replayed under other layouts without any rollout; each replay gets a verdict and what proves it.
# docs/tutorial.md says how to read it.
#   launch/quickstart.sh [a.b=c ...]          for example max_steps=2, which is quicker
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_venv.sh

output="${MOCK_SCHEDULER_OUTPUT:-./output}/quickstart-align"
status=0
# Two runs at a time: while one waits for its ranks or is compared, another computes.
.venv/bin/mock-scheduler align quickstart --output-dir "$output" --overwrite align.at_once=2 "$@" || status=$?

if [[ -f "$output/recording/recording.json" ]]; then
    echo
    echo "One recorded episode, as the policy played it:"
    .venv/bin/mock-scheduler show "$output/recording" --row best
fi
if [[ -f "$output/tp2-pp2/ledger.json" ]]; then
    echo
    echo "What the replay under tp2 pp2 built and called (end of $output/tp2-pp2/run.log):"
    sed -n '/^ *Ledger/,$p' "$output/tp2-pp2/run.log"
fi
exit "$status"

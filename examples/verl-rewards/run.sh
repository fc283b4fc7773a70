#!/bin/sh
# verl with rewards of `tidemill serve-rewards`; further options as ever: sh examples/verl-rewards/run.sh OPTIONS
export TIDEMILL_REWARDS_URL="${TIDEMILL_REWARDS_URL:-http://127.0.0.1:8440}"
exec python -m verl.trainer.main_ppo \
  reward.custom_reward_function.path=pkg://tidemill.services.reward.adapters \
  reward.custom_reward_function.name=compute_score \
  algorithm.adv_estimator=grpo "$@"

"""The one table of metric names: unit, reduction, meaning. docs/metrics.md is made from it."""

import sys
from pathlib import Path

from areal_ray.telemetry.metrics import MetricRegistry, MetricSpec, Reduction, metrics_page

_TABLE = """
reward/mean | | mean | Reward as scored, over the episodes trained on; before any shaping.
reward/group_std | | mean | Standard deviation of the reward within a group, mean over groups.
reward/min | | min | Smallest reward as scored.
reward/max | | max | Largest reward as scored.
reward/shaped_mean | | mean | Reward after objective.reward_shaping, if any; before any norm.
reward/chosen_mean | | mean | DPO, reward model: reward of the better answers of the pairs.
reward/rejected_mean | | mean | The same of the worse answers.
reward/margin_mean | | mean | The difference of the two.
reward/equal_groups | groups | sum | Groups whose siblings all have one reward: they teach nothing.
reward/scored_episodes | episodes | sum | Episodes with a reward.
reward/unscored_episodes | episodes | sum | Episodes whose reward raised, timed out or abstained.

eval/accuracy_fraction | fraction | last | Held-out episodes with a reward of 1 or more, or pairs.
eval/pass_fraction | fraction | last | pass@n: held-out tasks with at least one such episode.
eval/reward_mean | | last | Mean reward of the held-out episodes that were scored.
eval/episodes | episodes | last | Held-out episodes finished.
eval/failed_episodes | episodes | last | Held-out episodes without a reward; counted as not solved.
eval/sampled_tokens | tokens | last | Tokens sampled by the evaluation.
eval/pairs | pairs | last | DPO, reward model: held-out pairs looked at.
eval/loss | | last | The loss on held-out pairs.
eval/margin_mean | | last | Reward of the better held-out answer less that of the worse.
eval/wall_s | s | last | From the first held-out episode or pair to the last.

bounds/candidate_accuracy_fraction | fraction | last | Held-out, of a step's weights when judged.
bounds/refused_versions | versions | sum | 1 when what a step made was refused and undone.

staleness/mean_versions | versions | mean | Learner version - oldest version trained on, by group.
staleness/max_versions | versions | max | Largest staleness of a group trained in the step.
staleness/bound_versions | versions | last | admission.max_head_offpolicyness; absent if unlimited.
staleness/token_mean_versions | versions | mean | Mean staleness of the trained tokens.
staleness/token_max_versions | versions | max | Largest staleness of a trained token.
staleness/mixed_episodes | episodes | sum | Trained episodes sampled by more than one version.

learner/loss | | mean | The loss that was minimised, as its global mean.
learner/grad_norm_max | | max | Largest gradient norm before clipping, over the updates.
learner/lr | | last | Learning rate of the last update.
learner/entropy_nats | nats | mean | Entropy of the policy, mean over computed tokens.
learner/ratio_mean | | mean | exp(policy - old log-prob), as the loss takes it; computed tokens.
learner/ratio_max | | max | The largest of these.
learner/policy_kl_nats | nats | mean | Estimated KL between proximal policy and policy.
learner/clipped_fraction | fraction | mean | Tokens whose ratio the clip bounds, gradient and all.
learner/dual_clipped_fraction | fraction | mean | Tokens held by the dual clip.
learner/behaviour_weight_mean | | mean | exp(proximal - behaviour log-prob), before cap or mask.
learner/behaviour_weight_max | | max | Largest behaviour weight, before cap or mask.
learner/used_behaviour_weight_mean | | mean | Behaviour weights as the loss used them, capped.
learner/behaviour_kl_nats | nats | mean | KL(behaviour, proximal), or to policy if ratios are so.
learner/rejected_fraction | fraction | mean | Tokens that rejection_sampling masks or clamps.
learner/trained_tokens | tokens | sum | Tokens in the loss: neither prompt nor padding.
learner/teaching_tokens | tokens | sum | Trained tokens whose advantage is not zero.
learner/computed_tokens | tokens | sum | Tokens of forward passes, a shared prompt once.
learner/padded_tokens | tokens | sum | Tokens of forward passes, padding included.
learner/masked_stale_tokens | tokens | sum | Sampled tokens left out of the loss for being too old.
learner/sequences | | sum | Trajectories (branches count) that entered the step.
learner/left_out_episodes | episodes | sum | Episodes without a reward, or cut by mask_truncated.
learner/equal_reward_groups | groups | sum | Groups of the step whose shaped rewards are equal.
learner/micro_batches | | sum | Forward and backward passes.
learner/updates | updates | sum | Optimizer updates taken.
learner/empty_updates | updates | sum | Minibatches without an update: nothing to train on.
learner/non_finite_updates | updates | sum | Minibatches without an update: gradient not finite.
learner/skipped_steps | steps | sum | 1 when the step took no update at all.
learner/step_s | s | mean | Seconds of the train step.
learner/proximal_s | s | mean | Seconds of the train step spent on proximal log-probs.
learner/tokens_per_s | tokens_per_s | mean | learner/trained_tokens over learner/step_s.
learner/memory_bytes | bytes | max | Peak resident memory of the first rank; GPU memory apart.
learner/device_memory_bytes | bytes | max | Peak GPU memory, of the fullest rank.
learner/parameter_bytes | bytes | last | Parameters of all models on the fullest rank.
learner/optimizer_bytes | bytes | last | Optimizer states on the fullest rank.
learner/activation_bytes | bytes | last | What a rank's largest pass kept for its backward pass.
learner/token_accuracy_fraction | fraction | mean | SFT: targets that are the model's first choice.
learner/pair_accuracy_fraction | fraction | mean | Trained pairs whose better answer scored higher.
learner/kl_reference_nats | nats | mean | Estimated KL between policy and reference model.
learner/kl_teacher_nats | nats | mean | Estimated KL between policy and teacher.
learner/value_loss | | mean | The critic's loss, mean over its updates.
learner/value_explained_variance_fraction | fraction | mean | Returns that the critic foresaw.

mismatch/kl_nats | nats | mean | KL(rollout engine, learner) on tokens of the learner's own version.
mismatch/fresh_tokens | tokens | sum | Tokens of the learner's own version: kl_nats rests upon them.
mismatch/ratio_mean | | mean | exp(learner - rollout log-prob), mean over the same tokens.
mismatch/ratio_max | | max | The largest of these.
mismatch/stale_kl_nats | nats | mean | KL(rollout engine, learner) on tokens of older versions.
mismatch/stale_ratio_mean | | mean | exp(learner - rollout log-prob) on tokens of older versions.
mismatch/stale_ratio_max | | max | The largest of these.

queue/depth_groups | groups | last | Finished groups waiting for the learner after it took its own.
queue/dropped_groups | groups | sum | Groups too old at consumption, thrown away.
queue/dropped_fraction | fraction | last | Since the start: too old at consumption, of all consumed.
queue/wait_s | s | mean | From a group's arrival to its consumption.

admission/headroom_groups | groups | last | Groups that may start now.
admission/running_groups | groups | last | Groups being rolled out.
admission/admitted_groups | groups | sum | Groups started since the row before.
admission/filtered_groups | groups | sum | Groups refused as they teach nothing (dynamic filter).
admission/retried_groups | groups | sum | Groups started again after a failure.

ledger/admitted_groups | groups | last | Since the start; = trained + dropped + failed + in flight.
ledger/trained_groups | groups | last | Since the start.
ledger/dropped_groups | groups | last | Since the start: too old, or filtered.
ledger/failed_groups | groups | last | Since the start: no usable result; the task was retried.
ledger/in_flight_groups | groups | last | Admitted and without an ending yet.

rollout/sampled_tokens | tokens | sum | Tokens the policy sampled, of groups that arrived.
rollout/prompt_tokens | tokens | sum | Prompt and tool tokens of episodes that arrived.
rollout/tokens_per_s | tokens_per_s | mean | Tokens sampled by the fleet per second of wall time.
rollout/running_requests | requests | last | Turns being sampled, over all replicas.
rollout/waiting_requests | requests | last | Turns waiting for a slot, over all replicas.
rollout/busy_fraction | fraction | mean | Wall time that replicas spend in prefill and decode.
rollout/replicas | replicas | last | Replicas that serve.
rollout/restarts | restarts | sum | Replicas that were replaced.
rollout/version_spread_versions | versions | max | Newest less oldest version served in the fleet.

publish/wall_s | s | mean | From the end of the update until the version is committed.
publish/stage_s | s | mean | Seconds of a publish: until every staged byte was verified.
publish/swap_s | s | mean | Seconds of a publish: from there until every replica proved its swap.
publish/canary_s | s | max | Slowest replica's check of its live weights; it samples meanwhile.
publish/probe_max_nats | nats | max | Canary: largest difference of a log-prob, engine to learner.
publish/probe_mean_nats | nats | mean | Canary: mean of the absolute differences, over replicas.
publish/differing_replicas | replicas | sum | Replicas that swapped and differed; refreshed since.
publish/engine_idle_s | s | mean | Seconds a replica stood still, mean over replicas.
publish/bytes | bytes | sum | Bytes of one weight set, times the publishes.
publish/bytes_per_s | bytes_per_s | mean | Bytes of one weight set over publish/stage_s.
publish/count_publishes | publishes | sum | Versions committed.
publish/failed_publishes | publishes | sum | Publishes that kept the old version, or lost a replica.

agent/episodes | episodes | sum | Episodes finished, whatever their outcome.
agent/turns | turns | mean | Model calls of an episode.
agent/ok_episodes | episodes | sum | Outcome ok.
agent/truncated_episodes | episodes | sum | Outcome truncated: a token or turn limit cut it short.
agent/agent_error_episodes | episodes | sum | Outcome agent_error: the agent raised.
agent/env_error_episodes | episodes | sum | Outcome env_error: a tool or world failed.
agent/timeout_episodes | episodes | sum | Outcome timeout: over the wall-clock limit.
agent/truncated_fraction | fraction | mean | Episodes that a token or turn limit cut short.
agent/aborted_fraction | fraction | mean | Episodes whose last turn was aborted; not truncated ones.
agent/stopped_fraction | fraction | mean | Episodes that ended by themselves.
agent/branch_episodes | episodes | sum | Extra branches: histories that were rewritten, sub-agents.
agent/episode_tokens | tokens | mean | Tokens of an episode, everything the model saw.
agent/sampled_tokens | tokens | mean | Tokens the policy sampled in an episode.
agent/episode_s | s | mean | Wall time of an episode.
agent/slowest_episode_s | s | max | Wall time of the slowest episode.
agent/restarts | restarts | sum | Agent actors that were replaced.

time/step_s | s | mean | From one row to the next.
time/learner_wait_s | s | sum | Learner: waits for groups.
time/learner_train_s | s | sum | Learner: log-probs, loss, optimizer.
time/learner_judge_s | s | sum | Learner: waits for the verdict on what it made (bounds).
time/learner_publish_s | s | sum | Learner: sends weights.
time/learner_checkpoint_s | s | sum | Learner: writes a checkpoint.
time/rollout_busy_s | s | mean | Rollout: prefill and decode, mean over replicas.
time/rollout_swap_s | s | mean | Rollout: paused for a weight swap, mean over replicas.
time/rollout_idle_s | s | mean | Rollout: nothing to sample, mean over replicas.
time/agent_model_s | s | mean | Episode: waits for the model.
time/agent_tool_s | s | mean | Episode: in tools and worlds.
time/agent_reward_s | s | mean | Episode: in its reward.
time/admission_wait_s | s | sum | Task stream: waits for headroom.
time/reward_busy_s | s | sum | Reward actors: seconds spent scoring.

driver/cpu_s | s | sum | Processor seconds of the driver process.
driver/trajectory_cpu_s | s | mean | driver/cpu_s over the episodes that arrived.
driver/bytes | bytes | sum | Bytes of the summaries that came through the driver.
driver/trajectory_bytes | bytes | mean | driver/bytes over the episodes that arrived.
driver/memory_bytes | bytes | last | Resident memory of the driver.
"""


def _specs() -> list[MetricSpec]:
    rows = [line.split("|", 3) for line in _TABLE.splitlines() if line]
    return [
        MetricSpec(name.strip(), unit.strip(), Reduction(reduction.strip()), meaning.strip())
        for name, unit, reduction, meaning in rows
    ]


METRICS = MetricRegistry(_specs())
"""What may be logged. An objective or agent of your own adds with `METRICS.declare(...)`."""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(metrics_page(METRICS), encoding="utf-8")

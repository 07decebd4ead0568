"""The registry of metrics: name, unit, healthy range, meaning, and the name in TRL's PPOTrainer.

`python -m operant.metrics.registry > docs/metrics.md` writes the page. The report explains its charts with the same
sentences, and a test checks that the page is up to date.
"""

import re
from dataclasses import dataclass

_TABLE = """
# Progress
step | | | | training steps so far; each generates, scores and updates
episodes | | | episode | replies trained on so far
# Reward
reward/mean | score | rises | env/reward_mean | mean score of the judged replies, from reward and
    environment, before scaling
reward/std | score | above 0: nothing is learned from equal scores | env/reward_std | spread of those scores
reward/min | score | | | lowest of those scores
reward/max | score | | | highest of those scores
reward/scaled_mean | scaled score | | ppo/mean_scores, objective/scores | mean score after scaling, normalising and
    clipping, rewards of the environment included: the score that is trained on
reward/scaled_std | scaled score | | ppo/std_scores | spread of the scores that are trained on
reward/kl_penalty | scaled score | levels off; far above the spread of the scaled scores, training is
    mostly about KL | ppo/mean_non_score_reward,
    objective/non_score_reward (negative there) | KL penalty subtracted from the reward of a reply, mean over replies:
    coefficient times kl/paid
reward/return | scaled score | may fall while the reward rises: KL is paid for, and a normalised score is
    measured against the mean of all scores so far | objective/rlhf_reward | scaled score minus KL penalty, mean over
    replies: what each step maximises; the reward of a turn that is not trained on is discounted in it
reward/kl_penalty_std | scaled score | | | spread of that penalty over the replies
reward/return_std | scaled score | | | spread of the returns over the replies
reward/query_share | share | ..0.8 | | share of the judged scores' variance that the prompt explains (their intraclass
    correlation, at least 0), where 8 prompts or more have several judged replies: near 1, the reply hardly matters
reward/abstained | share | ..0.1 | | share of all replies on which the reward abstained; they are not trained on
reward/outcome/ok | samples | | | number of replies, over all ranks, that an isolated or tolerated reward scored
reward/outcome/error | samples | 0 | | number of replies on which the reward raised, died, or returned no valid score
reward/outcome/timeout | samples | 0 | | number of replies that were not judged in time
reward/outcome/abstain | samples | | | number of replies for which the reward returned None
reward/<part>/mean | score | | | mean of one named part of the reward, before its weight, over all replies that it
    judged; rewards of the environment are the part `world`. Absent if the reward has only one part
reward/<part>/std | score | | | spread of that part over the same replies
reward/<part>/abstained | share | ..0.1 | | share of all replies on which this part abstained
outcome/<class> | share | | | share of all replies whose `Judgement` names this outcome class; 0 if only an
    earlier step had it. At most 20 classes are named, the earliest and the most frequent; the rest are `other` together
# Distance from the reference
kl/per_reply | nats | 0..10 | objective/kl | sum over a reply of log-prob minus reference log-prob (k1), mean over
    replies: how far the policy has moved; a negative value means that sampling and scoring
    disagree
kl/per_reply_std | nats | | objective/kl_dist | spread of that sum over the replies
kl/per_token | nats | | | the same difference, mean over tokens
kl/paid | nats | | | KL penalty of a reply before its coefficient, mean over replies; equal to kl/per_reply for
    the k1 estimator
kl/k3 | nats | close to kl/per_reply | | a second estimate of the same KL, never negative: exp(-d) - 1 + d for a
    difference d, summed over a reply
kl/in_loss | nats | | | the KL term of the loss before its coefficient, mean over tokens
kl/coef | scaled score per nat | steady; a climb comes before numerical trouble | objective/kl_coef | penalty in the
    reward for one nat of KL in this step; constant where kl.control is fixed
kl/loss_coef | | | | weight of the KL term in the loss
# Policy
policy/loss | | noise around 0 | ppo/loss/policy, loss/policy_avg | the clipped objective, mean over tokens
policy/allowed_tokens | tokens | | | ids that could be drawn, mean over the drawn tokens, where a mask or truncation
    leaves some out
policy/entropy | nats | falls slowly; 0 is collapse | ppo/policy/entropy, policy/entropy_avg | entropy of the whole
    next-token distribution during the update, mean over tokens: high if the policy is undecided
policy/sampled_entropy | nats | falls slowly | objective/entropy | minus the log-prob of a reply, mean over replies
policy/clip_fraction | share | 0..0.3 | ppo/policy/clipfrac, policy/clipfrac_avg | share of tokens whose loss
    is clipped: a high share means that the steps are too large
policy/approx_kl | nats | 0..0.1 | ppo/policy/approxkl, policy/approxkl_avg | size of the update: half the squared
    change of log-prob, mean over tokens
policy/old_new_kl | nats | ..0.1 | ppo/policy/policykl | old minus new log-prob, mean over tokens
policy/old_new_k3 | nats | 0..0.1 | | the k3 estimate of the same divergence, never negative: early stopping
    uses it
policy/ratio_mean | | 0.9..1.1 | ppo/policy/ratio, val/ratio | new over old probability of a token, mean over tokens
policy/ratio_std | | ..0.5 | val/ratio_var (its square) | spread of those ratios over tokens
policy/ratio_min | | 0.005.. | ppo/policy/ratio | smallest ratio of the step
policy/ratio_max | | ..200 | ppo/policy/ratio | largest ratio of the step
policy/advantage_mean | | 0 if whitened | ppo/policy/advantages_mean | mean advantage over tokens, as the
    loss uses it in the first epoch
policy/advantage_std | | 1 if whitened | ppo/policy/advantages | spread of those advantages
policy/advantage_zero | share | ..0.9 | | share of replies whose advantage in the first epoch is 0 at every token:
    nothing is learned from them
policy/skipped_steps | share | 0 | | share of optimizer steps left out because their ratios were too large
# Value
value/loss | | falls, without spikes | ppo/loss/value, loss/value_avg | half the clipped squared error of the value,
    mean over tokens, before its coefficient
value/mean | scaled score | near returns/mean | ppo/val/mean | value before each token when it was sampled, mean over
    tokens
value/std | scaled score | | ppo/val/var (its square) | spread of those values over tokens
value/prediction | scaled score | near returns/mean | ppo/val/vpred | value during the update, mean over tokens
value/error | scaled score² | falls | ppo/val/error | squared distance of value and return during the update, mean over
    tokens
value/error_before | scaled score² | falls | | squared distance of value and return before the update, mean over tokens
value/clip_fraction | share | often 0.3 to 0.6 early on | ppo/val/clipfrac, val/clipfrac_avg | share of tokens whose
    value loss is clipped
value/explained_variance | | rises towards 1 | | 1 minus value/error_before over the variance of the returns, for the
    values that the advantages were computed from: 1 is a perfect critic, 0 one that predicts the mean, below 0 a worse
    one
value/explained_variance_fitted | | | ppo/val/var_explained | the same with value/error: these values are already
    fitted to the returns, so it is above 0 even for random returns
returns/mean | scaled score | | ppo/returns/mean | mean of the returns, which a critic learns, over tokens
returns/std | scaled score | | ppo/returns/var (its square) | spread of those returns
loss/total | | hardly informative: watch reward and KL | ppo/loss/total | the loss of the update: policy, value,
    entropy and KL terms with their coefficients, mean over the optimizer steps made
# Rollout
rollout/count | | | eps (a second) | number of replies of this step that are trained on
rollout/logprob_gap | nats | below 0.0001 in float32, below 0.05 in bfloat16 | | largest difference between the
    log-prob of a token when it was sampled and when it is scored with unchanged weights, in the first minibatch; of
    turns of the current weights, like the two likelihood metrics
rollout/engine_gap | nats | below 0.001 in float32, below 0.05 in bfloat16 | | difference between the log-prob of a
    token that the engine returned and the policy's own, mean over tokens of turns of the current weights. Present where
    log-probs are computed again (learner.rescore), as with engines that compute elsewhere
rollout/engine_gap_max | nats | | | largest of those differences
rollout/logprob_mean | nats | | objective/logprobs | log-prob of the sampled tokens under the whole distribution, mean
    over tokens
rollout/ref_logprob_mean | nats | | objective/ref_logprobs | the same tokens' log-prob under the reference
rollout/query_tokens | tokens | | tokens/queries_len_mean | mean length of the prompts; in an environment, of the
    prompt of each turn
rollout/query_tokens_std | tokens | | tokens/queries_len_std | spread of that length
rollout/reply_tokens | tokens | steady | tokens/responses_len_mean | mean length of the replies with their stop token;
    in an environment, of each turn. It shows rewards that favour length
rollout/reply_tokens_std | tokens | | tokens/responses_len_std | spread of that length
rollout/ended_stop | share | | val/num_eos_tokens (a count) | share of replies (turns) that ended with a stop token or
    stop string, or were chosen from a list
rollout/ended_length | share | | | share of replies (turns) that ended at the task's own length limit
rollout/turns | | | | mean number of turns per episode: 1 without an environment
rollout/dropped | share | ..0.5 | | share of all replies that were judged but not trained on, because they reached
    their length limit (on_length=drop)
rollout/too_stale | share | ..0.5 | | share of all replies that were judged but not trained on, because the weights that
    generated one of their turns are more than learner.max_staleness steps old; absent without that bound
select/share | share | above 0 | | episodes (turns) that the update learns from, of all of the step
    (learner.select): 0 if none is above the threshold, and the step changes nothing. Absent without selection
select/threshold | scaled score | rises | | the lowest score among them
select/score | scaled score | rises | | their mean score, after scaling and the KL charge
given/count | replies | | | demonstrations of the step, with a method that learns from its own replies and from them
given/logprob | nats per token | rises | | mean log-prob of a demonstrated token before the update, at
    sampling.temperature
given/loss | | falls | | mean over demonstrated tokens of the method's loss for them before its weight, such as minus
    their log-prob at sampling.temperature
rollout/staleness | steps | 0, or a few if replies are generated ahead or carried over | | steps between the weights
    that generated a turn and those before the update, mean over turns: 0 if every reply is of the current policy
rollout/staleness_max | steps | | | largest of those
rollout/carried | share | | | share of the replies that an earlier step has begun, with
    --partial-rollout-tokens: near 1 from the second step on, less where new replies have ended before older ones
rollout/importance_mean | | near 1 | | importance weight, capped, mean over tokens (learner.importance): far below 1 if
    the cap cuts much, or the replies are unlikely under the policy
rollout/importance_clipped | share | ..0.2 | | share of tokens whose importance weight is at its cap, or
    masked as it is above
rollout/ended_cut | share | | | share of episodes that a step limit cut; the value of the next state is
    added to their return
rollout/outgrown | episodes | 0 | | number of episodes that ended because their next prompt left no room for a reply in
    the model's context; the value of that state is added to their return. Absent if there are none
rollout/world_raised | episodes | 0 | | number of episodes in which the world raised an exception; like those of the two
    metrics below, they are neither judged nor trained on, and count in reward/abstained. Absent if there are none
rollout/world_crashed | episodes | 0 | | number of episodes in which the world's process died
rollout/world_timeout | episodes | 0 | | number of episodes in which the world did not answer in time
rollout/untrained | turns | | | number of turns that the world marked as not to be trained on, in the episodes that are
    trained on. Absent if there are none
rollout/unpaid | turns | 0 | | number of those turns whose reward is not trained on, because no trained turn came
    before them; reward/mean contains it. Absent if every turn is trained on
rollout/likelihood_gap | nats | 0 up to noise | | entropy of the policy plus log-prob of the token that was drawn,
    mean over the tokens of the first minibatch, with unchanged weights: 0 in expectation if this policy sampled the
    replies; above 0 if they are more likely (truncated or colder sampling), below 0 if they are less likely (hotter
    sampling, dropout, a suppressed end token, padding)
rollout/likelihood_z | standard errors | -6..6 | | the same over its standard error
# Games
game/won | share | rises | | share of the games of this step that were won, of those that are not trained on, too
game/lost | share | | | share of the games that were lost; the others were cut at their step limit
game/score | share | rises | | score of a game over the largest that it has, mean over games
game/turns | turns | | | turns of a game, those that the world played included
game/turns_to_win | turns | falls | | the same, mean over the games that were won
game/optimum_ratio | | falls towards 1 | | turns of a won game over those of its shortest solution, where that is known
game/examples | share | | | share of turns that the world itself played: examples, random and expert commands
game/states_per_1000 | states | | | different states of the games that were visited, per 1,000 turns of the step: how
    much is explored
actions/valid | share | 0.5.. | | share of the policy's commands that the game understood
actions/copied_from_prompt | share | low where actions/valid is low | | share of the policy's commands that stand in
    the prompt as they are: in a list of commands, in the text of the game, or as an earlier command
actions/empty | share | ..0.1 | | share of the policy's commands that are empty
memory/turns_fit | turns | | | earlier turns that the prompt of a turn still shows, mean over the policy's turns
memory/forgotten_tokens | tokens | | | tokens of the earlier turns that it does not show
# Text
text/empty | share | ..0.1 | | share of replies (turns) that are empty or have only spaces and . , ; : …
text/top_word | share | ..0.25 | | share of the most common word among all words
text/distinct_1 | share | steady | | number of different words over number of words, all replies of the step together
text/distinct_2 | share | steady | | the same for pairs of neighbouring words
text/repeated | share | ..0.2 | | share of a reply's word trigrams that occurred earlier in it, mean over replies
    (turns) of three words and more
text/exclamations | share | as the reference's | | share of characters that are exclamation marks
text/emojis | share | as the reference's | | share of characters that are emojis or other pictographs
text/non_letters | share | as the reference's | | share of characters other than letters, digits, space and common
    punctuation
# Supervised training
supervised/loss | nats | falls | | cross-entropy of the replies that are imitated, mean over the tokens that are
    trained on
supervised/bits_per_byte | bits | falls | | the same per byte of text: comparable between tokenizers
# Labelled replies
preference/loss | | falls | loss | the loss of a prompt's pairs, or of a good or bad reply, before weights; mean over
    the prompts with a pair, or over replies
preference/accuracy | share | 0.5.. | rewards/accuracies | share of the pairs whose order is right, mean over prompts,
    equal ones count half; in kto, and of good and bad replies, share of those on the right side of the baseline
preference/margin | | rises | rewards/margins | beta times the difference of the log-ratios of the better and the worse
    reply of a pair
preference/better | nats | a fall below 0: the better replies become less likely, too | rewards/chosen, over beta |
    log-prob minus reference log-prob of a whole reply: the better one of a pair, or a good one
preference/worse | nats | falls | rewards/rejected, over beta | the same of the worse reply of a pair, or a bad one
preference/unpaired | share | ..0.5 | | share of the prompts whose replies all have the same label or score: they teach
    nothing
preference/baseline | nats | | kl | the baseline of kto: its estimate of KL from policy to reference, from replies to
    other prompts; at least 0
preference/best | share | rises | | share of prompts where the reply with the highest score has the highest label
preference/confidence | share | as preference/accuracy | | mean over pairs of the probability of the order that the
    scores say, by Bradley-Terry: above the accuracy, the scores are too sure
preference/longer_is_better | share | below the accuracy | | share of the pairs in which the longer reply has the higher
    label: what length alone would reach
preference/prefers_longer | share | near longer_is_better | | share of the pairs in which the score prefers the longer
    reply
preference/score | score | | | score of a reply, mean over prompts
# Outcome critics
critic/loss | nats | falls | | cross-entropy of the predicted outcomes with the true ones, mean over programs
critic/accuracy | share | above critic/majority | | share of the programs whose most probable outcome is the true one
critic/confidence | share | as critic/accuracy | | mean probability of the predicted outcome: above the accuracy, the
    critic is too sure
evaluate/critic/majority | share | | | share of the most frequent outcome among the held-out programs: what a constant
    prediction reaches
evaluate/critic/calibration_error | share | ..0.1 | | expected calibration error on held-out programs: the distance of
    confidence and accuracy, mean over ten intervals of confidence
evaluate/critic/auc_<share> | share | 0.5.. | | area under the ROC curve of the probability that a held-out program
    passes, read from this percentage of its tokens: 0.5 tells nothing, 1 orders all
# Distillation and Q-learning
distill/divergence | nats | falls | | divergence of the policy from the teacher who reads the hint, before each token,
    over the whole vocabulary; mean over tokens. About 0 from the beginning: the hint tells the teacher nothing
ilql/q_error | scaled score² | falls | | squared distance of Q and its target, reward plus discounted V of the next
    state; mean over tokens and both estimates
ilql/value_loss | scaled score² | falls | | the expectile loss of V, mean over tokens
ilql/conservative | nats | below the log of the vocabulary's size | | negative log-prob of the tokens taken under
    softmax(Q), mean over tokens and both estimates
ilql/q | scaled score | near reward/mean, discounted | | the smaller Q of the tokens taken, mean over tokens
replay/size | replies | | | replies in the buffer that a step draws from, its own among them
soft_q/q | scaled score | | | the logit of the tokens taken, which is their Q, minus that of the reference if there is
    one, as in all six; mean over tokens
soft_q/v | scaled score | near soft_q/target_v | | logsumexp of the logits, the value of the state before each token;
    mean over tokens
soft_q/a | nats | rises, from -log of the vocabulary's size without a reference, from 0 with one | | Q - V of the
    tokens taken, their log-prob over the whole vocabulary (minus the reference's); mean over tokens
soft_q/target_q | scaled score | near soft_q/q | | as soft_q/q, of the copy that follows slowly
soft_q/target_v | scaled score | near soft_q/v | | as soft_q/v, of the copy that follows slowly
soft_q/target_a | nats | near soft_q/a | | as soft_q/a, of the copy that follows slowly
# Held-out tasks
evaluate/reward | score | rises with reward/mean | | mean score on the held-out tasks, from reward and environment
    before scaling, with the same random numbers each time
evaluate/unjudged | share | ..0.02 | | share of the held-out replies without a score, which the mean ignores; absent if
    all have one
evaluate/outcome/<class> | share | | | share of the held-out replies with this outcome class; absent if none has it
evaluate/game/won | share | rises | | game/won on the held-out tasks
evaluate/game/score | share | rises | | game/score on the held-out tasks
evaluate/game/turns | turns | | | game/turns on the held-out tasks
evaluate/game/turns_to_win | turns | falls | | game/turns_to_win on the held-out tasks
evaluate/game/optimum_ratio | | falls towards 1 | | game/optimum_ratio on the held-out tasks
evaluate/kl_per_reply | nats | 0..10 | | kl/per_reply on the held-out tasks, judged or not
evaluate/loss | nats | falls with supervised/loss | | cross-entropy of the held-out demonstrations, mean over tokens
evaluate/bits_per_byte | bits | falls | | the same per byte of text
evaluate/loss_before | nats | | | evaluate/loss before training
evaluate/reward_before | score | | | evaluate/reward before training
evaluate/reward_std | score | | | spread of those scores
evaluate/best_of_k | score | | | best score among the judged replies of a held-out task, mean over tasks
    (and seeds); only with evaluation.samples above 1
probe/reward | score | rises | | mean score of the policy's replies to the probe prompts, with the same random numbers
    each time
probe/count | | | | number of those replies that the reward judged
probe/kl_per_reply | nats | 0..10 | | kl/per_reply of those replies that a step would train on
probe/reward_before | score | | | probe/reward before training
probe/reference_reward | score | | | mean score of the reference's replies to the same prompts
probe/query_share | share | ..0.8 | | reward/query_share from two replies to each probe prompt before training
# Chosen metrics of held-out tasks
evaluate/bleu | | rises | | corpus BLEU of the held-out replies against their references by sacrebleu, 0 to 100
evaluate/chrf | | rises | | corpus chrF of them, an F-score of character n-grams, 0 to 100
evaluate/distinct | share | steady | | different word n-grams over all n-grams of the held-out replies
evaluate/exact_match | share | rises | | share of the held-out replies that equal one of their references
evaluate/<metric> | | | | a metric of the option evaluation.metrics on the held-out replies: its number for all of them,
    or the mean of its numbers for single replies; or a metric of the method's own loss on held-out labelled replies,
    such as evaluate/preference/accuracy
evaluate/<metric>_std | | | | spread of those numbers over the replies
evaluate/<metric>_before | | | | the metric before training
# Update
update/lr | | | ppo/learning_rate, lr | learning rate
update/grad_norm | | steady | gradients/* (whole histograms) | norm of the gradient before clipping, mean over the
    optimizer steps made
update/grad_norm_clipped | | | | norm of the gradient after clipping, mean over the same steps
update/refused | | 0 | | 1 if a NaN or infinity appeared in the step. The optimizer step in which it was found is
    refused together with the later ones; found before the first one, nothing changes
update/steps | | | | optimizer steps made
update/micro_tokens | tokens | | | largest number of tokens in one forward and backward pass, padding included; halved
    whenever memory runs out
update/epochs | | | | finished passes over the replies
update/early_stopped | | mostly 0 | | 1 if the KL between old and new policy ended the update early
# Trust region
trust/accepted | share | 1 | | 1 if the line search accepted a step, 0 if the weights stayed as they were
trust/kl | nats | 0..0.01 | | KL from the policy before the step to the one after it, mean over tokens
trust/backtracks | | 0..3 | | lengths that the line search refused before it accepted one
trust/improvement | | above 0 | | by how much the surrogate rose in the accepted step
trust/predicted | | above 0 | | what the gradient alone predicts for that step
# Time
time/step | s | | time/ppo/total, time/epoch | the whole step, without the writing after it
time/generate | s | | time/get_response, time/build_input_sentiment | generating the replies
time/ahead | s | | | generating these replies ahead, in a thread; `time/generate` is then only the wait for them
time/reward | s | | time/get_sentiment_preds | computing their rewards; with chunks, only the wait after generation
time/observe | s | | time/ppo/forward_pass, time/ppo/compute_rewards | values, reference and KL of the replies
time/advantage | s | | time/ppo/compute_advantages | advantages and returns
time/update | s | | time/ppo/optimize_step, time/optimization | epochs of optimizer steps
time/evaluate | s | | | generating and judging replies to the held-out tasks
time/probe | s | | | answering and scoring the probe prompts
time/checkpoint | s | | | writing checkpoints since the previous step
time/report | s | | | writing the report since the previous step
time/track | s | | time/ppo/calc_stats | writing replies and distributions
tokens/per_second | tokens/s | | | tokens of all replies, dropped ones included, over the time of the whole step
# Checkpoints
checkpoint/bytes | bytes | | | size of the checkpoint written after the previous step
# Memory
memory/resident_gb | GB | steady | | memory that the process uses now
memory/gpu_gb | GB | steady | | peak memory of its tensors on the GPU
"""
"""name | unit | healthy: words, or lowest..highest | TRL's names | meaning. Indented lines continue a row."""


@dataclass(frozen=True)
class Metric:
    """A metric, which has one value per step: `METRICS["kl/per_reply"].band == (0.0, 10.0)`."""

    name: str
    group: str
    unit: str
    healthy: str
    """In words: "rises", "0 to 10"."""
    old: str
    """TRL's names for it."""
    meaning: str
    band: tuple[float | None, float | None] | None = None
    """The healthy range as numbers (lowest, highest), if there is one."""

    def unhealthy(self, value: float) -> bool:
        """Return whether `value` is outside of the band by more than rounding."""
        low, high = self.band or (None, None)
        return (low is not None and value < low - 1e-4) or (high is not None and value > high + 1e-4)


def _read(table: str) -> dict[str, Metric]:
    metrics, group = {}, ""
    for line in re.sub(r"\n +", " ", table.strip()).split("\n"):
        if line.startswith("# "):
            group = line[2:]
            continue
        name, unit, healthy, old, meaning = (cell.strip() for cell in line.split("|"))
        band = None
        low, dots, high = healthy.partition("..")
        if dots:
            band = (float(low) if low else None, float(high) if high else None)
            healthy = f"{low} to {high}" if low and high else f"at most {high}" if high else f"at least {low}"
        metrics[name] = Metric(name, group, unit, healthy, old, meaning, band)
    return metrics


METRICS: dict[str, Metric] = _read(_TABLE)
CHOSEN = METRICS["evaluate/<metric>"].group
"""The group of the metrics that the option `evaluation.metrics` chooses."""

COLUMNS = {
    "task, group, rollout, turn": (
        "the task, the group of attempts that are compared, the attempt, and its turn", ""),
    "query, reply": ("both as text", "game_log"),
    "tokens": ("the text of each token of the reply", ""),
    "prompt, ids": ("the token ids of the prompt, and those of the reply", ""),
    "query_tokens, reply_tokens": ("their lengths", "tokens/queries_dist, tokens/responses_dist"),
    "logprobs, ref_logprobs": (
        "log-prob of each reply token, under the policy that generated it and under the reference",
        "objective/logprobs, objective/ref_logprobs"),
    "kl": ("KL penalty of each reply token, before the coefficient", "objective/kl_dist"),
    "values, advantages, returns": ("one number per reply token", "ppo/policy/advantages"),
    "passing": (
        "one number per reply token: the probability that the program passes, by the critic that has read it so far; "
        "absent without a critic", ""),
    "reward, reward/<part>": ("the score and its named parts, in the row of an attempt's last turn", "env/reward_dist"),
    "outcome, message": (
        "the outcome class and the message of the reward's `Judgement`, in the same row; of all parts of a sum", ""),
    "paid": ("the environment's reward for this reply", ""),
    "game": ("the transcript of a game as JSON, in the row of its last turn; absent in runs without games", ""),
    "end, version": ("why the reply ended, and the version of the weights that generated it", ""),
}  # fmt: skip
"""The columns of `rollouts/step-00012.parquet`: names -> (meaning, TRL's names)."""

_HEAD = """# Metrics

`metrics.jsonl` has one object per step. Every mean is a sum over a count, pooled over minibatches and ranks, and every
spread is a standard deviation (biased). A name is absent if there was nothing to count, and null if the value was NaN
or infinity. This page is generated: edit `src/operant/metrics/registry.py`, then run
`python -m operant.metrics.registry > docs/metrics.md`.

In an environment a reply is a whole episode, except where turns are named; text metrics are those of single turns. A
token is an action of the policy, and choosing a whole reply from a list is one action. Replies that are not trained
on, because they were not judged or because of `on_length=drop`, count only in metrics that name judged or all replies.
Means during the update are over every minibatch of every epoch. If `rescore` makes a second pass, as in bfloat16, its
log-probs and values replace those of sampling.
"""
_COLUMNS_HEAD = """
## Whole distributions

`rollouts/step-00012.parquet` has the values behind the histograms, one row per turn.

| column | meaning | TRL's name |
|---|---|---|
"""


def describe(name: str) -> Metric | None:
    """Return the entry of a metric, None if it has none; `reward/taste/mean` has that of `reward/<part>/mean`."""
    name = re.sub(r"^reward/.+/(mean|std|abstained)$", r"reward/<part>/\1", name)
    name = re.sub(r"^(|evaluate/)outcome/.+$", r"\1outcome/<class>", name)
    return METRICS.get(name) or METRICS.get(re.sub(r"^evaluate/.+?(_std|_before)?$", r"evaluate/<metric>\1", name))


def markdown() -> str:
    """Return the page docs/metrics.md."""
    page, group = _HEAD, ""
    for m in METRICS.values():
        if m.group != group:
            group = m.group
            page += f"\n## {group}\n\n| name | meaning | unit | healthy | TRL's name |\n|---|---|---|---|---|\n"
        page += f"| {_code(m.name)} | {m.meaning} | {m.unit} | {m.healthy} | {_code(m.old)} |\n"
    page += _COLUMNS_HEAD
    return page + "".join(f"| {_code(n)} | {meaning} | {_code(old)} |\n" for n, (meaning, old) in COLUMNS.items())


def _code(names: str) -> str:
    """Return the names in code quotes; remarks in brackets stay outside of them."""
    return re.sub(r"([\w/*<>]+)((?: \([^)]*\))?)(, |$)", r"`\1`\2\3", names) if names else ""


if __name__ == "__main__":
    print(markdown(), end="")

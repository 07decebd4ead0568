"""What every metric means: name, unit, healthy range, and what TRL's PPOTrainer called it.

`python -m operant.metrics.registry > docs/metrics.md` writes the page; the report explains its charts with the same
sentences, and a test holds all three together.
"""

import re
from dataclasses import dataclass

_TABLE = """
# Progress
step | | | | steps of training so far: one is play, judge, update
episodes | | | episode | replies trained on so far
# Reward
reward/mean | score | rises | env/reward_mean | mean score of the judged replies, as reward and world gave it
reward/std | score | above 0: equal scores teach nothing | env/reward_std | spread of those scores over the judged
    replies
reward/min | score | | | lowest of those scores
reward/max | score | | | highest of those scores
reward/scaled_mean | | | ppo/mean_scores, objective/scores | mean score after scaling, normalising and clipping, with
    what the world paid: what is trained on
reward/scaled_std | | | ppo/std_scores | spread of the scores that are trained on
reward/kl_penalty | score | small beside the reward | ppo/mean_non_score_reward, objective/non_score_reward (negative
    there) | what the KL term took from a reply, mean over replies: coefficient times kl/paid
reward/return | score | rises | objective/rlhf_reward | score as it is trained on minus KL penalty, mean over replies:
    what PPO maximises
reward/kl_penalty_std | score | | | spread of that penalty over the replies
reward/return_std | score | | | spread of the returns over the replies
reward/query_share | share | ..0.8 | | share of the judged scores' variance that the query explains (their intraclass
    correlation, at least 0), where 8 queries or more have several judged replies: near 1, what the policy says hardly
    matters
reward/abstained | share | ..0.1 | | share of all replies that the reward would not judge; they are left out
reward/outcome/ok | samples | | | of all replies, on all ranks, those that an isolated or tolerated reward has scored
reward/outcome/error | samples | 0 | | of all, those on which the reward raised, died, or answered what is no score
reward/outcome/timeout | samples | 0 | | of all, those that were not judged in time
reward/outcome/abstain | samples | | | of all, those for which the reward returned None
reward/<part>/mean | score | | | mean of one named part of the reward, before its weight, over all replies that it has
    judged; what the world paid is the part `world`. Absent where there is one part alone
reward/<part>/std | score | | | spread of one named part of the reward over those
reward/<part>/abstained | share | ..0.1 | | share of all replies that this part would not judge
# Distance from the reference
kl/per_reply | nats | 0..10 | objective/kl | sum over a reply of log-prob minus reference log-prob (k1), mean over
    replies: how far the policy has moved; negative means that sampling and scoring disagree
kl/per_reply_std | nats | | objective/kl_dist | spread of that sum over the replies
kl/per_token | nats | | | the same difference, mean over tokens
kl/paid | nats | | | what the reward's KL term charged a reply before its coefficient, mean over replies; equals
    kl/per_reply for the k1 estimator
kl/k3 | nats | close to kl/per_reply | | a second estimate of the same KL, never negative: exp(-d) - 1 + d for a
    difference d, summed over a reply
kl/in_loss | nats | | | the KL term of the loss before its coefficient, mean over tokens
kl/coef | score per nat | steady; a climb comes before numerical trouble | objective/kl_coef | what a nat of KL costs
    in the reward of this step; the controller moves it
kl/loss_coef | | | | weight of the KL term in the loss
# Policy
policy/loss | | noise around 0 | ppo/loss/policy, loss/policy_avg | the clipped objective, mean over tokens
policy/entropy | nats | falls slowly; 0 is collapse | ppo/policy/entropy, policy/entropy_avg | entropy of the whole
    next-token distribution during the update, mean over tokens: how undecided the policy is
policy/sampled_entropy | nats | falls slowly | objective/entropy | minus the log-prob of a reply, mean over replies
policy/clip_fraction | share | 0..0.3 | ppo/policy/clipfrac, policy/clipfrac_avg | share of tokens where clipping
    holds the update back: high means that steps are too large
policy/approx_kl | nats | 0..0.1 | ppo/policy/approxkl, policy/approxkl_avg | size of the update: half the squared
    change of log-prob, mean over tokens
policy/old_new_kl | nats | ..0.1 | ppo/policy/policykl | old minus new log-prob, mean over tokens
policy/old_new_k3 | nats | 0..0.1 | | the k3 estimate of the same divergence, never negative: what early stopping
    looks at
policy/ratio_mean | | 0.9..1.1 | ppo/policy/ratio, val/ratio | new over old probability of a token, mean over tokens
policy/ratio_std | | ..0.5 | val/ratio_var (its square) | spread of those ratios over tokens
policy/ratio_min | | 0.005.. | ppo/policy/ratio | smallest ratio of the step
policy/ratio_max | | ..200 | ppo/policy/ratio | largest ratio of the step
policy/advantage_mean | | 0 where it is whitened | ppo/policy/advantages_mean | mean advantage over tokens, as the
    loss uses it in the first epoch
policy/advantage_std | | 1 where it is whitened | ppo/policy/advantages | spread of the advantages over tokens,
    as the loss uses them in the first epoch
policy/advantage_zero | share | ..0.9 | | share of replies whose advantage, as the loss uses it in the first epoch, is 0
    at every token: nothing is learnt from them
policy/skipped_steps | share | 0 | | share of optimizer steps left out because their ratios were too large
# Value
value/loss | | falls, without spikes | ppo/loss/value, loss/value_avg | half the clipped squared error of the value,
    mean over tokens, before its coefficient
value/mean | score | near returns/mean | ppo/val/mean | value before each token when it was sampled, mean over tokens
value/std | score | | ppo/val/var (its square) | spread of those values over tokens
value/prediction | score | near returns/mean | ppo/val/vpred | value during the update, mean over tokens
value/error | score² | falls | ppo/val/error | squared distance of value and return during the update, mean over
    tokens
value/error_before | score² | falls | | squared distance of value and return before the update, mean over tokens
value/clip_fraction | share | often 0.3 to 0.6 early on | ppo/val/clipfrac, val/clipfrac_avg | share of tokens where
    value clipping holds the update back
value/explained_variance | | rises towards 1 | | 1 minus value/error_before over the variance of the returns, of the
    values that made the advantages: 1 is a perfect critic, 0 one that knows the mean, below 0 one that knows less
value/explained_variance_fitted | | | ppo/val/var_explained | the same with value/error: of values that are already
    fitted to these very returns, so that it is above 0 where there is nothing to know
returns/mean | score | | ppo/returns/mean | mean of the targets of the value, over tokens
returns/std | score | | ppo/returns/var (its square) | spread of those targets
loss/total | | tells little: watch reward and KL | ppo/loss/total | what was descended on: policy, value, entropy and
    KL terms with their coefficients, mean over the optimizer steps that were made
# Rollout
rollout/count | | | eps (a second) | replies of this step that are learnt from
rollout/logprob_gap | nats | below 0.0001 in float32, below 0.05 in bfloat16 | | largest difference between the
    log-prob of a token when it was sampled and when it is scored with unchanged weights, in the first minibatch
rollout/logprob_mean | nats | | objective/logprobs | log-prob of the sampled tokens under the whole distribution, mean
    over tokens
rollout/ref_logprob_mean | nats | | objective/ref_logprobs | the same tokens' log-prob under the reference
rollout/query_tokens | tokens | | tokens/queries_len_mean | length of the queries, mean; in a world of what stands
    before each turn
rollout/query_tokens_std | tokens | | tokens/queries_len_std | spread of that length
rollout/reply_tokens | tokens | steady | tokens/responses_len_mean | length of the replies with their stop token, mean;
    in a world of each turn: watch it for rewards that like length
rollout/reply_tokens_std | tokens | | tokens/responses_len_std | spread of that length
rollout/ended_stop | share | | val/num_eos_tokens (a count) | share of replies (turns) that ended with a stop token or
    stop string, or were chosen among given ones
rollout/ended_length | share | | | share of replies (turns) that ended at the task's own length limit
rollout/turns | | | | turns an episode, mean: 1 but in a world
rollout/dropped | share | ..0.5 | | share of all replies that were judged and left out, because they hit their length
    limit (on_length=drop)
rollout/ended_cut | share | | | share of episodes that a step limit cut; the value of what follows is counted in
rollout/likelihood_gap | nats | 0 but for noise | | entropy of the policy plus log-prob of the token that was drawn,
    mean over the tokens of the first minibatch, with unchanged weights: 0 in expectation where the replies come from
    this very policy; above 0 they are likelier than its own (truncated or colder sampling), below 0 unlikelier (hotter,
    dropout, a suppressed end, padding)
rollout/likelihood_z | standard errors | -6..6 | | the same over its standard error
# Text
text/empty | share | ..0.1 | | share of replies (turns) without any text, spaces and the signs . , ; : … aside
text/top_word | share | ..0.25 | | share of all words that are the commonest word
text/distinct_1 | share | steady | | different words over words, the replies of the step together
text/distinct_2 | share | steady | | different pairs of neighbouring words over pairs, the replies of the step together
text/repeated | share | ..0.2 | | share of a reply's word trigrams that it has said before, mean over replies (turns) of
    three words and more
text/exclamations | share | as the reference's | | share of characters that are exclamation marks
text/emojis | share | as the reference's | | share of characters that are emojis and other pictures
text/non_letters | share | as the reference's | | share of characters that are no letters, digits, space or common
    punctuation
# Given replies
supervised/loss | nats | falls | | cross-entropy of the given replies, mean over the tokens that are trained on
supervised/bits_per_byte | bits | falls | | the same over the bytes of those tokens' text: comparable between
    tokenizers
# Held-out tasks
evaluate/reward | score | rises with reward/mean | | mean score on the held-out tasks, as reward and world gave it,
    the same random numbers each time
evaluate/unjudged | share | ..0.02 | | share of the held-out replies without a score, which the mean leaves out; absent
    where all have one
evaluate/kl_per_reply | nats | 0..10 | | kl/per_reply on the held-out tasks, judged or not
evaluate/loss | nats | falls with supervised/loss | | cross-entropy of the held-out given replies, mean over tokens
evaluate/bits_per_byte | bits | falls | | the same over the bytes of those tokens' text
evaluate/loss_before | nats | | | evaluate/loss before training
evaluate/reward_before | score | | | evaluate/reward before training
evaluate/reward_std | score | | | spread of those scores
evaluate/best_of_k | score | | | mean over the held-out tasks (of every seed) of the best of their judged
    replies, where evaluation.samples asks for several
probe/reward | score | rises | | mean score of the policy's replies to the probe queries, the same random numbers each
    time
probe/kl_per_reply | nats | 0..10 | | kl/per_reply of those that a step would learn from
probe/reward_before | score | | | probe/reward before training
probe/reference_reward | score | | | mean score of the reference's replies to the same queries
probe/query_share | share | ..0.8 | | reward/query_share of two replies to each probe query before training
# Update
update/lr | | | ppo/learning_rate, lr | learning rate
update/grad_norm | | steady | gradients/* (whole histograms) | length of the gradient before clipping, mean over
    the optimizer steps that were made
update/grad_norm_clipped | | | | length of the gradient after clipping, mean over the same
update/refused | | 0 | | 1 where a number of the step was NaN or infinite: the optimizer step that it was found in is
    refused, with those that would have followed; found before the first one, nothing changes at all
update/steps | | | | optimizer steps made
update/micro_tokens | tokens | | | most of one forward and backward pass, padding included; halved where memory ran out
update/epochs | | | | passes over the replies that were finished
update/early_stopped | | mostly 0 | | 1 where the KL of old and new policy ended the update early
# Time
time/step | s | | time/ppo/total, time/epoch | the whole step; what is written when it is over is not in it
time/generate | s | | time/get_response, time/build_input_sentiment | sampling the replies
time/reward | s | | time/get_sentiment_preds | judging them; in chunks: waiting for it beyond generation
time/observe | s | | time/ppo/forward_pass, time/ppo/compute_rewards | values, reference and KL of the replies
time/advantage | s | | time/ppo/compute_advantages | advantages and returns
time/update | s | | time/ppo/optimize_step, time/optimization | epochs of optimizer steps
time/evaluate | s | | | playing and judging the held-out tasks
time/probe | s | | | the probe queries and what is known of their tokens
time/checkpoint | s | | | writing checkpoints since the step before
time/report | s | | | writing the report since the step before
time/track | s | | time/ppo/calc_stats | writing replies and distributions
tokens/per_second | tokens/s | | | tokens of all replies, also of those left out, over the time of the whole step
# Checkpoints
checkpoint/bytes | bytes | | | of the checkpoint that was written after the step before
# Memory
memory/resident_gb | GB | steady | | memory that the process holds now
memory/gpu_gb | GB | steady | | largest memory that its tensors held on the GPU
"""
"""name | unit | healthy: words, or lowest..highest | TRL's names | meaning. Indented lines go on."""


@dataclass(frozen=True)
class Metric:
    """One number a step: `METRICS["kl/per_reply"].band == (0.0, 10.0)`."""

    name: str
    group: str
    unit: str
    healthy: str
    """In words: "rises", "0 to 10"."""
    old: str
    """TRL's names for it."""
    meaning: str
    band: tuple[float | None, float | None] | None = None
    """The healthy range as numbers (lowest, highest), where it has some."""

    def unhealthy(self, value: float) -> bool:
        """Whether `value` is outside of the band by more than rounding."""
        low, high = self.band or (None, None)
        return (low is not None and value < low - 1e-4) or (high is not None and value > high + 1e-4)


def _read(table: str) -> dict[str, Metric]:
    metrics, group = {}, ""
    for line in re.sub(r"\n +", " ", table.strip()).split("\n"):
        if line.startswith("# "):
            group = line[2:]
            continue
        name, unit, healthy, old, meaning = (cell.strip() for cell in line.split("|"))
        metrics[name] = Metric(name, group, unit, _words(healthy), old, meaning, _band(healthy))
    return metrics


def _band(healthy: str) -> tuple[float | None, float | None] | None:
    low, dots, high = healthy.partition("..")
    return (float(low) if low else None, float(high) if high else None) if dots else None


def _words(healthy: str) -> str:
    low, dots, high = healthy.partition("..")
    if not dots:
        return healthy
    return f"{low} to {high}" if low and high else f"at most {high}" if high else f"at least {low}"


METRICS: dict[str, Metric] = _read(_TABLE)

COLUMNS = {
    "task, group, rollout, turn": (
        "which task, which attempts at it belong together, which attempt, and which of its replies", ""),
    "query, reply": ("as text", "game_log"),
    "tokens": ("the reply's ids as pieces of text", ""),
    "prompt, ids": ("the token ids that the policy saw, and those that it chose", ""),
    "query_tokens, reply_tokens": ("their lengths", "tokens/queries_dist, tokens/responses_dist"),
    "logprobs, ref_logprobs": (
        "of each chosen token, by the policy that spoke and by the reference",
        "objective/logprobs, objective/ref_logprobs"),
    "kl": ("what each chosen token was charged, before the coefficient", "objective/kl_dist"),
    "values, advantages, returns": ("of each chosen token", "ppo/policy/advantages"),
    "reward, reward/<part>": ("the score and its named parts, on an attempt's last reply", "env/reward_dist"),
    "paid": ("what the world paid for this reply", ""),
    "end, version": ("why the reply ended, and the version of the weights that spoke it", ""),
}  # fmt: skip
"""Of `rollouts/step-00012.parquet`: names -> (meaning, TRL's names)."""

_HEAD = """# Metrics

One object a step in `metrics.jsonl`. Every mean is a sum over a count, pooled over minibatches and ranks, and every
spread a standard deviation that divides by that count. A name is absent where nothing was counted, and null where the
number was not finite. This page is generated: edit `src/operant/metrics/registry.py`, then run
`python -m operant.metrics.registry > docs/metrics.md`.

In a world a reply is a whole episode, except where turns are named, and in the texts, which are those of single turns.
A token is an action of the policy: a choice among given replies is one. What is not learnt from, because nobody judged
it or `on_length=drop` left it out, counts where a sentence says judged or all, and nowhere else. Means during the
update are over every minibatch of every epoch. Where `rescore` makes a second pass, as in bfloat16, its log-probs and
values stand for those of sampling.
"""
_COLUMNS_HEAD = """
## Whole distributions

`rollouts/step-00012.parquet` holds what a histogram is made of, one row a reply.

| column | meaning | TRL's name |
|---|---|---|
"""


def describe(name: str) -> Metric | None:
    """The entry of a metric; `reward/taste/mean` is a `reward/<part>/mean`. None where nobody described it."""
    return METRICS.get(name) or METRICS.get(re.sub(r"^reward/.+/(mean|std|abstained)$", r"reward/<part>/\1", name))


def markdown() -> str:
    """The page docs/metrics.md."""
    page, group = _HEAD, ""
    for m in METRICS.values():
        if m.group != group:
            group = m.group
            page += f"\n## {group}\n\n| name | meaning | unit | healthy | TRL's name |\n|---|---|---|---|---|\n"
        page += f"| {_code(m.name)} | {m.meaning} | {m.unit} | {m.healthy} | {_code(m.old)} |\n"
    page += _COLUMNS_HEAD
    return page + "".join(f"| {_code(n)} | {meaning} | {_code(old)} |\n" for n, (meaning, old) in COLUMNS.items())


def _code(names: str) -> str:
    """Names in code quotes; what is said about them in brackets stays outside."""
    return re.sub(r"([\w/*<>]+)((?: \([^)]*\))?)(, |$)", r"`\1`\2\3", names) if names else ""


if __name__ == "__main__":
    print(markdown(), end="")

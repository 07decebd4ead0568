"""The options of `train`, `steps` and `Learner` as keyword arguments, for editors and type checkers.

This file is generated: edit the dataclass that holds the option, then run `make docs`. Those of a method's own loss,
advantage and update may also be in any mapping. Where one group alone has a name, the name alone will do.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class DataKeywords(TypedDict, total=False):
    """The options `data.*`."""

    text_field: str
    """The field that holds the prompt: text, chat messages or ids. A row without `text` may have it in
    `prompt`."""
    min_chars: int
    """Leave out texts with fewer characters."""
    max_chars: int | None
    """Leave out texts with more characters."""
    query_tokens: int | str | None
    """The prompt is this many first tokens of the text: 5, or "2-8" for a random number per task."""
    prompt_tokens: int | None
    """Longer prompts are cut to this many tokens. Special tokens, and what a form puts around the text, are
    kept. Of a chat, the text of the last message is cut, so that the chat template makes this many tokens of
    all messages."""
    prompt_keeps: str
    """The side of such a prompt that is kept: start or end."""
    template: str | None
    """The prompt as a pattern with the row's fields in braces: "Review: {text} Summary:"."""
    chat: bool
    """Make each prompt that is a text the message of a user, which the policy's chat template is given."""
    limit: int | None
    """Maximal number of tasks."""
    shuffle: bool
    """Shuffle the rows before `limit` cuts them."""
    id_field: str | None
    """The field with the id of the task; by default, the id is made of the source and the row's number."""
    target_field: str | None
    """The field that becomes `Task.target`, for rewards; of several, separated by commas, a mapping of them
    does."""
    reference_field: str | None
    """The field that becomes `Task.references`, a text or a list of texts, for rewards and metrics."""
    reply_field: str | None
    """Of demonstrations: the field of the replies, with prompts in `text_field`; none: the row's form decides."""
    loss_on: str
    """Of demonstrations: train on the replies alone, or on `all`, prompts too."""
    max_length: int | None
    """Of demonstrations: longer rows (prompt and reply, in tokens) are cut; none: rows too long are an error."""


class EvaluationKeywords(TypedDict, total=False):
    """The options `evaluation.*`."""

    samples: int
    """Replies to each held-out task (k)."""
    seeds: Sequence[int] | str
    """Seeds of the random numbers, each with `samples` replies per task; empty: the seed of the run."""
    sampling: Any
    """Sampling options that differ from training: {temperature: 0.7, top_p: 0.9}; {top_k: 1} is greedy."""
    beams: int
    """Above 1: replies are searched for by transformers' beam search with so many beams, and not drawn."""
    length_penalty: float
    """Of beam search: the score of a reply of n tokens is their summed log-probs over n ** length_penalty."""
    metrics: Any
    """Further metrics of the replies: bleu,rouge, or with options {bleu: {max_n: 2}}. A name is one that
    docs/evaluation.md lists, module:function, or one that an installed package adds."""


class IsolationKeywords(TypedDict, total=False):
    """The options `isolation.*`."""

    timeout: float
    """Seconds for a whole batch, which is judged within `timeout` + 2 s. The first call, with all samples, may
    take half of it; samples of a call that failed are judged again, one at a time, in the other half."""
    sample_timeout: float | None
    """Seconds for a sample that is judged alone; none: a quarter of the time that is left of `timeout`."""
    memory_gb: float | None
    """Address space of each of its processes, in GB; none: no limit (needed by a reward that uses CUDA)."""
    processes: int
    """Processes and threads that it may have, if the system can count them."""
    workers: int
    """Worker processes, each of which judges a part of the batch; the samples of a prompt stay together."""
    each: bool
    """Judge one sample at a time from the start; all of `timeout` is then for that."""
    again: bool
    """Judge samples alone after a failure; false if a score depends on the other samples of the batch."""
    retries: int
    """Times that a call in which the reward raised or died is repeated, as long as `timeout` allows: for
    rewards that ask a server."""
    retry_seconds: float
    """Seconds before the first repetition; before each further one twice as many."""
    on_error: float | str | None
    """A sample on which the reward raised, died or returned something unusable: drop, stop, or the score that
    it gets; none: an isolated reward drops it, any other stops the run."""
    on_timeout: float | str
    """A sample that was not judged in time: drop, stop, or a score."""
    on_abstain: float | str
    """A sample for which the reward returned None: drop, stop, or a score."""
    level: str
    """How an isolated reward is ended: pid namespace | sub-reaper | process group; auto: the strongest allowed
    here."""


class LearnerKeywords(TypedDict, total=False):
    """The options `learner.*`."""

    seed: int
    """Seed of every random number."""
    on_length: str
    """How a reply that hit its length limit is treated: ended | penalty (score.missing_stop) | drop |
    bootstrap."""
    device: str
    """Where the models live: auto (a GPU where torch has one), cpu, cuda, cuda:1, ..."""
    rescore: bool | None
    """Recompute log-probs and values in a second pass, even if decoding stored them. None: in bfloat16, where a
    token decoded alone and the same token in a whole row differ in the second digit, and with engines that
    compute elsewhere (openai, vllm)."""
    max_staleness: int | None
    """Episodes with a turn of weights more than this many steps old are left out; none: no bound."""
    importance: str
    """Importance weights in the loss, for turns of earlier weights or another sampler: none; token: of each
    token; sequence: of the whole episode. Log-probs and values of the policy before the update are then
    recomputed."""
    importance_cap: float | None
    """The largest importance weight; none: any."""
    importance_mask: bool
    """Masked importance sampling: tokens (or replies) whose weight is above the cap are not trained on. False:
    their weight is the cap, truncated importance sampling."""
    select: str | None
    """Rejection sampling: the replies of a step, over all ranks, that the update learns from. top:N: the best
    N; top:P%: the best P percent; group:N: the best N replies to each prompt (best of n); above:X: those with a
    score above X; none: all."""
    select_unit: str
    """What `select` keeps: episode, by its total; turn, by its discounted return from there on."""
    threads: int | str
    """Threads of the processor: a number, or auto: one if the model and the batch are so small that threads
    would wait for each other longer than they compute, otherwise all that torch has. Only sizes decide it."""
    keep_memory: bool
    """On Linux without a GPU: the C library keeps freed memory for the next step instead of returning it page
    by page. It holds for the whole process."""
    parallel: str
    """What the ranks of torchrun divide: ddp: replies; fsdp: also weights, gradients and states
    (docs/sharding.md)."""
    offload: str
    """With fsdp on a GPU, what the CPU's memory has: none; reference; optimizer: policy, gradients and states;
    both."""
    watch_every: int
    """Steps between detailed measurements: histograms of every gradient, norms of weights and updates by block;
    0: never. Tensors above 65,536 numbers are sampled."""
    keep_gradients: bool
    """Keep the gradients of the last optimizer step, clipped, in the parameters' `.grad` until the next update.
    They take as much memory as the trained weights. None are kept of an update that was refused or stopped
    early."""


class SamplingKeywords(TypedDict, total=False):
    """The options `sampling.*`."""

    temperature: float
    """Divides the logits, in sampling and in every score."""
    max_tokens: int
    """The task's own length limit, in tokens of the reply."""
    min_tokens: int
    """Stop tokens are masked, for policy and reference alike, until the reply has this many tokens."""
    fixed_length: bool
    """Every reply has `max_tokens` tokens: nothing stops it, as in Ziegler et al. (2019)."""
    stop_tokens: Sequence[int] | str
    """Ids that end a reply and are part of it. Empty: the policy's own end-of-sequence token. -1 alone: none."""
    stop_strings: Sequence[str] | str
    """Strings that end a reply. The ids keep the whole last token; the text is cut before the string."""
    top_k: int
    """Draw only from the k most likely tokens; 0: from all."""
    top_p: float
    """Draw only from the most likely tokens that together have this probability; 1: from all."""
    top_p_least: int
    """The smallest number of tokens that `top_p` leaves (`min_tokens_to_keep`)."""
    keep_stops: bool
    """Stop tokens can be drawn however unlikely they are: top-k, top-p and min-p do not remove them."""
    min_p: float
    """Draw only from tokens that are at least this likely relative to the most likely one; 0: from all."""
    truncation: str | None
    """`stored` allows top-k, top-p and min-p in training: each action then stores the ids that could be drawn."""
    guidance: float
    """Adds this times the Q of each token to its logit, of a policy that has Q values; 0: the language model
    alone."""
    only_text: bool
    """Bans what is no text by itself, in tokens other than stop tokens: parts of a character, control
    characters, white space alone, special tokens. A reply can then be printed and pasted."""
    banned: Sequence[int] | str
    """Ids that are never drawn and have probability 0 in every score."""
    choice: str
    """How an option is scored where the environment offers options; one is drawn in proportion to exp(score /
    temperature). mean: the mean log-prob of its tokens, with the stop token after it. sum: their sum, with
    which long options are hardly ever drawn."""


class KlKeywords(TypedDict, total=False):
    """The options `kl.*`."""

    coef: float
    """Price of one nat of KL in the reward; an adaptive controller starts from it. 0: no KL in the reward."""
    kind: str
    """k1 | k2 | k3 | absolute | reverse | forward: the KL term that is charged in the reward, per token."""
    reward_gradient: str
    """full: the gradient of the expected charge. score: without the gradient of the charge itself, as in TRL;
    then every kind but k1 has another optimum (docs/kl.md)."""
    loss_coef: float
    """Weight of a KL term in the loss. It can be combined with a KL charge in the reward (`coef`)."""
    loss_kind: str
    """k1 | k2 | k3 | reverse | forward | plain_k3: the KL term of the loss."""
    control: str
    """fixed | adaptive (Ziegler et al. 2019, per reply) | per_token (RL4LMs) | linear (to `end_coef`)."""
    target: float
    """KL that the controller aims at: nats per reply for `adaptive`, nats per token for `per_token`."""
    horizon: float | None
    """Number of replies over which `adaptive` corrects an error of 100 %; it counts an error as 20 % at most.
    None: a fiftieth of the run's replies, but at least those of a step; 10,000 where the length of the run is
    unknown."""
    end_coef: float
    """The coefficient at the end of the run with `linear`."""


class LossKeywords(TypedDict, total=False):
    """The options `loss.*`."""

    clip: float
    """The ratio may move by this much before the gain ends."""
    value_clip: float | None
    """The value may move by this much before a smaller error stops counting; none: not clipped."""
    value_coef: float
    """Weight of the value loss beside the policy loss."""
    entropy_coef: float
    """Weight of the entropy bonus."""
    dual_clip: float | None
    """Bounds the loss of a bad action that became likely, at this many times its advantage; above 1."""
    given_coef: float
    """Weight of the cross-entropy of given replies beside the loss of the policy's own."""
    clip_high: float | None
    """The bound above, where it is another than `clip`; none: `clip`."""
    kind: str
    """The loss; the page of the method has the formula of each."""
    margin: float
    """Scores of a pair should differ by this times the difference of their labels."""
    ties: str
    """Equal labels: none: left out; davidson, rao-kupper: a model of ties."""
    tie: float
    """How likely ties are in that model."""
    beta: float
    """Coefficient of the log-ratio to the reference: a smaller one allows more distance from it."""
    label_smoothing: float
    """Share of labels that are taken to be wrong; with kind sigmoid or robust."""
    pairs: str
    """all: every pair of replies to a prompt; ends: only the best ones against the worst ones."""
    good_weight: float
    """Weight of good replies."""
    bad_weight: float
    """Weight of bad replies."""
    divergence: str
    """reverse: KL(policy || teacher). forward: KL(teacher || policy)."""
    tau: float
    """The expectile of V: near 1, the value of the best replies of the data; 0.5: of their mean."""
    cql_coef: float
    """Weight of the term that keeps Q low where no reply has been."""
    bc_coef: float
    """Weight of the imitation of the replies."""
    awac_beta: float
    """The imitation's weights are exp(this * (Q - V)), at most 20; 0: all are 1."""
    version: str
    """Which consistency is learnt: v1 of one Q, v2 of a step, v3 of a path, or v2_v3 of both."""
    forward_share: float
    """Weight of these losses, which train A, against those that train V: policy and copy exchanged."""
    freeze_later: bool
    """In v3, no gradient goes through the A of later actions."""


class AdvantageKeywords(TypedDict, total=False):
    """The options `advantage.*`."""

    gamma: float
    """Discount between the tokens of a reply."""
    lam: float
    """Lambda of GAE between the tokens of a reply: 1 trusts returns, 0 the critic."""
    turn_gamma: float
    """Discount between the turns of an episode, on top of `gamma`."""
    turn_lam: float | None
    """Lambda between turns; none: `lam`."""
    level: str
    """token: each token is an action; turn_first, turn_mean: each turn, by its first value or their mean."""
    whiten_scope: str
    """Where advantages get mean 0 and variance 1: rollout, minibatch (after the cut), none."""
    unbiased: bool
    """Divide by n - 1 in that variance, as TRL and RL4LMs do."""
    whiten_rewards: bool
    """Scale rewards to variance 1 first, the mean kept."""
    scale: bool
    """Divide by the deviation of the group's returns."""
    deviation: str
    """population: divided by n, plus 1e-6. sample: by n - 1, plus 1e-4, as TRL."""
    omega: float
    """Weight of the comparison of turns that begin in the same state."""
    standardise: str
    """Subtract the mean of rewards and divide by their deviation: step, rlprompt, group or none."""
    shape: Sequence[float] | str
    """Four numbers a,b,c,d: the line that maps a reward of a to c, and one of b to d."""


class UpdateKeywords(TypedDict, total=False):
    """The options `update.*`."""

    micro_tokens: int
    """Tokens of one forward and backward pass, including padding if rows are padded. It bounds memory, and
    changes no number."""
    micro_batch: str
    """If memory runs out, auto: micro_tokens is halved and the optimizer step repeated; fixed: an error."""
    epochs: int
    """Passes over the batch in each training step."""
    minibatch: int | None
    """Units (episodes, pairs) per optimizer step, over all ranks; None: the whole batch."""
    target_kl: float | None
    """Stop the update when the epoch's mean KL(old || new) per token exceeds this."""
    ratio_threshold: float | None
    """Skip an optimizer step whose mean ratio exceeds this (TRL: 10)."""
    kl: str
    """exact: that KL over the whole vocabulary. sampled: its k3 estimate at the drawn tokens, without a copy of
    the policy."""
    solver_steps: int
    """Steps of conjugate gradients, each a product of the Fisher matrix and a vector."""
    damping: float
    """Added to the diagonal of the Fisher matrix while the direction is found."""
    fisher_share: float
    """The share of the replies that the Fisher matrix is computed from, but at least four replies, or all of
    fewer. They are drawn among those of all ranks."""
    backtracks: int
    """Lengths that the line search tries."""
    shrink: float
    """Each is this share of the one before."""
    critic_epochs: int
    """Passes over the batch that train the critic."""
    critic_minibatch: int | None
    """Replies per optimizer step of the critic, over all ranks; None: the whole batch."""


class OptimizerKeywords(TypedDict, total=False):
    """The options `optimizer.*`."""

    lr: float
    """Learning rate at its peak."""
    schedule: str
    """constant | linear (to 0) | cosine (to 0)."""
    warmup: float
    """Share of the run in which the rate rises to its peak; the schedule starts after it."""
    max_grad_norm: float | None
    """A longer gradient is scaled down to this length; none: not bounded."""
    kind: str
    """adamw | rmsprop (eps outside the root) | sgd | own (an optimizer from Python: `train(...,
    optimizer=...)`)."""
    betas: Sequence[float] | str
    """Of adamw: how much of each moment a step keeps."""
    alpha: float
    """Of rmsprop: how much of the mean square a step keeps."""
    momentum: float
    """Of rmsprop and sgd: how much of the last change a step keeps."""
    eps: float
    """Of adamw and rmsprop: added to the root that divides the gradient."""
    eps_placement: str
    """Of adamw. torch: outside the bias correction. tensorflow: inside it (eps-hat of arXiv:1412.6980), as in
    OpenAI's code."""
    weight_decay: float
    """Of matrices, not of vectors. adamw shrinks the weights; rmsprop and sgd add it to the gradient, as torch
    does."""
    states: str
    """Of adamw. float32, or 8bit: each of Adam's two moments in one byte, 2 bytes per trained weight instead of
    8, but slower."""


class ScoreKeywords(TypedDict, total=False):
    """The options `score.*`."""

    scale: bool
    """Divide by the running standard deviation of all scores so far."""
    normalise: bool
    """`scale` and `centre` together."""
    centre: bool
    """Subtract the running mean of all scores so far, this step's included; with `scale`, before dividing."""
    clip: float | None
    """Clip scores to -clip..clip, after scaling."""
    missing_stop: float | None
    """Penalty of a reply that hit the length limit."""
    missing_stop_mode: str
    """`replace` the score by `missing_stop`, or `add` it."""
    truncate_token: int | str | None
    """The reward sees the reply up to and with the first such token at position >= `truncate_after`."""
    truncate_after: int
    """In tokens from the start of the reply, which is 0."""
    truncate_penalty: float
    """Replaces the score of a reply without that token."""


class LoraKeywords(TypedDict, total=False):
    """The options `lora.*`."""

    rank: int
    """Width of the matrices; 0: no adapter, the weights themselves are trained."""
    alpha: float | None
    """The adapter's output is multiplied by alpha / rank; none: alpha is twice the rank, so the factor is 2."""
    targets: Sequence[str] | str
    """Layers with an adapter, by the last part of their name (q_proj,v_proj); all-linear: all but the output
    head."""
    adapter: str | None
    """A folder in peft's format: train this adapter further. The reference is then the adapter as it was
    loaded."""
    rslora: bool
    """Scale by alpha / sqrt(rank) instead of alpha / rank (rank-stabilised LoRA)."""
    quantise: str
    """none | 8bit | 4bit: quantise the frozen weights. It needs a GPU and the extra `quantise` (bitsandbytes)."""


class SoftPromptKeywords(TypedDict, total=False):
    """The options `soft_prompt.*`."""

    tokens: int
    """Number of vectors, which count as tokens of the context; 0: no soft prompt."""
    init: str
    """random: normal, with the deviation of the model's embeddings | words: the embeddings of soft_prompt.text."""
    text: str | None
    """The words that it begins as. A text of fewer tokens is repeated."""


class OutputMlpKeywords(TypedDict, total=False):
    """The options `output_mlp.*`."""

    width: int
    """Width of the hidden layer; 0: no MLP."""
    gain: float
    """The weights begin as Xavier's uniform numbers times this."""
    bias: float
    """Both biases begin as this."""
    logit_bias: float
    """Added to every logit. It changes no probability, but the value of soft Q-learning, the logsumexp."""


class ValueKeywords(TypedDict, total=False):
    """The options `value.*`."""

    layers: int
    """1: linear. 2: Linear, ReLU, Linear with twice the width."""
    init: str
    """zero | torch (nn.Linear's own, as TRL's) | normal (std 0.2) | small (std 1 / sqrt(D + 1), Ziegler et
    al.)."""
    detach: bool
    """Stop the gradient of the value loss before the language model's weights."""
    critic: str | None
    """`copy` (of the policy) or the name of a model: a separate critic network."""
    actions: bool
    """Two further heads with a value Q of each token. A method that needs them sets it."""


class ModelKeywords(TypedDict, total=False):
    """The options `model.*`."""

    train_layers: int | str | None
    """Train only this many of the top blocks; `auto`: max(2, layers // 6). The blocks below are a frozen trunk,
    which is computed once per token. None: train every layer."""
    train_head: bool | None
    """Train the output head. None: yes if every layer is trained, no with a frozen trunk."""
    precision: str
    """float32 | bfloat16: type of the weights in forward and backward passes. With bfloat16, the optimizer has
    float32 master copies of the trained weights."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass, block by block: less memory, a third more time."""
    packing: str
    """Pack the rows of a forward pass end to end, without padding: on, off, or auto (on a CPU, and on a GPU
    that has a kernel for it, with bfloat16). If packing is not exact for a model, its rows are padded."""
    chat_template: str | None
    """A chat template (Jinja), for tasks that are messages and a tokenizer that has no template; exported with
    it."""
    states_gb: float
    """Memory in GB for the cached trunk states of a batch. If they need more, every pass computes them again."""


class MaskKeywords(TypedDict, total=False):
    """The options `mask.*`."""

    by: str
    """copy: a copy of the policy, which keeps its weights for `every` steps (a learned mask). policy: the
    policy itself, which is plain truncated sampling. model: the frozen language model without its `output_mlp`."""
    every: int
    """Steps after which the copy becomes equal to the policy; 0: never, which is how RL4LMs behaved."""


class TeacherKeywords(TypedDict, total=False):
    """The options `teacher.*`."""

    hint: Any
    """What the teacher reads beside the prompt: target (of the task), feedback (`info["feedback"]` of the
    rollout, or the message of its judgement), answer (the world's answer to each reply), or module:function,
    from Python also a function: from a rollout to a text or token ids, or to a list with one of these for each
    turn. Empty: nothing."""
    template: str
    """Where the hint stands: before or behind {prompt}."""
    rate: float
    """A copy of the policy as teacher follows it by this share of the distance after each step. 0: the teacher
    stays the first policy; 1: it is the policy itself, as it was before the step."""


class ConditionKeywords(TypedDict, total=False):
    """The options `condition.*`."""

    wanted: float | None
    """The return that play asks for; none: the best ones of the step before, in turn, and nothing in the first
    step. From turn to turn it is what is left of it."""
    top: float
    """The share of the returns of the step before that counts as the best."""
    evaluated: float | None
    """The return that evaluation and probes ask for; none: `wanted`, or the best one of the step before."""
    template: Any
    """Where the return stands; from Python also a function from a return to the text or the token ids before
    the prompt."""
    digits: int
    """Digits behind the point to which the return is rounded."""
    turn_gamma: float
    """The discount between turns."""


class TargetKeywords(TypedDict, total=False):
    """The options `target.*`."""

    rate: float
    """Each step moves the copy by this share of its distance to the policy (polyak averaging)."""
    every: int
    """Instead, the copy becomes equal to the policy after every so many steps; 0: it follows by `rate`."""


class ReplayKeywords(TypedDict, total=False):
    """The options `replay.*`."""

    share: float
    """Share of the replies of each update, over all ranks, that are drawn from the buffer, in which those of
    the step itself are, too. 0: none, on-policy; 1: all, off-policy."""
    capacity: int
    """Replies that the buffer keeps, over all ranks: the newest ones."""


class LearnerArguments(
    LearnerKeywords, SamplingKeywords, OutputMlpKeywords, ModelKeywords, ReplayKeywords, total=False
):
    """The options of a `Learner`."""

    learner: LearnerKeywords
    sampling: SamplingKeywords
    kl: KlKeywords
    coef: float
    """Price of one nat of KL in the reward; an adaptive controller starts from it. 0: no KL in the reward."""
    reward_gradient: str
    """full: the gradient of the expected charge. score: without the gradient of the charge itself, as in TRL;
    then every kind but k1 has another optimum (docs/kl.md)."""
    loss_coef: float
    """Weight of a KL term in the loss. It can be combined with a KL charge in the reward (`coef`)."""
    loss_kind: str
    """k1 | k2 | k3 | reverse | forward | plain_k3: the KL term of the loss."""
    control: str
    """fixed | adaptive (Ziegler et al. 2019, per reply) | per_token (RL4LMs) | linear (to `end_coef`)."""
    horizon: float | None
    """Number of replies over which `adaptive` corrects an error of 100 %; it counts an error as 20 % at most.
    None: a fiftieth of the run's replies, but at least those of a step; 10,000 where the length of the run is
    unknown."""
    end_coef: float
    """The coefficient at the end of the run with `linear`."""
    loss: LossKeywords | Mapping[str, Any]
    value_clip: float | None
    """The value may move by this much before a smaller error stops counting; none: not clipped."""
    value_coef: float
    """Weight of the value loss beside the policy loss."""
    entropy_coef: float
    """Weight of the entropy bonus."""
    dual_clip: float | None
    """Bounds the loss of a bad action that became likely, at this many times its advantage; above 1."""
    given_coef: float
    """Weight of the cross-entropy of given replies beside the loss of the policy's own."""
    clip_high: float | None
    """The bound above, where it is another than `clip`; none: `clip`."""
    margin: float
    """Scores of a pair should differ by this times the difference of their labels."""
    ties: str
    """Equal labels: none: left out; davidson, rao-kupper: a model of ties."""
    tie: float
    """How likely ties are in that model."""
    beta: float
    """Coefficient of the log-ratio to the reference: a smaller one allows more distance from it."""
    label_smoothing: float
    """Share of labels that are taken to be wrong; with kind sigmoid or robust."""
    pairs: str
    """all: every pair of replies to a prompt; ends: only the best ones against the worst ones."""
    good_weight: float
    """Weight of good replies."""
    bad_weight: float
    """Weight of bad replies."""
    divergence: str
    """reverse: KL(policy || teacher). forward: KL(teacher || policy)."""
    tau: float
    """The expectile of V: near 1, the value of the best replies of the data; 0.5: of their mean."""
    cql_coef: float
    """Weight of the term that keeps Q low where no reply has been."""
    bc_coef: float
    """Weight of the imitation of the replies."""
    awac_beta: float
    """The imitation's weights are exp(this * (Q - V)), at most 20; 0: all are 1."""
    version: str
    """Which consistency is learnt: v1 of one Q, v2 of a step, v3 of a path, or v2_v3 of both."""
    forward_share: float
    """Weight of these losses, which train A, against those that train V: policy and copy exchanged."""
    freeze_later: bool
    """In v3, no gradient goes through the A of later actions."""
    advantage: AdvantageKeywords | Mapping[str, Any]
    gamma: float
    """Discount between the tokens of a reply."""
    lam: float
    """Lambda of GAE between the tokens of a reply: 1 trusts returns, 0 the critic."""
    turn_lam: float | None
    """Lambda between turns; none: `lam`."""
    whiten_scope: str
    """Where advantages get mean 0 and variance 1: rollout, minibatch (after the cut), none."""
    unbiased: bool
    """Divide by n - 1 in that variance, as TRL and RL4LMs do."""
    whiten_rewards: bool
    """Scale rewards to variance 1 first, the mean kept."""
    deviation: str
    """population: divided by n, plus 1e-6. sample: by n - 1, plus 1e-4, as TRL."""
    omega: float
    """Weight of the comparison of turns that begin in the same state."""
    standardise: str
    """Subtract the mean of rewards and divide by their deviation: step, rlprompt, group or none."""
    shape: Sequence[float] | str
    """Four numbers a,b,c,d: the line that maps a reward of a to c, and one of b to d."""
    update: UpdateKeywords | Mapping[str, Any]
    micro_tokens: int
    """Tokens of one forward and backward pass, including padding if rows are padded. It bounds memory, and
    changes no number."""
    micro_batch: str
    """If memory runs out, auto: micro_tokens is halved and the optimizer step repeated; fixed: an error."""
    epochs: int
    """Passes over the batch in each training step."""
    minibatch: int | None
    """Units (episodes, pairs) per optimizer step, over all ranks; None: the whole batch."""
    target_kl: float | None
    """Stop the update when the epoch's mean KL(old || new) per token exceeds this."""
    ratio_threshold: float | None
    """Skip an optimizer step whose mean ratio exceeds this (TRL: 10)."""
    solver_steps: int
    """Steps of conjugate gradients, each a product of the Fisher matrix and a vector."""
    damping: float
    """Added to the diagonal of the Fisher matrix while the direction is found."""
    fisher_share: float
    """The share of the replies that the Fisher matrix is computed from, but at least four replies, or all of
    fewer. They are drawn among those of all ranks."""
    backtracks: int
    """Lengths that the line search tries."""
    shrink: float
    """Each is this share of the one before."""
    critic_epochs: int
    """Passes over the batch that train the critic."""
    critic_minibatch: int | None
    """Replies per optimizer step of the critic, over all ranks; None: the whole batch."""
    lr: float
    """Learning rate at its peak."""
    schedule: str
    """constant | linear (to 0) | cosine (to 0)."""
    warmup: float
    """Share of the run in which the rate rises to its peak; the schedule starts after it."""
    max_grad_norm: float | None
    """A longer gradient is scaled down to this length; none: not bounded."""
    betas: Sequence[float] | str
    """Of adamw: how much of each moment a step keeps."""
    momentum: float
    """Of rmsprop and sgd: how much of the last change a step keeps."""
    eps: float
    """Of adamw and rmsprop: added to the root that divides the gradient."""
    eps_placement: str
    """Of adamw. torch: outside the bias correction. tensorflow: inside it (eps-hat of arXiv:1412.6980), as in
    OpenAI's code."""
    weight_decay: float
    """Of matrices, not of vectors. adamw shrinks the weights; rmsprop and sgd add it to the gradient, as torch
    does."""
    states: str
    """Of adamw. float32, or 8bit: each of Adam's two moments in one byte, 2 bytes per trained weight instead of
    8, but slower."""
    score: ScoreKeywords
    normalise: bool
    """`scale` and `centre` together."""
    centre: bool
    """Subtract the running mean of all scores so far, this step's included; with `scale`, before dividing."""
    missing_stop: float | None
    """Penalty of a reply that hit the length limit."""
    missing_stop_mode: str
    """`replace` the score by `missing_stop`, or `add` it."""
    truncate_token: int | str | None
    """The reward sees the reply up to and with the first such token at position >= `truncate_after`."""
    truncate_after: int
    """In tokens from the start of the reply, which is 0."""
    truncate_penalty: float
    """Replaces the score of a reply without that token."""
    lora: LoraKeywords
    rank: int
    """Width of the matrices; 0: no adapter, the weights themselves are trained."""
    targets: Sequence[str] | str
    """Layers with an adapter, by the last part of their name (q_proj,v_proj); all-linear: all but the output
    head."""
    adapter: str | None
    """A folder in peft's format: train this adapter further. The reference is then the adapter as it was
    loaded."""
    rslora: bool
    """Scale by alpha / sqrt(rank) instead of alpha / rank (rank-stabilised LoRA)."""
    quantise: str
    """none | 8bit | 4bit: quantise the frozen weights. It needs a GPU and the extra `quantise` (bitsandbytes)."""
    soft_prompt: SoftPromptKeywords
    tokens: int
    """Number of vectors, which count as tokens of the context; 0: no soft prompt."""
    text: str | None
    """The words that it begins as. A text of fewer tokens is repeated."""
    output_mlp: OutputMlpKeywords
    value: ValueKeywords
    layers: int
    """1: linear. 2: Linear, ReLU, Linear with twice the width."""
    detach: bool
    """Stop the gradient of the value loss before the language model's weights."""
    critic: str | None
    """`copy` (of the policy) or the name of a model: a separate critic network."""
    actions: bool
    """Two further heads with a value Q of each token. A method that needs them sets it."""
    model: ModelKeywords
    mask: MaskKeywords
    by: str
    """copy: a copy of the policy, which keeps its weights for `every` steps (a learned mask). policy: the
    policy itself, which is plain truncated sampling. model: the frozen language model without its `output_mlp`."""
    teacher: TeacherKeywords
    hint: Any
    """What the teacher reads beside the prompt: target (of the task), feedback (`info["feedback"]` of the
    rollout, or the message of its judgement), answer (the world's answer to each reply), or module:function,
    from Python also a function: from a rollout to a text or token ids, or to a list with one of these for each
    turn. Empty: nothing."""
    condition: ConditionKeywords
    wanted: float | None
    """The return that play asks for; none: the best ones of the step before, in turn, and nothing in the first
    step. From turn to turn it is what is left of it."""
    top: float
    """The share of the returns of the step before that counts as the best."""
    evaluated: float | None
    """The return that evaluation and probes ask for; none: `wanted`, or the best one of the step before."""
    digits: int
    """Digits behind the point to which the return is rounded."""
    target: TargetKeywords
    replay: ReplayKeywords


class TrainArguments(LearnerArguments, total=False):
    """The options of a run."""

    tokenizer: Any
    """The tokenizer of a policy that is a model."""
    lr_scheduler: Any
    """The scheduler of an optimizer of your own, or a function from the optimizer to one."""
    recipe: str
    """A recipe by name, or a YAML file; options given here replace its own."""
    resume: bool
    """Go on with the run in `out`."""
    fresh_optimizer: bool
    """With `resume`: load only the weights, and start with a new optimizer."""
    optimizer: OptimizerKeywords | Any
    """Its options; or an optimizer of your own, or what makes one."""
    form: Any
    """Makes tasks of rows as a data set publishes them: summarize, translate, commongen, totto, narrativeqa,
    dialog, imdb, extract, or module:function; from Python also a function. None: the options `data.*` name the
    fields."""
    env: Any
    """The environment: a name, or module:object; from Python also an object, class or function. None: the
    policy replies once to each prompt."""
    engine: Any
    """What generates the replies: a name, or module:object; from Python also an object, class or function.
    None: the policy itself, in this process (native for a transformers model)."""
    reference: Any
    """The model that KL is measured to: copy (of the initial policy), none, or a model."""
    preset: str | None
    """Option values of another system, by name; of several, separated by commas, later ones replace earlier
    ones."""
    steps: int
    batch: int
    """Replies per step, over all ranks."""
    samples: int
    """Replies to each prompt of a step."""
    reward_chunks: int
    """Calls of the reward per step, each with a part of the prompts, in a thread while the next part is
    generated. For rewards that wait or compute elsewhere and judge each reply by itself; 1: one call with all
    replies."""
    rollouts_ahead: int
    """Steps that rollouts are generated ahead of training, in a thread: they are at most so many updates old,
    and `learner.importance` is then token unless it is given. 0: each step generates its own."""
    partial_rollout_tokens: int
    """Most tokens of a reply in a step: the next one continues those that have not ended, with its weights, and
    `learner.importance` is then token unless it is given. 0: each step generates its replies to their ends."""
    evaluate: Any
    """Held-out tasks, evaluated before and after training with the same random numbers; 10% holds out that
    share of the tasks, which the seed chooses and training never draws. None: none, or if the tasks are the
    environment's own, those that it keeps for tests; the word none, or false, evaluates nothing there either."""
    evaluate_every: int
    """Steps between evaluations during training; 0: only before and after."""
    best: str | None
    """A metric: the model of the step with its largest value is exported to best/, and that step's checkpoint
    is kept. A minus before the name means the smallest value."""
    probes: int
    """Probe prompts, from the held-out tasks if there are any, that policy and reference answer; 0: none."""
    probe_every: int
    """Steps between answers to the probe prompts; they are also answered before and after training."""
    trackers: Sequence[str] | str | Mapping[str, Any]
    """Services that the run also logs to: tensorboard, wandb, trackio, or module:class; several are separated
    by commas, or are a mapping from each name to its options."""
    checkpoint: str
    """resume: the whole state, for an exact resume. light: only the trained weights, for a resume with
    --fresh-optimizer. both: one of each kind."""
    checkpoint_minutes: float
    """Minutes between checkpoints; 0: one after every step. One is always written at the end or on an
    interrupt."""
    checkpoint_every: int
    """Steps between further checkpoints; 0: only by time."""
    keep: int
    """How many of the newest checkpoints of each kind are kept."""
    keep_every: int
    """Steps between checkpoints that are never deleted; 0: none."""
    silence_minutes: float
    """Minutes without progress (a token, a micro-batch, a new phase) after which the stacks of all threads are
    written to log.txt and the process ends with code 1; the run can be resumed. 0: never, for a reward that
    asks a person. Slow phases are logged either way."""
    samples_every: int
    """Steps between sample replies on the console; 0: none."""
    data: DataKeywords
    text_field: str
    """The field that holds the prompt: text, chat messages or ids. A row without `text` may have it in
    `prompt`."""
    min_chars: int
    """Leave out texts with fewer characters."""
    max_chars: int | None
    """Leave out texts with more characters."""
    query_tokens: int | str | None
    """The prompt is this many first tokens of the text: 5, or "2-8" for a random number per task."""
    prompt_tokens: int | None
    """Longer prompts are cut to this many tokens. Special tokens, and what a form puts around the text, are
    kept. Of a chat, the text of the last message is cut, so that the chat template makes this many tokens of
    all messages."""
    prompt_keeps: str
    """The side of such a prompt that is kept: start or end."""
    chat: bool
    """Make each prompt that is a text the message of a user, which the policy's chat template is given."""
    limit: int | None
    """Maximal number of tasks."""
    shuffle: bool
    """Shuffle the rows before `limit` cuts them."""
    id_field: str | None
    """The field with the id of the task; by default, the id is made of the source and the row's number."""
    target_field: str | None
    """The field that becomes `Task.target`, for rewards; of several, separated by commas, a mapping of them
    does."""
    reference_field: str | None
    """The field that becomes `Task.references`, a text or a list of texts, for rewards and metrics."""
    reply_field: str | None
    """Of demonstrations: the field of the replies, with prompts in `text_field`; none: the row's form decides."""
    loss_on: str
    """Of demonstrations: train on the replies alone, or on `all`, prompts too."""
    max_length: int | None
    """Of demonstrations: longer rows (prompt and reply, in tokens) are cut; none: rows too long are an error."""
    evaluation: EvaluationKeywords
    seeds: Sequence[int] | str
    """Seeds of the random numbers, each with `samples` replies per task; empty: the seed of the run."""
    beams: int
    """Above 1: replies are searched for by transformers' beam search with so many beams, and not drawn."""
    length_penalty: float
    """Of beam search: the score of a reply of n tokens is their summed log-probs over n ** length_penalty."""
    metrics: Any
    """Further metrics of the replies: bleu,rouge, or with options {bleu: {max_n: 2}}. A name is one that
    docs/evaluation.md lists, module:function, or one that an installed package adds."""
    isolation: IsolationKeywords
    timeout: float
    """Seconds for a whole batch, which is judged within `timeout` + 2 s. The first call, with all samples, may
    take half of it; samples of a call that failed are judged again, one at a time, in the other half."""
    sample_timeout: float | None
    """Seconds for a sample that is judged alone; none: a quarter of the time that is left of `timeout`."""
    memory_gb: float | None
    """Address space of each of its processes, in GB; none: no limit (needed by a reward that uses CUDA)."""
    processes: int
    """Processes and threads that it may have, if the system can count them."""
    workers: int
    """Worker processes, each of which judges a part of the batch; the samples of a prompt stay together."""
    each: bool
    """Judge one sample at a time from the start; all of `timeout` is then for that."""
    again: bool
    """Judge samples alone after a failure; false if a score depends on the other samples of the batch."""
    retries: int
    """Times that a call in which the reward raised or died is repeated, as long as `timeout` allows: for
    rewards that ask a server."""
    retry_seconds: float
    """Seconds before the first repetition; before each further one twice as many."""
    on_error: float | str | None
    """A sample on which the reward raised, died or returned something unusable: drop, stop, or the score that
    it gets; none: an isolated reward drops it, any other stops the run."""
    on_timeout: float | str
    """A sample that was not judged in time: drop, stop, or a score."""
    on_abstain: float | str
    """A sample for which the reward returned None: drop, stop, or a score."""

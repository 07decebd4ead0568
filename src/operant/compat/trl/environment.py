"""`TextEnvironment` of TRL 0.11: a model that calls tools within its text.

    env = TextEnvironment(model, tokenizer, [SimpleTool()], reward_fn, prompt, generation_kwargs={"max_new_tokens": 32})
    queries, responses, masks, rewards, histories = env.run(["What is 2 + 2?"])
    trainer.step(queries, responses, rewards, masks)

A call is `<request><TOOL>query<call>`. The tool's answer and `<response>` follow, and the model goes on until
`<submit>`.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from operant.compat.trl.models import PreTrainedModelWrapper
from operant.compat.trl.trainer import end_of, padded_queries
from operant.types import OperantError, require

PROMPT, SYSTEM, MODEL, REWARD = (f"black on {colour}" for colour in ("grey85", "cyan3", "deep_sky_blue1", "plum1"))


class StringStoppingCriteria(StoppingCriteria):
    """Ends a batch when each of its replies contains one of the strings; `generated_tokens` counts each up to there."""

    def __init__(self, stop_strings: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self.stop_strings, self.tokenizer = stop_strings, tokenizer
        self.generated_tokens: list[int] = []
        self.start: int | None = None

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> bool:
        if self.start is None:
            self.start, self.generated_tokens = input_ids.shape[-1] - 1, [1] * len(input_ids)
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :])
        done = [any(stop in text for stop in self.stop_strings) for text in texts]
        self.generated_tokens = [n + (not ended) for n, ended in zip(self.generated_tokens, done)]
        if all(done):
            self.start = None
        return all(done)


class TextHistory:
    """The segments of one exchange: its text and tokens, the spans of both, and who wrote what (`system_spans`).

    `token_masks` [T] is 1 at the model's own tokens.
    """

    def __init__(self, text: str, tokens: Tensor, system: bool = True):
        self.text, self.tokens = "", tokens[:0]
        self.token_masks = torch.zeros(0, dtype=torch.long, device=tokens.device)
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.completed, self.truncated = False, False
        self.reward: float | Tensor = 0.0
        self.append_segment(text, tokens, system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Add what the world (`system`) or the model wrote. Raises: OperantError for an empty text or no tokens."""
        require(text and len(tokens), "a segment of a TextHistory needs a text and tokens; this one is empty")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text, self.tokens = self.text + text, torch.cat([self.tokens, tokens])
        chosen = torch.full((len(tokens),), int(not system), dtype=torch.long, device=tokens.device)
        self.token_masks = torch.cat([self.token_masks, chosen])

    def complete(self, truncated: bool = False) -> None:
        """End the exchange; `truncated`: because it became too long."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        start, end = self.text_spans[-1]
        return self.text[start:end]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first segment's tokens, all later ones, and the mask of these: the arguments of `PPOTrainer.step`."""
        cut = self.token_spans[0][1]
        return self.tokens[:cut], self.tokens[cut:], self.token_masks[cut:]

    def show_text(self, show_legend: bool = False) -> None:
        """Print the text, coloured by who wrote it."""
        spans = zip(self.text_spans, self.system_spans)
        self._show([(self.text[a:b], system) for (a, b), system in spans], show_legend)

    def show_tokens(self, tokenizer: PreTrainedTokenizerBase, show_legend: bool = False) -> None:
        """Print the tokens, coloured by who chose them."""
        pieces = (tokenizer.convert_ids_to_tokens(self.tokens[a:b].tolist()) for a, b in self.token_spans)
        self._show(list(zip((" ".join(some) + " " for some in pieces), self.system_spans)), show_legend)

    def _show(self, segments: Sequence[tuple[str, bool]], legend: bool) -> None:
        from rich import print as show
        from rich.text import Text

        styles = [PROMPT, *(SYSTEM if system else MODEL for _, system in segments[1:])]
        parts = [*zip((text for text, _ in segments), styles), (f"\n\nReward: {self.reward}", REWARD)]
        if legend:
            kinds = {"Prompt": PROMPT, "System": SYSTEM, "Model": MODEL, "Reward": REWARD}
            parts += [("\n\nColours: ", ""), *((f"{name} ", style) for name, style in kinds.items())]
        show(Text.assemble(*parts))


class TextEnvironment:
    """Lets a model with a value head answer queries with tools: callables by name, or objects of a class of that name.

    prompt: stands before every query. reward_fn: rewards of the last segments of all exchanges. max_turns: calls of an
    exchange. max_tool_reponse (TRL's spelling): characters of an answer. max_length: tokens of an exchange, None for
    no limit.
    """

    def __init__(
        self,
        model: PreTrainedModelWrapper,
        tokenizer: PreTrainedTokenizerBase,
        tools: Mapping[str, Callable[[str], object]] | Sequence[Callable[[str], object]] = (),
        reward_fn: Callable[..., Sequence[float | Tensor]] | None = None,
        prompt: str = "",
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, object] | None = None,
    ):
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        self.tools = dict(tools) if isinstance(tools, Mapping) else {type(tool).__name__: tool for tool in tools}
        self.reward_fn, self.max_turns, self.max_length = reward_fn, max_turns, max_length
        self.max_tool_response, self.generation_kwargs = max_tool_reponse, dict(generation_kwargs or {})
        self.request_token, self.call_token = "<request>", "<call>"
        self.response_token, self.submit_token = "<response>", "<submit>"
        self.is_encoder_decoder = model.is_encoder_decoder
        self.current_device = model.pretrained_model.device

    def _ids(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt").input_ids[0].to(self.current_device)

    def run(
        self, queries: Sequence[str], **rewards_kwargs: object
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[float | Tensor], list[TextHistory]]:
        """(queries, responses, masks, rewards, histories) of all exchanges, the first three as lists of tensors [T].

        rewards_kwargs: further arguments of `reward_fn`.
        """
        histories = [TextHistory(text, self._ids(text)) for text in (self.prompt + query for query in queries)]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = self.tasks_end_check([self.step(history) for history in histories], model_turn=False)
        self.compute_reward(histories, **rewards_kwargs)
        asked, replies, masks = ([one.split_query_response_tokens()[i] for one in histories] for i in range(3))
        return asked, replies, masks, [history.reward for history in histories], histories

    def step(self, history: TextHistory) -> TextHistory:
        """Answer the call at the end of an exchange that has not ended. A tool that fails answers with its error."""
        [history] = self.tasks_end_check([history])
        if history.completed:
            return history
        tool, query = self.parse_tool_call(history.last_text_segment)
        if tool is None or query is None:
            answer = f"Unknown tool call: {history.last_text_segment}"
        elif tool not in self.tools:
            answer = f"Unknown tool {tool}."
        else:
            try:
                answer = str(self.tools[tool](query))
            except Exception as error:  # the model shall see what its call did
                answer = f"Tool error: {error}"
        if len(answer) > self.max_tool_response:
            answer = answer[: self.max_tool_response - 3] + "..."
        history.append_segment(answer + self.response_token, self._ids(answer + self.response_token))
        return history

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """The tool and the query of `<request><TOOL>query<call>`; (None, None) where there is no such call."""
        call = re.search(f"{self.request_token}(.*?){self.call_token}", text, re.DOTALL)
        name = re.search(r"<(.*?)>", call[1]) if call else None
        return (name[1], call[1].partition(">")[2]) if call and name else (None, None)

    def compute_reward(self, histories: list[TextHistory], **reward_kwargs: object) -> list[TextHistory]:
        """Give each exchange the reward of its last segment. Raises: OperantError without a `reward_fn`."""
        if self.reward_fn is None:
            raise OperantError("a TextEnvironment needs a reward_fn: texts of the last segments to one number each")
        rewards = self.reward_fn([history.last_text_segment for history in histories], **reward_kwargs)
        for history, reward in zip(histories, rewards):
            history.reward = reward
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Add the model's next segment to each exchange that has not ended."""
        going = [history for history in histories if not history.completed]
        replies = self._generate_batched([history.tokens for history in going])
        for history, text, reply in zip(going, self.tokenizer.batch_decode(replies), replies):
            history.append_segment(text, reply, system=False)
        return histories

    def tasks_end_check(self, histories: list[TextHistory], model_turn: bool = True) -> list[TextHistory]:
        """Complete the exchanges that have ended."""
        for history in histories:
            truncated, ended = self.task_end_check(history, model_turn)
            if ended:
                history.complete(truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """(is too long, has ended) of an exchange. After its turn the model must have called a tool or submitted."""
        last = history.last_text_segment
        if history.completed:
            return False, False
        if self.max_length is not None and len(self._ids(history.text)) > self.max_length:
            return True, True
        called = self.request_token in last and self.call_token in last
        ended = bool(self.tokenizer.eos_token) and self.tokenizer.eos_token in history.text
        over = ended or self.submit_token in last
        return False, over or (model_turn and not called)

    def _generate_batched(
        self, query_tensors: Sequence[Tensor], batch_size: int = 16, pad_to_multiple_of: int | None = None
    ) -> list[Tensor]:
        outputs = list[Tensor]()
        self.model.eval()
        side = self.tokenizer.padding_side if self.is_encoder_decoder else "left"
        for start in range(0, len(query_tensors), batch_size):
            batch = query_tensors[start : start + batch_size]
            padded = padded_queries(self.tokenizer, batch, side, pad_to_multiple_of, self.current_device)
            stop = StringStoppingCriteria([self.call_token, self.submit_token], self.tokenizer)
            options = self.generation_kwargs | {"stopping_criteria": StoppingCriteriaList([stop])}
            width = 0 if self.is_encoder_decoder else padded["input_ids"].shape[1]
            drawn = self.model.generate(**padded, **options)
            for row, count in zip(drawn, stop.generated_tokens):
                reply = row[width : width + count + self.is_encoder_decoder]  # whose first token was not drawn
                outputs.append(reply[: end_of(reply, self.tokenizer, width, self.generation_kwargs)])
        return outputs

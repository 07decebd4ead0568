"""Moves what a script calls of trlX: `trlx.train` and its configurations."""

import re

from operant.options import ours
from operant.tools.migrate.renaming import literal, renamed
from operant.tools.migrate.source import Configuration, Node, ScriptTree, call_of, mapping

CALLED = {"optimizer": "optim", "scheduler": "lr_scheduler_type", "gen_kwargs": "guidance"}
"""What `name` stands for in a nested mapping; in the last one, `beta` is the guidance of ILQL."""
TRLX_CONFIGS = {"TRLConfig", "default_ppo_config", "default_ilql_config", "default_sft_config"}


def method_of(code: str) -> str:
    """The method of a configuration, by the class or function in its code; a model may have any name."""
    found = re.search(r"(ilql|sft)(?:_?config|trainer)", code.lower())
    return found[1] if found else "ppo"


class TrlxCalls(ScriptTree):
    """The calls of trlX in a script."""

    def trlx_configuration(self, call: Node, known: dict[str, list[Configuration]]) -> None:
        """trlX's configuration becomes a mapping, where the script has its values."""
        given: dict[str, str] = {}
        base = self.code(call.args[0].value) if call.args else ""
        method = method_of(self.code(call))
        if self.code(call.func).endswith("TRLConfig"):
            self._flat(call, given)
        elif base.endswith(".to_dict()"):  # TRLConfig.update(base, more)
            more = [self.code(argument.value) for argument in call.args[1:]]
            self.above(call, f"{', '.join(more)}: left out; its options need operant's names")
            made = Configuration(renamed({}, method, "trlx"), self.target(call), [base], start=self._span(call)[0])
            known.setdefault(made.target, []).append(made)
            self.replace(call, base.removesuffix(".to_dict()"))
            return
        else:
            self.above(call, f"{self.code(call)}: put its options here, under operant's names (docs/other-names.md)")
        made = Configuration(renamed(given, method, "trlx"), self.target(call), [], given, self._span(call)[0])
        if made.target:
            known.setdefault(made.target, []).append(made)
        self.as_mapping(call, made)

    def evolved(self, call: Node, base: str, known: dict[str, list[Configuration]], method: str = "") -> None:
        """`config.evolve(train=dict(...))` becomes the mapping with other values. method: by default as `base` says."""
        given: dict[str, str] = {}
        self._flat(call, given)
        found = renamed(given, method or method_of(base), "trlx")
        self.above(call, *found.comments)
        made = Configuration(found, self.target(call), [], given, self._span(call)[0])
        known.setdefault(made.target, []).append(made)
        self.replace(call, f"{base} | {mapping(found.values, [], self.indent(call))}")

    def _flat(self, node: Node, given: dict[str, str], called: str = "name") -> None:
        """The options of nested configurations and mappings, by their last names. called: what `name` stands for."""
        if isinstance(node, self.cst.Dict):
            elements = [e for e in node.elements if isinstance(e, self.cst.DictElement)]
            inner = [(str(literal(self.code(e.key))), e.value) for e in elements]
        else:
            inner = [*self.arguments(node)[0].items()]
        for name, value in inner:
            if called == "guidance" and name == "beta":
                given.setdefault("sampling.guidance", self.code(value))
            elif isinstance(value, self.cst.Dict) or (
                isinstance(value, self.cst.Call) and (self.code(value.func) + "$").endswith(("Config$", "dict$"))
            ):
                self._flat(value, given, CALLED.get(name, "name"))
            else:
                given.setdefault(called if name == "name" else name, self.code(value))

    def trlx(self, call: Node, known: dict[str, list[Configuration]]) -> str:
        """`trlx.train` becomes `operant.train`."""
        order = ("model_path", "reward_fn", "dataset", "samples", "rewards", "prompts", "eval_prompts", "metric_fn")
        arguments, _ = self.arguments(call, *order, "config", "stop_sequences")
        code = {name: self.code(value) for name, value in arguments.items() if self.code(value) != "None"}
        text = code.pop("config", "")
        found = self.configured(known, text, call)
        policy = code.pop("model_path", "")
        if not policy and not (found is not None and ("policy" in found.renamed.values or found.stars)):
            policy = "MODEL"
            self.above(call, "MODEL: trlX took it from the configuration")
        written = [policy] if policy else []
        if "reward_fn" in code:
            if "prompts" not in code:
                self.above(call, "TASKS: a list of prompts; trlX began each reply at the start token")
            written.append(f"tasks={code.pop('prompts', 'TASKS')}")
            written += [f"reward={self._reward_of_samples(arguments['reward_fn'])}", 'algorithm="ppo"']
            code.pop("reward_fn")
        else:
            labelled = "rewards" in code or "dataset" in code
            written.append(f"tasks={code.pop('samples', code.pop('dataset', 'TASKS'))}")
            written.append(f'algorithm="{"ilql" if labelled else "sft"}"')
            needs = "prompt, completion and reward" if labelled else "prompt and completion"
            self.above(call, f"tasks: rows with {needs}, as dicts (docs/algorithms.md)")
            code.pop("rewards", None)
        if "eval_prompts" in code:
            written.append(f"evaluate={code.pop('eval_prompts')}")
        if not text:
            self.above(call, "no configuration: trlX's defaults there, operant's here (docs/options.md)")
        elif found is None:
            self.above(call, f"{text}: its options need operant's names (docs/other-names.md)")
        else:
            written.append(f"**{text}")
        if stops := code.pop("stop_sequences", ""):
            written.append(f'**{{"sampling.stop_strings": {stops}}}')
        for left in code:
            here = " or ".join(filter(None, ours(left))) or "nothing"
            self.above(call, f"{left}: here it is {here}; docs/evaluation.md")
        self.replace(call, call_of(written, self.indent(call)))
        return self.target(call)

    def _reward_of_samples(self, given: Node) -> str:
        """A function of rollouts that calls trlX's reward function with the arguments that it takes."""
        made = self.assigned(given)
        if isinstance(made, self.cst.Name):
            made = self.functions.get(made.value, made)
        takes = {"samples", "prompts", "outputs"}
        if isinstance(made, self.cst.FunctionDef | self.cst.Lambda) and made.params.star_kwarg is None:
            takes &= {p.name.value for p in (*made.params.params, *made.params.kwonly_params)}
        parts = (("samples", "text"), ("prompts", "query"), ("outputs", "reply"))
        passed = [f"{name}=[r.{ours} for r in rollouts]" for name, ours in parts if name in takes]
        function = self.code(given)
        function = f"({function})" if isinstance(given, self.cst.Lambda) else function
        return f"lambda rollouts: {function}({', '.join(passed)})"

"""Moves a Python script of TRL or trlX, by its syntax tree.

Edits replace pieces of the text and leave the rest as it is. Comments that begin with `# operant:` stand above the
statement that they are about.
"""

import ast
import importlib
import re
from collections.abc import Mapping
from contextlib import suppress

from operant.options import note
from operant.tools.migrate.renaming import ALGORITHMS, COUNTED, UNKNOWN, bracketed, literal, renamed
from operant.tools.migrate.source import Configuration, Node, call_of, mapping
from operant.tools.migrate.trlx import TRLX_CONFIGS, TrlxCalls
from operant.types import OperantError, require

COMPAT = "operant.compat.trl"
NAME = re.compile(r"(name|path|name_or_path|model_id|checkpoint|\.model)$", re.IGNORECASE)
"""An expression with such an end is the name of a model."""
MOVED = {f"{kind}{end}": kind for kind in ALGORITHMS for end in ("Config", "Trainer")}
"""TRL's classes that are moved, and what their names begin with."""
COMPARED = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
LABELLED = ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
ORDER = {
    "grpo": COMPARED,
    "rloo": COMPARED,
    "dpo": LABELLED,
    "kto": LABELLED[:3],  # the fourth has been another one
    "ppo": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
}
"""The arguments of each trainer of TRL in their order; of those not here, the last."""
NATIVE = (
    "natively this loop is learner = operant.Learner(MODEL, algorithm='ppo', preset='trl'), then",
    "replies = learner.generate(queries, ...) and learner.step(replies, rewards): docs/other-names.md",
)


def moved(text: str, name: str) -> str:
    """The script moved to operant. name: of the file, for errors.

    Raises: OperantError without libcst, for a syntax error, and for a script that uses neither TRL nor trlX.
    """
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise OperantError(f"{name}{where}: {why}; it must be a Python 3 script") from error
    script = _Script(text)
    require(script.uses, f"{name} imports neither TRL (trl) nor trlX (trlx): there is nothing to move")
    script.move()
    new = script.edited()
    try:
        ast.parse(new)
    except SyntaxError as error:
        why = f"line {error.lineno} would not be Python; see docs/from-trl.md"
        raise OperantError(f"{name} cannot be moved: {why}") from error
    return new


class _Script(TrlxCalls):
    """A script, and how its parts are moved."""

    def move(self) -> None:
        old_loop = any("WithValueHead" in self.code(i) for i in self.imports) or any(
            self.meaning(call.func).endswith("WithValueHead.from_pretrained") for call in self.calls
        )
        native, trainers, configurations = set[str](), set[str](), dict[str, list[Configuration]]()
        # What begins the names of the trainers that classes of the script derive from.
        bases = (self.meaning(base.value).rpartition(".")[2] for made in self.classes for base in made.bases)
        derived = {name.removesuffix("Trainer") for name in bases if name.endswith("Trainer")}
        # The method of the first trainer of TRL, whose arguments may be transformers' own.
        names = (self.meaning(call.func) for call in self.calls)
        kinds = [name.rpartition(".")[2].removesuffix("Trainer") for name in names if name.startswith("trl.")]
        trained = next((ALGORITHMS[kind] for kind in kinds if kind in ALGORITHMS and kind != "PPO"), "")
        for call in sorted(self.calls, key=self._is_trainer):  # a configuration may stand in its call
            meaning = self.meaning(call.func)
            library, short = meaning.split(".")[0], meaning.rpartition(".")[2]
            kind = MOVED.get(short, "")
            if meaning == "transformers.TrainingArguments" and trained:
                self._configuration(call, trained, configurations, "transformers")
            elif kind in derived:
                self.above(call, f"a class here derives from {kind}Trainer, so this stays TRL's")
            elif library == "trl" and kind == "PPO" and old_loop:
                if short == "PPOTrainer":
                    self.above(call, *NATIVE)
            elif library == "trl" and kind:
                native.add(short)
                if short.endswith("Config"):
                    self._configuration(call, ALGORITHMS[kind], configurations)
                else:
                    trainers.add(self._trainer(call, ALGORITHMS[kind], configurations, f"{kind}Config" in native))
                    attribute = self.parents[call]
                    if isinstance(attribute, self.cst.Attribute) and attribute.attr.value == "train":
                        # Of `GRPOTrainer(...).train()` the end is left out.
                        self.edits.append((self._span(call)[1], self._span(self.parents[attribute])[1], ""))
            elif short == "evolve" and self.meaning(getattr(call.func.value, "func", call)).startswith("trlx."):
                self.evolved(call, self.code(call.func.value), configurations)
            elif library == "trlx" and short == "train":
                trainers.add(self.trlx(call, configurations))
            elif library == "trlx" and (short in TRLX_CONFIGS or "TRLConfig" in meaning):
                self.trlx_configuration(call, configurations)
        self._uses_of(trainers - {""}, configurations)
        kept = self._mentions(native, old_loop) | {f"{kind}{end}" for kind in derived for end in ("Config", "Trainer")}
        for statement in self.uses:
            self._import(statement, native, kept, old_loop)

    def _mentions(self, native: set[str], old_loop: bool) -> set[str]:
        """Change annotations with the classes that were moved; the classes that the script has other uses for."""
        kept: set[str] = set()
        for node in () if old_loop else self.mentioned:
            short, parent = self.meaning(node).rpartition(".")[2], self.parents[node]
            moved = self.meaning(node).startswith("trl.") and short in MOVED
            imported = self.around(node, self.cst.Import, self.cst.ImportFrom)
            if not moved or imported or (isinstance(parent, self.cst.Call) and parent.func is node):
                continue
            if isinstance(parent, self.cst.Annotation) and (short.endswith("Trainer") or short in native):
                self.replace(node, "dict" if short.endswith("Config") else "operant.Run")
                native.add(short)
            elif not isinstance(parent, self.cst.Attribute):
                kept.add(short)
                if short.endswith("Trainer"):
                    self.above(node, f"{short}: only its calls are moved; here write operant.train(...) by hand")
        return kept

    def _configuration(
        self, call: Node, algorithm: str, known: dict[str, list[Configuration]], system: str = "trl"
    ) -> None:
        """`GRPOConfig(...)` becomes a mapping of operant's options."""
        arguments, stars = self.arguments(call, "output_dir")
        given = {name: self.code(value) for name, value in arguments.items()}
        if system == "transformers":
            given = {"learning_rate": "5e-5", "lr_scheduler_type": '"linear"'} | given
        made = Configuration(renamed(given, algorithm, system), self.target(call), stars, given, self._span(call)[0])
        inside = self.parents[call]
        if made.target:
            known.setdefault(made.target, []).append(made)
        elif isinstance(inside, self.cst.Arg) and self._is_trainer(self.parents[inside]):
            known.setdefault(self.code(call), []).append(made)
        self.as_mapping(call, made)

    def _is_trainer(self, call: Node) -> bool:
        return isinstance(call, self.cst.Call) and self.meaning(call.func).endswith(("Trainer", "trlx.train"))

    def _trainer(self, call: Node, algorithm: str, known: dict[str, list[Configuration]], made_here: bool) -> str:
        """A trainer becomes `operant.train`; returns what it is assigned to. made_here: whether the script calls its
        configuration, which is a mapping then."""
        order = ORDER.get(algorithm, ORDER["sft"])
        arguments, stars = self.arguments(call, *order)
        if any(not argument.star and argument.keyword is None for argument in call.args[len(order) :]):
            self.above(call, f"arguments behind {order[-1]} without a name are left out: name them, and convert again")
        for star in stars:
            self.above(call, f"{star}: its arguments need operant's names too")
        arguments["processing_class"] = arguments.pop("tokenizer", arguments.get("processing_class"))
        model = arguments.pop("model", None)
        name = "MODEL" if model is None else self.code(model)
        if algorithm == "reward-model" and (loaded := self._loaded(model, known)):
            name = loaded
            self.above(call, "policy.trunk: the causal model below the new head, by name; the classifier is made here")
        written, options = [name], dict[str, str]()
        if algorithm == "reward-model":
            written, options = ['"reward_model"'], {"policy.trunk": name}
        if (tasks := arguments.pop("train_dataset", None)) is not None:
            written.append(f"tasks={self.code(tasks)}")
        if algorithm in ("grpo", "rloo", "ppo"):
            written.append(f"reward={self._reward(call, arguments, known)}")
        at_algorithm = len(written)
        if (evaluate := arguments.pop("eval_dataset", None)) is not None and self.code(evaluate) != "None":
            written.append(f"evaluate={self.code(evaluate)}")
        tokenizer = arguments.pop("processing_class", None)
        if algorithm == "ppo":
            self.above(call, "tasks: rows with a text 'prompt' or with messages; TRL's PPO took token ids")
            if arguments.pop("value_model", None) is not None:
                self.above(call, "value_model: the critic is a head on the policy; value.critic names a model for it")
        named = isinstance(model, self.cst.SimpleString | type(None)) or NAME.search(name)
        if algorithm != "reward-model" and not named:
            if tokenizer is None:
                self.above(call, "a model that is no name needs its tokenizer: tokenizer=...")
            else:
                written.append(f"tokenizer={self.code(tokenizer)}")
        if (reference := arguments.pop("ref_model", None)) is not None and self.code(reference) != "None":
            written.append(f"reference={self.code(reference)}")
        self._lora(call, arguments.pop("peft_config", None), options)
        configuration = arguments.pop("args", arguments.pop("config", None))
        text = "" if configuration is None or self.code(configuration) == "None" else self.code(configuration)
        found = self.configured(known, text, call)
        if found is None and not text:
            found = Configuration(renamed({}, algorithm), "")
            self.above(call, *found.renamed.comments)
        written.insert(at_algorithm, f'algorithm="{algorithm if found is None else found.renamed.algorithm}"')
        if found is None and (made_here or algorithm == "ppo"):
            written.append(f"**{text}")
            self.above(call, f"{text}: with operant's names; its epochs are steps, epochs * tasks * samples / batch")
        elif found is None:
            written.append(f"args={text}")
            self.above(call, f"{text}: TRL's own object, which operant.train reads; so TRL stays installed")
        elif found.renamed.epochs:
            count = found.renamed.values.get("samples", "1")
            passes = found.renamed.epochs if count == "1" else f"{found.renamed.epochs} * {bracketed(count)}"
            batch = bracketed(found.renamed.values["batch"])
            if tasks is not None:
                written.append(f"steps=max(1, int({passes} * len({self.code(tasks)}) / {batch}))")
            else:
                self.above(call, "steps: epochs * tasks * samples / batch")
        for left, value in arguments.items():
            if value is not None and self.code(value) not in ("None", "[]"):
                self.above(call, f"{left}: {note(left) or 'operant.train has no such argument; docs/extending.md'}")
        if found is not None and found.target:
            written.append(f"**{text}")
        elif found is not None:
            stars = [star for star in found.stars if star[:2] == "**"]
            written.append("**" + mapping(found.renamed.values | options, stars, self.indent(call) + "    "))
            options = {}
        if options:
            written.append("**" + mapping(options, [], self.indent(call) + "    "))
        self.replace(call, call_of(written, self.indent(call)))
        return self.target(call)

    def _loaded(self, node: Node, known: Mapping[str, list[Configuration]]) -> str:
        """Code of the name in `from_pretrained(NAME)`, whose value a node is; empty: it is none."""
        made = self.assigned(node)
        if not (isinstance(made, self.cst.Call) and self.code(made.func).endswith("from_pretrained") and made.args):
            return ""
        name = self.code(made.args[0].value)
        root, _, field = name.rpartition(".")
        configuration = self.configured(known, root, made)
        return name if configuration is None else configuration.constant(field) or name

    def _reward(self, call: Node, arguments: dict[str, Node], known: Mapping[str, list[Configuration]]) -> str:
        """TRL's reward functions as a function, a name, or a mapping to weights."""
        given = arguments.pop("reward_funcs", arguments.pop("reward_model", None))
        if given is None:
            return "REWARD"
        made = self.assigned(given)
        configuration = arguments.get("args")
        found = None if configuration is None else self.configured(known, self.code(configuration), call)
        options = {} if found is None else found.given
        if name := self._loaded(given, known):
            return _named(name) if literal(name) is not UNKNOWN else f'f"classifier:{{{name}}}"'
        weights = ast.parse(options["reward_weights"], mode="eval").body if "reward_weights" in options else None
        codes = [ast.unparse(w) for w in weights.elts] if isinstance(weights, ast.List | ast.Tuple) else None
        listed = isinstance(made, self.cst.List) and made.elements
        whole = isinstance(made, self.cst.Name) and made.value in self.functions
        one = whole or isinstance(made, self.cst.SimpleString | self.cst.Lambda)
        if not listed and not one and weights is not None:
            return f"dict(zip({self.code(given)}, {ast.unparse(weights)}))"
        if not listed:
            if isinstance(made, self.cst.Name) and not whole:
                self.above(call, f"reward: if {made.value} is a list, a mapping: dict.fromkeys({made.value}, 1.0)")
            name = _named(self.code(given))
            return f"{{{name}: {codes[0]}}}" if codes is not None and len(codes) == 1 else name
        each = [_named(self.code(element.value)) for element in made.elements]
        if len(each) == 1 and weights is None:
            return each[0]
        longer = {f"{self.code(given)}.append", f"{self.code(given)}.extend"}
        if any(self.code(one.func) in longer for one in self.calls):
            self.above(call, f"reward: what is appended to {self.code(given)} is missing here")
        if weights is not None and codes is None:
            return f"dict(zip([{', '.join(each)}], {ast.unparse(weights)}))"
        codes = ["1.0"] * len(each) if codes is None else codes
        return "{" + ", ".join(f"{one}: {weight}" for one, weight in zip(each, codes, strict=False)) + "}"

    def _lora(self, call: Node, given: Node, options: dict[str, str]) -> None:
        """peft's `LoraConfig` as options `lora.*`."""
        if given is None or self.code(given) == "None":
            return
        made = self.assigned(given)
        if not isinstance(made, self.cst.Call) or not self.code(made.func).endswith("LoraConfig"):
            self.above(call, "peft_config: lora.rank, and the other options lora.* (docs/adapters.md)")
            return
        assigned = ((self.code(a.targets[0].target), self.code(a.value)) for a in self.assigns)
        if (self.code(given), "None") in assigned:
            self.above(call, "lora.*: None under some condition there; leave these options out then")
        arguments, _ = self.arguments(made, "r")
        options["lora.rank"] = self.code(arguments.pop("r")) if "r" in arguments else "8"
        options["lora.alpha"] = "8"  # peft's default; ours is twice the rank
        if "target_modules" not in arguments:
            self.above(call, "lora.targets: all linear layers here; peft has a list for each architecture")
        if "bias" in arguments and self.code(arguments["bias"]).strip("\"'") == "none":
            arguments.pop("bias")
        ours_ = {"lora_alpha": "lora.alpha", "target_modules": "lora.targets", "use_rslora": "lora.rslora"}
        for theirs in [name for name in ours_ if name in arguments]:
            options[ours_[theirs]] = self.code(arguments.pop(theirs))
        if left := [name for name in arguments if name != "task_type"]:
            self.above(call, f"{', '.join(left)} of LoraConfig: docs/adapters.md")

    def _uses_of(self, trainers: set[str], known: Mapping[str, list[Configuration]]) -> None:
        """`trainer.train()`, `trainer.save_model(...)` and fields of configurations."""
        for node in self.attributes:
            base, name = self.code(node.value), node.attr.value
            root = next((c for c in known if base == c or base.startswith(f"{c}.")), None)
            if base in trainers:
                self._use_of_run(node, base, name)
            made = None if root is None else self.configured(known, root, node)
            if made is not None and name == "evolve" and isinstance(self.parents[node], self.cst.Call):
                self.evolved(self.parents[node], base, {}, made.renamed.algorithm)
            elif made is not None and root is not None and not isinstance(self.parents[node], self.cst.Attribute):
                self._field(node, root, name, made)

    def _use_of_run(self, node: Node, base: str, name: str) -> None:
        """An attribute of a trainer, which is a run now."""
        call = self.parents[node]
        called = isinstance(call, self.cst.Call) and call.func is node
        alone = called and isinstance(self.parents[call], self.cst.Expr)
        if called and name == "train":
            if call.args:
                self.above(call, "operant.train(..., resume=True) resumes the run in the folder out")
            self._drop(call, "operant.train above has trained to the end") if alone else self.replace(call, base)
        elif self.code(call) == f"{base}.state.log_history":
            self.replace(call, f"{base}.metrics")
            self.above(call, f"{base}.metrics: their names are in docs/metrics.md")
        elif called and not alone and name == "evaluate":
            self.replace(call, f"{base}.after.metrics()")
        elif called and name in ("save_model", "save_pretrained", "save") and call.args:
            start = self._span(call.args[0].value)[0]
            self.edits.append((self._span(call)[0], start, f"operant.export({base}.policy, "))
        elif alone:
            why = note(name) or "the run folder has the model in export/, its metrics and its report"
            self._drop(call, f"{' '.join(self.code(call).split())}: {why}")
        elif name not in ("policy", "metrics", "path"):
            self.above(node, f"{base}.{name}: a run has policy, metrics and path")

    def _drop(self, call: Node, why: str) -> None:
        """Replace a statement that has no equal by a comment; `pass` stays where its block would be empty."""
        line = self.parents[self.parents[call]]
        block = self.parents[line]
        self.above(call, why)
        alone = len(line.body) == 1
        if alone and not isinstance(block, self.cst.BaseCompoundStatement) and len(block.body) > 1:
            place = self.places[line]
            self.edits.append((self.starts[place.start.line - 1], self.starts[place.end.line], ""))
        else:
            self.replace(call, "pass")

    def _field(self, node: Node, root: str, name: str, made: Configuration) -> None:
        """A field of a configuration, which is a mapping now."""
        counted = name in COUNTED
        values = {} if counted else renamed({name: "0.5"}, made.renamed.algorithm, "trlx").values
        mine = next(iter(values), "")
        assigned = isinstance(self.parents[node], self.cst.AssignTarget)
        string = self.around(node, self.cst.FormattedString)
        mark = "'" if string and string.quote == '"' else '"'  # Python 3.11 ends an f-string at its own one
        if mine in made.renamed.values or (mine and assigned):
            self.replace(node, f"{root}[{mark}{mine}{mark}]")
        elif assigned:
            why = f"it depends on other options: set it where {root} is made" if counted else note(name)
            self.above(node, f"{name}: {why or 'there is no such option here'}")
        elif constant := made.constant(name):
            self.replace(node, f"{mark}{x}{mark}" if string and isinstance(x := literal(constant), str) else constant)
        else:
            self.above(node, f"{self.code(node)}: {root} is a mapping of operant's options now, and has no such entry")

    def _import(self, statement: Node, native: set[str], kept: set[str], old_loop: bool) -> None:
        """An import of TRL or trlX."""
        cst = self.cst
        if isinstance(statement, cst.Import):
            modules = []
            for alias in statement.names:
                module = self.code(alias.name)
                if module.split(".")[0] not in ("trl", "trlx"):
                    modules.append(self.code(alias).rstrip(","))
                elif kept and not old_loop:
                    modules += [self.code(alias).rstrip(","), "operant"]
                elif module == "trl" and old_loop:
                    modules.append(f"{COMPAT} as {alias.asname.name.value if alias.asname else 'trl'}")
                else:
                    modules.append("operant")
            self.replace(statement, f"import {', '.join(modules)}")
            return
        module = self.code(statement.module)
        if isinstance(statement.names, cst.ImportStar):
            self.above(statement, "name what is imported: import operant, or from operant.compat.trl import ...")
            return
        if module.startswith("trlx"):
            self.replace(statement, "import operant")
            return
        lines, rest, ours_, gone = [], [], [], []
        there: Mapping[str, object] = {}
        with suppress(ImportError):  # not every module of TRL has one here
            there = vars(importlib.import_module(COMPAT + module.removeprefix("trl")))
        for alias in statement.names:
            name, text = self.code(alias.name), self.code(alias).rstrip(", \n")
            if name in kept:
                rest.append(text)
                if name in native:
                    gone.append(name)
            elif name in native:
                gone.append(name)
            elif old_loop and name in there:
                ours_.append(text)
            else:
                (gone if name in MOVED and not old_loop else rest).append(text)
        if gone:
            lines.append("import operant")
        if ours_:
            lines.append(f"from {COMPAT}{module.removeprefix('trl')} import {', '.join(ours_)}")
        if rest:
            lines.append(f"from {module} import {', '.join(rest)}")
            self.above(statement, f"{', '.join(rest)}: not in operant; these still need TRL")
        if gone or ours_:
            self.replace(statement, f"\n{self.indent(statement)}".join(lines))


def _named(code: str) -> str:
    """A reward: the name of a classifier on the Hub gets its prefix."""
    value = literal(code)
    return repr(f"classifier:{value}") if isinstance(value, str) else code

"""Typed configuration: every field with its check, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import scorers
from eval.errors import UserError
from graphkv import correction
from graphkv.coverage import Selector
from graphkv.graph import Graph
from graphkv.models import ModelConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
GRANULARITIES = ("kv_head", "query_head")
HEAD_BUDGETS = ("uniform", "ada")


@dataclass(frozen=True)
class CellSettings:
    """One cell: what is kept of a prompt.

    Parameters
    ----------
    scorer
        How important a token is.
    budget
        Tokens kept a layer, window included (int), or a share of the prompt (float in (0, 1]).
    graph
        The re-ranking; None leaves the scores alone.
    granularity
        `kv_head`: one set of tokens a KV head. `query_head`: keys are repeated and each query head has its own set, as
        in the paper's code base, at as many times the memory as query heads share a KV head.
    head_budget
        `uniform`: every head of a layer keeps the same number. `ada`: a layer's past budget goes to the heads whose
        scores are largest (AdaKV).
    head_floor
        With `ada`: the share of the uniform budget that no head goes below.
    bias
        Gives back the attention of evicted tokens: `none`, `mass` or `uniform`; see `graphkv.correction.correct`.
    fold
        With `bias=mass`: kept values also become those of the evicted tokens that they stand for.
    selector
        How the kept set follows from the scores that the graph leaves; with `head_budget=ada` within each head, whose
        budget the scores decide.
    """

    scorer: scorers.Scorer
    budget: int | float = 512
    graph: Graph | None = None
    granularity: str = "kv_head"
    head_budget: str = "uniform"
    head_floor: float = 0.2
    bias: str = "none"
    fold: bool = False
    selector: Selector = Selector()

    def __post_init__(self) -> None:
        if self.selector.name == "topk":
            object.__setattr__(self, "selector", Selector())  # its other options mean nothing: one cell, not many
        if self.bias not in correction.KINDS:
            raise ValueError(f"bias must be {', '.join(correction.KINDS)}, not {self.bias!r}")
        if self.fold and self.bias != "mass":
            raise ValueError("fold needs bias=mass, which says which token stands for which")
        if self.head_budget not in HEAD_BUDGETS:
            raise ValueError(f"head_budget must be {' or '.join(HEAD_BUDGETS)}, not {self.head_budget!r}")
        if not 0 <= self.head_floor <= 1:
            raise ValueError(f"head_floor must be in [0, 1], not {self.head_floor}")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be {' or '.join(GRANULARITIES)}, not {self.granularity!r}")
        if self.scorer.keeps_all:
            # The full cache has neither budget nor graph; clearing them makes all such cells one cell.
            plain = {"budget": 1.0, "graph": None, "granularity": "kv_head", "head_budget": "uniform"}
            plain |= {"bias": "none", "fold": False, "selector": Selector()}
            for name, value in plain.items():
                object.__setattr__(self, name, value)
        elif isinstance(self.budget, int):
            if self.budget < 1:
                raise ValueError(f"budget must be 1 or more tokens, not {self.budget}")
            if self.budget < self.scorer.window + self.scorer.sinks:
                sinks = f" and the {self.scorer.sinks} sinks" if self.scorer.sinks else ""
                raise ValueError(
                    f"budget={self.budget} is below the window of {self.scorer.window} tokens{sinks} that {self.name} "
                    "always keeps: raise budget or lower scorer.window"
                )
        elif not 0 < self.budget <= 1:
            raise ValueError(f"budget must be whole tokens or a ratio in (0, 1], not {self.budget}")
        if self.selector.name != "topk" and self.graph is not None:
            for option, value in (("accumulate", "sum"), ("signal", "evict")):
                if getattr(self.graph, option) == value:
                    raise ValueError(
                        f"selector={self.selector.name} weighs tokens by their scores, which graphkv.{option}={value} "
                        "does not leave as weights: choose another, or selector=topk"
                    )

    def check_decode_eviction(self) -> None:
        """Refuse to go on evicting in decode with a method that is not defined so, or with ragged heads."""
        if self.scorer.keeps_all:
            return
        if not self.scorer.evicts_in_decode:
            defined = [name for name in scorers.names() if scorers.get(name).evicts_in_decode]
            raise UserError(f"decode.evict_every is defined for {', '.join(defined)}, not for {self.name}")
        if self.head_budget != "uniform":
            raise UserError("decode.evict_every works with head_budget=uniform only")
        if self.bias != "none":
            raise UserError("decode.evict_every works with bias=none only")
        if self.selector.name != "topk":
            raise UserError("decode.evict_every works with selector=topk only")
        if getattr(self.scorer, "causal", True) is False:
            raise UserError("decode.evict_every needs scorer.causal=true: what a later token attends to is causal")

    @property
    def needs(self) -> scorers.Needs:
        """What must be recorded of a prompt for this cell."""
        return self.scorer.needs | self.needs_beside_scores

    @property
    def needs_beside_scores(self) -> scorers.Needs:
        """What must be there of a prompt once its tokens are scored."""
        needs = correction.needs(self.bias)
        return needs if self.graph is None else needs | self.graph.needs

    @property
    def name(self) -> str:
        """The scorer's name: its file's."""
        return type(self.scorer).__module__.rsplit(".", 1)[-1]

    @property
    def label(self) -> str:
        """Short unique name: scorer, options that differ from their defaults, budget, graph."""
        if self.scorer.keeps_all:
            return self.name
        amount = str(self.budget) if isinstance(self.budget, int) else f"{self.budget:g}n"
        graph = "" if self.graph is None else f"+graphkv{_changed(self.graph)}"
        ada = "+ada" if self.head_budget == "ada" else ""
        bias = "" if self.bias == "none" else f"+{self.bias}{'+fold' if self.fold else ''}"
        selector = "" if self.selector.name == "topk" else f"+{self.selector.name}{_changed(self.selector, 'name')}"
        heads = "@query_head" if self.granularity == "query_head" else ""
        return f"{self.name}{_changed(self.scorer)}-{amount}{ada}{graph}{selector}{bias}{heads}"

    def describe(self) -> dict[str, Any]:
        """Everything that decides what is kept, as JSON values."""
        return {
            "scorer": {"name": self.name, **dataclasses.asdict(self.scorer)},
            "budget": self.budget,
            "graphkv": None if self.graph is None else _described(self.graph),
            "granularity": self.granularity,
            "head_budget": self.head_budget,
            "head_floor": self.head_floor if self.head_budget == "ada" else None,
            **({} if self.bias == "none" else {"bias": self.bias, "fold": self.fold}),
            **self.selector.describe(),
        }


def _described(graph: Graph) -> dict[str, Any]:
    """Options of a graph; one that came after the first records is named only if it does something."""
    options = dataclasses.asdict(graph)
    if graph.min_distance == 0:
        del options["min_distance"]
    return options


def _changed(options: Any, but: str = "") -> str:
    """`(window=8,kernel=5)` for a dataclass whose fields, `but` one, differ from their defaults, else nothing."""
    changed = [
        f"{field.name}={getattr(options, field.name)}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default and field.name != but
    ]
    return f"({','.join(changed)})" if changed else ""


@dataclass(frozen=True)
class DecodeConfig:
    """How answers are written: the fields of `conf/decode/*.yaml`.

    Parameters
    ----------
    mode
        `batch`: all cells of a sample are rows of one batch; `solo`: one after the other, the reference.
    max_cells
        Most rows in a batch.
    evict_every
        Cut cells back to their budget after every so many tokens of the answer, for methods that are defined so;
        None evicts after the prefill only.
    cuda_graph
        On one GPU, replay the decode step as a CUDA graph; False launches each of its kernels.
    """

    mode: str = "batch"
    max_cells: int = 32
    evict_every: int | None = None
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("batch", "solo"):
            raise ValueError(f"mode must be batch or solo, not {self.mode!r}")
        if self.max_cells < 1:
            raise ValueError(f"max_cells must be 1 or more, not {self.max_cells}")
        if self.evict_every is not None and self.evict_every < 1:
            raise ValueError(f"evict_every must be 1 or more tokens or null, not {self.evict_every}")
        if not isinstance(self.cuda_graph, bool):
            raise ValueError(f"cuda_graph must be true or false, not {self.cuda_graph!r}")


@dataclass(frozen=True)
class PrefillConfig:
    """How prompts are read.

    Parameters
    ----------
    chunk
        Tokens read at a time: the same result in less memory; None reads the prompt at once.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be 1 or more tokens, not {self.chunk}")


@dataclass(frozen=True)
class RunConfig:
    """A whole run of one cell: the resolved `conf/config.yaml`."""

    model: ModelConfig
    cell: CellSettings
    task: Mapping[str, Any]
    protocol: Mapping[str, Any]
    decode: DecodeConfig
    prefill: PrefillConfig
    name: str
    results_dir: str
    limit: int | None
    partial: bool
    artifact: str | None = None
    on_error: str = "continue"
    force: bool = False
    study: Mapping[str, Any] | None = None


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """A configuration dataclass from plain values.

    Raises
    ------
    UserError
        For an unknown key (with the nearest known one), a value of the wrong type, or one that the class refuses;
        the message begins with `where` and the key.
    """
    hints = typing.get_type_hints(cls)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known) or 'none'}"
            raise UserError(f"{where}.{key} is not a setting ({hint})")
        if not _fits(value, hints[key]):
            raise UserError(f"{where}.{key} must be {_type_name(hints[key])}, not {value!r}")
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, bool):
        return bool in options
    return isinstance(value, options) or (float in options and isinstance(value, int))


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {_type_name(typing.get_args(hint)[0])}"
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return " or ".join(words.get(option, option.__name__) for option in options)


def cell_settings(
    scorer: str,
    budget: int | float,
    graphkv: Mapping[str, Any] | bool | None = None,
    scorer_options: Mapping[str, Any] | None = None,
    granularity: str = "kv_head",
    head_budget: str = "uniform",
    head_floor: float = 0.2,
    bias: str = "none",
    fold: bool = False,
    selector: Mapping[str, Any] | None = None,
) -> CellSettings:
    """A cell from plain values.

    Parameters
    ----------
    scorer
        A name from `scorers.names()`.
    budget
        Tokens (int) or a share of the prompt (float in (0, 1]), window included.
    graphkv
        Options of the re-ranking (`{}` or True: all defaults); None or False switches it off.
    scorer_options
        Fields of the scorer that differ from their defaults.
    granularity, head_budget, head_floor, bias, fold
        See `CellSettings`.
    selector
        Options of `graphkv.coverage.Selector`, such as `{"name": "coverage"}`; None keeps the best scores.
    """
    try:
        scorer_class = scorers.get(scorer)
    except ValueError as error:
        raise UserError(str(error)) from error
    made = build(scorer_class, scorer_options or {}, "scorer")
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise UserError(f"budget must be whole tokens or a ratio in (0, 1], not {budget!r}")
    graph = None
    if graphkv is not None and graphkv is not False:
        graph = build(Graph, {} if graphkv is True else graphkv, "graphkv")
    try:
        chosen_by = build(Selector, selector or {}, "selector")
        return CellSettings(made, budget, graph, granularity, head_budget, head_floor, bias, fold, chosen_by)
    except ValueError as error:
        raise UserError(str(error)) from error


_TOP = (
    "artifact bias budget decode fold force granularity graphkv head_budget head_floor limit model name on_error "
    "partial prefill protocol results_dir scorer selector shards study task"
).split()


def parse(config: DictConfig) -> RunConfig:
    """Check a composed Hydra configuration and turn it into typed objects."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {str(error).splitlines()[0]}") from error
    for key in ("experiment", "also"):  # they were composed into the rest, or into further cells
        values.pop(key, None)
    for key in values:
        if key not in _TOP:
            raise UserError(f"{key} is not a setting; known settings: {', '.join(_TOP)}")
    scorer = dict(values["scorer"])
    graph = dict(values.get("graphkv") or {"enabled": False})
    enabled = graph.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise UserError(f"graphkv.enabled must be true or false, not {enabled!r}")
    limit = values["limit"]
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise UserError(f"limit must be a positive number of samples or null, not {limit!r}")
    for switch in ("partial", "force"):
        if not isinstance(values[switch], bool):
            raise UserError(f"{switch} must be true or false, not {values[switch]!r}")
    run = RunConfig(
        model=build(ModelConfig, values["model"], "model"),
        cell=cell_settings(
            scorer.pop("name"),
            values["budget"],
            graph if enabled else None,
            scorer,
            values["granularity"],
            values["head_budget"],
            values["head_floor"],
            values["bias"],
            values["fold"],
            values["selector"],
        ),
        task=values["task"],
        protocol=values["protocol"],
        decode=build(DecodeConfig, values["decode"], "decode"),
        prefill=build(PrefillConfig, values["prefill"], "prefill"),
        name=values["name"],
        results_dir=values["results_dir"],
        limit=limit,
        partial=values["partial"],
        artifact=values["artifact"],
        on_error=values["on_error"],
        force=values["force"],
        study=values["study"],
    )
    if run.on_error not in ("continue", "stop"):
        raise UserError(f"on_error must be continue or stop, not {run.on_error!r}")
    if run.decode.evict_every is not None:
        run.cell.check_decode_eviction()
    return run


def model_preset(name: str, **overrides: Any) -> ModelConfig:
    """The model configuration `conf/model/<name>.yaml`, with fields replaced by `overrides`."""
    file = CONF / "model" / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(found.stem for found in file.parent.glob("*.yaml")))
        raise UserError(f"unknown model {name!r}: choose one of {known}, or give a folder that holds a saved model")
    values = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    return build(ModelConfig, {**values, **overrides}, "model")

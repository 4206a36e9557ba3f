"""The nouns that every room passes around: Conv, element types, layouts, graphs, targets, statistics,
plans."""

from aerogel.ir.config import Config, Packed
from aerogel.ir.conv import NUMBERED, Conv, Pool
from aerogel.ir.dtypes import (
    ELEMENTS,
    F32,
    ITEM_BYTES,
    NUMPY,
    Array,
    Dtypes,
    from_float64,
    nonzero,
    to_float64,
)
from aerogel.ir.graph import INTS, OPS, Argument, Graph, Node, Ref, Special, references
from aerogel.ir.layout import LINE_BYTES, Layout, Shape
from aerogel.ir.numbers import ceil_div, round_up
from aerogel.ir.plan import Beside, Choice, Plan, Refusal, Timing, Tried
from aerogel.ir.stats import Idle, Stats, majority, runs_of
from aerogel.ir.target import (
    EXTRAS,
    MOST_THREADS,
    VECTOR_BYTES,
    Gpu,
    Other,
    Target,
    features,
    here_levels,
    host,
    short,
)
from aerogel.ir.way import EAGER, GRAPH, LAYOUTS, PARTS, Way

__all__ = [
    "EAGER",
    "ELEMENTS",
    "EXTRAS",
    "F32",
    "GRAPH",
    "INTS",
    "ITEM_BYTES",
    "LAYOUTS",
    "LINE_BYTES",
    "MOST_THREADS",
    "NUMBERED",
    "NUMPY",
    "OPS",
    "PARTS",
    "VECTOR_BYTES",
    "Argument",
    "Array",
    "Beside",
    "Choice",
    "Config",
    "Conv",
    "Dtypes",
    "Gpu",
    "Graph",
    "Idle",
    "Layout",
    "Node",
    "Other",
    "Packed",
    "Plan",
    "Pool",
    "Ref",
    "Refusal",
    "Shape",
    "Special",
    "Stats",
    "Target",
    "Timing",
    "Tried",
    "Way",
    "ceil_div",
    "features",
    "from_float64",
    "here_levels",
    "host",
    "majority",
    "nonzero",
    "references",
    "round_up",
    "runs_of",
    "short",
    "to_float64",
]

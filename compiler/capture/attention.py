"""Attention that authors write out, raised to the operator that stands for attention.

    scores = q·kᵀ → a·scores + c → softmax over the keys → ·v        or torch's scaled_dot_product_attention

Whatever stands between the first product and the softmax (scales, casts, where, masked_fill, sums with masks) is
carried as ``Affine``: a factor and a shift of the scores. Both must follow from the number of tokens T alone, and are
computed for some T: what a mask means is decided by its elements, however it was built. A token must see itself and all tokens
before it, or the last W of them, with equal factors and, up to a constant for each token, which softmax takes away, no
shift or one that grows evenly with the key's position (ALiBi: a slope for each head); others must be masked. The T that
are tried lie around every integer that the mask is made with, so that none of them can change the rule beyond what was
tried, and a large one is tried too, as integers can also be computed (10 · 10), and bounds be no integers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from adaptc.capture import hooks
from adaptc.capture.aten import SKIPPED
from adaptc.capture.constants import constant, is_function
from adaptc.capture.constants import name_of as key
from adaptc.capture.functional import functional
from adaptc.capture.places import PREFIX, place_of
from adaptc.errors import CaptureError

MASKED = -1e4
"""Shifts from here down mask: exp(-1e4) is 0 in float32, as long as no two scores of a row differ by thousands."""

LENGTHS = (2, 3, 5, 8, 13, 34)
"""Numbers of tokens that every mask is tried for."""

LARGEST = 8200
"""Most tokens that a mask is tried for: a quarter of a gigabyte in float32."""

ELEMENTS = 2**24
"""Elements of the largest mask and bias that are tried in any case. A bias that was rounded on the way is even for few
tokens only."""

EVEN = 4 * torch.finfo(torch.float32).eps
"""By how much of its largest value a bias may be off: it is a product and a difference, of float32."""

ENDLESS = 2**31
"""Integers from here on mean the end of a dimension."""


class Unproven(Exception):
    """Why an attention isn't known to be causal, as the end of a sentence."""


def raised(exported: torch.export.ExportedProgram, constants: Mapping[str, torch.Tensor],
           context: int) -> torch.export.ExportedProgram:
    """The program with ``adaptc.attention`` in place of attention that is written out, changed in place.

    constants   buffers, by name, that no file stores; context: most tokens of a sequence, 0 if it isn't known.
    CaptureError naming every softmax between two products over pairs of tokens that isn't causal attention, and every
    bias of pairs that isn't one by distance.
    """
    exported = functional(exported)
    graph = exported.graph
    drop_checks(graph)
    found = [node for node in graph.nodes if key(node) == SDPA or _is_softmax_of_pairs(node)]
    biased = [node for node in graph.nodes if key(node) == "adaptc.attention" and hooks.PAIRS in node.args[5]]
    if not found and not biased:
        return exported
    masks = Masks(exported, constants, context)
    problems = []
    for node in found:
        try:
            _replace(graph, _sdpa(node, masks) if key(node) == SDPA else _written_out(node, masks))
        except Unproven as reason:
            problems.append(f"{node.target} in {place_of(node)} isn't causal attention that adaptc has: {reason}")
    for node in biased:
        try:
            _by_distance(graph, node, masks)
        except Unproven as reason:
            problems.append(f"the position bias of attention in {place_of(node)} isn't one that adaptc has: {reason}")
    return finished(exported, problems, HINT)


def finished(exported: torch.export.ExportedProgram, problems: list[str], hint: str) -> torch.export.ExportedProgram:
    """The program whose graph was changed; CaptureError with all ``problems`` where there are any."""
    if problems:
        raise CaptureError(". ".join(dict.fromkeys(problems)) + ".", hint=hint)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()
    return exported


def drop_checks(graph: torch.fx.Graph) -> None:
    """Takes out what nothing uses, and checks on what the trace assumed, which would keep masks alive."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and key(node) in SKIPPED and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


HINT = ("adaptc's attention is causal, with or without a sliding window and a bias that grows evenly with distance; both "
        "may depend on positions alone.")

SDPA = "aten.scaled_dot_product_attention"
SOFTMAX = ("aten.softmax", "aten._softmax", "aten._safe_softmax")
PRODUCTS = ("aten.matmul", "aten.bmm", "aten.baddbmm")
VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.unflatten",
         "aten.flatten", "aten.view_as", "aten.reshape_as")
COPIES = ("aten.contiguous", "aten.clone", "aten.detach", "aten.alias", "aten.to", "aten._to_copy", "aten.type_as",
          "aten.float", "aten.dropout")
"""Operators that change nothing of what attention is."""


# ---- the pattern


@dataclass(frozen=True)
class Found:
    """One attention: q[..., T, D], k[..., T, D] or kᵀ if ``turned``, v[..., T, Dv] → ``result`` [..., T, Dv]."""

    result: torch.fx.Node
    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    turned: bool
    rule: Rule


@dataclass(frozen=True)
class Rule:
    """Which keys a token sees (the last ``window``, 0: all), the factor of its scores, and by how much each head's
    scores rise with each later key (none: not at all)."""

    scaling: float
    window: int
    slopes: tuple[float, ...] = ()


def _is_softmax_of_pairs(node: torch.fx.Node) -> bool:
    if key(node) not in SOFTMAX:
        return False
    shape = node.meta["val"].shape
    return is_of_pairs(shape) and node.args[1] in (-1, len(shape) - 1)


def is_of_pairs(shape: torch.Size) -> bool:
    """Whether the last two dimensions are the number of tokens."""
    return len(shape) >= 2 and _same_symbol(shape[-1], shape[-2])


def _same_symbol(a: Any, b: Any) -> bool:
    return isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr


def _written_out(softmax: torch.fx.Node, masks: Masks) -> Found:
    chain, product = _back(softmax.args[0], masks)
    q, k = product.args[-2:]
    result = _forth(softmax)
    return Found(result, q, k, result.args[1], True, masks.rule(product, chain))


def _back(node: torch.fx.Node, masks: Masks) -> tuple[list[torch.fx.Node], torch.fx.Node]:
    """From a softmax's operand to the product of queries and keys: the operators between them in order, and it."""
    chain: list[torch.fx.Node] = []
    while key(node) not in PRODUCTS:
        data = [source for source in node.all_input_nodes if not masks.fixed(source)]
        if key(node) not in AFFINE or len(data) != 1:
            raise Unproven(f"its scores go through {node.target} in {place_of(node)}"
                           + (", where what they meet depends on tokens" if len(data) > 1 else ""))
        chain.insert(0, node)
        node = data[0]
    if key(node) == "aten.baddbmm":
        chain.insert(0, node)
    return chain, node


def _forth(softmax: torch.fx.Node) -> torch.fx.Node:
    """The product of a softmax and values."""
    node = softmax
    while True:
        if len(node.users) != 1:
            raise Unproven("its weights are used by more than a product with values")
        (user,) = node.users
        if key(user) in ("aten.matmul", "aten.bmm") and user.args[0] is node and user.args[1] is not node:
            return user
        if key(user) not in (*VIEWS, *COPIES) or not pairs_stay(node, user):
            raise Unproven(f"its weights go through {user.target} in {place_of(user)}")
        node = user


def pairs_stay(before: torch.fx.Node, after: torch.fx.Node) -> bool:
    """Whether the last two dimensions are the same pairs of tokens, and the others the same heads."""
    a, b = before.meta["val"].shape, after.meta["val"].shape
    pairs = len(b) >= 2 and _same_symbol(a[-2], b[-2]) and _same_symbol(a[-1], b[-1])
    return pairs and _heads(a) == _heads(b)


def _heads(shape: torch.Size) -> int:
    if not all(isinstance(d, int) for d in shape[:-2]):
        raise Unproven("how many heads it has depends on the number of tokens")
    return math.prod(shape[:-2])


def _sdpa(node: torch.fx.Node, masks: Masks) -> Found:
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args)) | node.kwargs
    if named.get("dropout_p", 0.0):
        raise Unproven("it drops some of its weights")
    q, k, v = named["query"], named["key"], named["value"]
    scale = named.get("scale")
    width = q.meta["val"].shape[-1]
    rule = masks.rule_of_mask(named.get("attn_mask"), named.get("is_causal", False), tuple(q.meta["val"].shape[:-2]))
    return Found(node, q, k, v, False, replace(rule, scaling=width**-0.5 if scale is None else float(scale)))


# ---- the replacement


def _replace(graph: torch.fx.Graph, found: Found) -> None:
    """``found`` as an ``adaptc.attention``, beside the views that it needs."""
    hooks.operators()
    aten, ours = torch.ops.aten, torch.ops.adaptc
    ids = next(n for n in graph.nodes if n.op == "placeholder" and n.name == "input_ids")
    shape = found.q.meta["val"].shape
    heads = _heads(shape)
    with graph.inserting_before(found.result):
        new = Inserter(graph, found.result)
        k = new(aten.transpose.int, found.k, -2, -1) if found.turned else found.k
        count = new(aten.sym_size.int, ids, 1)
        groups = _groups(shape, k.meta["val"].shape)
        if groups != _groups(shape, found.v.meta["val"].shape):
            raise Unproven("its keys and values have other heads")
        q, k, v = (new.shaped(x, (1, h, count, x.meta["val"].shape[-1])) for x, h in
                   ((found.q, heads), (k, groups), (found.v, groups)))
        mask = new(ours.mask.default, ids, None, "sliding" if found.rule.window else "causal", found.rule.window)
        slopes = found.rule.slopes and [new(ours.constant.default, [*found.rule.slopes], [heads], torch.float32,
                                            found.q.meta["val"].device)]
        result = new(ours.attention.default, q, k, v, mask, [*slopes], ["slopes"] if slopes else [],
                     found.rule.scaling, found.rule.window, 0.0)
        result = new(aten.transpose.int, result, 1, 2)
        out = found.result.meta["val"]
        result = new.shaped(result, (*out.shape[:-2], count, out.shape[-1]))
        result = result if result.meta["val"].dtype == out.dtype else new(aten.to.dtype, result, out.dtype)
    found.result.replace_all_uses_with(result)
    graph.erase_node(found.result)


class Inserter:
    """Makes operators in the place of a node, with what is known of it."""

    def __init__(self, graph: torch.fx.Graph, place: torch.fx.Node):
        self.graph, self.place = graph, place
        self.mode = place.meta["val"].fake_mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self.place.meta.items() if k in ("nn_module_stack", "stack_trace")}
        with self.mode:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda a: a.meta["val"]), **kwargs)
        return node

    def shaped(self, x: torch.fx.Node, shape: tuple) -> torch.fx.Node:
        """x reshaped, one dimension of which may be a number in the graph."""
        own = x.meta["val"].shape
        if len(own) == len(shape) and list(own[:-2]) == list(shape[:-2]):
            return x
        node = self.graph.call_function(torch.ops.aten.reshape.default, (x, list(shape)))
        node.meta = {k: v for k, v in self.place.meta.items() if k in ("nn_module_stack", "stack_trace")}
        with self.mode:
            sizes = [d.meta["val"] if isinstance(d, torch.fx.Node) else d for d in shape]
            node.meta["val"] = x.meta["val"].reshape(sizes)
        return node


def _groups(queries: torch.Size, keys: torch.Size) -> int:
    """How many heads keys or values have; neighbouring query heads share one. Unproven where they are shared in
    another way."""
    heads, own = _heads(queries), _heads(keys)
    lead, theirs = (tuple(d for d in shape[:-2]) for shape in (queries, keys))
    while lead[:1] == (1,):
        lead = lead[1:]
    while theirs[:1] == (1,):
        theirs = theirs[1:]
    theirs = (1,) * (len(lead) - len(theirs)) + theirs
    same = next((i for i, (a, b) in enumerate(zip(lead, theirs)) if a != b), len(theirs))
    if heads % own or len(theirs) > len(lead) or (len(lead) > 1 and own > 1 and any(d != 1 for d in theirs[same:])):
        raise Unproven(f"its queries have {tuple(queries[:-2])} heads and its keys or values {tuple(keys[:-2])}")
    return own


# ---- a bias by distance of each query

ROWWISE = ("aten.mul", "aten.div", *COPIES)
"""Operators through which a bias may go whose other operand has one value for all keys: 0 stays 0."""


def _by_distance(graph: torch.fx.Graph, node: torch.fx.Node, masks: Masks) -> None:
    """Puts ``distances`` [T, H, D] in the place of the bias [1, H, T, T] of an ``adaptc.attention``, of which element
    (i, j) is element i - j of what is gathered from [1, H, T, D], and 0 from distance D on."""
    bias, far, chain = node.args[4][-1], None, []
    while key(bias) != "aten.gather":
        data = [x for x in bias.all_input_nodes if not masks.fixed(x)]
        others = [x for x in bias.all_input_nodes if masks.fixed(x)]
        if len(data) != 1 or bias.args[0] is not data[0]:
            raise Unproven(f"it comes of {bias.target} in {place_of(bias)}, which adaptc doesn't follow")
        if key(bias) == "aten.masked_fill" and far is None and bias.args[2] == 0:
            far = bias.args[1]
        elif key(bias) in ROWWISE and all(x.meta["val"].shape[-1] == 1 for x in others if x.meta["val"].ndim):
            chain.insert(0, bias)
        else:
            raise Unproven(f"it goes through {bias.target} in {place_of(bias)}")
        bias = data[0]
    table, axis, index = bias.args[:3]
    extent = table.meta["val"].shape[-1]
    if axis not in (-1, 3) or not isinstance(extent, int) or not masks.fixed(index) or far is None:
        raise Unproven(f"{bias.target} in {place_of(bias)} isn't a choice by distance, 0 beyond some")
    masks.check_distances(index, far, extent)
    with graph.inserting_before(node):
        new, value = Inserter(graph, node), table
        for step in chain:
            value = new(step.target, value, *step.args[1:])
        value = new(torch.ops.aten.squeeze.dim, new(torch.ops.aten.transpose.int, value, 1, 2), 0)
    node.update_arg(4, [*node.args[4][:-1], value])
    node.update_arg(5, [*node.args[5][:-1], "distances"])


# ---- what happens to scores


@dataclass(frozen=True)
class Affine:
    """scale · scores + shift; both broadcast to the scores' [..., T, T]."""

    scale: torch.Tensor
    shift: torch.Tensor


def _add(x: Any, y: Any, alpha: float = 1) -> Affine:
    if isinstance(x, Affine):
        return Affine(x.scale, x.shift + alpha * y)
    return Affine(alpha * y.scale, x + alpha * y.shift)


def _sub(x: Any, y: Any, alpha: float = 1) -> Affine:
    return _add(x, y, -alpha)


def _mul(x: Any, y: Any) -> Affine:
    x, y = (x, y) if isinstance(x, Affine) else (y, x)
    return Affine(x.scale * y, x.shift * y)


def _div(x: Any, y: Any) -> Affine:
    if isinstance(y, Affine):
        raise Unproven("it divides by its scores")
    return Affine(x.scale / y, x.shift / y)


def _where(condition: Any, x: Any, y: Any) -> Affine:
    if isinstance(condition, Affine):
        raise Unproven("what it masks depends on its scores")
    x, y = (v if isinstance(v, Affine) else Affine(torch.zeros(()), torch.as_tensor(v)) for v in (x, y))
    return Affine(torch.where(condition, x.scale, y.scale), torch.where(condition, x.shift, y.shift))


def _at_least(x: Any, low: Any = None) -> Affine:
    """The larger of scores and a number that is no score: one so low that it masks."""
    x, low = (x, low) if isinstance(x, Affine) else (low, x)
    low = torch.as_tensor(low)
    if not bool((low <= MASKED).all()):
        raise Unproven("it bounds its scores from below")
    return Affine(x.scale, torch.maximum(x.shift, low))


def _baddbmm(added: Any, scores: Affine, _: Any, beta: float = 1, alpha: float = 1) -> Affine:
    return _add(beta * added, _mul(scores, alpha))


AFFINE: dict[str, Callable[..., Affine]] = {
    "aten.add": _add,
    "aten.sub": _sub,
    "aten.mul": _mul,
    "aten.div": _div,
    "aten.true_divide": _div,
    "aten.where": _where,
    "aten.masked_fill": lambda x, mask, value: _where(mask, value, x),
    "aten.maximum": _at_least,
    "aten.max": _at_least,
    "aten.clamp": _at_least,
    "aten.clamp_min": _at_least,
    "aten.baddbmm": _baddbmm,
    **dict.fromkeys((*VIEWS, *COPIES), lambda x, *_: x),
}  # fmt: skip


def _reheaded(x: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
    """x, which broadcasts to [*before, T, T], for [*after, T, T]."""
    if x.ndim <= 2:
        return x
    own = x.shape[:-2]
    if all(d == 1 for d in own):
        return x.reshape((1,) * len(after) + x.shape[-2:])
    return x.expand(*before, *x.shape[-2:]).reshape(*after, *x.shape[-2:])


# ---- what masks mean


class Masks:
    """Values of a graph that follow from the number of tokens alone, and what they do to scores."""

    def __init__(self, exported: torch.export.ExportedProgram, constants: Mapping[str, torch.Tensor], context: int):
        self.context = context
        self.known: dict[torch.fx.Node, int] = {}
        """Values that follow from T: equal numbers are equal values."""
        self.numbers: dict[Any, int] = {}
        self.integers: dict[int, frozenset[int]] = {}
        """Integers that each value is made with."""
        self.tensors = _buffers(exported, constants)
        self.rules: dict[Any, Rule] = {}
        self.ids = next(n for n in exported.graph.nodes if n.op == "placeholder" and n.name == "input_ids")
        self.symbol = self.ids.meta["val"].shape[1].node.expr
        for node in exported.graph.nodes:
            if (made := self._made_of(node)) is not None:
                what, numbers = made
                self.known[node] = self.numbers.setdefault(what, len(self.numbers))
                self.integers[self.known[node]] = numbers

    def fixed(self, node: torch.fx.Node) -> bool:
        """Whether a value follows from T alone."""
        return node in self.known

    def _made_of(self, node: torch.fx.Node) -> tuple[Any, frozenset[int]] | None:
        """What a value is made of, and the integers in it; None if it depends on more than T."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            numbers = _integers(int(n) for n in expression.atoms(sympy.Integer))
            return (str(expression), numbers) if expression.free_symbols <= {self.symbol} else None
        if node in self.tensors:
            tensor = self.tensors[node]
            kept = tensor.detach().contiguous().reshape(-1)
            raw = kept.view(torch.uint8).numpy().tobytes() if kept.numel() else b""
            return ((hashlib.sha256(raw).hexdigest(), tensor.dtype, tuple(tensor.shape)), _integers(tensor.shape))
        if node.op != "call_function" or not is_function(node):
            return None
        args, kwargs = self._arguments(node)
        sources = [n for n in pytree.tree_leaves((args, kwargs)) if isinstance(n, torch.fx.Node)]
        if any(source not in self.known for source in sources):
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        what = (str(node.target), str(tree), tuple(self._leaf(leaf) for leaf in leaves))
        numbers = _integers(leaf for leaf in leaves if not isinstance(leaf, (bool, torch.fx.Node)))
        return what, numbers.union(*(self.integers[self.known[source]] for source in sources))

    def _leaf(self, leaf: Any) -> Any:
        return ("node", self.known[leaf]) if isinstance(leaf, torch.fx.Node) else repr(leaf)

    def _arguments(self, node: torch.fx.Node) -> tuple[tuple, dict]:
        """A node's arguments; a tensor of which only shape and dtype matter becomes a ``_Like``."""
        args, kwargs = tuple(node.args), dict(node.kwargs)
        if key(node) in SHAPED and args:
            value = args[0].meta["val"]
            shape = tuple(d if isinstance(d, int) else d.node.expr for d in value.shape)
            args = (_Like(shape, value.dtype), *args[1:])
        return args, kwargs

    # ---- values for a number of tokens

    def value(self, node: torch.fx.Node, count: int, memo: dict[int, Any]) -> Any:
        """The node's value for ``count`` tokens, on the CPU."""
        number = self.known[node]
        if number not in memo:
            memo[number] = self._computed(node, count, memo)
        return memo[number]

    def _computed(self, node: torch.fx.Node, count: int, memo: dict[int, Any]) -> Any:
        kind = node.meta.get("val")
        if isinstance(kind, torch.SymInt):
            return int(kind.node.expr.subs(self.symbol, count))
        if node in self.tensors:
            return self.tensors[node]

        def given(leaf: Any) -> Any:
            if isinstance(leaf, torch.fx.Node):
                return self.value(leaf, count, memo)
            if isinstance(leaf, _Like):
                shape = [d if isinstance(d, int) else int(d.subs(self.symbol, count)) for d in leaf.shape]
                return torch.empty(shape, dtype=leaf.dtype)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(given, self._arguments(node))
        if key(node) == "adaptc.mask":
            return _mask(*args)
        if key(node) == "adaptc.constant":
            return constant(*args)
        return node.target(*args, **kwargs)

    # ---- rules

    def rule(self, product: torch.fx.Node, chain: list[torch.fx.Node]) -> Rule:
        """Which keys are seen after the operators of ``chain`` have been applied to the scores of ``product``."""
        def scores(count: int) -> Affine:
            memo: dict[int, Any] = {}
            form, shape = Affine(torch.ones(()), torch.zeros(())), product.meta["val"].shape
            data = product
            for node in chain:
                if node is product:
                    args = (self.value(product.args[0], count, memo), form, None)
                else:
                    args = tuple(form if a is data else self._given(a, count, memo) for a in node.args)
                kwargs = {k: form if v is data else self._given(v, count, memo) for k, v in node.kwargs.items()
                          if k in ("alpha", "beta", "min", "other")}
                form = AFFINE[key(node)](*args, **kwargs)
                after = node.meta["val"].shape
                if key(node) in VIEWS and not pairs_stay(data, node):
                    raise Unproven(f"{node.target} in {place_of(node)} takes its scores apart")
                if key(node) in VIEWS:
                    form = Affine(*(_reheaded(x, shape[:-2], after[:-2]) for x in (form.scale, form.shift)))
                data, shape = node, after
            return form

        for node in chain:
            if not node.meta["val"].dtype.is_floating_point:
                raise Unproven(f"{node.target} in {place_of(node)} makes {node.meta['val'].dtype} of its scores")
        made = tuple(self._signature(node, product, chain) for node in chain)
        used = (n for node in chain for n in node.all_input_nodes if self.fixed(n))
        numbers = frozenset().union(*(self.integers[self.known[n]] for n in used))
        heads = tuple(chain[-1].meta["val"].shape[:-2] if chain else product.meta["val"].shape[:-2])
        return self._decided((made, str(product.meta["val"].shape[:-2])), scores, numbers, heads)

    def rule_of_mask(self, mask: torch.fx.Node | None, is_causal: bool, heads: tuple[int, ...]) -> Rule:
        """Which keys are seen with scaled_dot_product_attention's own mask, by ``heads`` of queries."""
        if mask is None:
            if not is_causal:
                raise Unproven("every token sees all others")
            return Rule(1.0, 0)
        if not self.fixed(mask):
            raise Unproven("its mask depends on more than positions")

        def scores(count: int) -> Affine:
            value = self.value(mask, count, {})
            if value.dtype == torch.bool:
                value = torch.zeros(value.shape).masked_fill(~value, -math.inf)
            return Affine(torch.ones(()), value)

        return self._decided(("mask", self.known[mask]), scores, self.integers[self.known[mask]], heads)

    def check_distances(self, index: torch.fx.Node, far: torch.fx.Node, extent: int) -> None:
        """Unproven unless a key that is seen has its distance as ``index``, and is ``far`` from distance ``extent`` on."""
        for count in self._lengths({extent, *self.integers[self.known[index]], *self.integers[self.known[far]]}):
            memo: dict[int, Any] = {}
            behind = torch.arange(count)[:, None] - torch.arange(count)
            near = (behind >= 0) & (behind < extent)
            chosen, beyond = (self.value(x, count, memo) for x in (index, far))
            if not bool(((chosen == behind) | ~near).all()) or not bool(((beyond == (behind >= extent)) | (behind < 0)).all()):
                raise Unproven(f"of {count} tokens, what is added to scores isn't chosen by distance alone, and 0 from "
                               f"distance {extent} on")

    def _given(self, x: Any, count: int, memo: dict[int, Any]) -> Any:
        return pytree.tree_map(lambda a: self.value(a, count, memo) if isinstance(a, torch.fx.Node) else a, x)

    def _signature(self, node: torch.fx.Node, product: torch.fx.Node, chain: list[torch.fx.Node]) -> Any:
        data = {product, *chain}
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        return str(node.target), str(node.meta["val"].shape), tuple(
            "scores" if leaf in data else self._leaf(leaf) if leaf in self.known or not isinstance(leaf, torch.fx.Node)
            else "tokens" for leaf in leaves)

    def _decided(self, what: tuple, scores: Callable[[int], Affine], numbers: Iterable[int],
                 heads: tuple[int, ...]) -> Rule:
        what = (*what, heads)
        if what not in self.rules:
            self.rules[what] = _rule(scores, self._lengths(numbers), heads, self.context or LARGEST)
        return self.rules[what]

    def _lengths(self, numbers: Iterable[int]) -> list[int]:
        """Numbers of tokens to try: small ones, and all around the integers that a mask is made with."""
        most = self.context or LARGEST
        around = {abs(n) + d for n in numbers if abs(n) < ENDLESS for d in (-1, 0, 1, 2)}
        if self.context and any(n > most for n in around):
            around = {n for n in around if n < most} | {most}
        if any(n > LARGEST for n in around):
            raise Unproven(f"its mask is made with {max(around)}, and adaptc tries masks of up to {LARGEST} tokens")
        return sorted({n for n in (*LENGTHS, *around) if 2 <= n <= most})


SHAPED = ("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros", "aten.new_ones", "aten.new_full",
          "aten.empty_like", "aten.new_empty", "adaptc.mask")
"""Operators that take nothing but the shape and dtype of their first operand."""


@dataclass(frozen=True)
class _Like:
    """A tensor of which only this matters; a dimension that depends on T is an expression."""

    shape: tuple
    dtype: torch.dtype


def _buffers(exported: torch.export.ExportedProgram, constants: Mapping[str, torch.Tensor]) -> dict:
    """Arguments of the graph whose values no file and no caller decides."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    kinds = torch.export.graph_signature.InputKind
    found = {}
    for spec in exported.graph_signature.input_specs:
        name = (spec.target or "").removeprefix(PREFIX + ".")
        if spec.kind is kinds.BUFFER and name in constants:
            found[nodes[spec.arg.name]] = constants[name]
        elif spec.kind is kinds.CONSTANT_TENSOR and not exported.constants[spec.target].is_meta:
            found[nodes[spec.arg.name]] = exported.constants[spec.target]
    return found


def _integers(values: Iterable[Any]) -> frozenset[int]:
    """Integers that may be bounds: whole numbers of any type, but those that mask."""
    return frozenset(int(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)
                     and (isinstance(v, int) or MASKED < v < math.inf and v == int(v)))


def _mask(like: torch.Tensor, padding: torch.Tensor | None, kind: str, window: int,
          blocks: torch.Tensor | None = None) -> torch.Tensor:
    """What ``adaptc.mask`` stands for, as transformers' written out attention has it: 0, or float32's least number."""
    if padding is not None and not bool((padding == 1).all()):
        raise Unproven("its mask keeps some tokens and not others")
    count = like.shape[1]
    behind = torch.arange(count)[:, None] - torch.arange(count)
    seen = {
        "causal": behind >= 0,
        "sliding": (behind >= 0) & (behind < window),
        "bidirectional": torch.ones_like(behind, dtype=torch.bool),
    }
    if kind not in seen:
        raise Unproven(f"its mask is {kind}")
    visible = seen[kind]
    if blocks is not None:  # tokens of one block, which has a number from 0 on, see each other
        visible = visible | ((blocks[0, :, None] == blocks[0, None, :]) & (blocks[0, :, None] >= 0))
    return torch.zeros(count, count).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]


def _rule(scores: Callable[[int], Affine], lengths: list[int], heads: tuple[int, ...], most: int) -> Rule:
    """The rule that holds for all ``lengths``, in ascending order, and for a longer one, of at most ``most`` tokens.
    ``heads``: the scores' leading dimensions."""
    scales, windows, plain, slopes = set(), set(), 0, None
    lengths = [*lengths]
    for count in lengths:
        try:
            form = scores(count)
        except (RuntimeError, TypeError) as error:  # torch's, or operands that no row of AFFINE takes
            said = str(error).partition("\n")[0]
            raise Unproven(f"for {count} tokens its mask can't be computed ({said})") from error
        window = _window(form, count)
        scales.add(_factor(form, count, window))
        if slopes is None:
            slopes = _slopes(form, heads)
            masks = math.prod(heads) if slopes.any() else max(form.scale.numel(), form.shift.numel()) // count**2
            long = min(most, math.isqrt(ELEMENTS // max(masks, 1)))
            lengths += [long] if long > lengths[-1] else []
        _check_even(form, count, window, slopes, heads)
        if window < count:
            windows.add(window)
        else:
            plain = count
    if len(scales) > 1:
        raise Unproven("the factor of its scores depends on the number of tokens")
    if len(windows) > 1 or (windows and plain > min(windows)):
        raise Unproven("how many tokens before it a token sees depends on the number of tokens")
    return Rule(scales.pop(), windows.pop() if windows else 0, tuple(slopes.tolist()) if slopes.any() else ())


def _window(form: Affine, count: int) -> int:
    """How many tokens, itself and those before it, the last token sees; all must see as many, and no later ones."""
    masked = form.shift.expand(*form.shift.shape[:-2], count, count) <= MASKED
    behind = torch.arange(count)[:, None] - torch.arange(count)
    seen = ~masked.reshape(-1, count, count)
    window = int(seen[0, -1].sum())
    wrong = (seen != (behind >= 0) & (behind < window)).nonzero()
    if len(wrong):
        head, i, j = wrong[0].tolist()
        raise Unproven(f"of {count} tokens, token {i} {'sees' if seen[head, i, j] else 'does not see'} token {j}")
    return window


def _factor(form: Affine, count: int, window: int) -> float:
    """The factor of all scores that are seen."""
    behind = torch.arange(count)[:, None] - torch.arange(count)
    seen = (behind >= 0) & (behind < window)
    scale = form.scale.expand(*form.scale.shape[:-2], count, count)
    first = scale.reshape(-1)[0]
    if bool((scale.masked_fill(~seen, first) != first).any()) or bool((scale.abs() > first.abs()).any()):
        raise Unproven("its scores have several factors")
    return float(first)


def _slopes(form: Affine, heads: tuple[int, ...]) -> torch.Tensor:
    """f64[H]: by how much each head's scores rise with a later key, of two tokens; 0 where the first is masked."""
    shift = form.shift.expand(*heads, 2, 2)[..., 1, :].reshape(-1, 2).double()
    return torch.where(shift[:, 0] > MASKED, shift[:, 1] - shift[:, 0], 0.0)


def _check_even(form: Affine, count: int, window: int, slopes: torch.Tensor, heads: tuple[int, ...]) -> None:
    """Unproven if scores that are seen rise otherwise than by ``slopes`` a key."""
    behind = torch.arange(count)[:, None] - torch.arange(count)
    hidden = (behind < 0) | (behind >= window)
    if not bool(slopes.any()) and not bool((form.shift.expand(*form.shift.shape[:-2], count, count) != 0).masked_fill(
            hidden, False).any()):
        return
    distance = behind.masked_fill(hidden, 0)
    for shift, slope in zip(form.shift.expand(*heads, count, count).reshape(-1, count, count), slopes):
        shift = shift.masked_fill(hidden, 0.0)
        rise = (shift - shift.diagonal()[:, None]).masked_fill(hidden, 0.0)
        if not bool((rise + slope * distance).abs().max() <= EVEN * shift.abs().max()):
            raise Unproven("it adds to its scores what neither masks them nor grows evenly with distance: a bias by distance "
                           f"of another form, as {count} tokens show")

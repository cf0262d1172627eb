"""Hollow tensors: shapes and shared stores in the place of data, as cheap as Python allows.

A hollow tensor says it lives on the CPU, so that autocast, checkpoints and models treat it as a real one. An operator
runs once for every set of shapes, on the meta device; what came out is remembered and made again without running.
Torch's own fake tensors give the same at several times the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_CPU = torch.device("cpu")
_META = torch.device("meta")
_MAKE = torch.Tensor._make_wrapper_subclass
_SCALAR = torch.ops.aten._local_scalar_dense.default
_SET = torch.ops.aten.set_.source_Tensor
_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
_RESHAPES_IN_PLACE = {"set_", "resize_", "resize_as_"}

Facts = tuple[torch.Size, tuple[int, ...], int, torch.dtype, int]
"""Shape, strides, offset, dtype, bytes of the store."""


class DataNeeded(Exception):
    """The model's code asks what a tensor holds, or does what shapes alone cannot follow."""


class Store:
    """The bytes that views share; tells its watcher when nothing holds them any more."""

    __slots__ = ("nbytes", "parameter", "watcher", "window")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.window = 0
        """Tokens that a query over it looks back, 0 for all."""
        self.parameter = False
        self.watcher: Callable[[Store], None] | None = None

    def __del__(self) -> None:
        if self.watcher is not None:
            self.watcher(self)


class Hollow(torch.Tensor):
    """A CPU tensor without data."""

    store: Store
    facts: Facts

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Operators outside a trace."""
        return OPERATORS.run(func, args, kwargs or {})[0]

    def __repr__(self, *, tensor_contents=None) -> str:
        """Shape and dtype: there is nothing else to print."""
        return f"Hollow({tuple(self.shape)}, {self.dtype})"


def _over(facts: Facts, store: Store) -> Hollow:
    tensor = _MAKE(Hollow, facts[0], facts[1], facts[2], None, facts[3], torch.strided, _CPU)
    tensor.store = store
    tensor.facts = facts
    return tensor


def like(tensor: torch.Tensor) -> Hollow:
    """A hollow tensor shaped as ``tensor``, with a store of its own."""
    flat = tensor.new_empty(tensor.shape, device=_META)
    nbytes = flat.untyped_storage().nbytes()
    return _over((flat.shape, flat.stride(), 0, flat.dtype, nbytes), Store(nbytes))


class Known:
    """What an operator makes of arguments of given shapes."""

    __slots__ = ("amount", "counter", "fresh", "made")

    def __init__(self, made: Any, fresh: bool) -> None:
        self.made = made
        """A ``_Made``, lists and tuples of them, or a plain value."""
        self.fresh = fresh
        """Whether there is a new store in it."""
        self.counter: str | None = None
        self.amount = 0.0
        """What a watcher of all operators notes beside it."""


class _Made:
    """A tensor that an operator makes."""

    __slots__ = ("facts", "source")

    def __init__(self, facts: Facts, source: int) -> None:
        self.facts = facts
        self.source = source
        """Which tensor argument's store it shares; below zero: which of the new ones."""


class Operators:
    """Runs operators on hollow tensors and remembers what they make."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def run(self, func, args, kwargs) -> tuple[Any, Known | None, bool]:
        """(the result, what is known of the operator, whether it is known only now); real tensors alone run for real.

        Raises:
            DataNeeded: shapes do not decide the result.
        """
        tensors: list[torch.Tensor] = []
        key = (func, _parts(args, tensors), _parts(kwargs.items(), tensors) if kwargs else None)
        known = self._known.get(key)
        if known is not None:
            if known.made is None:
                return args[0], known, False
            return _remake(known.made, tensors), known, False
        if tensors and not any(type(tensor) is Hollow for tensor in tensors):
            return func(*args, **kwargs), None, False
        if func is _SCALAR:
            return _scalar(args[0]), None, False
        if func is _SET and args[0].facts == args[1].facts:
            # How torch's parametrisations swap a parameter for another of its shape.
            args[0].store = args[1].store
            return args[0], None, False
        known = Known(None, False) if _writes(func) else _learn(func, args, kwargs, tensors)
        self._known[key] = known
        return (args[0] if known.made is None else _remake(known.made, tensors)), known, True


OPERATORS = Operators()
"""One for all: what an operator makes of shapes is the same in every trace."""


def _parts(values: Iterable[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """What decides the shape of a result; the tensors among ``values`` are collected."""
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is Hollow:
            tensors.append(value)
            parts.append(value.facts)
        elif kind is list or kind is tuple:
            parts.append(_parts(value, tensors))
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
            parts.append((value.shape, value.stride(), value.dtype))
        else:
            # 1, 1.0 and True are equal and make different dtypes.
            parts += (kind, value)
    return tuple(parts)


def _remake(made: Any, tensors: Sequence[Any]) -> Any:
    if type(made) is _Made:
        source = made.source
        return _over(made.facts, tensors[source].store if source >= 0 else Store(made.facts[4]))
    return _remake_all(made, tensors, {})


# Not a closure that calls itself: that would be a cycle, and keep tensors alive until the next collection.
def _remake_all(made: Any, tensors: Sequence[Any], fresh: dict[int, Store]) -> Any:
    if type(made) is _Made:
        if made.source >= 0:
            return _over(made.facts, tensors[made.source].store)
        if made.source not in fresh:
            fresh[made.source] = Store(made.facts[4])
        return _over(made.facts, fresh[made.source])
    if isinstance(made, (list, tuple)):
        return type(made)([_remake_all(part, tensors, fresh) for part in made])
    return made


def _scalar(tensor: Hollow) -> bool:
    """Conditions do not hold: a mask is not all ones, nothing is out of range, no row is empty."""
    if tensor.dtype is torch.bool:
        return False
    raise DataNeeded("the code reads a number out of a tensor")


def _writes(func) -> bool:
    """Whether ``func`` changes its first argument and returns it.

    Raises:
        DataNeeded: it changes something else.
    """
    schema = func._schema
    if not schema.is_mutable:
        return False
    name = schema.name.split("::")[-1]
    first, returns = schema.arguments[0].alias_info, schema.returns
    alone = sum(1 for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write) == 1
    if not (first is not None and first.is_write and alone and len(returns) == 1):
        raise DataNeeded(f"{name} changes more than its first argument")
    if torch.Tag.inplace_view in func.tags or name in _RESHAPES_IN_PLACE:
        raise DataNeeded(f"{name} changes a shape in place")
    return True


def _learn(func, args, kwargs, tensors: Sequence[torch.Tensor]) -> Known:
    """Run ``func`` on the meta device and keep what it makes."""
    flats: dict[int, torch.UntypedStorage] = {}
    meta = {id(tensor): _on_meta(tensor, flats) for tensor in tensors}
    named = {name: _mapped(value, meta) for name, value in kwargs.items()}
    if any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = _META
    made = _run(func, _mapped(args, meta), named)
    sources = {meta[id(t)].untyped_storage()._cdata: index for index, t in reversed(list(enumerate(tensors)))}
    known = len(sources)
    described = _described(made, sources)
    return Known(described, len(sources) > known)


def _run(func, args, kwargs) -> Any:
    if _GROUPED is not None and func is _GROUPED.default and args[0].dtype is not torch.bfloat16:
        # The meta kernel takes bf16 alone; CUDA's goes through the groups one by one in any dtype.
        low = [value.bfloat16() if isinstance(value, torch.Tensor) and value.dim() > 1 else value for value in args]
        return func(*low, **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _described(made: Any, sources: dict[int, int]) -> Any:
    if isinstance(made, torch.Tensor):
        storage = made.untyped_storage()
        source = sources.setdefault(storage._cdata, -len(sources) - 1)
        return _Made((made.shape, made.stride(), made.storage_offset(), made.dtype, storage.nbytes()), source)
    if isinstance(made, (list, tuple)):
        return type(made)([_described(part, sources) for part in made])
    return made


def _on_meta(tensor: torch.Tensor, flats: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if type(tensor) is not Hollow:
        return tensor.to(_META)
    shape, stride, offset, dtype, nbytes = tensor.facts
    store = id(tensor.store)
    if store not in flats:
        flats[store] = torch.empty(nbytes, dtype=torch.uint8, device=_META).untyped_storage()
    return torch.empty(0, dtype=dtype, device=_META).set_(flats[store], offset, shape, stride)


def _mapped(value: Any, meta: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return meta[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(inner, meta) for inner in value)
    return value

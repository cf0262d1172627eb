"""YAML that refuses what SafeLoader accepts in silence: a key given twice, aliases that loop or multiply."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError

MAX_VALUES = 10_000
"""Values of a document with its aliases written out. A large job has a hundred; nine aliases of nine aliases, nine
levels deep, are 400 million."""
MAX_DEPTH = 32
"""Levels of a document; a job has four. PyYAML needs seconds for thousands of them."""
MERGE_TAG = "tag:yaml.org,2002:merge"


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses what cannot have been meant."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """One node with everything in it.

        Raises:
            yaml.composer.ComposerError: it stands too deep.
        """
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, "nested too deeply", parent.start_mark if parent else None)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The document's root, before any value is made from it.

        Raises:
            yaml.composer.ComposerError: an alias stands inside what it names, or the aliases multiply.
        """
        root = super().get_single_node()
        if root is not None:
            _count(root, {}, set())
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, every key once; keys that ``<<`` merges in give way to the mapping's own.

        Raises:
            yaml.constructor.ConstructorError: a key is repeated, or is itself a collection.
        """
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == MERGE_TAG else self.construct_object(key_node, deep=True)
            try:
                repeated = key in seen
            except TypeError:
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is not a plain word", key_node.start_mark
                ) from None
            if repeated:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _number_as_written(loader: StrictLoader, node: yaml.ScalarNode) -> Any:
    """A number; ``12:30:00``, which YAML 1.1 counts in sixties, is the text that was typed."""
    if ":" in node.value:
        return loader.construct_scalar(node)
    make = loader.construct_yaml_int if node.tag.endswith(":int") else loader.construct_yaml_float
    return make(node)


for tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    StrictLoader.add_constructor(tag, _number_as_written)


def _count(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Values below and at ``node``, aliases counted as often as they are used; each node is walked once."""
    own = id(node)
    if own in above:
        raise ComposerError(None, None, "an alias stands inside what it names", node.start_mark)
    if own not in known:
        above.add(own)
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inside = list(node.value)
        known[own] = 1 + sum(_count(part, known, above) for part in inside)
        above.remove(own)
    if known[own] > MAX_VALUES:
        raise ComposerError(None, None, f"more than {MAX_VALUES:,} values", node.start_mark)
    return known[own]

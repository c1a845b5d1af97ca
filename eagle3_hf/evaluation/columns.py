"""What a benchmark compares: ordinary decoding, prompt lookup, and heads with their settings, one column each."""

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import GenerationConfig

from ..model.tree_settings import PAPER_TREE, given_tree, tree_settings


# Settings of a head's generation config; those that a head declares besides are known too.
HEAD_FIELDS = (*PAPER_TREE, "assistant_window", "assistant_coupled_sampling")
# What is the same for all columns of a table, and the option that sets it.
_TABLE_FIELDS = {"max_new_tokens": "max_new_tokens", "do_sample": "temperatures", "temperature": "temperatures"}
_UNMEASURED = ("max_length", "num_return_sequences", "num_beams", "return_dict_in_generate", "output_scores")
# Settings of decoding methods that draft without a head.
_WITHOUT_HEAD = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "use_mtp")

PROMPT_LOOKUP = "prompt lookup"
_LOOKUP_TOKENS = (10, 4)

_NEXT_FIELD = re.compile(r",(?=\s*[A-Za-z_]\w*=)")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Column:
    """One way of decoding.

    Attributes:
        name: Heading of the column.
        head: Name of the head that drafts; `None` for decoding without one.
        head_settings: Fields of the head's generation config, by name.
        call_settings: Further arguments of `generate`.
        best_of: Name of a set of columns of which only the fastest is reported, under this name.
    """

    name: str
    head: str | None = None
    head_settings: Mapping[str, Any] = field(default_factory=dict)
    call_settings: Mapping[str, Any] = field(default_factory=dict)
    best_of: str | None = None

    def supports(self, batch_size: int) -> bool:
        """Whether transformers decodes batches of this size in this way."""
        return batch_size == 1 or not any(name in self.call_settings for name in _WITHOUT_HEAD)

    def as_dict(self) -> dict[str, Any]:
        """Return the column as JSON values."""
        return asdict(self)

    @contextmanager
    def applied(self, heads: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Give the head the column's settings for a while, and return the column's arguments of `generate`."""
        if self.head is None:
            yield dict(self.call_settings)
            return
        head = heads[self.head]
        kept = head.generation_config
        head.generation_config = copy.deepcopy(kept)
        for name, value in self.head_settings.items():
            setattr(head.generation_config, name, value)
        try:
            yield {"assistant_model": head, **self.call_settings}
        finally:
            head.generation_config = kept


PLAIN = Column("plain")


def lookup_columns() -> list[Column]:
    """Return transformers' prompt lookup with two numbers of tokens, of which the better one is reported."""
    return [
        Column(f"{PROMPT_LOOKUP} {count}", call_settings={"prompt_lookup_num_tokens": count}, best_of=PROMPT_LOOKUP)
        for count in _LOOKUP_TOKENS
    ]


def head_columns(heads: Sequence[str], trees: Sequence[str] = ()) -> list[Column]:
    """Return a column for each head with each tree; without trees, each head has its own settings."""
    if not trees:
        return [Column(head, head) for head in heads]
    return [Column(f"{head} {tree}", head, parse_tree(tree)) for head in heads for tree in trees]


def parse_tree(text: str) -> dict[str, Any]:
    """Parse the size of a tree: drafted nodes, levels and children per node such as `"15/4/4"`, or `"auto"`.

    Returns:
        Fields of a head's generation config. `"auto"` alone, or in place of the nodes, lets measured costs choose.

    Raises:
        ValueError: the text is neither.
    """
    nodes, *others = text.split("/")
    whole = len(others) in (0, 2) if nodes == "auto" else len(others) == 2
    numbers = others if nodes == "auto" else [nodes, *others]
    if not whole or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in numbers):
        raise ValueError(
            f"a tree is three positive numbers, nodes/depth/top_k such as 15/4/4, or auto or auto/8/10, got {text!r}"
        )
    values: list[Any] = ["auto" if nodes == "auto" else int(nodes), *map(int, others)]
    return dict(zip(PAPER_TREE, values, strict=False))


def parse_column(text: str, heads: Mapping[str, Any]) -> Column:
    """Parse a column such as `"narrow:num_assistant_tokens=auto,assistant_window=64"`.

    Args:
        text: The name, and fields with JSON values; `tree=15/4/4` sets the three fields of a tree, and `head=NAME`
            chooses a head (default: the first one; `head=none` for none). Without fields, or with those of prompt
            lookup, nothing is drafted by a head.
        heads: The heads by name.

    Raises:
        ValueError: the text has another form, or a field or head is unknown.
    """
    return column_of(*column_fields(text), heads)


def column_fields(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields of a column, see [`parse_column`].

    Raises:
        ValueError: the text has another form.
    """
    name, _, rest = text.partition(":")
    name = name.strip()
    if not name:
        raise ValueError(f"a column is NAME:FIELD=VALUE,FIELD=VALUE, got {text!r}, which has no name")
    fields: dict[str, Any] = {}
    for setting in _NEXT_FIELD.split(rest) if rest.strip() else ():
        key, equals, value = setting.strip().partition("=")
        if not equals or not key:
            raise ValueError(f"a column is NAME:FIELD=VALUE,FIELD=VALUE, got {setting!r} in {text!r}")
        fields |= parse_tree(value) if key == "tree" else {key: _value(value)}
    return name, fields


def column_of(name: str, fields: Mapping[str, Any], heads: Mapping[str, Any]) -> Column:
    """Return the column with these fields, each of the head's generation config or an argument of `generate`.

    Raises:
        ValueError: a field or the head is unknown, or a field is the same for all columns.
    """
    given = dict(fields)
    without = not given or any(key in _WITHOUT_HEAD for key in given)
    head = given.pop("head", None if without else next(iter(heads), None))
    head = None if head in (None, "none") else str(head)
    if head is not None and head not in heads:
        raise ValueError(f"column {name}: there is no head {head}, but {', '.join(heads) or 'none'}")
    own: dict[str, Any] = {}
    call: dict[str, Any] = {}
    known = vars(GenerationConfig())
    declared = {} if head is None else vars(getattr(heads[head], "generation_config", None) or GenerationConfig())
    for key, value in given.items():
        if key in _TABLE_FIELDS:
            raise ValueError(f"column {name}: {key} is the same for all columns of a table; set {_TABLE_FIELDS[key]}")
        if key in _UNMEASURED:
            raise ValueError(f"column {name}: {key} cannot be compared; leave it out")
        if key in HEAD_FIELDS and head is not None:
            own[key] = value
        elif key in known:
            call[key] = value
        elif key in declared:
            own[key] = value
        else:
            raise ValueError(f"column {name}: {key} is no setting of decoding{_nearest(key, [*HEAD_FIELDS, *known])}")
    return Column(name, head, own, call)


def check_names(columns: Sequence[Column]) -> None:
    """Check that no two columns have the same name.

    Raises:
        ValueError: two have.
    """
    names = [column.name for column in columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two columns have the name {twice!r}: name them differently (columns: {', '.join(names)})")


def tree_in_words(column: Column, heads: Mapping[str, Any], target) -> tuple[str, bool]:
    """Return the size of a column's tree as text, empty without a tree, and whether it is a chain.

    Raises:
        ValueError: a size is not a positive integer.
    """
    if column.head is None:
        return "", False
    with column.applied(heads):
        head = heads[column.head]
        if not hasattr(head.config, "captured_layer_ids"):  # an ordinary assistant
            return "", False
        settings = tree_settings(head, target)
        nodes = "auto" if settings.at_most else settings.num_nodes
        default = "" if given_tree(head.generation_config) else f" (the default on {target.device.type})"
        return f"{nodes}/{settings.depth}/{settings.top_k}{default}", settings.top_k == 1


def _value(text: str) -> Any:
    """Parse JSON, or return the text."""
    text = text.strip()
    try:
        return json.loads(_PYTHON.get(text, text))
    except ValueError:
        return text


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""

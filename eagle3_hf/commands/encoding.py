"""Options for the encoding of chats, the same in every command that encodes a dataset."""

import argparse
from typing import TYPE_CHECKING

from .values import count, json_object


if TYPE_CHECKING:
    from ..training.data.options import EncodingOptions


def add_encoding(parser: argparse.ArgumentParser) -> None:
    """Add the options `--max_length`, `--last_turn_only`, `--mask_reasoning` and `--chat_template_kwargs`."""
    parser.add_argument("--max_length", type=count, default=2048, help="tokens kept of each chat")
    parser.add_argument("--last_turn_only", action="store_true", help="learn from the last answer of a chat only")
    parser.add_argument("--mask_reasoning", action="store_true", help="do not learn reasoning, nor the tags around it")
    parser.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        help='variables for the chat template, as JSON: {"enable_thinking": false}',
    )


def encoding_options(arguments: argparse.Namespace) -> "EncodingOptions":
    """Return what the options say as one object."""
    from ..training.data.options import EncodingOptions

    return EncodingOptions(
        max_length=arguments.max_length,
        template_kwargs=arguments.chat_template_kwargs,
        last_turn_only=arguments.last_turn_only,
        mask_reasoning=arguments.mask_reasoning,
    )

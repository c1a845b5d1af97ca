"""Heads for other engines, and the card of any head. Knows configs and tensors, and no model class."""

from .card import card_text, serve_command, write_card
from .errors import ExportError
from .head import FORMATS, check_folder, export_head, needs_target_weights
from .unsupported import ENGINES, obstacles


__all__ = [
    "ENGINES",
    "FORMATS",
    "ExportError",
    "card_text",
    "check_folder",
    "export_head",
    "needs_target_weights",
    "obstacles",
    "serve_command",
    "write_card",
]

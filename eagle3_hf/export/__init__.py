"""Writes heads for serving engines, and the model card of any head.

This package works on configs and tensors and knows no model class.
"""

from .borrowed import needs_target_weights
from .card import card_text, serve_command, write_card
from .errors import ExportError
from .head import FORMATS, export_head
from .unsupported import ENGINES, unsupported_features
from .writing import check_folder


__all__ = [
    "ENGINES",
    "FORMATS",
    "ExportError",
    "card_text",
    "check_folder",
    "export_head",
    "needs_target_weights",
    "serve_command",
    "unsupported_features",
    "write_card",
]

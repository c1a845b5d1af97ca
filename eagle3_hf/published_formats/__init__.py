"""Published heads: which dialect a folder speaks, and its config and tensor names in our canonical words.

Dialects are told apart by content (config keys, tensor names and shapes), never by a `model_type` or class name, since
published heads claim to be `llama` and other projects use our class names. A new dialect begins in `dialects` (what
tells it apart), `names` (its tensor names) and `describe` (its config keys).
"""

from .config_keys import TARGET_KEYS
from .describe import HeadDescription, describe
from .detection import check_is_head, is_head_config, is_own_layout
from .errors import HeadFormatError, shortened
from .names import DROPPED_TENSORS, WEIGHT_RENAMINGS, FileNames
from .rope import REFERENCE_THETA
from .tensors import TensorInfo, float_dtype, read_tensor_table


__all__ = [
    "DROPPED_TENSORS",
    "REFERENCE_THETA",
    "TARGET_KEYS",
    "WEIGHT_RENAMINGS",
    "FileNames",
    "HeadDescription",
    "HeadFormatError",
    "TensorInfo",
    "check_is_head",
    "describe",
    "float_dtype",
    "is_head_config",
    "is_own_layout",
    "read_tensor_table",
    "shortened",
]

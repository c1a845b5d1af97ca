"""Published heads of all projects, translated into fields of `Eagle3DraftConfig` and canonical tensor names.

Formats are recognised by their content (config keys, tensor names and shapes), never by `model_type` or a class name,
since published heads claim to be `llama` and other projects use our class names. Support for a new format begins in
`detection` (how it is recognised), `names` (its tensor names) and `fields` (its config keys).
"""

from .config_keys import TARGET_KEYS
from .describe import HeadDescription, describe
from .detection import check_is_head, is_head_config, is_own_format
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
    "is_own_format",
    "read_tensor_table",
    "shortened",
]

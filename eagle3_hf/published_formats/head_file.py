"""What a head's file says, read with checks: values of its config, and shapes of its tensors under canonical names."""

from dataclasses import dataclass
from typing import Any

from .errors import HeadFormatError
from .names import FileNames


@dataclass
class HeadFile:
    """Reads sizes and flags of one published head, and raises where config and tensors contradict each other.

    Attributes:
        config: The flat config.
        shapes: The tensors' shapes by canonical name.
        names: How the file spells these names, for messages.
        notes: Collects what had to be assumed; it becomes warnings at load.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    names: FileNames
    notes: list[str]

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self.shapes

    # ----- sizes of tensors ------------------------------------------------------------------------------------------

    def matrix(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix.

        Raises:
            HeadFormatError: the tensor is missing, not two-dimensional, or empty.
        """
        if name not in self.shapes:
            raise HeadFormatError(f"missing tensors ['{self.names.show(name)}']")
        shape = self.shapes[name]
        if len(shape) != 2 or 0 in shape:
            raise HeadFormatError(f"{self.names.show(name)} must be a matrix, got shape {shape}")
        return shape

    def height(self, name: str) -> int:
        """Return the first dimension of a matrix: the width of a projection's output."""
        return self.matrix(name)[0]

    def length(self, name: str) -> int:
        """Return the number of entries of a vector.

        Raises:
            HeadFormatError: the tensor is missing, not one-dimensional, or empty.
        """
        shape = self.shapes.get(name, (0,))
        if len(shape) != 1 or shape[0] < 1:
            shown = self.names.show(name)
            raise HeadFormatError(f"{shown} must be a vector, got shape {self.shapes.get(name, 'none')}")
        return shape[0]

    def divided_height(self, tensor: str, by: int, name: str) -> int:
        """Return the first dimension of a matrix divided by `by`, the config field `name`."""
        height = self.height(tensor)
        if height % by or height < by:
            raise HeadFormatError(
                f"{self.names.show(tensor)} has {height} rows, which is not a multiple of {name} {by}"
            )
        return height // by

    # ----- values of the config --------------------------------------------------------------------------------------

    def positive(self, name: str) -> int:
        """Return an integer of at least 1 from the config."""
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HeadFormatError(f"its config must have `{name}`, an integer of at least 1; it says {value!r}")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean from the config; an absent one is false."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise HeadFormatError(f"its config's {name} must be true or false, got {value!r}")
        return bool(value)

    # ----- both must agree -------------------------------------------------------------------------------------------

    def agreed(self, name: str, size: int) -> int:
        """Return the size that the tensors have, after checking that the config does not name another one."""
        if self.config.get(name) is not None and self.positive(name) != size:
            raise HeadFormatError(f"its config says {name} {self.config[name]}, but its tensors are made for {size}")
        return size

    def flag_with_tensor(self, flag: str, tensor: str, value: bool | None = None) -> bool:
        """Return a flag that must be set exactly if the tensor is there.

        Args:
            flag: The name of the flag.
            tensor: The canonical name of its tensor.
            value: The flag's value where it has several names in the config; read from the config when `None`.
        """
        value = self.flag(flag) if value is None else value
        if value and not self.has(tensor):
            raise HeadFormatError(f"its config says `{flag}: true`, but it has no tensor {self.names.show(tensor)}")
        if self.has(tensor) and not value:
            raise HeadFormatError(
                f"it has a tensor {self.names.show(tensor)}, but its config does not say `{flag}: true`; if it was "
                f"trained with that norm, load it with {flag}=True"
            )
        return value

    def tensor_unless_denied(self, flag: str, tensor: str) -> bool:
        """Return whether the tensor is there; the config may leave the flag out, but must not contradict it."""
        if self.flag(flag) and not self.has(tensor):
            raise HeadFormatError(f"its config says `{flag}: true`, but it has no tensor {self.names.show(tensor)}")
        if self.config.get(flag) is False and self.has(tensor):
            raise HeadFormatError(f"it has a tensor {self.names.show(tensor)}, but its config says `{flag}: false`")
        return self.has(tensor)

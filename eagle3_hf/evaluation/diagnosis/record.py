"""The tokenizer and the chat template, against what a head's config recorded at training."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ...model.configuration_eagle3 import Eagle3DraftConfig
from ...model.vocab import tokenizer_hashes


@dataclass(frozen=True)
class RecordCheck:
    """Hashes of the head's record and of the tokenizer; `None` where nothing is recorded, or there is no template.

    Attributes:
        recorded_vocab, vocab: Hash of the tokenizer's vocabulary.
        recorded_template, template: Hash of the chat template.
    """

    recorded_vocab: str | None
    vocab: str
    recorded_template: str | None
    template: str | None

    @property
    def is_other_vocab(self) -> bool:
        """Whether the head was trained with another tokenizer."""
        return self.recorded_vocab not in (None, self.vocab)

    @property
    def is_other_template(self) -> bool:
        """Whether the head was trained with another chat template."""
        return self.recorded_template not in (None, self.template)

    def __str__(self) -> str:
        parts = []
        for name, recorded, is_other in (
            ("tokenizer", self.recorded_vocab, self.is_other_vocab),
            ("chat template", self.recorded_template, self.is_other_template),
        ):
            words = "not recorded by the head" if recorded is None else "another" if is_other else "the head's own"
            parts.append(f"{name}: {words}")
        return ", ".join(parts)


def check_record(config: Eagle3DraftConfig, tokenizer: PreTrainedTokenizerBase) -> RecordCheck:
    """Compare a tokenizer with the record in a head's config."""
    vocab, template = tokenizer_hashes(tokenizer)
    return RecordCheck(config.target_vocab_hash, vocab, config.target_chat_template_hash, template)


__all__ = ["RecordCheck", "check_record"]

"""The EAGLE-3 draft head: fuse the target's features, run the draft layer(s), norm, draft-vocabulary head.

Position `j` of the draft reads the target's feature of token `j` and the embedding of token `j + 1`, and predicts
token `j + 2`. A position that has no target feature yet reads the draft's own output at the position before (paper
section 3.1).
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.utils import ModelOutput

from ..published_formats import DROPPED_TENSORS
from . import vocab
from .attention import Attend, CachedAttention, Eagle3Attention, Eagle3LatentAttention, Rotary
from .borrowed import Borrowed, call_on_module_device, compute_dtype
from .configuration_eagle3 import Eagle3DraftConfig
from .loading import load_head
from .norms import Eagle3RMSNorm
from .offload import require_resident, require_weights
from .rope import default_frequencies
from .target_check import check_target
from .target_modules import target_vocab_size
from .tree_settings import declare_tree_settings
from .warm_start import new_head_config, special_ids, warm_start_body, warm_start_head


# Decoding needs neither the training-time test nor the model card's tables: they are imported where they are used.
if TYPE_CHECKING:
    from ..ttt.loss import StepLoss, Supervision
    from ..ttt.settings import TTTSettings


@dataclass
class Eagle3DraftOutput(ModelOutput):
    """Output of [`Eagle3DraftModel.forward`].

    Attributes:
        loss: () the weighted training-time-test loss; `None` without labels.
        logits: (B, T, D) of one causal pass; `None` with labels.
        hidden_states: (B, T, H) before the final norm, of the first pass.
        step_losses, step_hits, step_counts: (S,) sums over the supervised pairs of every step.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    step_losses: torch.Tensor | None = None
    step_hits: torch.Tensor | None = None
    step_counts: torch.Tensor | None = None


class Eagle3RotaryEmbedding(LlamaRotaryEmbedding):
    """The draft's own RoPE. Frequencies stay in float32 whatever dtype the head is moved to."""

    compute_default_rope_parameters = staticmethod(default_frequencies)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        """Return cos and sin (B, n, width), the first half of sin negated as `apply_rotary` needs it."""
        cos, sin = super().forward(x, position_ids)
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat([-first, second], dim=-1)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 and self.inv_freq.device.type != "meta":
            fresh = type(self)(self.config).inv_freq.to(self.inv_freq.device)
            self.register_buffer("inv_freq", fresh, persistent=False)
            self.register_buffer("original_inv_freq", fresh.clone(), persistent=False)
        return self


class Eagle3DecoderLayer(nn.Module):
    """One draft layer. The first reads embedding and feature; its residual is the feature, before the norm."""

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.is_first = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = (Eagle3LatentAttention if config.is_latent else Eagle3Attention)(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = Eagle3RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = Eagle3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Eagle3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        residual = hidden
        if self.is_first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3PreTrainedModel(PreTrainedModel):
    config: Eagle3DraftConfig
    config_class = Eagle3DraftConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # forward takes num_items_in_batch; Trainer then counts the labels of the whole step
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = ["Eagle3DecoderLayer"]
    # `loading` compares all names before, and knows when a file may lack a map or hold an unused norm.
    _keys_to_ignore_on_load_unexpected = [*DROPPED_TENSORS, r"^norm\.weight$"]
    _keys_to_ignore_on_load_missing = [r"^d2t$", r"^t2d$"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Eagle3DraftModel):
            module._init_vocabulary_buffers()


class Eagle3DraftModel(Eagle3PreTrainedModel, GenerationMixin):
    """An EAGLE-3 draft head. Pass it to `target.generate(..., assistant_model=draft)`.

    It inherits `GenerationMixin` only so that transformers creates, saves and loads its `generation_config`, where the
    tree settings live: `num_assistant_tokens` (drafted nodes, root not counted), `assistant_tree_depth` (levels) and
    `assistant_tree_top_k` (children per expanded node; 1 = a chain). Where the number of nodes is not set, or is
    `"auto"`, each round has the size that pays, up to the other two and limits for the target's device (see
    `model.tree_settings`). When sampling, the draft looks at the coming random numbers (see `decoding.coupling`);
    `assistant_coupled_sampling = False` there turns that off.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3DraftConfig):
        super().__init__(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        captured = config.num_captured_layers * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = Eagle3RMSNorm(captured, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                Eagle3RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_captured_layers)
            )
        if config.use_aux_hidden_state:
            self.fc = nn.Linear(captured, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([Eagle3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        if config.final_norm:
            self.norm = Eagle3RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = Eagle3RotaryEmbedding(config)  # type: ignore[arg-type] # as much of a LlamaConfig as it reads
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._has_draft_vocab, self._starts_warm = False, True
        self._init_vocabulary_buffers()
        self._target: weakref.ref | None = None
        self.stats: Any = None  # SpeculationStats of the last generate call
        self._trial: Any = None  # counts of the first rounds, see `decoding.draft.trial`
        self._warned_of_length = False
        self.post_init()
        declare_tree_settings(self.generation_config)

    # ----- the forward passes ---------------------------------------------------------------------------------------

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Target features (B, T, A * Ht) -> (B, T, H); not for the draft's own outputs."""
        first: Any = self.layers[0]
        features = features.to(first.hidden_norm.weight.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            chunks = features.split(self.config.target_hidden_size, dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features) if self.config.use_aux_hidden_state else features

    def run_layers(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Callable,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Return (B, n, H) the outputs before the final norm.

        Args:
            hidden: (B, n, H) features.
            embeds: (B, n, H) embeddings of the next tokens.
            position_ids: (B, n).
            attend: What a position attends to, called with `position_ids`.
            rotary: What `rotary_emb` returns for the positions, where the caller knows it already.
        """
        embeds = embeds.to(hidden.dtype)
        if rotary is None:
            rotary = self.rotary_emb(hidden, position_ids)
        attend = partial(attend, position_ids=position_ids)
        for layer in self.layers:
            hidden = layer(hidden, embeds, rotary, attend)
        return hidden

    def feedback(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the next position reads where there is no target feature."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def compute_logits(self, hidden: torch.Tensor, borrowed: Borrowed | None = None) -> torch.Tensor:
        """(..., H) before the final norm -> (..., D) over the draft vocabulary."""
        head = self.lm_head if self.config.own_lm_head else (borrowed or self.borrow()).lm_head
        return head(self.norm(hidden) if self.config.final_norm else hidden)

    def forward(
        self,
        input_ids: torch.LongTensor,
        features: torch.Tensor,
        labels: torch.LongTensor | None = None,
        teacher_logits: torch.Tensor | None = None,
        teacher_in_vocab: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        settings: "TTTSettings | None" = None,
        teacher_features: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> Eagle3DraftOutput:
        """One causal pass, or with `labels` the whole training-time-test unroll (paper section 3.2).

        Args:
            input_ids: (B, T), padded on the right (positions before the padding do not see it).
            features: (B, T, A * Ht) target features of the same tokens.
            labels: (B, T), the token where it is a supervised target and -100 elsewhere.
            teacher_logits: (n, D) the target's logits over the draft vocabulary, for the n supervised pairs in order.
            teacher_in_vocab: (n,) bool, whether the target's own first choice is in the draft vocabulary.
            attention_mask: Accepted and not needed, see `input_ids`.
            position_ids: (B, T) of packed sequences, starting at 0 in every document.
            settings: Steps, their weights and their loss; the paper's when `None`.
            teacher_features: (n, Ht) the target's last feature at the token that each pair reads.
            num_items_in_batch: Global count of supervised tokens to divide by; this batch's own when `None`.
        """
        self._require_vocabulary("forward")
        borrowed = self.borrow()
        if labels is None:
            hidden = self._first_pass(input_ids, features, borrowed)
            return Eagle3DraftOutput(logits=self.compute_logits(hidden, borrowed), hidden_states=hidden)
        from ..ttt.loss import Supervision, supervised_mask, weighted_loss
        from ..ttt.settings import TTTSettings

        require_resident(self, "training")
        if teacher_logits is None or teacher_in_vocab is None:
            raise ValueError(
                "forward with labels learns what the target says: pass teacher_logits and teacher_in_vocab too, or "
                "leave labels out for one causal pass"
            )
        settings = settings or TTTSettings()
        settings.check_fits(self.config)
        mask = supervised_mask(labels, position_ids)
        supervision = Supervision.build(mask, teacher_logits, teacher_in_vocab, position_ids, teacher_features)
        steps = self.training_time_test(input_ids, features, supervision, settings, borrowed)
        count = num_items_in_batch if num_items_in_batch is not None else len(supervision.teacher)
        return Eagle3DraftOutput(
            loss=weighted_loss(steps, count, settings),
            step_losses=torch.stack([step.loss_sum.detach() for step in steps]),
            step_hits=torch.stack([step.hits.sum() for step in steps]),
            step_counts=torch.tensor([len(step.entries) for step in steps], device=input_ids.device),
        )

    def training_time_test(
        self,
        input_ids: torch.LongTensor,
        features: torch.Tensor,
        supervision: "Supervision",
        settings: "TTTSettings",
        borrowed: Borrowed | None = None,
    ) -> "list[StepLoss]":
        """The unroll alone, see `ttt.unroll`: the loss of each step. Documents are those of `supervision`."""
        from ..ttt.unroll import training_time_test

        return training_time_test(self, input_ids, features, supervision, settings, borrowed or self.borrow())

    def _first_pass(self, input_ids, features, borrowed) -> torch.Tensor:
        embeds = borrowed.embed(nn.functional.pad(input_ids, (0, 1))[:, 1:])
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.run_layers(self.fuse(features), embeds, positions, CachedAttention())

    # ----- the target -----------------------------------------------------------------------------------------------

    def bind(self, target: PreTrainedModel) -> "Eagle3DraftModel":
        """Check that this head fits `target`, keep a weak reference to it and copy its eos/pad/bos ids. Returns self.

        Nothing of the target becomes part of the head: not its parameters, state dict, device moves, or saves.

        Raises:
            ValueError: hidden size, vocabulary or layer ids do not fit; both numbers are named.
        """
        self.check_target(target)
        self._target = weakref.ref(target)
        # Of the target's config, not of its generation config: a pipeline compares these before it takes a head.
        text_config = target.config.get_text_config()
        for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
            setattr(self.config, name, getattr(text_config, name, None))
        return self

    def borrow(self, target: PreTrainedModel | None = None) -> Borrowed:
        """What this head needs from `target` (default: the bound one) to run, held only by the returned object."""
        if target is None:
            target = self._target() if self._target is not None else None
        embeds, head = self.config.own_embeddings, self.config.own_lm_head
        if target is None:
            if embeds and head:
                return Borrowed(self._embed_own, self.lm_head)
            raise ValueError(
                "this head borrows its target's embedding, and no target is bound (or it was deleted): call "
                "draft.bind(target) first and keep the target alive"
            )
        return Borrowed(
            self._embed_own if embeds else call_on_module_device(target.get_input_embeddings()),
            self.lm_head if head else call_on_module_device(target.get_output_embeddings(), compute_dtype(target)),
        )

    def _embed_own(self, ids: torch.Tensor) -> torch.Tensor:
        """A prompt may hold ids beyond the vocabulary (Mllama's image token), which have no embedding."""
        return self.embed_tokens(ids.clamp(max=self.config.vocab_size - 1))

    def check_target(self, target: PreTrainedModel) -> None:
        """Reject a target this head was not made for, naming both numbers; settle layer ids the file did not give."""
        check_target(self.config, target)

    # ----- the draft vocabulary -------------------------------------------------------------------------------------

    @property
    def has_draft_vocab(self) -> bool:
        """Whether the map from draft to target ids is set; where only its size is known, the trainer sets it."""
        return self._has_draft_vocab

    def set_draft_vocab(self, ids: torch.Tensor | list[int]) -> None:
        """Set the map, once, from `D` target ids; copies the tokens' rows of the bound target's output layer.

        Raises:
            ValueError: the map is already set, or the ids do not fit.
        """
        if self._has_draft_vocab:
            raise ValueError(
                "the draft vocabulary is already set; the weights of the output layer belong to its tokens: make a "
                "new head for another one"
            )
        ids = torch.as_tensor(ids, dtype=torch.int64, device="cpu").sort().values
        if len(ids) != self.config.draft_vocab_size:
            raise ValueError(f"draft_vocab_size is {self.config.draft_vocab_size}, but {len(ids)} ids were given")
        d2t, t2d = vocab.offsets_and_mask(ids, self.config.vocab_size)
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)
        self._has_draft_vocab = True
        target = self._target() if self._target is not None else None
        if target is not None and self._starts_warm:
            warm_start_head(self, target)

    def draft_vocab_ids(self) -> torch.Tensor:
        """(D,) target ids of the draft's tokens, ascending."""
        self._require_vocabulary("draft_vocab_ids")
        return vocab.ids_from_offsets(self.d2t)

    def draft_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Draft ids -> target ids (`d2t` holds offsets)."""
        return ids + self.d2t.to(ids.device)[ids]

    def _init_vocabulary_buffers(self) -> None:
        """Set the identity map, or none; transformers' initialisers keep what was loaded from a file."""
        identity = self.config.draft_vocab_size == self.config.vocab_size
        init.zeros_(self.d2t)
        init.constant_(self.t2d, identity)
        self._has_draft_vocab = identity

    def _require_vocabulary(self, what: str) -> None:
        if not self._has_draft_vocab:
            raise ValueError(
                f"{what} needs a draft vocabulary: only its size ({self.config.draft_vocab_size} of "
                f"{self.config.vocab_size}) is known. The trainer builds the map from the training data; otherwise "
                "call draft.set_draft_vocab(ids)"
            )

    # ----- creating, loading, saving --------------------------------------------------------------------------------

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        draft_vocab: torch.Tensor | list[int] | None = None,
        draft_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        warm_start: bool = True,
        **config_overrides,
    ) -> "Eagle3DraftModel":
        """A new head for `target`, warm-started from it and bound to it.

        Args:
            target: Any decoder-only causal LM of transformers.
            draft_vocab: `D` target ids, or token counts (V,) of which the most frequent are taken, or `None`.
            draft_vocab_size: `D`. Without `draft_vocab` the map stays unset until the trainer builds it; with neither,
                the draft has the target's whole vocabulary.
            dtype: Of the parameters; float32 is right for training.
            warm_start: Copy from the target what fits (see `warm_start`); `False` starts at random.
            config_overrides: Any [`Eagle3DraftConfig`] field, such as `num_hidden_layers` or `hidden_size`.
        """
        vocab_size = target_vocab_size(target)
        ids = vocab.resolve(draft_vocab, draft_vocab_size, vocab_size, special_ids(target))
        size = len(ids) if ids is not None else draft_vocab_size
        config = new_head_config(target, vocab_size, size or vocab_size, config_overrides)
        draft = cls(config).to(dtype)  # type: ignore[arg-type] # transformers wraps this method without its types
        draft.bind(target)
        draft._starts_warm = warm_start
        if warm_start:
            warm_start_body(draft, target)
        if ids is not None and len(ids) < vocab_size:
            draft.set_draft_vocab(ids)  # also copies their part of the target's output layer
        elif draft.has_draft_vocab and warm_start:
            warm_start_head(draft, target)
        return draft

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs) -> "Eagle3DraftModel":
        """Load a head saved by `save_pretrained`, or one in any published format (docs/heads.md lists them).

        Every tensor of the file is used and every parameter filled, or an error names it. Ambiguous checkpoints load
        with a default and a warning that names the override. No code from the repository is run. The dtype is the
        file's unless `dtype=` is given. Keywords override config fields, for example `target_layer_ids=[2, 16, 29]`.

        Raises:
            HeadFormatError: no EAGLE-3 head, one that is not supported, a damaged or unsafe file, or tensors that do
                not fit.
        """
        draft, info = load_head(cls, super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)
        declare_tree_settings(draft.generation_config)
        result: Any = (draft, info) if kwargs.get("output_loading_info") else draft
        return result

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save under this package's tensor names, whatever names the file had that this head was loaded from.

        A model card is written beside the weights, unless there is one that a person wrote or edited.
        """
        self._require_vocabulary("save_pretrained")
        require_weights(self)
        super().save_pretrained(save_directory, *args, **{"save_original_format": False, **kwargs})
        if kwargs.get("is_main_process", True):
            from ..export.card import write_card

            write_card(save_directory, self.config, self.generation_config)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        """transformers writes its own empty card just before it uploads."""
        from ..export.card import write_card

        write_card(working_dir, self.config, self.generation_config)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self._has_draft_vocab = self._has_draft_vocab or int(self.t2d.sum()) == self.config.draft_vocab_size
        return result

    def get_input_embeddings(self):
        """`None` where the target's are borrowed; peft asks before it leaves the output layer out of "all-linear"."""
        return self.embed_tokens if self.config.own_embeddings else None

    def generate(self, *args, **kwargs):
        raise TypeError(
            "a draft head cannot generate alone: call target.generate(..., assistant_model=draft), after "
            "eagle3_hf.enable() if it was disabled"
        )

    def __deepcopy__(self, memo):
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update({k: v if k == "_target" else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return clone

    def __getstate__(self):
        return {**self.__dict__, "_target": None}  # a weak reference cannot be pickled, and the target must not be

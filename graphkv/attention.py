"""The one attention function, registered with transformers under the name `graphkv`.

A model loaded with `attn_implementation="graphkv"` hands every layer's rotated queries, keys and values to
`attention`, which passes them to the *state* given in the forward call: a `graphkv.prefill.Recorder` while a prompt
is read, a `graphkv.cache.RaggedCache` while answers are written. The state travels as a keyword argument of the forward
call, so modules are never patched and nothing outlives the call.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from eval.errors import UserError

NAME = "graphkv"

# Variants of attention that a model asks for through these keywords; ignoring one would give wrong numbers.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class State(Protocol):
    """Receives the attention of every layer during one forward call."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention output [batch, H, q, d] of queries [batch, H, q, d] with new keys/values [batch, G, q, d]."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    kv_state: State | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function in the signature of transformers' `AttentionInterface`; returns [batch, q, H, d]."""
    if kv_state is None:
        raise RuntimeError("a model with graphkv attention runs through graphkv.Engine, which passes kv_state")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(
                f"layer {module.layer_idx} of this model uses {name}={kwargs[name]!r}, which eviction does not "
                "support: choose a model with plain causal attention in every layer"
            )
    output = kv_state.attend(module, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


def forward(model: PreTrainedModel, ids: Tensor, start: int | Tensor, state: State, last: int = 1) -> Tensor:
    """Run `model` over new tokens.

    Parameters
    ----------
    model
        A model loaded with graphkv attention.
    ids
        [batch, q] token ids, int64, on the model's device.
    start
        True position of the first of them, the same for every row; a [1, 1] int64 tensor where it must not be fixed.
    state
        Supplies attention; see the module docstring.
    last
        For how many of the last tokens logits are computed (0 = all).

    Returns
    -------
    Tensor
        [batch, last, vocabulary] logits in the model's dtype.
    """
    positions = (torch.arange(ids.shape[1], device=ids.device) + start).expand(ids.shape)
    return model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, kv_state=state).logits


# Without a mask function of this name transformers builds no mask, which would cost a host sync a forward: the states
# know which key each query may see.
AttentionInterface.register(NAME, attention)

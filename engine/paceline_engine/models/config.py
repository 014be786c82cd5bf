"""What a checkpoint says about its architecture, as one frozen record.

The decoder is driven by this record alone: differences between Llama-family models are fields, not classes. Every
field beyond the geometry has the value that changes nothing as its default, so a device can compare with a default
record to see what it would have to compute. Loaders (GGUF, Hugging Face folder) produce it; the model and the KV pool
consume it. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

# Scalings of rotation speeds that the decoder computes, besides none at all.
ROPE_SCALINGS = ("linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """How one layer attends.

    scale multiplies q.k. window: a token sees that many tokens, itself included; None is all. softcap: scores become
    softcap * tanh(scores / softcap); None is off.
    """

    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry and numerics of a Llama-family decoder. Sizes are counts of elements.

    attention_bias, attention_output_bias, mlp_bias: biases on query, key and value; on the attention's output; on the
    MLP's three matrices. hidden_act: of the gated MLP, "silu" or "gelu_tanh". norm_offset: added to every norm's stored
    weight when it is loaded (Gemma stores w - 1). post_norms: a second norm on the output of attention and of MLP,
    before the residual sum (Gemma 2, 3). embedding_scale multiplies the embedded tokens. attention_scale: of q.k, None
    is head_dim ** -0.5. attention_softcap, logit_softcap: as in `AttentionLayer`. sliding_window holds in
    sliding_layers (indices). rope_factors: what each rotation speed is divided by, after rope_scaling (GGUF's
    rope_freqs). local_rope_theta: of the sliding layers, unscaled; None is rope_theta everywhere. no_rope_layers:
    indices of layers without positions (SmolLM3).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float | str] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    rope_factors: tuple[float, ...] = ()
    local_rope_theta: float | None = None
    no_rope_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def kv_bytes_per_token(self, bytes_per_element: int, num_devices: int = 1) -> int:
        """Bytes of keys and values of one token over all layers, on each of num_devices; 8 bits have a scale a vector.

        Where there are fewer KV heads than devices, some of these hold the same head.
        """
        scale = 4 if bytes_per_element == 1 else 0
        heads = max(1, self.num_kv_heads // num_devices)
        return 2 * self.num_layers * heads * (self.head_dim * bytes_per_element + scale)

    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What an attention backend must know of each layer, first to last."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        sliding = frozenset(self.sliding_layers)
        return tuple(
            AttentionLayer(
                scale=scale,
                window=self.sliding_window if index in sliding else None,
                softcap=self.attention_softcap,
            )
            for index in range(self.num_layers)
        )

    def numerics(self) -> str:
        """Everything besides geometry and weights that the KV of a token depends on, as text for the identity.

        The longest position is part of some scalings of the rotation.
        """
        names = (
            "max_position_embeddings rope_theta rope_scaling rope_factors local_rope_theta no_rope_layers rms_norm_eps "
            "norm_offset embedding_scale attention_scale attention_softcap sliding_window sliding_layers hidden_act "
            "post_norms qk_norm"
        )
        values = {name: getattr(self, name) for name in names.split()}
        values["rope_scaling"] = sorted((self.rope_scaling or {}).items())
        return " ".join(f"{name}={value}" for name, value in values.items())

"""The sizes that the demo can train, by the name that ``--params`` takes."""

from __future__ import annotations

import dataclasses

VOCABULARY = 256
"""One token for each byte."""
END = 0
"""The byte that ends a document: no Python source file holds it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT-2 of ``layers`` blocks of ``width``, trained on ``batch`` rows of ``context`` bytes a step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    dropout: float = 0.1
    named_after: str = ""
    """A well-known model of the same size."""

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (VOCABULARY + self.context + 2) * self.width

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state: float32 parameters and AdamW's two moments."""
        return 12 * self.parameters

    @property
    def memory_nbytes(self) -> int:
        """Memory that the demo takes at most, about: parameters, gradients and moments, three snapshots, DCP's copy, and torch itself."""
        return 16 * self.parameters + 3 * self.state_nbytes + self.state_nbytes + 800_000_000

    @property
    def disk_nbytes(self) -> int:
        """Space that the demo takes at most, about: three checkpoints and the one being written, of the run and of the comparison."""
        return 8 * self.state_nbytes

    def config(self) -> dict[str, object]:
        """The ``config.json`` with which Hugging Face transformers builds the same model."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": VOCABULARY,
            "n_positions": self.context,
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "embd_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "attn_pdrop": 0.0,
            "bos_token_id": END,
            "eos_token_id": END,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }


SIZES = {
    "0.1M": Size(layers=2, width=64, heads=2, context=64, batch=4),
    "11M": Size(layers=6, width=384, heads=6, context=128, batch=4),
    "46M": Size(layers=6, width=800, heads=10, context=256, batch=4, named_after="FastPitch"),
    "345M": Size(layers=27, width=1024, heads=16, context=256, batch=4, named_after="Megatron-BERT"),
}

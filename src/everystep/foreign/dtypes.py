"""torch's dtypes and the words that safetensors has for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

WORDS: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""torch dtype -> safetensors dtype word."""
DTYPES: Mapping[str, torch.dtype] = {word: dtype for dtype, word in WORDS.items()}
"""safetensors dtype word -> torch dtype."""

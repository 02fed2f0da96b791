"""FlashAttention for CuPy and NumPy arrays: exact attention in O(S) memory."""

from .aot import precompile
from .attention import (
    explain,
    flash_attention,
    flash_attention_backward,
    flash_attention_vjp,
)

__all__ = [
    "explain",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_vjp",
    "precompile",
]
__version__ = "0.1.0"

"""The environment variables, all read here and once.

``CUPY_CACHE_DIR``
    Folder of the compiled kernels, shared with CuPy's own (default
    ``~/.cupy/kernel_cache``); they lie in its subfolder ``cupy_flash``.
``CUPY_FLASH_DEBUG``
    ``1`` checks lengths that lie on the device, which costs a synchronisation in
    each call that has them.
"""

from __future__ import annotations

import os
from pathlib import Path

_DEFAULT = "~/.cupy/kernel_cache"

debug: bool = os.environ.get("CUPY_FLASH_DEBUG", "") not in ("", "0")


def cache_folder() -> Path:
    """Return the folder of compiled kernels; it need not exist."""
    # As CuPy finds its own; os.path.expanduser doesn't mind that there is no home.
    root = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser(_DEFAULT)
    return Path(root, "cupy_flash")

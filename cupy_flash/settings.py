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
import tempfile
from pathlib import Path

_DEFAULT = "~/.cupy/kernel_cache"

_temporary: tempfile.TemporaryDirectory[str] | None = None

debug: bool = os.environ.get("CUPY_FLASH_DEBUG", "") not in ("", "0")


def cache_folder() -> Path:
    """Return the folder of compiled kernels; it need not exist."""
    return Path(_cache_root(), "cupy_flash")


def _cache_root() -> str:
    # As CuPy finds its own; os.path.expanduser doesn't mind that there is no home.
    return os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser(_DEFAULT)


def let_cupy_start() -> None:
    """Give CuPy a folder for the life of this process if it can't make its own.

    CuPy makes its cache folder when it is imported, and can't be imported otherwise.
    """
    global _temporary
    try:
        os.makedirs(_cache_root(), exist_ok=True)
    except OSError:
        _temporary = tempfile.TemporaryDirectory(
            prefix="cupy_flash-", ignore_cleanup_errors=True
        )
        os.environ["CUPY_CACHE_DIR"] = _temporary.name


def cache_is_temporary() -> bool:
    """Whether compiled kernels are gone when this process ends."""
    return _temporary is not None and _cache_root() == _temporary.name

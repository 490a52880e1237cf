"""What torch calls when it is imported (entry point group ``torch.backends``).

An exception here would break ``import torch`` for every program in the environment, so nothing may get out.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Registers the backend ``ftcomm`` with torch.distributed; never raises."""
    try:
        from ftcomm.torch.register import register_backend

        register_backend()
    except Exception as error:  # noqa: BLE001 - see above
        warnings.warn(f"The torch.distributed backend 'ftcomm' is not available: {error}", RuntimeWarning, stacklevel=2)

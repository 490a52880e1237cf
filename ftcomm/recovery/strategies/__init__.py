"""What survivors do when a rank has died: one small file for each way, and the choice between them."""

from ftcomm.recovery.strategies.base import Facts, Strategy
from ftcomm.recovery.strategies.choose import STRATEGIES, choose

__all__ = ["STRATEGIES", "Facts", "Strategy", "choose"]

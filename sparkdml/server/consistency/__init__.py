"""How far workers may run apart: one model a file."""

from sparkdml.server.consistency.asp import ASP
from sparkdml.server.consistency.base import Clocks, Consistency
from sparkdml.server.consistency.bsp import BSP
from sparkdml.server.consistency.ssp import SSP
from sparkdml.server.consistency.tap import TAP

__all__ = ["ASP", "BSP", "SSP", "TAP", "Clocks", "Consistency"]

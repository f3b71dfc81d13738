"""The names under which saved models and checkpoints record classes that have since moved.

A saved estimator records its strategy and callbacks by module and class, and so does a checkpoint's
fingerprint. Files keep the names of the first release that wrote them, so that older files still
load and resume after a class has moved inside the package. Add a line here when moving a class; a
class without a line is recorded under its own name.
"""

from __future__ import annotations

from typing import Any

# A class's current name, and the module under which it is recorded.
_RECORDED = {
    "sparkdml.parameter_server.consistency:ASP": "sparkdml.server.consistency.asp",
    "sparkdml.parameter_server.consistency:BSP": "sparkdml.server.consistency.bsp",
    "sparkdml.parameter_server.consistency:SSP": "sparkdml.server.consistency.ssp",
    "sparkdml.parameter_server.consistency:TAP": "sparkdml.server.consistency.tap",
    "sparkdml.parameter_server.downpour:Downpour": "sparkdml.strategies.downpour",
    "sparkdml.parameter_server.consistency:Expulsion": "sparkdml.server.consistency.expulsion",
    "sparkdml.parameter_server.filters:Largest": "sparkdml.server.filters",
    "sparkdml.parameter_server.filters:Significant": "sparkdml.server.filters",
    "sparkdml.parameter_server.hybrid:Hybrid": "sparkdml.strategies.hybrid",
    "sparkdml.parameter_server.kvstore.serving:WithStore": "sparkdml.kvstore.serving",
    "sparkdml.parameter_server.optimizers:Adagrad": "sparkdml.server.optimizers",
    "sparkdml.parameter_server.optimizers:Adam": "sparkdml.server.optimizers",
    "sparkdml.parameter_server.optimizers:Add": "sparkdml.server.optimizers",
    "sparkdml.parameter_server.optimizers:SGD": "sparkdml.server.optimizers",
    "sparkdml.parameter_server.strategy:ParameterServer": "sparkdml.strategies.parameter_server",
    "sparkdml.server_group:ServerGroup": "sparkdml.serving.group",
    "sparkdml.strategies.decentralized.ad_psgd:ADPSGD": "sparkdml.strategies.ad_psgd",
    "sparkdml.strategies.decentralized.gossip:Gossip": "sparkdml.strategies.gossip",
    "sparkdml.strategies.local.block_momentum:BlockMomentum": "sparkdml.strategies.block_momentum",
    "sparkdml.strategies.local.easgd:EASGD": "sparkdml.strategies.easgd",
    "sparkdml.strategies.local.hogwild:Hogwild": "sparkdml.strategies.hogwild",
    "sparkdml.strategies.local.local_sgd:LocalSGD": "sparkdml.strategies.local_sgd",
    "sparkdml.strategies.local.slow_mo:SlowMo": "sparkdml.strategies.slow_mo",
    "sparkdml.strategies.second_order.lbfgs:LBFGS": "sparkdml.strategies.lbfgs",
    "sparkdml.strategies.second_order.newton_cg:NewtonCG": "sparkdml.strategies.newton_cg",
}
_CURRENT = {
    f"{module}:{current.partition(':')[2]}": current.partition(":")[0]
    for current, module in _RECORDED.items()
}


def recorded_module(value: Any) -> str:
    """Return the module under which files record this class or function."""
    module: str = value.__module__
    return _RECORDED.get(f"{module}:{value.__qualname__}", module)


def current_module(module: str, name: str) -> str:
    """Return the module in which a recorded class or function is now defined."""
    return _CURRENT.get(f"{module}:{name}", module)

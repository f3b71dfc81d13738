"""A saved model that somebody else wrote: what it names is neither imported nor called."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_folder import LAYER, load_estimator, load_model, write_estimator, write_model
from torch import nn

import sparkdml as dml
from sparkdml.errors import DataError, ParameterError, SetupError
from sparkdml.factories import is_factory
from sparkdml.history import History
from sparkdml.mlflow_flavor import load_local
from sparkdml.model import TorchModel
from sparkdml.persistence.allowed import (
    OWN_VALUES,
    check_import,
    is_functional,
    may_be_built,
    may_be_called,
)
from sparkdml.persistence.folder import PlainFolder
from sparkdml.persistence.references import NotPlain, encode_reference
from sparkdml.persistence.spark_ml import ModelWriter, StageWriter
from sparkdml.training.callbacks import Callback
from sparkdml.training.modules import Modules
from sparkdml.training.weights import encode_weights

COMMAND = {"dict": {"cmd": "touch MARK", "encoding": None, "errors": None}}
GETOUTPUT = {"import": "subprocess:getoutput"}


def call(of: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"partial": {"of": of, "args": list(args), "kwargs": kwargs}}


PAYLOADS = {
    "a routine that is annotated to make a module": call(
        "torch.fx:symbolic_trace", GETOUTPUT, concrete_args=COMMAND
    ),
    "the same by its own module": call(
        "torch.fx._symbolic_trace:symbolic_trace", GETOUTPUT, concrete_args=COMMAND
    ),
    "another one": call("torch.fx.experimental.proxy_tensor:dispatch_trace", GETOUTPUT),
    "a command": call("subprocess:getoutput", "touch MARK"),
    "a function without arguments": {"import": "os:getcwd"},
    "a module class that compiles source": call("torch.fx.graph_module:GraphModule", {"dict": {}}),
    "a callable as an argument": call(
        "torch.nn.functional:triplet_margin_with_distance_loss", distance_function=GETOUTPUT
    ),
    "a callable as an argument of a class": call("torch.nn.modules.linear:Linear", GETOUTPUT),
    "what an allowed module has imported": {
        "import": "torch.nn.functional:importlib.import_module"
    },
    "a function of an allowed module": {
        "import": "torch.optim.optimizer:register_optimizer_step_pre_hook"
    },
    "a private name of torch": call("torch.hub:load", "evil/repo", "net"),
    "no name": {"import": "torch.nn.modules.linear:"},
    "no text": {"import": ["os"]},
    "a function of torch as what makes the module": call("torch.nn.functional:relu", 1),
    "an optimizer as what makes the module": {"import": "torch.optim.sgd:SGD"},
    "an object of a run": {
        "object": {
            "class": "sparkdml.runtime.driver.checkpointed_run:CheckpointedRun",
            "args": ["plan"],
            "state": {"plan": 1},
        }
    },
    "an object of the standard library": {
        "object": {"class": "subprocess:Popen", "args": ["args"], "state": {"args": ["id"]}}
    },
    "private attributes": {
        "object": {
            "class": "sparkdml.strategies.allreduce:AllReduce",
            "args": [],
            "state": {"__class__": 1},
        }
    },
    "one of several": {"dict": {"up": {"import": "os:getcwd"}}},
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not os.path.exists("MARK")


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_planted_model_runs_nothing(tmp_path: Path, payload: Any) -> None:
    folder = write_model(tmp_path / "model", payload)
    with pytest.raises(DataError, match=r"model(\.up)? in .*objects\.json is saved"):
        load_model(folder)
    with pytest.raises(DataError, match="is saved"):  # as mlflow loads it
        load_local(str(folder))
    for place in ("loss", "step", "metrics"):
        value = {"dict": {"up": payload}} if place == "metrics" else payload
        folder = write_model(tmp_path / place, LAYER, **{place: value})
        if payload not in FINE_AS_A_FUNCTION:
            with pytest.raises(DataError, match=f"{place}.* in .* is saved"):
                load_model(folder)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("param", ["model", "optimizer", "preprocess", "strategy", "callbacks"])
def test_a_planted_estimator_names_nothing(tmp_path: Path, param: str, payload: Any) -> None:
    value = [payload] if param == "callbacks" else payload
    if payload not in FINE_AS_A_FUNCTION:
        with pytest.raises(DataError, match=rf"{param}.* in .*objects\.json is saved"):
            load_estimator(write_estimator(tmp_path / "estimator", **{param: value}))


# They are called with tensors alone, or with parameters.
FINE_AS_A_FUNCTION = [
    PAYLOADS["a function of torch as what makes the module"],
    PAYLOADS["an optimizer as what makes the module"],
]

TASKS = """
import pathlib
pathlib.Path("IMPORTED").touch()

import torch
from subprocess import getoutput
import sparkdml as dml

def drop_everything(*anything):
    pathlib.Path("MARK").touch()

def make_net() -> torch.nn.Module:
    pathlib.Path("MARK").touch()

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1, bias=False)

class Tokenizer:
    pass

@dml.factory
def make_marked(size=1):
    return torch.nn.Linear(size, 1, bias=False)
"""


@pytest.fixture
def admin_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module on the path, as in the working directory of a notebook; not imported yet."""
    (tmp_path / "admin_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "admin_tasks"
    sys.modules.pop("admin_tasks", None)


@pytest.mark.parametrize("name", ["drop_everything", "make_net", "Net", "make_marked"])
def test_nothing_is_imported_that_is_not_allowed(
    tmp_path: Path, admin_tasks: str, name: str
) -> None:
    folder = write_model(tmp_path / "model", {"import": f"{admin_tasks}:{name}"})
    with pytest.raises(DataError, match=r"allow_packages\('admin_tasks'\).*SPARKDML_ALLOW_PACK"):
        load_model(folder)
    assert not os.path.exists("IMPORTED")


@pytest.mark.parametrize("name", ["drop_everything", "make_net", "getoutput", "Tokenizer"])
def test_of_an_allowed_package_only_classes_and_marked_functions_are_called(
    tmp_path: Path, admin_tasks: str, name: str
) -> None:
    folder = write_model(tmp_path / "model", {"import": f"{admin_tasks}:{name}"})
    bound = write_model(tmp_path / "bound", call(f"{admin_tasks}:{name}", 1))
    argument = call("torch.nn.modules.container:Sequential", {"import": f"{admin_tasks}:{name}"})
    with dml.allow_packages(admin_tasks):
        for place in (folder, bound, write_model(tmp_path / "argument", argument)):
            with pytest.raises(DataError, match=r"model in .* is saved as"):
                load_model(place)
        for param in ("model", "optimizer"):
            planted = {param: {"import": f"{admin_tasks}:{name}"}}
            with pytest.raises(DataError, match=rf"{param} in .* is saved as"):
                load_estimator(write_estimator(tmp_path / param, **planted))


def test_an_allowed_package_loads(
    tmp_path: Path, admin_tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_class = write_model(
        tmp_path / "class", {"import": "admin_tasks:Net"}, loss={"import": "admin_tasks:make_net"}
    )
    by_function = write_model(tmp_path / "function", call("admin_tasks:make_marked", size=1))
    with dml.allow_packages("other", admin_tasks):
        assert type(load_model(by_class).module).__name__ == "Net"
        assert isinstance(load_model(by_function).module, nn.Linear)
    with pytest.raises(DataError, match="allow_packages"):
        load_model(by_class)
    monkeypatch.setenv("SPARKDML_ALLOW_PACKAGES", "other, admin_tasks")
    assert type(load_model(by_class).module).__name__ == "Net"


def test_with_pickles_allowed_anything_loads(tmp_path: Path, admin_tasks: str) -> None:
    """An older save of a function that is not marked."""
    source = f"{TASKS}\ndef make_old():\n    return Net()\n"
    (tmp_path / "admin_tasks.py").write_text(source)
    folder = write_model(tmp_path / "model", {"import": "admin_tasks:make_old"})
    with dml.allow_packages(admin_tasks), pytest.raises(DataError, match=r"sparkdml\.factory"):
        load_model(folder)
    with dml.allow_pickle():
        assert type(load_model(folder).module).__name__ == "Net"


@pytest.mark.parametrize("name", ["torch", "torch.fx", "os", "builtins", "", "a b", None, ".x"])
def test_what_cannot_be_allowed(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="allow_packages"), dml.allow_packages(name):
        pass


def test_a_mark_is_the_object_itself() -> None:
    def marked() -> nn.Module:
        return nn.Identity()

    assert not is_factory(marked)
    assert dml.factory(marked) is marked
    assert is_factory(marked)

    @wraps(marked)
    def wrapper() -> nn.Module:
        return marked()

    wrapper.__dict__.update(vars(marked))
    assert not is_factory(wrapper)
    assert not is_factory(partial(marked))
    assert not is_factory(None)
    with pytest.raises(ParameterError, match="function"):
        dml.factory(3)


class Maker:
    @classmethod
    @dml.factory
    def make(cls) -> nn.Module:
        return nn.Identity()

    @dml.factory
    @staticmethod
    def make_other() -> nn.Module:
        return nn.Identity()

    @classmethod
    def unmarked(cls) -> nn.Module:
        return nn.Identity()


def test_methods_are_marked_too() -> None:
    assert is_factory(Maker.make)
    assert is_factory(Maker.make_other)
    assert not is_factory(Maker.unmarked)
    assert encode_reference(Maker.make) == {"import": f"{__name__}:Maker.make"}
    with pytest.raises(NotPlain, match=r"unmarked is not marked.*sparkdml\.factory"):
        encode_reference(Maker.unmarked)


@dml.factory
class Settings:
    def __init__(self, size: int) -> None:
        self.size = size


class Unmarked(Settings):
    pass


def test_marked_classes_are_rebuilt() -> None:
    saved = encode_reference(Settings(3))
    assert saved["object"]["state"] == {"size": 3}
    with pytest.raises(NotPlain, match="Unmarked is no strategy"):
        encode_reference(Unmarked(3))


def routines() -> list[Any]:
    """Whatever is loaded once torch's own entrances are, by name and by identity."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("fx", "export", "jit", "hub", "package", "onnx", "ao.quantization"):
            importlib.import_module(f"torch.{name}")
        for name in ("fx.experimental.proxy_tensor", "distributed.fsdp", "utils.data", "nn.utils"):
            importlib.import_module(f"torch.{name}")
    found: dict[int, Any] = {}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if inspect.isroutine(value):
                    found[id(value)] = value
    return list(found.values())


def test_of_all_routines_none_may_be_called() -> None:
    annotated = 0
    for value in routines():
        made = getattr(value, "__annotations__", {}).get("return")
        annotated += (made is not None and "Module" in str(made)) or "Tensor" in str(made)
        if is_factory(value):
            continue  # of tests and of sparkdml.testing
        assert not may_be_built(value)
        if is_functional(value):
            assert value.__module__ == "torch.nn.functional"
            continue
        assert not may_be_called(value), value
    assert annotated > 500


def test_functional_takes_no_file_and_no_text() -> None:
    """What torch.nn.functional defines itself works on tensors."""
    taken = [value for value in vars(nn.functional).values() if is_functional(value)]
    assert 50 < len(taken) < 250
    for value in taken:
        for name in inspect.signature(value).parameters:
            assert not any(one in name for one in ("path", "file", "url", "code")), value


def own_classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(dml.__path__, "sparkdml."):
        if found.name.split(".")[1] in ("testing", "mlflow_flavor"):
            continue
        module = importlib.import_module(found.name)
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == found.name:
                yield value


def test_of_our_own_classes_only_values_of_params_are_rebuilt() -> None:
    built = {f"{one.__module__}:{one.__qualname__}" for one in own_classes() if built_by_file(one)}
    assert built == OWN_VALUES
    dataclass_names = {
        f"{one.__module__}:{one.__qualname__}"
        for one in own_classes()
        if dataclasses.is_dataclass(one)
    }
    assert len(dataclass_names - built) > 100
    public = [getattr(dml, name) for name in dml.__all__]
    for value in public:
        concrete = inspect.isclass(value) and not inspect.isabstract(value)
        if concrete and issubclass(value, dml.Strategy | Callback) and value is not Callback:
            assert f"{value.__module__}:{value.__qualname__}" in OWN_VALUES


def built_by_file(value: type) -> bool:
    try:
        check_import(f"{value.__module__}:{value.__qualname__}", "it")
    except DataError:
        return False
    return may_be_built(value)


def test_layers_outside_of_torch_nn_are_pickled() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(1, 1))
    with pytest.raises(NotPlain, match="not among torch's own layers"):
        encode_reference(type(torch.ao.nn.quantized.FloatFunctional()))
    with pytest.raises(NotPlain):
        encode_reference(graph)


def test_arguments_that_do_not_fit_are_our_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", call("torch.nn.modules.linear:Linear", "a", "b"))
    with pytest.raises(DataError, match=r"can't be made by .*Linear.*TypeError"):
        load_model(folder)


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {"import": "gone_package.nets:Net"})
    with dml.allow_packages("gone_package"), pytest.raises(SetupError, match="PYTHONPATH"):
        load_model(folder)


def test_the_class_of_the_stage_is_checked_before_its_import(
    tmp_path: Path, admin_tasks: str
) -> None:
    folder = write_model(tmp_path / "model", LAYER)
    metadata = folder / "metadata/part-00000"
    text = metadata.read_text()
    for name in ("admin_tasks.Net", "subprocess.Popen", "sparkdml.cli.main.main", "os", ""):
        metadata.write_text(text.replace("sparkdml.model.TorchModel", name))
        with pytest.raises(DataError, match="is saved as"):
            load_local(str(folder))
    assert not os.path.exists("IMPORTED")


def test_saving_says_what_loading_needs(tmp_path: Path) -> None:
    own = dml.TorchEstimator(model=Maker.make, optimizer=torch.optim.SGD, loss=nn.MSELoss())
    with pytest.warns(UserWarning, match=r"names .*:Maker\.make: .*allow_packages\('tests'\)"):
        save_stage(own, tmp_path / "own")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dml.allow_packages("tests"):
            save_stage(own, tmp_path / "allowed")
        plain = dml.TorchEstimator(
            model=nn.Linear(1, 1),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss=nn.functional.mse_loss,
            strategy=dml.ParameterServer(consistency=dml.SSP(2)),
            callbacks=[
                dml.EarlyStopping(),
                dml.LearningRateSchedule(torch.optim.lr_scheduler.StepLR),
            ],
            checkpoint=dml.Checkpoints("s3://bucket/run", every="epoch", keep=dml.Keep(last=2)),
        )
        save_stage(plain, tmp_path / "plain")
        load_estimator(tmp_path / "plain")
    unmarked = dml.TorchEstimator(
        model=Maker.unmarked, optimizer=torch.optim.SGD, loss=nn.MSELoss()
    )
    with pytest.warns(UserWarning, match=r"pickle.*Maker\.unmarked is not marked.*factory"):
        save_stage(unmarked, tmp_path / "unmarked")
    with pytest.raises(SetupError, match=r"unmarked is not marked.*allow_pickle"):
        load_estimator(tmp_path / "unmarked")


def save_stage(stage: Any, folder: Path) -> None:
    StageWriter(stage).save_to(PlainFolder(str(folder)))


def make_unmarked(size: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))


@pytest.mark.parametrize("source", [make_unmarked, partial(make_unmarked, 2)], ids=["as", "bound"])
def test_of_what_an_unmarked_function_made_the_structure_is_saved(
    tmp_path: Path, source: Any
) -> None:
    torch.manual_seed(3)
    module = Modules()
    module["one"], module["two"] = source(), nn.Linear(1, 1)
    sources = {"one": source, "two": partial(nn.Linear, 1, 1)}
    for name, own, made in (("several", sources, module), ("one", source, module["one"])):
        fitted: TorchModel = TorchModel._make(
            module=made,
            source=own,
            weights=encode_weights(made),
            loss=nn.MSELoss(),
            metrics={},
            features=(),
            output_shape=None,
            history=History([], None, None),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ModelWriter(fitted).save_to(PlainFolder(str(tmp_path / name)))
        loaded = load_model(tmp_path / name).module.state_dict()
        for key, tensor in made.state_dict().items():
            assert torch.equal(loaded[key], tensor)
